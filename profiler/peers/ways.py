"""Ways to the answers of a model: they take tokenized texts as they come, and padding is in their time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attmemo.profiler.models import LoadedModel, Tokens, answers, collate

Way = Callable[[Sequence[Tokens]], Tensor]  # gives answers as `models.answers` does
Ask = Callable[[Sequence[Tokens]], tuple[float, Tensor]]  # the seconds that it took, and the answers


def another(loaded: LoadedModel) -> LoadedModel:
    """The same model once more, with weights of its own."""
    fields = {name: getattr(loaded, name) for name in ("name", "tokenizer", "kind", "dtype", "pooling", "answer")}
    return LoadedModel(model=copy.deepcopy(loaded.model), **fields)


def way_of(loaded: LoadedModel, model: Any = None) -> Way:
    """Ask the model, or another one that takes the same inputs."""
    return lambda texts: answers(loaded, collate(loaded, texts), model)


def timed(way: Way) -> Ask:
    """A way of this process, timed here."""

    def ask(texts: Sequence[Tokens]) -> tuple[float, Tensor]:
        start = time.perf_counter()
        given = way(texts)
        return time.perf_counter() - start, given

    return ask


class Cache:
    """A cache of exact duplicates: a text whose very tokens came before is not asked again.

    Attributes
    ----------
    texts, found : int
        Texts that came, and those of them that were known.
    """

    def __init__(self, behind: Ask) -> None:
        self._behind = behind
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.texts = self.found = 0

    def __call__(self, texts: Sequence[Tokens]) -> tuple[float, Tensor]:
        start, inside, around = time.perf_counter(), 0.0, 0.0
        new = list({tuple(text.ids): text for text in texts if tuple(text.ids) not in self._known}.values())
        if new:
            asked = time.perf_counter()
            inside, given = self._behind(new)
            around = time.perf_counter() - asked - inside  # what the way does not count: between processes
            self._keep(new, given)
        self._count(texts, len(new))
        found = torch.stack([self._known[tuple(text.ids)] for text in texts])
        return time.perf_counter() - start - around, found

    def learn(self, texts: Sequence[Tokens], given: Tensor) -> None:
        """Texts that another way has answered."""
        self._count(texts, len({tuple(text.ids) for text in texts if tuple(text.ids) not in self._known}))
        self._keep(texts, given)

    @property
    def share(self) -> float:
        """Share of the texts that were known."""
        return self.found / max(1, self.texts)

    @property
    def nbytes(self) -> int:
        """Bytes of answers, and eight for each token."""
        return sum(answer.nbytes + 8 * len(ids) for ids, answer in self._known.items())

    def _count(self, texts: Sequence[Tokens], new: int) -> None:
        self.texts, self.found = self.texts + len(texts), self.found + len(texts) - new

    def _keep(self, texts: Sequence[Tokens], given: Tensor) -> None:
        self._known.update(zip((tuple(text.ids) for text in texts), given.clone(), strict=True))
