"""sentence-transformers reads last hidden states alone: BERT's own pooler is left out, unless something looks."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from torch import nn

from attmemo import memoize
from attmemo.forward.hooks import Hook
from attmemo.packed.reader_hook import ReaderHook, reader_of

LINES = ["alpha beta", "gamma", "alpha beta gamma delta"]


@pytest.fixture(name="embedder")
def _embedder(tiny_bert: str) -> Any:
    """Words of a tiny BERT, and their mean."""
    sentence = pytest.importorskip("sentence_transformers")
    from sentence_transformers.models import Pooling, Transformer

    return sentence.SentenceTransformer(modules=[Transformer(tiny_bert, max_seq_length=48), Pooling(32)], device="cpu")


class Counted(nn.Tanh):
    """The pooler's activation, which counts its calls."""

    calls = 0

    def forward(self, x: Any) -> Any:
        type(self).calls += 1
        return super().forward(x)


def calls_of(embedder: Any) -> int:
    """How often the pooler runs while lines are embedded."""
    Counted.calls = 0
    embedder.encode(LINES)
    return Counted.calls


def test_the_pooler_runs_only_where_something_looks(embedder: Any) -> None:
    model = embedder[0].model
    model.pooler.activation = Counted()
    assert calls_of(embedder) == 1
    expected = embedder.encode(LINES)
    memoize(embedder, reuse="none")
    assert isinstance(embedder[0].forward, ReaderHook)
    assert calls_of(embedder) == 0
    assert np.allclose(embedder.encode(LINES), expected, atol=1e-5)
    seen: list[Any] = []
    own = model.forward

    def around(*args: Any, **kwargs: Any) -> Any:
        seen.append(own(*args, **kwargs))
        return seen[-1]

    model.forward = around
    assert calls_of(embedder) == 1
    assert seen[0].pooler_output is not None
    model.forward = own
    assert calls_of(embedder) == 0
    features = embedder.preprocess(LINES)
    assert model(**{name: features[name] for name in ("input_ids", "attention_mask")}).pooler_output is not None


def test_both_ways_give_the_same_bits(embedder: Any) -> None:
    memoize(embedder, reuse="none")
    seen = embedder.encode(LINES)
    model = embedder[0].model
    handle = model.embeddings.register_forward_hook(lambda *given: None)
    assert np.array_equal(embedder.encode(LINES), seen)
    handle.remove()


def test_a_module_that_is_asked_for_other_outputs_gets_them(embedder: Any) -> None:
    embedder[0].modality_config["text"]["method_output_name"] = "pooler_output"
    memoize(embedder, reuse="none")
    assert not isinstance(embedder[0].__dict__.get("forward"), Hook)
    assert reader_of(embedder, embedder[0].model) is None


def test_a_copy_and_an_undone_model_have_no_hook(embedder: Any) -> None:
    memoize(embedder, reuse="none")
    assert not isinstance(copy.deepcopy(embedder)[0].forward, Hook)
    embedder.attmemo.undo()
    assert not isinstance(embedder[0].forward, Hook)
