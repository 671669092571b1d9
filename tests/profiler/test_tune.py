"""Choosing thresholds on small real models: bounds that hold, and numbers that add up."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from attmemo import Database, DataError, memoize
from attmemo.db import DatabaseWriter
from attmemo.embed.training import TrainOptions
from attmemo.errors import EmbedderMissingError, TuningError
from attmemo.perfmodel.cost import CostModel
from attmemo.perfmodel.profile import HitRates, LayerCosts, Profile
from attmemo.perfmodel.tuner import JUDGED, sequences_judged
from attmemo.profiler.answers import ask, changed, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.models import LoadedModel, load_model, tokenize
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune


@pytest.fixture(scope="module", params=["bert", "deberta"])
def tuned(
    request: pytest.FixtureRequest, later: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A database after a tuning run, and what the run said."""
    path = shutil.copytree(
        request.getfixturevalue(f"{request.param}_database"), tmp_path_factory.mktemp("tuned") / "db"
    )
    return path, tune(path, [later["tune"]], TuneOptions(budget=0.5))


def path_model(path: Path) -> str:
    with Database(path) as database:
        return database.manifest.model.name


class TestTune:
    def test_result_is_complete_and_can_be_written_as_json(self, tuned: tuple[Path, dict[str, Any]]) -> None:
        result = json.loads(json.dumps(tuned[1], allow_nan=False))
        assert len(result["thresholds"]) == len(result["radii"]) == 2
        assert all(0.0 < t <= 1.0 for t in result["thresholds"])
        assert sorted(chain.from_iterable(result["groups"])) == [0, 1]
        assert (result["lookup"], result["budget"], result["confidence"]) == ("sequence", 0.5, 0.95)
        assert result["certified"] is True
        assert result["observed"] <= result["upper_bound"] <= 0.5
        assert 0.0 < result["served"] <= 1.0
        assert (result["total"], result["judged"]) == (120, sequences_judged(120, 0.5))
        assert result["path"][0]["served"] == 0.0
        assert all(point["upper_bound"] <= 0.5 for point in result["path"][:-1])
        assert result["data"] == ["tune.log"]
        assert "%" in result["sentence"]
        assert result["min_cosine"] is None, "a classifier's answers are classes"

    def test_the_database_then_has_an_automatic_threshold(self, tuned: tuple[Path, dict[str, Any]]) -> None:
        path, result = tuned
        with Database(path) as database:
            assert database.manifest.tuning is not None
            model: Any = load_model(database.manifest.model.name).model
            memoize(model, "auto", database)
            assert model.attmemo.threshold == result["thresholds"]
            assert model.attmemo.lookup == "sequence"

    def test_what_was_certified_holds_when_it_is_served(
        self, tuned: tuple[Path, dict[str, Any]], later: dict[str, Path]
    ) -> None:
        """Served share and changed answers on the tuning data are those that the result reports."""
        path, result = tuned
        with Database(path) as database:
            loaded = load_model(database.manifest.model.name)
            tokens = tokenize(loaded, later["tune"].read_text().splitlines(), 48)
            prepared = prepare(loaded, tokens, 16)
            exact = ask(loaded, prepared)
            memoize(loaded.model, "auto", database, gate=False)
            given = ask(loaded, prepared)
            stats: dict[str, Any] = loaded.model.attmemo.stats()  # type: ignore[union-attr,operator,assignment]
        assert abs(stats["hit_rate"] - result["served"]) < 0.15  # `served` is counted on a part
        assert float(changed("classifier", exact, given, 0.98).float().mean()) <= result["upper_bound"]

    def test_a_budget_too_small_to_certify_says_so_and_changes_nothing(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        options = TuneOptions(budget=0.001, limit=60)
        with pytest.raises(TuningError, match="allow-uncertified"):
            tune(path, [later["tune"]], options)
        with Database(path) as database:
            assert database.manifest.tuning is None
        result = tune(path, [later["tune"]], TuneOptions(**options.__dict__ | {"allow_uncertified": True}))
        assert result["certified"] is False
        assert result["needed"] > 60
        assert result["observed"] <= 0.001
        assert "NOT CERTIFIED" in result["sentence"]

    def test_too_little_data_for_a_radius_each_certifies_one_for_all_layers(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        """Nothing has to be set aside for choosing, so fewer texts do; what is promised is what is served."""
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        result = tune(path, [later["tune"]], TuneOptions(budget=0.15, limit=25))
        assert result["needed"] <= 25 < result["needed"] / JUDGED
        assert result["certified"] is True
        assert len(result["groups"]) == 1
        assert "for all layers" in result["sentence"]
        with Database(path) as database:
            loaded = load_model(database.manifest.model.name)
            tokens = tokenize(loaded, later["tune"].read_text().splitlines()[:25], 48)
            prepared = prepare(loaded, tokens, 25)
            exact = ask(loaded, prepared)
            memoize(loaded.model, "auto", database, gate=False)
            given = ask(loaded, prepared)
            stats: dict[str, Any] = loaded.model.attmemo.stats()  # type: ignore[union-attr,operator,assignment]
        assert abs(stats["hit_rate"] - result["served"]) < 1e-6
        assert float(changed("classifier", exact, given, 0.98).float().mean()) == result["observed"]

    def test_candidates_are_judged_with_the_gate_on_as_they_will_be_served(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        """Where a hit in layer 1 costs more than exact attention, layer 1 is not served and does not count."""
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        scores = {(layer, length): [0.99] * 8 for layer in (0, 1) for length in range(1, 49)}
        free, dear = CostModel(0.0, 0.0, 0.0), CostModel(0.0, 0.0, 10.0)
        costs = [LayerCosts(dear, free, free), LayerCosts(free, dear, free)]
        profile = Profile(costs, HitRates({}), HitRates(scores), free, torch.get_num_threads(), "float32")
        with Database(path) as database:
            manifest = database.manifest
        with DatabaseWriter(path, manifest.model, manifest.storage, manifest.settings) as writer:
            writer.publish(profile=profile.to_dict())
        for limit in (25, 60):  # one radius for all layers; a radius for each group
            result = tune(path, [later["tune"]], TuneOptions(budget=0.15, limit=limit))
            assert result["certified"] is True
            assert 0.0 < result["served"] <= 0.5
            assert max(result["radii"]) > 0.0

    def test_a_candidate_that_serves_what_the_one_before_served_is_not_run_again(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import attmemo.profiler.tune as module

        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        options = TuneOptions(budget=0.15, limit=25, fineness=2)
        passes: list[int] = []

        def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
            passes.append(1)
            return ask(*args, **kwargs)

        monkeypatch.setattr(module, "ask", counted)
        first = tune(path, [later["tune"]], options)
        once = len(passes)
        again = tune(path, [later["tune"]], replace(options, fineness=1000))
        assert len(again["path"]) > 100 * len(first["path"])
        assert len(passes) - once <= 2 + 25, "the exact answers, and once for each text that one more distance reaches"
        assert again["served"] >= first["served"]

    def test_a_lookup_in_every_layer_is_tuned_by_trying(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        result = tune(path, [later["tune"]], TuneOptions(budget=0.5, lookup="layer", limit=40))
        assert json.loads(json.dumps(result, allow_nan=False))["lookup"] == "layer"
        assert len(set(result["thresholds"])) == 1
        assert result["certified"] is True
        model: Any = load_model(path_model(path)).model
        memoize(model, database=path)
        assert model.attmemo.lookup == "layer"

    def test_the_model_is_bare_afterwards_and_tells_its_progress(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import attmemo.profiler.tune as module

        models: list[LoadedModel] = []
        opening = module.open_model

        def watched(*args: Any) -> LoadedModel:
            models.append(opening(*args))
            return models[-1]

        monkeypatch.setattr(module, "open_model", watched)
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        told: list[tuple[str, int, int]] = []
        tune(path, [later["tune"]], TuneOptions(budget=0.5, limit=40), lambda *step: told.append(step))
        tried = next(what for what, _, _ in told if what.startswith("candidate 2/")).split("/")[1]
        assert int(tried) > 2
        assert {what for what, _, _ in told} >= {
            "exact answers",
            "sensitivity",
            "layers 1/2",
            "layers 2/2",
            f"candidate 2/{tried}",
        }
        assert all(0 <= done <= total for _, done, total in told)
        (model,) = (found.model for found in models)
        assert not any("forward" in module.__dict__ for module in model.modules())

    def test_data_that_is_in_the_database_is_refused(self, bert_database: Path, service_log: Path) -> None:
        with pytest.raises(DataError, match="every text would find itself"):
            tune(bert_database, [service_log], TuneOptions())

    def test_a_copy_under_another_name_is_refused_too(
        self, bert_database: Path, service_log: Path, tmp_path: Path
    ) -> None:
        shutil.copy(service_log, tmp_path / "other.log")
        other = [tmp_path / "other.log"]
        with pytest.raises(DataError, match=r"other\.log is what the embedder was trained on"):
            tune(bert_database, other, TuneOptions())
        with pytest.raises(DataError, match=r"other\.log is what the database was built from"):
            evaluate(bert_database, other, EvaluateOptions())

    @pytest.mark.parametrize("budget", [0.0, 1.0, -0.1, float("nan")])
    def test_a_budget_that_is_none_is_refused(
        self, bert_database: Path, later: dict[str, Path], budget: float
    ) -> None:
        with pytest.raises(TuningError):
            tune(bert_database, [later["tune"]], TuneOptions(budget=budget, limit=20))

    def test_an_untrained_database_is_refused(
        self, loaded: LoadedModel, service_log: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        build_database(loaded, [service_log], tmp_path / "db", BuildOptions(max_length=48, limit=20))
        with pytest.raises(EmbedderMissingError, match="attmemo train-embedder"):
            tune(tmp_path / "db", [later["tune"]], TuneOptions())

    def test_training_again_forgets_the_tuning(self, tuned: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
        path = Path(shutil.copytree(tuned[0], tmp_path / "db"))
        train_database(path, TrainOptions(steps=0), profile=False)
        with Database(path) as database:
            assert database.manifest.tuning is None
