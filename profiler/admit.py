"""Deduplication at build: a sequence whose maps are all in the database already, nearly, is not stored again.

Comparing with every record would read the whole database for each sequence. Candidates are the records of the same
length whose first hidden states lie nearest, in a random projection; only their maps are compared. A record that the
projection overlooks costs bytes, never answers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from attmemo.similarity import similarity_score

CANDIDATES = 4  # records compared in full
_DIMENSIONS = 64
_CHANNELS = 8
_SEED = 20240229

Maps = Callable[[int], Sequence[Tensor]]


class Admission:
    """Remembers what was stored, and says whether something is new.

    Parameters
    ----------
    threshold : float
        Similarity score (Eq. 1) that every layer's map must reach for a record to stand for the sequence.
    maps_of : callable
        Maps ``[h, n, n]`` of all layers of a stored record, by its number.
    """

    def __init__(self, threshold: float, maps_of: Maps) -> None:
        self._threshold, self._maps_of = threshold, maps_of
        self._narrow: Tensor | None = None  # [H, p]
        self._mix: dict[int, Tensor] = {}  # length -> [d, n p]
        self._vectors: dict[int, Tensor] = {}  # length -> [room, d]
        self._records: dict[int, list[int]] = defaultdict(list)

    def admits(self, maps: Sequence[Tensor], first_input: Tensor) -> bool:
        """Whether no stored record has nearly these maps: ``[h, n, n]`` by layer, hidden states ``[n, H]``."""
        length = len(first_input)
        records = self._records[length]
        if not records:
            return True
        distances = (self._vectors[length][: len(records)] - self._project(first_input)).norm(dim=1)
        for place in distances.topk(min(CANDIDATES, len(records)), largest=False).indices.tolist():
            pairs = zip(maps, self._maps_of(records[place]), strict=True)
            if all(float(similarity_score(new, old)) >= self._threshold for new, old in pairs):
                return False
        return True

    def remember(self, record: int, first_input: Tensor) -> None:
        """A record was stored under this number."""
        length = len(first_input)
        records = self._records[length]
        vectors = self._vectors.get(length)
        if vectors is None or len(vectors) == len(records):
            room = torch.empty(max(64, 2 * len(records)), _DIMENSIONS)
            if vectors is not None:
                room[: len(records)] = vectors
            vectors = self._vectors[length] = room
        vectors[len(records)] = self._project(first_input)
        records.append(record)

    def _project(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[n, H]`` in ``[d]`` numbers that keep distances, roughly.

        First channels, then positions: one matrix for both would have n times H times d numbers.
        """
        length, size = hidden.shape
        if self._narrow is None:
            self._narrow = torch.randn(size, _CHANNELS, generator=torch.Generator().manual_seed(_SEED))
        if length not in self._mix:
            generator = torch.Generator().manual_seed(_SEED + length)
            self._mix[length] = torch.randn(_DIMENSIONS, length * _CHANNELS, generator=generator)
        return self._mix[length] @ (hidden.float() @ self._narrow).flatten()
