"""Shared keys and values, or EL-attention? Which fits, and which is faster, from a few counts and two measured rates.

Sources: the memory formulas and the counts of operations are derived in EL-attention (seed 002), Table 1, and FastSeq
(seed 000), section 3.1; the 1 / (2·L·M) of EL-attention for cross-attention follows.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from pathlib import Path

import torch

# EL-attention has to be this much faster, by the estimate, before it is chosen for speed: a wrong choice the other
# way costs several times as much as a right one gains.
_CLEARLY = 0.8
_KEPT_FREE = 0.1  # of the free memory


@dataclass(frozen=True)
class Shape:
    """What one call needs, in counts.

    Attributes
    ----------
    layers, samples, beams : int
        L, B, M.
    length : int
        N: source positions, or those of the prompt.
    new : int
        T: positions to be generated.
    width : int
        D: of the hidden states.
    heads, key_heads, head_width : int
        h, h/g, d.
    size : int
        s: bytes of an element.
    cross : bool
        True: one hidden state serves all layers (cross-attention). False: each layer has its own (self-attention).
    """

    layers: int
    samples: int
    beams: int
    length: int
    new: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    size: int
    cross: bool

    def stock_bytes(self) -> int:
        """2·L·D·s·(B·M·N + B·M·t): every beam has its own."""
        return self._pair() * self.layers * self.samples * self.beams * (self.length + self.new)

    def shared_bytes(self) -> int:
        """2·L·D·s·(B·N + B·M·t)."""
        return self._pair() * self.layers * self.samples * (self.length + self.beams * self.new)

    def el_bytes(self) -> int:
        """B·N·D·s for cross-attention, beside the suffix; L·D·s·(B·N + B·M·t) for self-attention."""
        one = self.width * self.size
        if self.cross:
            return self.samples * self.length * one + self._pair() * self.layers * self.samples * self.beams * self.new
        return self.layers * self.samples * (self.length + self.beams * self.new) * one

    def shared_seconds(self, machine: Machine) -> float:
        """Building keys and values once, then reading them at every step."""
        build = 4 * self.layers * self.samples * self.length * self.width * self.key_heads * self.head_width
        read = self._pair() * self.layers * self.samples * self.length
        work = 4 * self.layers * self.samples * self.beams * self.length * self.heads * self.head_width
        return build / machine.flops + self.new * max(read / machine.bandwidth, work / machine.flops)

    def el_seconds(self, machine: Machine) -> float:
        """Nothing is built; the states are read twice a layer and step, and every head works at the full width."""
        read = 2 * self.layers * self.samples * self.length * self.width * self.size
        work = 4 * self.layers * self.samples * self.beams * self.length * self.heads * self.width
        absorb = 4 * self.layers * self.samples * self.beams * self.heads * self.head_width * self.width
        return self.new * max(read / machine.bandwidth, (work + absorb) / machine.flops)

    def _pair(self) -> int:
        return 2 * self.key_heads * self.head_width * self.size


@dataclass(frozen=True)
class Machine:
    """What a device does: bytes a second read from memory, and multiply-adds a second times two."""

    bandwidth: float
    flops: float


def choose(shape: Shape, machine: Machine | None, free: int | None) -> str:
    """ "shared" or "el": what fits, then what is clearly faster.

    Parameters
    ----------
    shape : Shape
    machine : Machine or None
        None: do not choose EL-attention for its speed. On the CPU its many small products cost more than their count
        says.
    free : int or None
        Bytes of free memory; None if unknown.
    """
    if free is not None and shape.shared_bytes() > (1 - _KEPT_FREE) * free and shape.el_bytes() < shape.shared_bytes():
        return "el"
    if machine is None:
        return "shared"
    return "el" if shape.el_seconds(machine) < _CLEARLY * shape.shared_seconds(machine) else "shared"


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


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device; None if it cannot be known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


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
