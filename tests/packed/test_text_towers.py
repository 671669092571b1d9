"""Text towers of CLIP and SigLIP: packed, pooled as ever, and left alone where padding would be pooled."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers
from families import SIZES, _bias
from packed_models import CLIP, NEAR, SIGLIP, batch, gap, last
from packed_tools import left_alone, ran_packed
from same_text import bits, by_our_kernels, of_blocks

from attmemo import UnsupportedModelError, memoize
from attmemo.models import adapter_for, check_adapter
from attmemo.packed.stack import READS_PADDING

_TEXT = SIZES | {"initializer_factor": 3.0}
_VISION = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
           "image_size": 16, "patch_size": 4}  # fmt: skip


def pair(bare: Any, **asked: Any) -> tuple[Any, Any]:
    return bare, memoize(copy.deepcopy(bare), reuse="none", **asked)


def both_of(family: str, **text: Any) -> Any:
    """A model with both towers."""
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(text_config=_TEXT | text, vision_config=_VISION)
    return _bias(getattr(transformers, f"{family}Model")(config))


@pytest.mark.parametrize("name", CLIP)
def test_the_pooled_row_is_the_originals(name: str) -> None:
    bare, model = pair(CLIP[name]())
    inputs = batch([9, 2, 17, 30])
    for row, n in enumerate([9, 2, 17, 30]):
        inputs["input_ids"][row, n - 1] = 9 if "id" in name else 119
    with torch.inference_mode():
        seen, expected = model(**inputs), bare(**inputs)
    key = "text_embeds" if "id" in name else "pooler_output"
    assert gap(seen[key], expected[key]) <= NEAR
    assert ran_packed(model)


@pytest.mark.parametrize("name", CLIP)
def test_where_the_end_lies_in_padding_the_original_code_answers(name: str) -> None:
    bare, model = pair(CLIP[name]())
    inputs = batch([9, 4])
    inputs["input_ids"][0, inputs["input_ids"][0] == 9] = 8
    inputs["input_ids"][1, 6] = 9 if "id" in name else 119
    inputs["input_ids"][1, :4] = 7
    assert torch.equal(last(model, inputs), last(bare, inputs))
    assert left_alone(model) == {READS_PADDING: 2}


@pytest.mark.parametrize("family", ["CLIP", "Siglip", "Siglip2"])
def test_a_model_with_both_towers_gives_the_same_scores(family: str) -> None:
    bare, model = pair(both_of(family))
    ids = torch.randint(5, 119, (3, 12), generator=torch.Generator().manual_seed(2))
    ids[:, -1] = 119
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(3))
    asked = {"input_ids": ids, "pixel_values": images}
    with torch.inference_mode():
        seen, expected = model.get_text_features(ids), bare.get_text_features(ids)
        assert gap(seen.pooler_output, expected.pooler_output) <= NEAR
        assert ran_packed(model)
        if family != "Siglip2":  # its images are cut into patches before
            assert gap(model(**asked).logits_per_text, bare(**asked).logits_per_text) <= NEAR
            assert ran_packed(model)
    assert not any("forward" in vars(module) for module in model.vision_model.modules())
    if family != "Siglip2":
        memoize(model.vision_model, reuse="none")
        with torch.inference_mode():
            assert gap(model(**asked).logits_per_image, bare(**asked).logits_per_image) <= NEAR
        assert ran_packed(model)
        assert ran_packed(model.vision_model)


@pytest.mark.parametrize("name", SIGLIP)
class TestSigLIP:
    def test_float32_is_the_original_and_so_is_what_it_pools(self, name: str) -> None:
        bare, model = pair(SIGLIP[name]())
        for length in (1, 2, 17, 64):
            ids = batch([length] * 5, length)["input_ids"]
            for inputs in ({"input_ids": ids}, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
                with torch.inference_mode():
                    seen, expected = model(**inputs), bare(**inputs)
                assert gap(seen.last_hidden_state, expected.last_hidden_state) <= NEAR
                assert gap(seen.pooler_output, expected.pooler_output) <= NEAR
                assert ran_packed(model)

    def test_with_padding_the_original_code_answers(self, name: str) -> None:
        bare, model = pair(SIGLIP[name]())
        inputs = batch([9, 4])
        with torch.inference_mode():
            assert torch.equal(model(**inputs).pooler_output, bare(**inputs).pooler_output)
        assert left_alone(model) == {READS_PADDING: 2}

    def test_bfloat16_is_as_near_to_float64_as_the_original(self, name: str) -> None:
        bare, model = pair(SIGLIP[name]().to(torch.bfloat16))
        exact = copy.deepcopy(bare).double()
        ours = theirs = 0.0
        for seed in range(8):
            inputs = {"input_ids": batch([20] * 8, seed)["input_ids"]}
            reference = last(exact, inputs)
            ours += float((last(model, inputs).double() - reference).square().sum())
            theirs += float((last(bare, inputs).double() - reference).square().sum())
        assert ran_packed(model)
        assert 0 < ours**0.5 <= 1.1 * theirs**0.5

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_int8_is_near_the_original(self, name: str, dtype: torch.dtype) -> None:
        bare, model = pair(SIGLIP[name]().to(dtype), linear="int8")
        inputs = {"input_ids": batch([20] * 8)["input_ids"]}
        near = torch.cosine_similarity(last(model, inputs).float(), last(bare, inputs).float(), dim=-1)
        assert near.mean() > 0.96
        assert ran_packed(model)

    @pytest.mark.parametrize("linear", ["exact", "int8"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_text_has_the_same_bits_alone_and_in_any_batch(self, name: str, dtype: torch.dtype, linear: str) -> None:
        _, model = pair(SIGLIP[name]().to(dtype), linear=linear)
        if not by_our_kernels(model):
            pytest.skip("kernels of attmemo do not compute this type here")
        ids, seen = batch([33] * 9)["input_ids"], [defaultdict[bytes, set[bytes]](set) for _ in range(9)]
        for size in (1, 2, 9):
            for start in range(0, 9 - size + 1, size):
                with of_blocks(model) as calls:
                    last(model, {"input_ids": ids[start : start + size]})
                ((embedded, made),) = calls
                for row in range(size):
                    seen[start + row][bits(embedded[row])].add(bits(made[row]))
        assert all(len(one) == 1 for states in seen for one in states.values())


class TestRefused:
    def test_rows_and_maps_are_refused_by_name(self) -> None:
        model: Any = CLIP["CLIP text"]()
        with pytest.raises(UnsupportedModelError, match="are causal"):
            memoize(model, reuse="rows", database=":memory:", budget=0.01)
        with pytest.raises(UnsupportedModelError, match="maps of this family"):
            check_adapter(*_known(model))
        with pytest.raises(UnsupportedModelError, match="rows of this family"):
            memoize(SIGLIP["SigLIP"](), reuse="rows", database=":memory:", budget=0.01)

    def test_an_image_tower_is_not_taken_for_a_text_tower(self) -> None:
        for family in ("CLIP", "Siglip"):
            assert adapter_for(both_of(family).vision_model)[0].family == "clip-vision"
        with pytest.raises(UnsupportedModelError, match="no adapter knows"):
            memoize(both_of("Siglip2").vision_model, reuse="none")


def _known(model: Any) -> Any:
    adapter, sites = adapter_for(model)
    return adapter, model, sites
