"""Causal models, texts that begin alike, and batches of them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from families import VOCABULARY, _bias
from packed_models import GATED, Inputs
from torch import Tensor

from attmemo import memoize
from attmemo.packed.prefixes import CUT

Ids = npt.NDArray[np.int64]

CAUSAL = [name for name in GATED if name not in ("EuroBERT", "Gemma 3, bidirectional", "Privacy Filter")]
"""Families whose blocks are causal: with windows and without."""

ARITHMETICS = [("bfloat16", "exact"), ("float32", "int8"), ("float32", "exact"), ("bfloat16", "int8")]


def make(name: str, dtype: str = "bfloat16") -> Any:
    """A bare model of this family with positions for long texts."""
    bare: Any = GATED[name]()
    config = copy.deepcopy(bare.config)
    config.update({"max_position_embeddings": 512})
    torch.manual_seed(1)
    return _bias(type(bare)(config)).to(getattr(torch, dtype)).eval()


def whole(name: str, dtype: str = "bfloat16", linear: str = "exact") -> Any:
    """The same, packed, and every row is computed."""
    model = memoize(make(name, dtype), reuse="none", linear=linear)
    model.attmemo.engine.reuse.shares = False
    return model


def random_ids(rng: np.random.Generator, count: int) -> Ids:
    return rng.integers(5, VOCABULARY, count)


def family_of(rng: np.random.Generator, count: int, lengths: Sequence[int] = (0, 1, 5, 16, 33, 70)) -> list[Ids]:
    """Texts, each of which begins as an earlier one does, up to any place, if not with something new."""
    found: list[Ids] = [random_ids(rng, 90)]
    while len(found) < count:
        before = found[rng.integers(len(found))]
        kept = before[: rng.choice([0, CUT - 1, CUT, 2 * CUT + 1, 60, len(before)])]
        found.append(np.concatenate([kept, random_ids(rng, int(rng.choice(lengths)) + (len(kept) == 0))]))
    return [found[place] for place in rng.permutation(count)]


def batch_of(texts: Sequence[Ids], *, left: bool = False, more: int = 0) -> Inputs:
    """One batch, padded on one side to the longest and `more`."""
    width = max(map(len, texts)) + more
    ids, mask = torch.zeros(2, len(texts), width, dtype=torch.long)
    for row, own in enumerate(texts):
        at = slice(width - len(own), width) if left else slice(len(own))
        ids[row, at], mask[row, at] = torch.from_numpy(own), 1
    return {"input_ids": ids, "attention_mask": mask}


def answer(model: Any, inputs: Inputs) -> Tensor:
    """What the model gives for the valid tokens ``[N, ...]``, or for each text."""
    with torch.inference_mode():
        found = model(**inputs)
    states: Tensor | None = getattr(found, "last_hidden_state", None)
    return found.logits if states is None else states[inputs["attention_mask"].bool()]


def rows_of(model: Any) -> int:
    """Rows computed since the last time; nothing went wrong."""
    stats = model.attmemo.stats()
    model.attmemo.reset_stats()
    assert not stats["failures"]
    assert not stats["ineligible"]
    return int(stats["rows_computed"])
