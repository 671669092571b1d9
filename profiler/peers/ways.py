"""A way takes tokenized texts in the order of arrival and gives their answers, as `models.answers` does.

The time of a way includes padding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attmemo.profiler.models import LoadedModel, Tokens, answers, collate

Way = Callable[[Sequence[Tokens]], Tensor]


def another(loaded: LoadedModel) -> LoadedModel:
    """The same model once more, with weights of its own."""
    fields = {name: getattr(loaded, name) for name in ("name", "tokenizer", "kind", "dtype", "pooling", "answer")}
    return LoadedModel(model=copy.deepcopy(loaded.model), **fields)


def way_of(loaded: LoadedModel, model: Any = None) -> Way:
    """Ask the model, or another one that takes the same inputs."""
    return lambda texts: answers(loaded, collate(loaded, texts), model)


class Duplicates:
    """A cache in front of a way: a text whose very tokens came before is not asked again.

    Attributes
    ----------
    texts, found : int
        Texts that came, and those of them that were known.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.texts = self.found = 0

    def __call__(self, texts: Sequence[Tokens]) -> Tensor:
        new = list({tuple(text.ids): text for text in texts if tuple(text.ids) not in self._known}.values())
        if new:
            self._keep(new, self._way(new))
        self.texts, self.found = self.texts + len(texts), self.found + len(texts) - len(new)
        return torch.stack([self._known[tuple(text.ids)] for text in texts])

    def learn(self, texts: Sequence[Tokens], given: Tensor) -> None:
        """Texts that another way has answered."""
        new = {tuple(text.ids) for text in texts if tuple(text.ids) not in self._known}
        self.texts, self.found = self.texts + len(texts), self.found + len(texts) - len(new)
        self._keep(texts, given)

    def _keep(self, texts: Sequence[Tokens], given: Tensor) -> None:
        self._known.update(zip((tuple(text.ids) for text in texts), given.clone(), strict=True))
