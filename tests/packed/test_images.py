"""Images and sounds: patches or frames in place of tokens, none of them padding."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, inputs_of
from packed_models import NEAR, UNPADDED, firsts, gap, last
from packed_tools import ran_packed
from same_text import bits, by_our_kernels, of_blocks

from attmemo import UnsupportedModelError, memoize


def images(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    return inputs_of(FAMILIES["ViT"], [17] * count, seed)


def samples(name: str, count: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Images, or sounds, for a model of `UNPADDED`."""
    given = inputs_of(FAMILIES["Whisper"], [20] * count, seed) if "Whisper" in name else images(count, seed)
    return {name: value.to(dtype) for name, value in given.items()}


def pair(bare: Any, **asked: Any) -> tuple[Any, Any]:
    return bare, memoize(copy.deepcopy(bare), reuse="none", **asked)


@pytest.mark.parametrize("name", UNPADDED)
def test_float32_is_the_original(name: str) -> None:
    bare, model = pair(UNPADDED[name]())
    for count in (1, 2, 8):
        inputs = samples(name, count, count)
        assert gap(last(model, inputs), last(bare, inputs)) <= NEAR
        assert ran_packed(model)
        with torch.inference_mode():
            seen, expected = model(**inputs), bare(**inputs)
        assert type(seen) is type(expected)
        if "pooler_output" in expected:
            assert gap(seen.pooler_output, expected.pooler_output) <= NEAR


@pytest.mark.parametrize("name", UNPADDED)
def test_bfloat16_is_as_near_to_float64_as_the_original(name: str) -> None:
    bare, model = pair(UNPADDED[name]().to(torch.bfloat16))
    exact = copy.deepcopy(bare).double()
    ours = theirs = 0.0
    for seed in range(8):
        inputs = samples(name, 8, seed, torch.bfloat16)
        reference = last(exact, {name: value.double() for name, value in inputs.items()})
        ours += float((last(model, inputs).double() - reference).square().sum())
        theirs += float((last(bare, inputs).double() - reference).square().sum())
    assert ran_packed(model)
    assert 0 < ours**0.5 <= 1.1 * theirs**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", UNPADDED)
def test_int8_is_near_the_original(name: str, dtype: torch.dtype) -> None:
    bare, model = pair(UNPADDED[name]().to(dtype), linear="int8")
    inputs = samples(name, 8, dtype=dtype)
    near = torch.cosine_similarity(last(model, inputs).float(), last(bare, inputs).float(), dim=-1)
    assert near.mean() > 0.96
    assert ran_packed(model)


@pytest.mark.parametrize("linear", ["exact", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["ViT", "CLIP images", "Whisper encoder"])
def test_an_image_has_the_same_bits_alone_and_in_any_batch(name: str, dtype: torch.dtype, linear: str) -> None:
    _, model = pair(UNPADDED[name]().to(dtype), linear=linear)
    if not by_our_kernels(model):
        pytest.skip("kernels of attmemo do not compute this type here")
    ((kind, every),) = samples(name, 9, dtype=dtype).items()
    before, seen = torch.get_num_threads(), [defaultdict[bytes, set[bytes]](set) for _ in every]
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for size in (1, 2, 9):
                for start in range(0, 9 - size + 1, size):
                    with of_blocks(model) as calls:
                        last(model, {kind: every[start : start + size]})
                    ((embedded, made),) = calls
                    for row in range(size):
                        seen[start + row][bits(embedded[row])].add(bits(made[row]))
    finally:
        torch.set_num_threads(before)
    assert all(len(one) == 1 for states in seen for one in states.values())


def test_a_classifier_reads_first_rows_alone_and_one_with_two_tokens_all() -> None:
    config: Any = FAMILIES["ViT"].make().config
    config.update({"num_labels": 5})
    bare, model = pair(transformers.ViTForImageClassification(config).eval())
    inputs = images(4)
    before = firsts(model)
    with torch.inference_mode():
        assert gap(model(**inputs).logits, bare(**inputs).logits) <= NEAR
    assert firsts(model) == before + 1
    config = FAMILIES["DeiT"].make().config
    bare, model = pair(transformers.DeiTForImageClassificationWithTeacher(config).eval())
    assert not model.attmemo.stats()["first_row"]
    with torch.inference_mode():
        assert gap(model(**inputs).logits, bare(**inputs).logits) <= NEAR
    assert ran_packed(model)


def test_rows_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match="rows of this family"):
        memoize(FAMILIES["ViT"].make(), reuse="rows", database=":memory:", budget=0.01)
