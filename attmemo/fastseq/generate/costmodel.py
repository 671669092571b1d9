"""Shared keys and values, or EL-attention? Which fits, and which is faster, from a few counts and two measured rates.

Sources: the memory formulas and the counts of operations are derived in EL-attention (arXiv 2105.04779), Table 1, and
FastSeq (arXiv 2106.04718), section 3.1; the 1 / (2·L·M) of EL-attention for cross-attention follows.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from attmemo.fastseq.generate.shape import Mode, ModelShape

# EL-attention has to be this much faster, by the estimate, before it is chosen for speed: a wrong choice the other
# way costs several times as much as a right one gains.
_CLEARLY = 0.8
_KEPT_FREE = 0.1  # of the free memory


@dataclass(frozen=True)
class Call:
    """What one call needs, in counts.

    Attributes
    ----------
    model : ModelShape
    samples, beams : int
        B, M.
    length : int
        N: source positions, or those of the prompt.
    new : int
        T: positions to be generated.
    """

    model: ModelShape
    samples: int
    beams: int
    length: int
    new: int

    def bytes(self, mode: Mode) -> int:
        """Of all cached states in the end."""
        return self.model.cache_bytes(self.samples, self.beams, self.length, self.new, mode)

    def shared_seconds(self, machine: Machine) -> float:
        """Building keys and values once, then reading them at every step."""
        positions = self.model.layers * self.samples * self.length
        build = 4 * positions * self.model.width * self.model.keys
        read = 2 * positions * self.model.keys * self.model.item
        work = 4 * positions * self.beams * self.model.queries
        return build / machine.flops + self.new * max(read / machine.bandwidth, work / machine.flops)

    def el_seconds(self, machine: Machine) -> float:
        """Nothing is built; the states are read twice a layer and step, and every head works at the full width."""
        positions, width = self.model.layers * self.samples * self.length, self.model.width
        read = 2 * positions * width * self.model.item
        work = 4 * positions * self.beams * self.model.heads * width
        absorb = 4 * self.model.layers * self.samples * self.beams * self.model.queries * width
        return self.new * max(read / machine.bandwidth, (work + absorb) / machine.flops)


@dataclass(frozen=True)
class Machine:
    """What a device does: bytes a second read from memory, and multiply-adds a second times two."""

    bandwidth: float
    flops: float


def choose(call: Call, machine: Machine | None, free: int | None) -> str:
    """ "shared" or "el": what fits, then what is clearly faster.

    Parameters
    ----------
    call : Call
    machine : Machine or None
        None: do not choose EL-attention for its speed. On the CPU its many small products cost more than their count
        says.
    free : int or None
        Bytes of free memory; None if unknown.
    """
    shared = call.bytes("shared")
    if free is not None and shared > (1 - _KEPT_FREE) * free and call.bytes("el") < shared:
        return "el"
    if machine is None:
        return "shared"
    return "el" if call.el_seconds(machine) < _CLEARLY * call.shared_seconds(machine) else "shared"


@functools.cache
def measured(device: torch.device, dtype: torch.dtype) -> Machine:
    """The rates of a device, measured once a process: a product of 64 rows with 16 MB, and reading 64 MB.

    64 rows are what EL-attention has for 16 heads and 4 beams; a square product would promise too much.
    """
    side = 2048
    left = torch.ones(64, side, dtype=dtype, device=device)
    right = torch.ones(side, side, dtype=dtype, device=device)
    wide = torch.ones(2**24, dtype=dtype, device=device)
    product = _seconds(lambda: torch.mm(left, right), device)
    reading = _seconds(lambda: wide.sum(), device)
    return Machine(wide.numel() * wide.element_size() / reading, 2 * 64 * side * side / product)


def _seconds(work: object, device: torch.device) -> float:
    assert callable(work)
    best = float("inf")
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return max(best, 1e-7)
