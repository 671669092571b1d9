"""How sure answers from records are, and what is kept with a record for that: its own answer.

A class is as sure as it is ahead of the second best one. A vector is sure if it is near the record's own answer; one
with more rows computed, if it is near the one with fewer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from attmemo.guard.answers import Answer, Answers, Read, cosines
from attmemo.planner.guarded import Chosen
from attmemo.reuse.growing import GrowingRows
from attmemo.reuse.offer import Offer

KEY: Final = 8
"""Bytes in front of an answer that is kept with a record: what answers of this kind have in common."""


class Sureness:
    """Of the answers of one model.

    Parameters
    ----------
    answers : Answers
    store : GrowingRows or None
        Keeps what was computed exactly.

    Attributes
    ----------
    key : bytes
        `KEY` bytes that stand for the model's head and the answer: with another key a record's answer is not known.
        At first none is.
    """

    def __init__(self, answers: Answers, store: GrowingRows | None) -> None:
        self._answers, self._store, self.key = answers, store, os.urandom(KEY)

    def of_record(self, record: int) -> float | None:
        """How far the record's own class is ahead: what it serves will hardly be surer. None: not known."""
        kept = None if self._answers.are_vectors else self._kept(record, 1)
        return None if kept is None else float(kept[0])

    def margins(
        self, seen: Read, chosen: Mapping[int, Chosen], first: Sequence[Answer] = ()
    ) -> dict[int, float | None]:
        """How sure answers from records are, by place. None: not known.

        Parameters
        ----------
        seen : Read
            The answers.
        chosen : mapping of int to Chosen
            Whose answers from records are asked for, and which records these are.
        first : sequence of Answer
            With more rows computed: these answers with fewer, in the same order.
        """
        if not seen.are_vectors:
            return {place: seen.margin(place) for place in chosen}
        if first:
            moved = cosines(seen.values[list(chosen)], torch.stack([one.vector for one in first]))
            return dict(zip(chosen, moved, strict=True))
        found = {place: self._kept(one.reused.record, seen.values.shape[1]) for place, one in chosen.items()}
        own = {place: kept for place, kept in found.items() if kept is not None}
        known = cosines(seen.values[list(own)], torch.from_numpy(np.stack(list(own.values())))) if own else []
        return dict.fromkeys(chosen) | dict(zip(own, known, strict=True))

    def note(self, seen: Read, offers: Mapping[int, Offer]) -> None:
        """Have the answers of sequences that may become records kept with them: of classes, how sure they are."""
        kept = seen.values if seen.are_vectors else seen.margins
        if kept is not None:
            numbers = kept.float().numpy()
            for place, offer in offers.items():
                offer.note = self.key + numbers[place].tobytes()

    def _kept(self, record: int, count: int) -> npt.NDArray[np.float32] | None:
        """So many numbers of a record's own answer; None: they are not known."""
        note = b"" if self._store is None else self._store.note_of(record)
        known = note[:KEY] == self.key and len(note) == KEY + 4 * count
        return np.frombuffer(note, np.float32, offset=KEY) if known else None
