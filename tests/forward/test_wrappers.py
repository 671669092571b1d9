"""What people put around a model, and what they do to its weights: served all the same, or refused by name."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, inputs_of
from memoized_families import gap, output
from torch import Tensor, nn

from attmemo import UnsupportedModelError, memoize, unmemoize
from attmemo.embed.training import TrainOptions
from attmemo.models import adapter_for
from attmemo.profiler.build import build_from_inputs
from attmemo.profiler.models import LoadedModel, load_model
from attmemo.profiler.train import train_database

LENGTHS = [9, 12, 9, 7, 12, 16, 9, 12, 7, 16]


def make_database(model: nn.Module, inputs: dict[str, Tensor], folder: Path, **options: Any) -> Path:
    """A trained database of these inputs."""
    rows = ({name: value[row : row + 1] for name, value in inputs.items()} for row in range(len(LENGTHS)))
    path = build_from_inputs(model, rows, folder / "db", held_out=0.0, **options)
    train_database(path, TrainOptions(steps=5), profile=False)
    return path


@pytest.fixture(name="loaded")
def _loaded(tiny_bert: str) -> LoadedModel:
    return load_model(tiny_bert)


class TestPipelines:
    @pytest.mark.parametrize("inside", [True, False], ids=["the pipeline", "its model"])
    def test_a_pipeline_is_served_and_answers_as_before(
        self, loaded: LoadedModel, bert_database: Path, log_lines: list[str], inside: bool
    ) -> None:
        from transformers import pipeline

        model, tokenizer = loaded.model, loaded.tokenizer
        pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu", top_k=None)
        texts = log_lines[:12]
        expected = pipe(texts, batch_size=4, truncation=True, max_length=48)
        memoize(pipe if inside else pipe.model, threshold=0.0, database=bert_database, gate=False)
        seen = pipe(texts, batch_size=4, truncation=True, max_length=48)
        assert loaded.model.attmemo.stats()["hits"] > 0  # type: ignore[operator, union-attr]
        for ours, theirs in zip(seen, expected, strict=True):
            assert [label["label"] for label in ours] == [label["label"] for label in theirs]
            scores = [[label["score"] for label in labels] for labels in (ours, theirs)]
            assert np.allclose(*scores, atol=1e-5)
        unmemoize(pipe if inside else pipe.model)
        assert not hasattr(loaded.model, "attmemo")

    def test_a_cross_encoder_is_served(self, tiny_bert: str, tmp_path: Path, log_lines: list[str]) -> None:
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
        from sentence_transformers import CrossEncoder

        cross = CrossEncoder(tiny_bert, device="cpu", num_labels=5)
        pairs = [(a[:40], b[:40]) for a, b in zip(log_lines[:6], log_lines[6:12], strict=True)]
        tokens = cross.tokenizer(*map(list, zip(*pairs, strict=True)), padding=True, return_tensors="pt")
        model = cross.model
        rows = [
            {name: value[row : row + 1, : int(tokens["attention_mask"][row].sum())] for name, value in tokens.items()}
            for row in range(len(pairs))
        ]
        path = build_from_inputs(model, rows * 2, tmp_path / "db", held_out=0.0)
        train_database(path, TrainOptions(steps=5), profile=False)
        expected = cross.predict(pairs, convert_to_numpy=True)
        memoize(cross, threshold=0.0, database=path, gate=False)
        seen = cross.predict(pairs, convert_to_numpy=True)
        assert model.attmemo.stats()["hit_rate"] == 1.0
        assert np.allclose(seen, expected, atol=1e-3)  # float16 maps


class TestAdapted:
    def test_merged_low_rank_adapters_are_plain_weights(self, loaded: LoadedModel, tmp_path: Path) -> None:
        import peft

        torch.manual_seed(2)
        config = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
        model = peft.get_peft_model(loaded.model, config)
        with pytest.raises(UnsupportedModelError, match="no adapter knows") as refusal:
            memoize(model, database=tmp_path)  # not merged: adapters can be switched
        assert "looks like bert, but projections are not plain linear layers" in str(refusal.value)
        assert "query, value: peft.tuners.lora.layer.Linear" in str(refusal.value), "the cause is not named"
        merged = model.merge_and_unload().eval()
        inputs = inputs_of(FAMILIES["BERT"], LENGTHS)
        path = make_database(merged, inputs, tmp_path, storage="float32")
        expected = output(merged, inputs)
        memoize(merged, threshold=0.0, database=path, gate=False)
        assert gap(output(merged, inputs)[1, :12], expected[1, :12]) <= 1e-5
        assert merged.attmemo.stats()["hit_rate"] == 1.0


QUANTIZABLE = ["BERT", "DistilBERT", "MPNet", "DeBERTa-v3", "ViT", "BART encoder", "T5 encoder", "Llama", "OPT"]


class TestQuantized:
    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("name", QUANTIZABLE)
    def test_dynamic_int8_is_served_within_its_own_rounding(self, name: str, tmp_path: Path) -> None:
        from torch.ao.quantization import quantize_dynamic

        family = FAMILIES[name]
        model = quantize_dynamic(family.make(), {nn.Linear}, dtype=torch.qint8)
        inputs = inputs_of(family, LENGTHS)
        path = make_database(model, inputs, tmp_path, storage="float32")
        # Alone, as they were captured: the scale of a tensor's int8 depends on all of its rows.
        alone = [
            {key: value[row : row + 1, :n] if family.kind == "tokens" else value[row : row + 1]
             for key, value in inputs.items()}
            for row, n in enumerate(LENGTHS)
        ]  # fmt: skip
        expected = [output(model, one) for one in alone]
        memoize(model, threshold=0.0, database=path, gate=False)
        for one, exact in zip(alone, expected, strict=True):
            near = nn.functional.cosine_similarity(output(model, one).flatten(), exact.flatten(), dim=0)
            assert float(near) > 0.99  # numbers on the edge round to the other side, and others after them
        assert model.attmemo.stats()["hit_rate"] == 1.0
        memoize(model, threshold=1.0, database=path, gate=False)
        other = inputs_of(family, [12, 12], seed=8)
        served = output(model, other)
        unmemoize(model)
        assert torch.equal(served, output(model, other)), "a miss is exact"

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize("name", ["ModernBERT", "DeBERTa"])
    def test_a_fused_projection_in_int8_is_refused_by_name(self, name: str) -> None:
        from torch.ao.quantization import quantize_dynamic

        model = quantize_dynamic(FAMILIES[name].make(), {nn.Linear}, dtype=torch.qint8)
        with pytest.raises(UnsupportedModelError, match=r"fused projection is a Linear \(quantized or adapted\)"):
            memoize(model)

    def test_an_int8_weight_that_differs_is_another_model(self) -> None:
        from torch.ao.quantization import quantize_dynamic

        from attmemo.fingerprint import model_fields

        model = FAMILIES["BERT"].make()
        other = copy.deepcopy(model)
        with torch.no_grad():
            other.encoder.layer[1].attention.self.key.weight[3, 4] += 0.5  # type: ignore[index, union-attr]
        fields = [
            model_fields(quantize_dynamic(one, {nn.Linear}, dtype=torch.qint8)) for one in (model, model, other)
        ]
        assert fields[0] == fields[1]
        assert fields[0]["weights"] != fields[2]["weights"]

    @pytest.mark.parametrize("name", ["BERT", "DeBERTa-v3", "Llama"])
    def test_int8_weights_of_torchao_are_served(self, name: str, tmp_path: Path) -> None:
        torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        family = FAMILIES[name]
        model = family.make()
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        inputs = inputs_of(family, LENGTHS)
        path = make_database(model, inputs, tmp_path, storage="float32")
        expected = output(model, inputs)
        memoize(model, threshold=0.0, database=path, gate=False)
        seen = output(model, inputs)
        assert model.attmemo.stats()["hit_rate"] == 1.0
        for row, n in enumerate(LENGTHS):
            assert gap(seen[row, :n], expected[row, :n]) <= 1e-4

    def test_a_fused_projection_of_torchao_is_refused_by_name(self) -> None:
        torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
        model = FAMILIES["ModernBERT"].make()
        torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
        with pytest.raises(UnsupportedModelError, match="fused projection"):
            memoize(model)


class TestPruned:
    @pytest.mark.parametrize("name", ["BERT", "DeBERTa-v3"])
    def test_answers_of_a_pruned_model_do_not_depend_on_the_batch(self, name: str, tmp_path: Path) -> None:
        """AttMEMO, Table 8: the same accuracy for every batch size."""
        from torch.nn.utils import prune

        model = FAMILIES[name].make()
        for module in model.modules():
            if isinstance(module, nn.Linear):
                prune.l1_unstructured(module, "weight", 0.85)
                prune.remove(module, "weight")
        inputs = inputs_of(FAMILIES[name], LENGTHS)
        path = make_database(model, inputs, tmp_path)
        asked = inputs_of(FAMILIES[name], [9, 7, 12, 11, 16, 9, 12, 9], seed=4)
        asked["input_ids"][:3] = torch.where(asked["attention_mask"][:3] > 0, inputs["input_ids"][[0, 3, 1]], 0)
        memoize(model, threshold=0.4, database=path, gate=False)
        found = []
        for size in (1, 3, 8):
            model.attmemo.reset_stats()
            parts = [
                output(model, {key: value[start : start + size] for key, value in asked.items()})
                for start in range(0, 8, size)
            ]
            found.append((torch.cat(parts), model.attmemo.stats()["hits"]))
        assert 0 < found[0][1] < 8 * 3
        for answers, hits in found[1:]:
            assert hits == found[0][1]
            for row, n in enumerate(asked["attention_mask"].sum(1).tolist()):
                assert gap(answers[row, :n], found[0][0][row, :n]) <= 1e-5


class TestCompiled:
    @pytest.mark.parametrize("name", ["BERT", "DeBERTa-v3", "ALBERT", "T5 encoder", "GPT-2", "Llama"])
    @pytest.mark.parametrize("first", ["compiled", pytest.param("memoized", marks=pytest.mark.slow)])
    def test_a_model_compiled_before_or_after_is_served(self, name: str, first: str, tmp_path: Path) -> None:
        """With the eager backend: what is traced is the same, and compiling takes no minutes."""
        torch.compiler.reset()
        family = FAMILIES[name]
        model = family.make()
        inputs = inputs_of(family, LENGTHS)
        path = make_database(model, inputs, tmp_path, storage="float32")
        more = {"use_cache": False} if adapter_for(model)[0].causal else {}
        host: Any = adapter_for(model)[0].host(model)
        expected = output(model, inputs)
        if first == "compiled":
            compiled: Any = torch.compile(host, backend="eager")
            with torch.inference_mode():
                compiled(**inputs, **more)
            memoize(model, threshold=0.0, database=path, gate=False)
        else:
            memoize(model, threshold=0.0, database=path, gate=False)
            compiled = torch.compile(host, backend="eager")
        with torch.inference_mode():
            seen = compiled(**inputs, **more).last_hidden_state
        stats = model.attmemo.stats()
        for row, n in enumerate(LENGTHS):
            assert gap(seen[row, :n], expected[row, :n]) <= 1e-5
        assert stats["hit_rate"] == 1.0


class TestPrecision:
    def test_a_processor_without_bfloat16_is_warned_about(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from attmemo.system import precision

        monkeypatch.setattr(precision, "has_native_bfloat16", lambda: False)
        assert "only emulates" in str(precision.slow(torch.bfloat16))
        monkeypatch.setattr(precision, "has_native_bfloat16", lambda: True)
        assert precision.slow(torch.bfloat16) is None
        assert precision.slow(torch.float32) is None
        assert "float16" in str(precision.slow(torch.float16))

    @pytest.mark.parametrize("native", [False, None, True])
    def test_the_best_type_is_bfloat16_where_the_processor_multiplies_it(
        self, native: bool | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from attmemo.cli.options import parse_precision
        from attmemo.system import precision

        monkeypatch.setattr(precision, "has_native_bfloat16", lambda: native)
        assert precision.best_dtype() == (torch.bfloat16 if native else torch.float32)
        assert parse_precision("auto") == ("bfloat16" if native else "float32")

    @pytest.mark.parametrize("native", [False, None, True])
    def test_memoize_warns_where_bfloat16_is_emulated(
        self, native: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        from attmemo.system import precision

        model = FAMILIES["BERT"].make().to(torch.bfloat16)
        path = make_database(model, inputs_of(FAMILIES["BERT"], LENGTHS), tmp_path)
        monkeypatch.setattr(precision, "has_native_bfloat16", lambda: native)
        with caplog.at_level(logging.WARNING, "attmemo"):
            memoize(model, threshold=0.0, database=path, gate=False)
        assert caplog.text.count("only emulates") == (native is False)

    def test_a_model_in_float64_is_not_served(self, tmp_path: Path) -> None:
        model = FAMILIES["BERT"].make().to(torch.float64)
        inputs = inputs_of(FAMILIES["BERT"], LENGTHS)
        path = make_database(model, inputs, tmp_path, storage="float32")
        expected = output(model, inputs)
        memoize(model, threshold=0.0, database=path, gate=False)
        seen = output(model, inputs)
        assert not model.attmemo.stats()["failures"]
        assert model.attmemo.stats()["hit_rate"] == 1.0
        for row, n in enumerate(LENGTHS):
            assert gap(seen[row, :n], expected[row, :n]) <= 1e-5

    @pytest.mark.parametrize("name", ["BERT", "DeBERTa", "ModernBERT", "T5 encoder", "GPT-2", "Llama", "Qwen3"])
    @pytest.mark.parametrize("storage", ["auto", "float16", "uint8"])
    def test_a_model_in_bfloat16_is_served_in_its_own_precision(
        self, name: str, storage: str, tmp_path: Path
    ) -> None:
        family = FAMILIES[name]
        model = family.make().to(torch.bfloat16)
        inputs = inputs_of(family, LENGTHS)
        path = make_database(model, inputs, tmp_path, storage=storage)
        expected = output(model, inputs)
        memoize(model, threshold=0.0, database=path, gate=False)
        seen = output(model, inputs)
        assert seen.dtype == torch.bfloat16
        assert model.attmemo.stats()["hit_rate"] == 1.0
        for row, n in enumerate(LENGTHS):
            cosine = nn.functional.cosine_similarity(
                seen[row, :n].float().flatten(), expected[row, :n].float().flatten(), dim=0
            )
            assert float(cosine) > 0.99
