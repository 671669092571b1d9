"""The plan of one forward: decided once, at the first layer, and only read afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.embed.lookup import Found
from attmemo.models import Rows, Spans

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Share:
    """What one layer is served: these sequences of the batch, from these records."""

    sequences: Ints  # [g], ascending
    records: Ints  # [g]
    missed: Rows  # all other sequences of the batch
    predicted: float  # sum of the predicted similarity scores

    @staticmethod
    def nothing(batch: int) -> Share:
        """No sequence of the batch is served from a record."""
        none = np.empty(0, np.int64)
        return Share(none, none, Rows.without(batch, none), 0.0)


@dataclass(frozen=True, slots=True)
class Reused:
    """How a record serves one sequence of n tokens."""

    record: int
    source: npt.NDArray[np.int32]  # [n], as in `RowShare`


@dataclass(frozen=True, slots=True)
class RowShare(Share):
    """What a stack is served: for every token of the batch the row of its sequence's record that supplies it."""

    source: npt.NDArray[np.int32]  # [sum n]; below 0: computed, as in `attmemo.kernels.align.Alignment`
    record: npt.NDArray[np.int64]  # [B]; -1: the sequence is computed whole
    admitted: Mapping[int, npt.NDArray[np.int32]] = field(default_factory=dict)
    """Sequences that are computed whole and become records, with their tokens."""
    beside: Mapping[int, Reused] = field(default_factory=dict)
    """Sequences that are computed whole, and beside from a record, to compare both."""
    last: Tensor | None = None
    """Last hidden states ``[B, L, H]`` that were computed before; then nothing is computed."""

    @classmethod
    def of(
        cls, lengths: Ints, records: Ints, source: npt.NDArray[np.int32], predicted: float = 0.0,
        admitted: Mapping[int, npt.NDArray[np.int32]] | None = None, beside: Mapping[int, Reused] | None = None,
    ) -> RowShare:  # fmt: skip
        """The share of a batch: records ``[B]`` (-1: none) and what they supply; nothing to a sequence without one."""
        served = records >= 0
        sequences = np.flatnonzero(served)
        if len(sequences) < len(records):
            source = np.where(np.repeat(served, lengths), source, np.int32(-1)).astype(np.int32)
        missed = Rows.without(len(records), sequences)
        return cls(sequences, records[sequences], missed, predicted, source, records, admitted or {}, beside or {})

    @classmethod
    def computed(cls, last: Tensor) -> RowShare:
        """The share of a batch whose last hidden states are there already."""
        batch, every = len(last), np.arange(len(last))
        none = np.full(batch, -1, np.int64)
        return cls(every, none, Rows.without(batch, every), 0.0, np.empty(0, np.int32), none, last=last)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a forward is served, or the one reason why it stays exact.

    Parameters
    ----------
    reason : str or None
        Why the whole forward stays exact; None if a layer is served.
    eligible : bool
        False: the forward could not be served whatever is stored (counted in ``stats()["ineligible"]``).
    spans : Spans or None
        Where valid tokens lie; None if nothing was read.
    found : Found or None
        What the lookup found; None if there was none.
    layers : mapping of int to Share
        Layers that are served.
    declined : mapping of int to int
        Sequences by layer that are near enough, but too few in their batch to pay.
    """

    reason: str | None = None
    eligible: bool = True
    spans: Spans | None = None
    found: Found | None = None
    layers: Mapping[int, Share] = field(default_factory=dict)
    declined: Mapping[int, int] = field(default_factory=dict)
