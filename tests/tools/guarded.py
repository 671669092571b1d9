"""Guarded models, what they are taught, and what is counted."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers as hf
from families import FAMILIES
from packed_models import Inputs, batch, gap, valid
from torch import Tensor

from attmemo import memoize
from attmemo.guard.certificate import Counts

LENGTHS = [30, 20, 33, 16, 25, 20]
FIRST, SECOND = 4, 10
"""Places of two tokens that are changed. Those around them are the same in all variants."""


BEGUN: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
"""What guards had counted before their first request."""


NAMES = ["BERT", "BERT classifier", "DeBERTa-v3"]
BASE = batch(LENGTHS, 3)


def variant(*places: int, by: int = 1, of: Inputs = BASE) -> Inputs:
    """The batch with another token at these places, in every sequence."""
    ids = of["input_ids"].clone()
    for place in places:
        ids[:, place] = 5 + (ids[:, place] - 5 + by) % 100
    return of | {"input_ids": ids}


def rows_of(inputs: Inputs, *rows: int) -> Inputs:
    return {name: value[list(rows)] for name, value in inputs.items()}


def run(model: Any, inputs: Inputs, *args: Any, **more: Any) -> Any:
    """The output; what a memoized model wants to keep is kept when this returns."""
    with torch.inference_mode():
        found = model(*args, **inputs, **more)
    flush(model)
    return found


def flush(model: Any) -> None:
    """Wait until what a model wants to keep is kept; other models keep nothing."""
    handle = getattr(model, "attmemo", None)
    assert handle is None or handle.flush()


def sure(model: Any, factor: float = 300.0) -> Any:
    """The classifier with a head that is sure of every answer."""
    with torch.no_grad():
        model.classifier.weight.mul_(factor)
        model.classifier.bias.zero_()
    return model


def guarded(model: Any, database: Any = ":memory:", **options: Any) -> Any:
    """A copy that is guarded; always looked up, so that nothing depends on this machine's speed."""
    found = memoize(copy.deepcopy(model), database=database, reuse="rows", **{"gate": False, "budget": 0.01} | options)
    BEGUN[found.attmemo] = found.attmemo.stats()["guard"]["done"]
    return found


def certify(model: Any) -> Any:
    """All that was verified may be served from now on, and nothing is drawn."""
    guard = model.attmemo.guarded.guard
    guard.certificate.adopt(Counts(same=100_000, requests=1_000))
    guard.drawn = 0.0
    return model


def taught(model: Any, **options: Any) -> Any:
    """A guarded model that has verified a change at each of two places, but not both of them together."""
    found = guarded(model, **options)
    for inputs in (BASE, variant(FIRST), variant(SECOND)):
        run(found, inputs)
    return certify(found)


BOTH = variant(FIRST, SECOND)


def trusting(model: Any) -> Any:
    """A model that tries its records, however sure their own answers are."""
    index = model.attmemo.planner.index
    index.note_sureness(index.numbers(), [np.nan] * len(index))
    return model


def done(model: Any) -> dict[str, int]:
    """What became of the requests so far."""
    found: dict[str, int] = model.attmemo.stats()["guard"]["done"]
    begun = BEGUN[model.attmemo]
    return {name: count - begun.get(name, 0) for name, count in found.items() if count > begun.get(name, 0)}


def field(output: Any) -> Tensor:
    found: Tensor = output[0]
    return found


def worst(seen: Any, expected: Any, inputs: Inputs) -> float:
    """Greatest difference over all fields, at valid tokens."""
    found = []
    for one, other in zip(seen.to_tuple(), expected.to_tuple(), strict=True):
        found.append(gap(one, other, valid(inputs) if one.dim() == 3 else None))
    return max(found)


class Case:
    def __init__(self, name: str) -> None:
        self.bare: Any = FAMILIES[name].make()
        if name != "BERT":
            sure(self.bare)
        self.exact: Any = memoize(copy.deepcopy(self.bare), reuse="none")


class Pairs(hf.BertForSequenceClassification):  # type: ignore[misc]
    """Classes of one text, or of two texts together."""

    def forward(self, input_ids: Any, attention_mask: Any, other_ids: Any = None) -> Any:
        pooled = self.bert(input_ids, attention_mask)[1]
        if other_ids is not None:
            pooled = pooled + self.bert(other_ids, attention_mask)[1]
        return hf.modeling_outputs.SequenceClassifierOutput(logits=self.classifier(pooled))


def until(holds: Callable[[], bool], seconds: float = 60.0) -> bool:
    """Whether something holds within some time."""
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.005)
    return holds()
