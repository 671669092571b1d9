"""The planner: what a batch takes, what is free, and what out of memory looks like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generators import make_model
from hypothesis import given
from hypothesis import strategies as st
from transformers import BartConfig, GPT2Config, LlamaConfig, MarianConfig, PegasusConfig, T5Config, WhisperConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

from attmemo.errors import AttmemoError
from attmemo.fastseq.generate.shape import ModelShape
from attmemo.fastseq.pipeline import planner
from attmemo.fastseq.pipeline.planner import BatchPlanner, Guard, is_out_of_memory, peak_bytes
from attmemo.models.cache_name import CACHE_NAME

GIB = 1 << 30
BART_LARGE = ModelShape(12, 1024, 1024, 4096, 16, 50265, item=2)


class TestFormula:
    @pytest.mark.parametrize(
        ("batch", "mode", "gib"), [(32, "stock", 6.293), (32, "shared", 1.793), (128, "shared", 7.172)]
    )
    def test_the_cells_of_fastseqs_table_2(self, batch: int, mode: Any, gib: float) -> None:
        assert BART_LARGE.cache_bytes(batch, 4, 1024, 50, mode) / GIB == pytest.approx(gib, abs=5e-4)

    @pytest.mark.parametrize(
        ("batch", "source", "mha", "el"),
        [(32, 256, 1.5, 0.02), (32, 1024, 6, 0.06), (64, 256, 3, 0.03), (64, 1024, 12, 0.13), (320, 1024, 60, 0.63)],
    )
    def test_the_cells_of_els_table_4(self, batch: int, source: int, mha: float, el: float) -> None:
        assert BART_LARGE.cache_bytes(batch, 4, source, 0, "stock") / GIB == pytest.approx(mha, rel=0.01)
        assert BART_LARGE.cache_bytes(batch, 4, source, 0, "el") / GIB == pytest.approx(el, abs=0.006)
        ratio = BART_LARGE.cache_bytes(1, 4, source, 0) / BART_LARGE.cache_bytes(1, 4, source, 0, "el")
        assert ratio == 96

    @pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
    @pytest.mark.parametrize("beams", [1, 3])
    def test_the_cache_of_a_real_model(self, family: str, beams: int) -> None:
        model = make_model(family)
        batch, source, new = 2, 9, 6
        ids = torch.randint(4, 50, (batch, source))
        given_options = {"num_beams": beams, "max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        output = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), return_dict_in_generate=True, **given_options
        )
        cache = output[CACHE_NAME]
        parts = [cache.self_attention_cache, cache.cross_attention_cache] if family != "gpt2" else [cache]
        assert isinstance(cache, EncoderDecoderCache if family != "gpt2" else DynamicCache)
        held = sum(
            t.numel() * t.itemsize for part in parts for layer in part.layers for t in (layer.keys, layer.values)
        )
        shape = ModelShape.of(model.config)
        # The first token of a decoder behind an encoder is its start; the last that is generated is not cached.
        cached = new if family != "gpt2" else new - 1
        assert held == shape.cache_bytes(batch, beams, source, cached)

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            (BartConfig(encoder_layers=3, decoder_layers=5), (5, 1024, 1024, 4096, 16, 50265)),
            (MarianConfig(decoder_layers=2, d_model=64, decoder_attention_heads=4, encoder_attention_heads=8,
                          encoder_ffn_dim=96, vocab_size=70), (2, 64, 64, 96, 4, 70)),
            (PegasusConfig(), (12, 1024, 1024, 4096, 16, 50265)),
            (WhisperConfig(), (4, 384, 384, 1536, 6, 51865)),
            (T5Config(d_model=32, d_kv=12, num_heads=4, num_layers=3, num_decoder_layers=2, d_ff=50, vocab_size=9),
             (2, 48, 32, 50, 4, 9)),
            (GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=11), (3, 48, 48, 192, 4, 11)),
            (LlamaConfig(hidden_size=64, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2,
                         intermediate_size=80, vocab_size=30), (2, 16, 64, 80, 8, 30)),
        ],
        ids=lambda value: type(value).__name__,
    )  # fmt: skip
    def test_configurations_are_read(self, config: Any, expected: tuple[int, ...]) -> None:
        shape = ModelShape.of(config, torch.float16)
        found = (shape.layers, shape.keys, shape.width, shape.inner, shape.heads, shape.vocabulary)
        assert found == expected
        assert shape.item == 2
        assert shape.encoder == config.is_encoder_decoder

    def test_a_configuration_without_sizes(self) -> None:
        with pytest.raises(AttmemoError, match=r"d_model") as caught:
            ModelShape.of(object())
        assert "--batch-size" in str(caught.value)

    def test_what_a_step_takes_is_not_underestimated(self) -> None:
        """What was measured of the resident set: MiB for B, M, N, t."""
        bart = ModelShape(4, 512, 512, 2048, 8, 50265)
        gpt2 = ModelShape(4, 512, 512, 2048, 8, 50257, encoder=False)
        for shape, sizes, measured in (
            (bart, (8, 4, 512, 8), 424), (bart, (16, 4, 128, 24), 333), (bart, (32, 1, 512, 4), 391),
            (bart, (2, 8, 64, 40), 74), (gpt2, (8, 4, 256, 8), 531), (gpt2, (16, 1, 512, 6), 535),
            (gpt2, (4, 4, 64, 60), 79),
        ):  # fmt: skip
            predicted = peak_bytes(shape, *sizes) / (1 << 20)
            assert measured <= predicted <= 1.5 * measured, (sizes, predicted)
        eager = ModelShape(2, 32, 32, 64, 4, 1000, eager=True)
        assert peak_bytes(eager, 3, 1, 2000, 5) >= 3 * 4 * 2000 * 2000 * 4


class TestPlan:
    @given(st.integers(1, 1 << 36), st.integers(1, 4096), st.integers(1, 512), st.integers(1, 8))
    def test_a_planned_batch_fits(self, free: int, source: int, new: int, beams: int) -> None:
        plan = BatchPlanner(BART_LARGE, free=free, most=64)
        batch = plan.plan(source, new, beams)
        assert 1 <= batch <= 64
        assert batch == 1 or plan.bytes(batch, beams, source, new) <= free
        larger = batch + (1 if batch < 8 else 8)
        assert larger > 64 or plan.bytes(larger, beams, source, new) > free

    def test_sharing_leaves_room_for_more(self) -> None:
        plans = {
            m: BatchPlanner(BART_LARGE, free=8 * GIB, mode=m).plan(1024, 50, 4) for m in ("stock", "shared", "el")
        }
        assert plans["stock"] < plans["shared"] <= plans["el"]

    def test_longer_texts_make_smaller_batches(self) -> None:
        plan = BatchPlanner(BART_LARGE, free=4 * GIB)
        sizes = [plan.plan(source, 50, 4) for source in (64, 128, 256, 512, 1024)]
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] > sizes[-1]

    def test_what_is_free_is_asked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(planner, "free_memory", lambda device: 10 * GIB)
        assert BatchPlanner(BART_LARGE).free == 5 * GIB


class TestOutOfMemory:
    def test_the_cpu_allocator(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            torch.empty(1 << 55)
        assert is_out_of_memory(caught.value)

    def test_others(self) -> None:
        assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
        assert is_out_of_memory(MemoryError())
        assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))

    @pytest.mark.parametrize(
        "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory"), OSError(12)]
    )
    def test_no_other_error_is_taken_for_it(self, error: Exception) -> None:
        assert not is_out_of_memory(error)


class TestGuard:
    def test_nothing_failed(self) -> None:
        assert Guard().allowed(10**6) > 10**9

    def test_half_of_what_failed_and_no_more_of_shorter_ones_than_as_many_tokens(self) -> None:
        guard = Guard()
        guard.failed(16, 100)
        assert guard.allowed(100) == 8
        assert guard.allowed(50) == 16
        assert guard.allowed(10_000) == 1
        guard.failed(8, 100)
        assert guard.allowed(100) == 4
        assert guard.halvings == 2

    @given(st.integers(2, 1000), st.integers(1, 5000))
    def test_halving_does_not_end(self, batch: int, tokens: int) -> None:
        guard = Guard()
        while batch > 1:
            guard.failed(batch, tokens)
            assert guard.allowed(tokens) == batch // 2
            batch = guard.allowed(tokens)
