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
        self._projections: dict[tuple[int, int], Tensor] = {}
        self._vectors: dict[int, list[Tensor]] = defaultdict(list)
        self._records: dict[int, list[int]] = defaultdict(list)

    def admits(self, maps: Sequence[Tensor], first_input: Tensor) -> bool:
        """Whether no stored record has nearly these maps: ``[h, n, n]`` by layer, hidden states ``[n, H]``."""
        length = len(first_input)
        if not self._records[length]:
            return True
        vector = self._project(first_input)
        distances = (torch.stack(self._vectors[length]) - vector).norm(dim=1)
        for place in distances.topk(min(CANDIDATES, len(distances)), largest=False).indices.tolist():
            stored = self._maps_of(self._records[length][place])
            if all(
                float(similarity_score(new, old)) >= self._threshold for new, old in zip(maps, stored, strict=True)
            ):
                return False
        return True

    def remember(self, record: int, first_input: Tensor) -> None:
        """A record was stored under this number."""
        length = len(first_input)
        self._records[length].append(record)
        self._vectors[length].append(self._project(first_input))

    def _project(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[n, H]`` in a few numbers that keep distances, roughly."""
        key = (hidden.shape[0], hidden.shape[1])
        if key not in self._projections:
            generator = torch.Generator().manual_seed(_SEED)
            # One for channels and one for positions: a full one would have n * H * 64 numbers.
            self._projections[key] = torch.randn(key[1], 8, generator=generator)
        narrow = hidden.float() @ self._projections[key]  # [n, 8]
        generator = torch.Generator().manual_seed(_SEED + key[0])
        return torch.randn(_DIMENSIONS, narrow.numel(), generator=generator) @ narrow.flatten()
