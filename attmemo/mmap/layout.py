"""How the slots of one arena file lie: one shape, one type, one stride."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from attmemo.mmap.pages import page_size, round_up

CACHE_LINE = 64
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32)
"""Storage types a slot may have; the 8-bit ones are for quantized records."""


@dataclass(frozen=True)
class SlotLayout:
    """Where slot i begins, how many bytes it has, and how a tensor reads them; ValueError if the numbers disagree.

    A slot is an array of one shape and type, for a map (heads, n, n) with n the number of valid tokens. Whether the
    layout fits the pages of the machine is the arena's question: the same file may be read by copying.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype  # one of `DTYPES`
    stride: int  # bytes from the start of one slot to the start of the next
    header: int  # bytes before slot 0
    slots: int

    def __post_init__(self) -> None:
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"a slot needs a shape of positive sizes, not {self.shape}")
        if self.dtype not in DTYPES:
            raise ValueError(f"slots of {self.dtype} are not supported; use one of {', '.join(map(str, DTYPES))}")
        if self.stride < self.nbytes:
            raise ValueError(f"the stride ({self.stride} bytes) is smaller than a slot ({self.nbytes} bytes)")
        if self.stride % self.dtype.itemsize or self.header % self.dtype.itemsize:
            raise ValueError(f"stride ({self.stride}) and header ({self.header}) must be whole items of {self.dtype}")
        if self.header < 0 or self.slots < 0:
            raise ValueError(f"header ({self.header}) and slots ({self.slots}) must not be negative")

    @classmethod
    def paged(
        cls, shape: tuple[int, ...], dtype: torch.dtype, slots: int = 0, header: int = 0, page: int | None = None
    ) -> SlotLayout:
        """The layout with the smallest stride that a window can map: slot and header are rounded up to a page."""
        page = page_size() if page is None else page
        nbytes = math.prod(shape) * dtype.itemsize
        return cls(tuple(shape), dtype, round_up(nbytes, page), round_up(header, page), slots)

    @classmethod
    def packed(cls, shape: tuple[int, ...], dtype: torch.dtype, slots: int = 0, header: int = 0) -> SlotLayout:
        """The layout for slots that are never mapped into a window: `nbytes` rounded up to a cache line."""
        nbytes = math.prod(shape) * dtype.itemsize
        return cls(tuple(shape), dtype, round_up(nbytes, CACHE_LINE), round_up(header, page_size()), slots)

    @property
    def nbytes(self) -> int:
        """Bytes of one slot, without what pads it to the stride."""
        return math.prod(self.shape) * self.dtype.itemsize

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of the tensor [slots, *shape], counted in items as PyTorch does."""
        strides = [1]
        for size in reversed(self.shape[1:]):
            strides.append(strides[-1] * size)
        return (self.stride // self.dtype.itemsize, *reversed(strides))

    @property
    def dense(self) -> bool:
        """Whether slots follow each other without padding, so that a batch of them is a contiguous tensor."""
        return self.stride == self.nbytes

    @property
    def file_bytes(self) -> int:
        """Bytes that the file must have: the header and every slot with its padding."""
        return self.header + self.slots * self.stride

    def offset(self, slot: int) -> int:
        """Byte offset of a slot in the file. Not bounds-checked."""
        return self.header + slot * self.stride

    def with_slots(self, slots: int) -> SlotLayout:
        """The same layout for another number of slots."""
        return replace(self, slots=slots)
