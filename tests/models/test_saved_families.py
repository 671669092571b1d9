"""Saved checkpoints of families: built, trained with a profile, tuned, evaluated, and served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from tiny_models import make_tokenizer

from attmemo import Database, UnsupportedModelError, memoize, unmemoize
from attmemo.embed.training import TrainOptions
from attmemo.fingerprint import model_fields
from attmemo.models import adapter_for
from attmemo.profiler import map_recorder
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import answers, collate, greatest_length, load_model, tokenize
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune

LONGEST = 32
SHARING = ["ALBERT", "ALBERT, groups"]
PAIRS = ["T5", "T5 encoder", "Marian"]


def checkpoint(name: str, folder: Path, lines: list[str]) -> Any:
    """Save a tiny model of this family with a tokenizer; the model."""
    model: Any = FAMILIES[name].make()
    tokenizer = make_tokenizer(lines)
    model.resize_token_embeddings(len(tokenizer))
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def texts(folder: Path, seed: int, count: int) -> Path:
    file = folder / f"{seed}.log"
    file.write_text("".join(f"{line}\n" for line in generate_log(count, seed=seed)))
    return file


def go_all_the_way(folder: Path, lines: list[str]) -> tuple[Path, dict[str, Any]]:
    """Build a database of the model in this folder, train, tune and evaluate it; its path and its profile."""
    path = folder / "db"
    options = BuildOptions(max_length=LONGEST, limit=60)
    build_database(load_model(str(folder / "model")), [texts(folder, 1, 60)], path, options)
    report = train_database(path, TrainOptions(steps=5), profile=True)
    assert not [note for note in report["notes"] if "profile" in note]
    tune(path, [texts(folder, 5, 20)], TuneOptions(budget=0.5, allow_uncertified=True))
    options = EvaluateOptions(repeats=1, exhaustive=5, threshold=0.5, gate=False, sweep=False)
    assert evaluate(path, [texts(folder, 6, 12)], options)["schema"]
    return path, report["profile"]


@pytest.mark.parametrize("name", SHARING)
def test_layers_that_share_a_module_are_built_profiled_and_tuned(
    name: str, tmp_path: Path, log_lines: list[str]
) -> None:
    checkpoint(name, tmp_path / "model", log_lines)
    path, profile = go_all_the_way(tmp_path, log_lines)
    with Database(path) as database:
        assert len(profile["costs"]) == database.manifest.model.layers
    model: Any = load_model(str(tmp_path / "model")).model
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.mark.parametrize("name", SHARING)
def test_a_shared_module_is_timed_once_for_each_of_its_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock ticks at each reading. Hooks for each layer would count a tick for each of them."""
    model: Any = FAMILIES[name].make()
    _, sites = adapter_for(model)
    ticks = iter(range(1000))
    monkeypatch.setattr(map_recorder.time, "perf_counter", lambda: next(ticks))
    with map_recorder.attention_seconds(model) as spent, torch.inference_mode():
        model(input_ids=torch.arange(5)[None])
    assert spent == [1] * len(sites)
    assert not [module for module in model.modules() if module._forward_hooks or module._forward_pre_hooks]


@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "MPNet"])
def test_the_greatest_length_fits_the_positions(name: str, tmp_path: Path, log_lines: list[str]) -> None:
    checkpoint(name, tmp_path, log_lines)
    loaded = load_model(str(tmp_path))
    longest = greatest_length(loaded, None)
    with torch.inference_mode():
        loaded.model(input_ids=torch.full((1, longest), 7))
        with pytest.raises((IndexError, RuntimeError)):
            loaded.model(input_ids=torch.full((1, longest + 1), 7))


def test_an_encoder_saved_alone_without_its_weights_is_refused(tmp_path: Path, log_lines: list[str]) -> None:
    checkpoint("BART encoder", tmp_path, log_lines)
    with pytest.raises(UnsupportedModelError, match=r"no weights for encoder\..*its maps would be random"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("name", PAIRS)
def test_the_encoder_of_a_pair_is_built_profiled_tuned_and_evaluated(
    name: str, tmp_path: Path, log_lines: list[str]
) -> None:
    kind = type(checkpoint(name, tmp_path / "model", log_lines))
    saved = kind.from_pretrained(tmp_path / "model").eval()  # as a user has it, to generate with
    loaded = load_model(str(tmp_path / "model"))
    assert loaded.kind == "encoder"
    adapter, _ = adapter_for(saved)
    assert model_fields(adapter.host(saved)) == model_fields(adapter.host(loaded.model)), "another model's database"
    path, _ = go_all_the_way(tmp_path, log_lines)
    memoize(saved, "auto", path)
    assert saved.attmemo.enabled


# A BART encoder alone is nothing that transformers loads again.
TEXT = [name for name, family in FAMILIES.items() if family.kind == "tokens" and name != "BART encoder"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXT)
def test_every_checkpoint_comes_all_the_way(name: str, tmp_path: Path, log_lines: list[str]) -> None:
    checkpoint(name, tmp_path / "model", log_lines)
    path, profile = go_all_the_way(tmp_path, log_lines)
    loaded = load_model(str(tmp_path / "model"))
    with Database(path) as database:
        assert len(profile["costs"]) == database.manifest.model.layers
        assert database.manifest.tuning is not None
    model: Any = memoize(loaded.model, 0.0, path, gate=False)
    stored = collate(loaded, tokenize(loaded, list(generate_log(60, seed=1))[:4], LONGEST))
    with torch.inference_mode():
        served = answers(loaded, stored)
        assert model.attmemo.stats()["hits"] > 0
        unmemoize(model)
        assert torch.allclose(served, answers(loaded, stored), atol=0.05 * float(served.abs().max())), "float16 maps"
