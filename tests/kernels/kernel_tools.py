"""What the tests of kernels share: sequences to align, rows in panels, and arrays that are only read."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from walls import before_walls

from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import NO_KINDS, Kinds
from attmemo.kernels.plan import Demand, RowPlan, plan

BARE = Rule(near=0, edges=False, ends=False)
Sequences = list[list[int]]


def packed(sequences: Sequences) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """Tokens one behind the other, and where each sequence starts."""
    tokens = np.array([token for sequence in sequences for token in sequence], np.int32)
    return tokens, np.cumsum([0, *map(len, sequences)]).astype(np.int64)


def every(inputs: Sequences, records: Sequences) -> npt.NDArray[np.int64]:
    """All records are candidates of each input."""
    return np.tile(np.arange(len(records)), (len(inputs), 1))


def planned(
    inputs: Sequences, candidates: npt.NDArray[np.int64], records: Sequences, rule: Rule, kinds: Kinds = NO_KINDS
) -> RowPlan:
    """The plan that wants nothing of a record but to leave few rows to compute."""
    sure = np.full(len(records), np.nan, np.float32)
    return plan(*packed(inputs), candidates, *packed(records), sure, kinds, rule, Demand())


def changed(sequence: list[int], random: np.random.Generator, vocabulary: int) -> list[int]:
    """A few tokens replaced, inserted, removed, and sometimes a block moved."""
    result = list(sequence)
    for _ in range(random.integers(0, 5)):
        at, gone, new = random.integers(0, len(result) + 1), random.integers(0, 4), random.integers(0, 4)
        result[at : at + gone] = random.integers(0, vocabulary, new).tolist()
    if random.random() < 0.3:
        at = random.integers(0, len(result) + 1)
        result = result[at:] + result[:at]
    return result


@st.composite
def sequences(draw: st.DrawFn) -> tuple[Sequences, Sequences]:
    """Inputs and records: some unrelated, some changed copies, in alphabets from one letter on, across words of 64."""
    random = np.random.default_rng(draw(st.integers(0, 2**31)))
    vocabulary, length = draw(st.sampled_from([1, 2, 4, 30, 2000])), draw(st.sampled_from([3, 20, 64, 70, 140]))

    def fresh() -> list[int]:
        return random.integers(-vocabulary // 2, vocabulary, random.integers(0, length + 1)).tolist()

    records = [fresh() for _ in range(4)]
    inputs = [changed(records[random.integers(4)], random, vocabulary) if random.random() < 0.6 else fresh()
              for _ in range(3)]  # fmt: skip
    return inputs, records


RULES = st.builds(
    Rule,
    near=st.sampled_from([0, 1, 2, 3, 1000]),
    near_numbers=st.sampled_from([None, 0, 1, 2]),
    most_moved=st.sampled_from([None, 0, 1, 3, 60, 10**12]),
    edges=st.booleans(),
    ends=st.booleans(),
)


def walled(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A copy that ends where memory ends: one byte farther, and the process dies."""
    size = array.nbytes
    room = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = np.frombuffer(mmap.mmap(-1, room + mmap.PAGESIZE), np.uint8)
    wall = ctypes.c_void_p(memory.ctypes.data + room)
    assert ctypes.CDLL(None, use_errno=True).mprotect(wall, mmap.PAGESIZE, 0) == 0  # PROT_NONE
    copy = memory[room - size : room].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


APPLIED: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda y: F.gelu(y, approximate="tanh"),
    "quick_gelu": lambda y: y * torch.sigmoid(1.702 * y),
    "clipped": lambda y: y.clamp(max=7) * torch.sigmoid(1.702 * y.clamp(max=7)),
}


def parts(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(outputs, inputs, generator=random) / inputs**0.5
    return weight.to(dtype), torch.randn(outputs, generator=random).to(dtype)


def rows(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return (torch.randn(count, width, generator=torch.Generator().manual_seed(seed)) + 0.3).to(dtype)


def read_only(tensor: Tensor) -> Tensor:
    """A copy in memory that cannot be written, before a page that cannot be read."""
    copy = before_walls(tensor)
    first = copy.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    size = copy.data_ptr() + copy.numel() * copy.element_size() - first
    assert libc.mprotect(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.PROT_READ) == 0
    return copy
