"""Modules of sentence-transformers behind a packed model: dense layers, sparse heads, a vector of each token."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from families import DECODER
from packed_models import NEAR, gap
from torch import nn
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from attmemo import memoize

LINES = ["alpha beta", "gamma", "alpha beta gamma delta epsilon zeta", "gamma"]

sentence = pytest.importorskip("sentence_transformers", reason="package sentence-transformers is not installed")


def packed(bare: Any, **options: Any) -> Any:
    model = memoize(copy.deepcopy(bare), reuse="none", **options)
    model.attmemo.reset_stats()
    return model


def all_packed(model: Any) -> bool:
    stats = model.attmemo.stats()
    return stats["sequences"] > 0 and not stats["ineligible"] and not stats["failures"]


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_dense_layers_behind_pooling_get_the_same_vectors(tiny_bert: str, mode: str) -> None:
    from sentence_transformers.models import Dense, Normalize, Pooling, Transformer

    torch.manual_seed(0)
    modules = [
        Transformer(tiny_bert, max_seq_length=48), Pooling(32, pooling_mode=mode), Dense(32, 96, bias=False),
        Dense(96, 24, activation_function=nn.Identity()), Normalize(),
    ]  # fmt: skip
    bare = sentence.SentenceTransformer(modules=modules, device="cpu")
    model = packed(bare)
    seen, expected = (torch.from_numpy(one.encode(LINES)) for one in (model, bare))
    assert seen.shape == (4, 24)
    assert gap(seen, expected) <= NEAR
    assert all_packed(model)


@pytest.mark.parametrize("strategy", ["max", "sum"])
def test_a_sparse_head_gives_the_same_weights_of_words(tiny_bert: str, strategy: str) -> None:
    """The head computes logits of padding too, and must not pool them."""
    pytest.importorskip("sentence_transformers.sparse_encoder", reason="this version has no sparse encoders")
    from sentence_transformers import SparseEncoder
    from sentence_transformers.sparse_encoder.modules import MLMTransformer, SpladePooling

    torch.manual_seed(0)
    bare = SparseEncoder(modules=[MLMTransformer(tiny_bert), SpladePooling(strategy)], device="cpu")
    model = packed(bare)
    seen, expected = (one.encode(LINES, convert_to_sparse_tensor=False) for one in (model, bare))
    assert bool((expected > 0).any())
    assert gap(seen, expected) <= NEAR
    assert all_packed(model)
    rounded = packed(bare, linear="int8")
    near = rounded.encode(LINES, convert_to_sparse_tensor=False)
    assert 0.0 < gap(near, expected) <= 0.05
    assert all_packed(rounded)


def test_a_vector_of_each_token_is_the_same_and_so_are_scores(tiny_bert: str) -> None:
    if not hasattr(sentence, "MultiVectorEncoder"):
        pytest.skip("this version has no encoders of many vectors")
    from sentence_transformers.models import Dense, Normalize, Transformer
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask

    torch.manual_seed(0)
    dense = Dense(
        32, 16, bias=False, activation_function=nn.Identity(), module_input_name="token_embeddings",
        module_output_name="token_embeddings",
    )  # fmt: skip
    bare = sentence.MultiVectorEncoder(
        modules=[Transformer(tiny_bert), dense, MultiVectorMask(), Normalize(module_input_name="token_embeddings")],
        device="cpu",
    )
    model = packed(bare)
    for seen, expected in zip(model.encode(LINES), bare.encode(LINES), strict=True):
        assert seen.shape == expected.shape
        assert gap(torch.as_tensor(seen), torch.as_tensor(expected)) <= NEAR
    assert all_packed(model)
    rounded = packed(bare, linear="int8")
    assert all_packed(rounded) is False, "nothing was asked yet"
    scores = [one.similarity(one.encode(LINES[:1]), one.encode(LINES)) for one in (model, bare, rounded)]
    assert gap(*scores[:2]) <= NEAR
    assert 0.0 < gap(scores[2], scores[1]) <= 0.05
    assert all_packed(rounded)


def test_a_reranker_that_is_a_decoder_gives_the_same_scores(tiny_bert: str, tmp_path: Path) -> None:
    """`LogitScore`: the logits of two words behind the last token, padded on the left."""
    pytest.importorskip("sentence_transformers.cross_encoder.modules", reason="this version has no such rerankers")
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_bert)
    tokenizer.save_pretrained(tmp_path)
    sizes = DECODER | {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
    Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=12)).save_pretrained(tmp_path)
    decoder = Transformer(str(tmp_path), transformer_task="text-generation")
    bare = sentence.CrossEncoder(modules=[decoder, LogitScore(5, 6)], device="cpu")
    pairs = [(LINES[2], line) for line in LINES]
    expected = torch.from_numpy(bare.predict(pairs))
    for options in ({}, {"reuse": "prefix"}):
        model = memoize(copy.deepcopy(bare), **options)
        assert gap(torch.from_numpy(model.predict(pairs)), expected) <= NEAR
        assert all_packed(model)
