"""A cache of exact duplicates in front of a path that has a process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from attmemo.profiler.models import Tokens
from attmemo.profiler.peers import Duplicates


class Cached:
    """The cache, asked as the path is.

    Parameters
    ----------
    behind : str
        The path.
    ask : callable
        Takes texts; gives seconds and answers ``[B, …]``.
    """

    def __init__(self, behind: str, ask: Callable[[Sequence[Tokens]], tuple[float, np.ndarray]]) -> None:
        self.behind, self._ask = behind, ask
        self._seconds = self._wall = 0.0
        self._cache = Duplicates(self._miss)
        self._bytes = 0

    def __call__(self, texts: Sequence[Tokens]) -> tuple[float, np.ndarray]:
        """Seconds without those between the processes, and the answers."""
        self._seconds = self._wall = 0.0
        start = time.perf_counter()
        given = self._cache(texts)
        whole = time.perf_counter() - start
        return whole - self._wall + self._seconds, given.numpy()

    def learn(self, texts: Sequence[Tokens], exact: Tensor) -> None:
        """Texts that came while the path was not timed; `exact` has an answer for each text of the stream."""
        given = exact[[text.row for text in texts]]
        self._count(texts, given.nbytes)
        self._cache.learn(texts, given)

    @property
    def found(self) -> float:
        """Share of the texts that were known."""
        return self._cache.found / max(1, self._cache.texts)

    @property
    def nbytes(self) -> int:
        """Bytes of answers, and eight for each token; of texts that were learned, duplicates are counted too."""
        return self._bytes

    def _miss(self, texts: Sequence[Tokens]) -> Tensor:
        start = time.perf_counter()
        self._seconds, given = self._ask(texts)
        self._wall = time.perf_counter() - start
        self._count(texts, given.nbytes)
        return torch.from_numpy(given)

    def _count(self, texts: Sequence[Tokens], answers: int) -> None:
        self._bytes += answers + 8 * sum(map(len, texts))
