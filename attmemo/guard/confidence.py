"""How sure answers from records are, and what is kept with a record for that: its own answer.

A class is as sure as it is ahead of the second best one. A vector is sure if it is near the record's own answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from attmemo.guard.answers import Answers, Read, cosines
from attmemo.rows.candidate import Offer
from attmemo.rows.live_store import GrowingRows

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

    def of_note(self, note: bytes) -> float:
        """Return how far a record's own class is ahead, from what is kept with it; NaN: not known."""
        kept = None if self._answers.are_vectors else self._numbers(note, 1)
        return math.nan if kept is None else float(kept[0])

    def margins(self, seen: Read, records: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Return how sure answers from these records are, ``[B]``; NaN: not known.

        Parameters
        ----------
        seen : Read
            The answers of B sequences.
        records : int64 [B]
            The record of each; -1: none.
        """
        count = len(seen.values)
        if not seen.are_vectors:
            return np.full(count, np.nan, np.float32) if seen.margins is None else seen.margins.float().numpy()
        found = np.full(count, np.nan, np.float32)
        width, store = seen.values.shape[1], self._store
        if store is None:
            return found
        notes, key, size = store.notes_of(records.tolist()), self.key, KEY + 4 * width
        own, kept = [], bytearray()
        for place, note in enumerate(notes):
            if len(note) == size and note.startswith(key):
                own.append(place)
                kept += note[KEY:]
        if own:
            vectors = torch.from_numpy(np.frombuffer(kept, np.float32).reshape(len(own), width))
            found[own] = cosines(seen.values[own], vectors)
        return found

    def note(self, seen: Read, offers: Mapping[int, Offer]) -> None:
        """Have the answers of sequences that may become records kept with them: of classes, how sure they are."""
        kept = seen.values if seen.are_vectors else seen.margins
        if kept is not None:
            numbers = kept.float().numpy()
            for place, offer in offers.items():
                offer.note = self.key + numbers[place].tobytes()

    def _numbers(self, note: bytes, count: int) -> npt.NDArray[np.float32] | None:
        known = note[:KEY] == self.key and len(note) == KEY + 4 * count
        return np.frombuffer(note, np.float32, offset=KEY) if known else None


def known(margin: float) -> float | None:
    """Return a margin; None: it is not known."""
    return None if margin != margin else float(margin)
