"""What a request hands over of a sequence that it computed whole, so that a record can be made of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.rows.layout import RowLayout
from attmemo.rows.store import Record


@dataclass(slots=True, weakref_slot=True)
class Offer:
    """A sequence that was computed whole, as its request hands it over.

    Parameters
    ----------
    tokens : int32 [n]
    body : uint8 [bytes]
        What was computed, as a layout of the model's own types places it. No other sequence uses this memory as long
        as something refers to it.
    rows : Tensor [layers, 2, n, H]
        K and V of each layer, in `body`.
    last : Tensor [n, H]
        Last hidden states, in `body`.
    note : bytes
        Kept with the record.
    spare : bool
        A record could have served the sequence: keep it only if nothing has to go for it.
    generation : int
        That of the store, before the sequence was computed.
    """

    tokens: npt.NDArray[np.int32]
    body: npt.NDArray[np.uint8]
    rows: Tensor
    last: Tensor
    note: bytes = b""
    spare: bool = False
    generation: int = 0

    @classmethod
    def of(
        cls, tokens: npt.NDArray[np.int32], layout: RowLayout, body: npt.NDArray[np.uint8], generation: int
    ) -> Offer:
        """An offer of what will be written to `rows` and `last`, without scales."""
        return cls(tokens, body, *layout.parts_of(body, len(tokens)), generation=generation)

    def as_record(self, layout: RowLayout) -> npt.NDArray[np.uint8]:
        """The bytes of the record in the types of a layout: the same memory if these are the model's.

        ValueError: there are more or fewer tokens than rows.
        """
        if len(self.tokens) != len(self.last):
            raise ValueError(f"{len(self.tokens)} tokens, and {len(self.last)} rows")
        if layout.storage == (self.rows.dtype, self.last.dtype):
            return self.body
        return layout.body_of(Record.pack(self.tokens, self.rows, self.last, layout.storage, layout.heads))

    def is_finite_in(self, storage: tuple[torch.dtype, torch.dtype]) -> bool:
        """Whether it can be kept: one number that is not finite has no finite sum.

        `storage`: types of K and V, and of the last hidden states. A number that is larger than they hold would become
        infinite.
        """
        if not all(math.isfinite(float(part.sum(dtype=torch.float32))) for part in (self.last, self.rows[-1])):
            return False
        return all(_fits(part, kept) for part, kept in zip((self.rows, self.last), storage, strict=True))


def _fits(part: Tensor, kept: torch.dtype) -> bool:
    """Whether a type holds all numbers of a tensor. Whole numbers have scales beside them."""
    if not kept.is_floating_point or torch.finfo(kept).max >= torch.finfo(part.dtype).max:
        return True
    return float(part.abs().max()) <= torch.finfo(kept).max
