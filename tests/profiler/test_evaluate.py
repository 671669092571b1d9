"""Judging what thresholds do, on small real models: numbers that add up, and honest words."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES

from attmemo import Database, DataError, memoize
from attmemo.db import KIND_MAP, DatabaseWriter
from attmemo.embed.training import TrainOptions
from attmemo.errors import AttmemoError
from attmemo.models import adapter_for, encoder_of
from attmemo.profiler.answers import ask, changed, cosine, harm, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.logs import generate_log
from attmemo.profiler.map_recorder import Capture
from attmemo.profiler.map_trial import CONTROLS, MeanMaps, RandomMaps, serving_control
from attmemo.profiler.models import LoadedModel, Tokens, batches, collate, load_model, own_pooling, tokenize
from attmemo.profiler.open import first_inputs, stored_texts
from attmemo.profiler.quality import time_passes
from attmemo.profiler.report import write_report
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune

QUICK = EvaluateOptions(repeats=1, exhaustive=20, limit=48, batch_size=16, threshold=0.5, gate=False, sweep=False)


@pytest.fixture(scope="module")
def result(bert_database: Path, later: dict[str, Path]) -> dict[str, Any]:
    """An evaluation with everything in it."""
    options = EvaluateOptions(**QUICK.__dict__ | {"sweep": True, "lookup": "sequence"})
    return evaluate(bert_database, [later["ask"]], options)


class TestEvaluate:
    def test_result_has_every_part_and_can_be_written_as_json(self, result: dict[str, Any]) -> None:
        again = json.loads(json.dumps(result, allow_nan=False))
        assert again == result
        assert result["schema"] == "attmemo.evaluate/1"
        assert result.keys() >= {
            "verdict", "notes", "database", "data", "conditions", "threshold", "threshold_source", "lookup",
            "hit_rate", "exhaustive_hit_rate", "exhaustive_sample", "ineligible", "quality", "layers", "time",
            "controls", "sweep",
        }  # fmt: skip
        assert (result["threshold"], result["lookup"], result["ineligible"]) == (0.5, "sequence", 0)
        assert result["data"]["sequences"] == 48
        assert result["database"]["records"] == 300

    def test_numbers_agree_with_each_other(self, result: dict[str, Any]) -> None:
        rates = [row["hit_rate"] for row in result["layers"]]
        assert result["hit_rate"] == pytest.approx(np.mean(rates))
        assert 0.0 < result["hit_rate"] <= result["data"]["length_stored"]
        assert result["exhaustive_hit_rate"] == pytest.approx(
            np.mean([row["exhaustive_hit_rate"] for row in result["layers"]])
        )
        quality = result["quality"]
        assert quality["agreement"] + quality["changed"] == pytest.approx(1.0)
        assert quality["cosine_min"] <= quality["cosine_p1"] <= quality["cosine_mean"] <= 1.0 + 1e-6
        for row in result["layers"]:
            if row["mean_true_similarity"] is not None:
                assert row["mean_true_similarity"] <= row["exhaustive_mean_similarity"] + 0.1
                assert row["mean_true_similarity"] >= 0.5
        parts = result["time"]["parts_ms"]
        assert all(value >= 0.0 for value in parts.values())
        assert sum(parts.values()) == pytest.approx(result["time"]["memoized_ms"])
        assert result["time"]["best_exact"] == "stock"
        assert result["time"]["speedup_low"] <= result["time"]["speedup"] <= result["time"]["speedup_high"]

    def test_controls_stand_beside_what_is_measured(self, result: dict[str, Any]) -> None:
        rows = {row["name"]: row for row in result["controls"]}
        assert list(rows) == ["memoized", "mean map", "random map", "duplicate cache"]
        assert rows["memoized"]["agreement"] == result["quality"]["agreement"]
        assert rows["memoized"]["hit_rate"] == result["hit_rate"]
        for name in ("mean map", "random map"):  # the same texts and layers are served, only with other maps
            assert rows[name]["hit_rate"] == pytest.approx(result["hit_rate"], abs=0.1)
            assert rows[name]["logit_distance_mean"] != rows["memoized"]["logit_distance_mean"]
        assert rows["random map"]["logit_distance_mean"] > rows["memoized"]["logit_distance_mean"]
        assert rows["duplicate cache"]["agreement"] == 1.0

    def test_a_stricter_threshold_serves_no_more(self, result: dict[str, Any]) -> None:
        rows = result["sweep"]
        assert [row["threshold"] for row in rows] == sorted(row["threshold"] for row in rows)
        rates = [row["hit_rate"] for row in rows]
        assert rates == sorted(rates, reverse=True)
        assert rates[0] == pytest.approx(result["hit_rate"])  # the same threshold, asked without a gate
        assert rates[1] > 0.0, "the model was still disabled by the timing of the threshold before"
        assert all(row["agreement"] + row["changed"] == pytest.approx(1.0) for row in rows)
        assert {row["gate"] for row in rows} == {"off"}, "it must not be taken for the deployed path"

    def test_a_report_can_be_made_of_it(self, result: dict[str, Any], tmp_path: Path) -> None:
        page, numbers = write_report(result, tmp_path)
        assert result["verdict"].split(":")[0] in page.read_text()
        assert json.loads(numbers.read_text()) == result

    @pytest.mark.parametrize("lookup", ["layer", "sequence"])
    @pytest.mark.parametrize("family", ["bert", "deberta"])
    def test_where_nothing_hits_every_answer_is_exact_and_the_verdict_says_it_does_not_pay(
        self, request: pytest.FixtureRequest, later: dict[str, Path], family: str, lookup: str
    ) -> None:
        options = EvaluateOptions(
            **QUICK.__dict__ | {"threshold": 1.0, "lookup": lookup, "controls": False, "exhaustive": 5}
        )
        found = evaluate(request.getfixturevalue(f"{family}_database"), [later["ask"]], options)
        assert found["hit_rate"] == 0.0
        assert found["quality"]["agreement"] == 1.0
        assert found["quality"]["logit_distance_mean"] == 0.0
        assert "does not pay" in found["verdict"]
        assert "100.0 %" in found["verdict"]
        assert all(row["mean_true_similarity"] is None for row in found["layers"])

    @pytest.mark.parametrize("threshold", [0.0, [0.4, 1.0]])
    def test_thresholds_of_zero_and_of_every_layer_are_reported_as_given(
        self, bert_database: Path, later: dict[str, Path], threshold: Any
    ) -> None:
        options = EvaluateOptions(**QUICK.__dict__ | {"threshold": threshold, "controls": False})
        found = evaluate(bert_database, [later["ask"]], options)
        assert found["threshold"] == threshold
        if threshold == 0.0:
            assert found["hit_rate"] == pytest.approx(found["data"]["length_stored"])
            # A text of a length that is not stored has nothing to find, whatever it would accept.
            assert found["exhaustive_hit_rate"] <= 1.0
        else:
            assert found["layers"][1]["hits"] == 0

    def test_records_added_after_training_cannot_be_found_and_do_no_harm(
        self, loaded: LoadedModel, bert_database: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        """A length that only they have is stored, but in no index."""
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        extra, asked = tmp_path / "extra.log", tmp_path / "asked.log"
        extra.write_text(
            "short line number one\nshort line number two\na line that has a word or two more than that\n"
        )
        asked.write_text("short line number six\n" + later["ask"].read_text())
        build_database(loaded, [extra], path, BuildOptions(max_length=48, storage="float32"))
        with Database(path) as database:
            (only,) = {len(t) for t in tokenize(loaded, ["short line number six"], 48)}
            assert only in database.lengths
        found = evaluate(path, [asked], EvaluateOptions(**QUICK.__dict__ | {"threshold": 0.0, "limit": 20}))
        assert found["layers"][0]["hits"] < found["layers"][0]["sequences"]

    def test_labels_give_the_accuracy_of_both(self, bert_database: Path, tmp_path: Path, loaded: LoadedModel) -> None:
        lines = list(generate_log(40, seed=91))
        exact = ask(loaded, prepare(loaded, tokenize(loaded, lines, 48), 16)).argmax(1).tolist()
        labels = [answer if number % 4 else (answer + 1) % 5 for number, answer in enumerate(exact)]
        options = EvaluateOptions(
            **QUICK.__dict__ | {"label_column": "label", "text_column": "text", "exhaustive": 0, "threshold": 1.0}
        )
        for name, shown in (("number", str), ("name", lambda label: f"LABEL_{label}")):
            file = tmp_path / f"{name}.csv"
            write_csv(file, lines, [shown(label) for label in labels])
            found = evaluate(bert_database, [file], options)
            assert found["quality"]["accuracy_exact"] == pytest.approx(0.75)
            assert found["quality"]["accuracy_memoized"] == pytest.approx(0.75)
            assert [row["accuracy"] for row in found["controls"][:3]] == pytest.approx([0.75] * 3)

    def test_labels_that_are_not_the_models_are_refused(self, bert_database: Path, tmp_path: Path) -> None:
        file = tmp_path / "wrong.csv"
        write_csv(file, list(generate_log(12, seed=91)), ["spam"] * 12)
        options = EvaluateOptions(**QUICK.__dict__ | {"label_column": "label", "text_column": "text"})
        with pytest.raises(DataError, match="'spam', expected one of LABEL_0"):
            evaluate(bert_database, [file], options)

    def test_without_a_tuning_run_there_is_no_automatic_threshold(
        self, bert_database: Path, later: dict[str, Path]
    ) -> None:
        from attmemo import DatabaseError

        options = EvaluateOptions(**QUICK.__dict__ | {"threshold": "auto"})
        with pytest.raises(DatabaseError, match="attmemo tune"):
            evaluate(bert_database, [later["ask"]], options)

    def test_a_profile_gives_the_gate_something_to_say(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        report = train_database(path, TrainOptions(steps=0, backend="flat"))
        assert json.loads(json.dumps(report, allow_nan=False))["profile"]["costs"]
        options = EvaluateOptions(**QUICK.__dict__ | {"gate": True, "controls": False, "exhaustive": 0})
        found = evaluate(path, [later["ask"]], options)
        assert {row["gate"] for row in found["layers"]} <= {"on", "off"}
        assert all(row["why"] for row in found["layers"])

    def test_measures_the_path_that_is_deployed_and_the_sweep_says_that_it_does_not(
        self, bert_database: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        """Where a hit costs more than exact attention, the gate leaves every call alone: so does the evaluation."""
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        train_database(path, TrainOptions(steps=0, backend="flat"))
        with Database(path) as database:
            manifest = database.manifest
        profile: dict[str, Any] = json.loads(json.dumps(manifest.profile))
        for costs in profile["costs"]:
            costs["exact"] = dict.fromkeys(costs["exact"], 0.0)
        with DatabaseWriter(path, manifest.model, manifest.storage, manifest.settings) as writer:
            writer.publish(profile=profile)
        options = replace(QUICK, gate=True, sweep=True, controls=False, exhaustive=0)
        found = evaluate(path, [later["ask"]], options)
        assert (found["hit_rate"], found["quality"]["changed"]) == (0.0, 0.0)
        assert found["conditions"]["gate"] == "on"
        assert found["sweep"][0]["hit_rate"] > 0.0
        assert {row["gate"] for row in found["sweep"]} == {"off"}


def write_csv(file: Path, texts: list[str], labels: list[str]) -> None:
    with file.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "label"])
        writer.writerows(zip(texts, labels, strict=True))


class TestAnswers:
    def test_no_texts_are_no_tokens(self, loaded: LoadedModel) -> None:
        assert tokenize(loaded, [], 48) == []

    def test_are_in_the_order_of_the_texts_whatever_the_batches(
        self, loaded: LoadedModel, log_lines: list[str]
    ) -> None:
        tokens = tokenize(loaded, log_lines[:21], 48)
        whole = ask(loaded, prepare(loaded, tokens, 4))
        assert whole.shape == (21, 5)
        for item in tokens[:5]:
            alone = ask(loaded, [([type(item)(0, item.ids, item.segments)], collate(loaded, [item]))])
            assert torch.allclose(whole[item.row], alone[0], atol=1e-4)
        assert ask(loaded, []).shape == (0, 1)

    def test_batches_hold_texts_of_similar_length_and_each_once(
        self, loaded: LoadedModel, log_lines: list[str]
    ) -> None:
        tokens = tokenize(loaded, log_lines[:50], 96)
        parts = list(batches(tokens, 8))
        lengths = [len(item) for part in parts for item in part]
        assert lengths == sorted(lengths)
        assert sorted(item.row for part in parts for item in part) == list(range(50))

    def test_an_embedding_leaves_padding_out(self, tiny_bert: str, log_lines: list[str]) -> None:
        loaded = load_model(tiny_bert)
        loaded.model, loaded.kind = loaded.model.base_model, "encoder"  # type: ignore[assignment]
        tokens = tokenize(loaded, log_lines[:6], 96)
        together = ask(loaded, prepare(loaded, tokens, 6))
        assert torch.allclose(together.norm(dim=1), torch.ones(6), atol=1e-5)
        one = ask(loaded, [([type(tokens[0])(0, tokens[0].ids, tokens[0].segments)], collate(loaded, tokens[:1]))])
        assert torch.allclose(together[0], one[0], atol=1e-5)

    def test_a_change_is_another_class_or_a_turned_embedding(self) -> None:
        exact = torch.tensor([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
        given = torch.tensor([[3.0, 2.9], [1.0, 0.0], [1.0, 0.1]])
        assert changed("classifier", exact, given, 0.98).tolist() == [False, True, False]
        assert changed("encoder", exact, given, 0.98).tolist() == [True, True, False]
        assert cosine(exact, exact).tolist() == pytest.approx([1.0] * 3)
        assert harm("classifier", exact, exact).tolist() == pytest.approx([0.0] * 3)
        assert (harm("encoder", exact, given) >= -1e-6).all()
        assert float(harm("classifier", torch.tensor([[99.0, 0.0]]), torch.tensor([[0.0, 99.0]]))) == pytest.approx(
            1.0
        )

    def test_timing_asks_every_path_for_every_batch(self, loaded: LoadedModel, log_lines: list[str]) -> None:
        prepared = prepare(loaded, tokenize(loaded, log_lines[:9], 48), 4)
        asked: list[str] = []

        def path(name: str) -> Callable[[], None]:
            return lambda: asked.append(name)

        spent = time_passes(loaded, prepared, {"a": path("a"), "b": path("b")}, 2)
        assert {name: len(seconds) for name, seconds in spent.items()} == {"a": 2, "b": 2}
        assert asked.count("a") == asked.count("b") == 1 + 2 * len(prepared)
        assert asked[2:6] != ["a", "b", "a", "b"], "one path always runs on the other's warm caches"


class TestControls:
    def test_serve_their_own_maps_and_give_way_again(
        self, tiny_bert: str, bert_database: Path, log_lines: list[str]
    ) -> None:
        loaded = load_model(tiny_bert)
        prepared = prepare(loaded, tokenize(loaded, log_lines[:16], 48), 8)
        model: Any = memoize(loaded.model, 0.0, bert_database, gate=False)
        before = ask(loaded, prepared)
        found = {}
        for name in CONTROLS:
            with serving_control(model.attmemo.engine, name):
                found[name] = ask(loaded, prepared)
            assert torch.equal(ask(loaded, prepared), before)
        with pytest.raises(RuntimeError), serving_control(model.attmemo.engine, "mean map"):
            raise RuntimeError
        assert torch.equal(ask(loaded, prepared), before)
        assert not torch.allclose(found["mean map"], before, atol=1e-3)
        assert not torch.allclose(found["random map"], before, atol=1e-3)

    def test_a_mean_map_is_a_distribution_and_the_same_for_every_record(self, bert_database: Path) -> None:
        with Database(bert_database) as database:
            records = np.flatnonzero(database.records.lengths == 48)[:3].astype(np.int64)
            with MeanMaps(database).fetch(1, 48, records) as maps:
                assert torch.equal(maps[0], maps[2])
                assert torch.allclose(maps[0].sum(-1), torch.ones(4, 48), atol=1e-4)

    def test_a_random_map_is_a_strangers(self, bert_database: Path) -> None:
        with Database(bert_database) as database:
            control = RandomMaps(database)
            for length, count in database.lengths.items():
                records = np.flatnonzero(database.records.lengths == length).astype(np.int64)
                for layer in (0, 1):
                    with control.fetch(layer, length, records) as maps:
                        own = [database.slot(KIND_MAP, layer, int(record)) for record in records]
                        assert all(
                            count == 1 or maps[place].data_ptr() != slot.data_ptr() for place, slot in enumerate(own)
                        )
            control.close()


class TestStoredTexts:
    """Texts that are in the database would find themselves, and every number would flatter."""

    @pytest.mark.parametrize("storage", ["float32", "uint8"])
    def test_are_known_as_the_model_sees_them_and_no_others_are(
        self, loaded: LoadedModel, service_log: Path, log_lines: list[str], storage: str, tmp_path: Path
    ) -> None:
        build_database(loaded, [service_log], tmp_path / "db", BuildOptions(48, limit=60, storage=storage))
        digits = [f"{line[:-1]}{'1' if line[-1] != '1' else '2'}" for line in log_lines[:20]]
        texts = [*log_lines[:20], *digits, "no such thing", log_lines[3].upper()]
        with Database(tmp_path / "db") as database:
            tokens = tokenize(loaded, texts, 48)
            known = {tuple(item.ids) for item in tokenize(loaded, log_lines[:60], 48)}
            inside = stored_texts(loaded, database, tokens)
        assert inside == {item.row for item in tokens if tuple(item.ids) in known}
        assert inside >= {*range(20), 41}, "the tokenizer does not see capitals"
        assert len(inside) < 40, "a digit makes another text"
        assert not any(module._forward_pre_hooks for module in loaded.model.modules())

    @pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if family.kind == "tokens"])
    def test_are_told_by_what_a_build_stores_of_them_in_every_family(self, family: str) -> None:
        model = encoder_of(FAMILIES[family].make()).eval()
        tokenizer = SimpleNamespace(pad_token_id=0, model_input_names=["input_ids"])
        loaded = LoadedModel(family, model, tokenizer, "encoder", "float32")
        items = [Tokens(row, torch.randint(5, 110, (9,)).tolist(), None) for row in range(3)]
        adapter, sites = adapter_for(model)
        with Capture(model, adapter, sites) as capture:
            expected = capture.run(collate(loaded, items)).inputs[0]
        assert torch.allclose(torch.stack(list(first_inputs(loaded, items))), expected, atol=1e-5)
        assert not any(module._forward_pre_hooks for module in model.modules())

    def test_are_left_out_and_counted(
        self, bert_database: Path, service_log: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        """A log that grew since the build is the ordinary case, and the certificate would be too good."""
        path = Path(shutil.copytree(bert_database, tmp_path / "db"))
        fresh = later["ask"].read_text()
        (tmp_path / "fresh.log").write_text(fresh)
        (tmp_path / "grown.log").write_text("".join(service_log.read_text().splitlines(True)[:40]) + fresh)
        options = EvaluateOptions(**QUICK.__dict__ | {"limit": None, "controls": False})
        alone, grown = (evaluate(path, [tmp_path / f"{name}.log"], options) for name in ("fresh", "grown"))
        assert grown["data"]["in_database"] == alone["data"]["in_database"] + 40
        for key in ("hit_rate", "quality"):
            assert grown[key] == alone[key]
        assert any("are in the database; they were left out" in note for note in grown["notes"])
        tuned = tune(path, [tmp_path / "grown.log"], TuneOptions(budget=0.5))
        assert tuned["in_database"] == grown["data"]["in_database"]
        assert tuned["total"] == grown["data"]["sequences"]

    def test_alone_are_refused(self, bert_database: Path, service_log: Path, tmp_path: Path) -> None:
        (tmp_path / "part.log").write_text("".join(service_log.read_text().splitlines(True)[:30]))
        for call in (
            lambda: tune(bert_database, [tmp_path / "part.log"], TuneOptions()),
            lambda: evaluate(bert_database, [tmp_path / "part.log"], QUICK),
        ):
            with pytest.raises(DataError, match="all 30 texts are in the database"):
                call()


class TestPooling:
    """An embedding is judged as the application reads it."""

    @pytest.fixture
    def encoder(self, tiny_bert: str, tmp_path: Path) -> Path:
        """A bare encoder, saved as sentence-transformers does but for its modules."""
        loaded = load_model(tiny_bert)
        loaded.model.base_model.save_pretrained(tmp_path / "encoder")  # type: ignore[operator,union-attr]
        loaded.tokenizer.save_pretrained(tmp_path / "encoder")
        return tmp_path / "encoder"

    @staticmethod
    def save(folder: Path, modules: Sequence[str], **modes: object) -> None:
        """Write the configuration of sentence-transformers."""
        steps = [
            {
                "idx": n,
                "name": str(n),
                "path": f"{n}_{name}" if n else "",
                "type": f"sentence_transformers.models.{name}",
            }
            for n, name in enumerate(("Transformer", *modules))
        ]
        (folder / "modules.json").write_text(json.dumps(steps))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))

    @pytest.mark.parametrize("pooling", ["mean", "cls", "max", "lasttoken"])
    def test_is_that_of_the_models_own_configuration(self, encoder: Path, log_lines: list[str], pooling: str) -> None:
        mode = pooling if pooling == "lasttoken" else f"{pooling}_token" + "s" * (pooling != "cls")
        self.save(encoder, ("Pooling", "Normalize"), **{f"pooling_mode_{mode}": True, "pooling_mode_other": False})
        loaded = load_model(str(encoder))
        items = tokenize(loaded, log_lines[:5], 48)
        given = ask(loaded, prepare(loaded, items, 5))
        assert loaded.pooling == pooling
        for item in items:
            with torch.inference_mode():
                states = loaded.model(torch.tensor([item.ids])).last_hidden_state[0]
            pooled = {"mean": states.mean(0), "cls": states[0], "max": states.amax(0), "lasttoken": states[-1]}
            expected = torch.nn.functional.normalize(pooled[pooling], dim=0)
            assert torch.allclose(given[item.row], expected, atol=1e-5)

    def test_is_the_mean_where_nothing_is_said(self, encoder: Path) -> None:
        assert own_pooling(str(encoder)) == "mean"
        self.save(encoder, ("Pooling",), pooling_mode="cls")
        assert own_pooling(str(encoder)) == "cls", "the newer spelling"

    def test_that_is_not_computed_here_is_refused_when_it_is_asked_for(
        self, encoder: Path, service_log: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        build_database(load_model(str(encoder)), [service_log], tmp_path / "db", BuildOptions(48, limit=40))
        for modules, modes, said in (
            (("Pooling", "Dense"), {"pooling_mode_mean_tokens": True}, "the layers Dense"),
            (("Pooling",), {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "cls_token, max_token"),
            (("Pooling",), {"pooling_mode_weightedmean_tokens": True}, "weightedmean_tokens"),
        ):
            self.save(encoder, modules, **modes)
            with pytest.raises(DataError, match=f"(?s){said}.*--pooling mean"):
                evaluate(tmp_path / "db", [later["ask"]], QUICK)

    def test_that_is_not_computed_here_never_keeps_costs_from_being_measured(
        self, encoder: Path, service_log: Path, tmp_path: Path
    ) -> None:
        build_database(load_model(str(encoder)), [service_log], tmp_path / "db", BuildOptions(48, limit=40))
        self.save(encoder, ("Pooling", "Dense"), pooling_mode_mean_tokens=True)
        told = train_database(tmp_path / "db", TrainOptions(steps=0), model=str(encoder))
        assert told["profile"] is not None

    def test_asked_for_is_used_and_noted(
        self, encoder: Path, service_log: Path, later: dict[str, Path], tmp_path: Path
    ) -> None:
        path = tmp_path / "db"
        build_database(load_model(str(encoder)), [service_log], path, BuildOptions(48, limit=200))
        train_database(path, TrainOptions(steps=0), profile=False)
        found = {}
        for pooling in ("mean", "cls"):
            tuned = tune(path, [later["tune"]], TuneOptions(0.5, pooling=pooling))
            with Database(path) as database:
                assert database.manifest.tuning is not None
                assert database.manifest.tuning["pooling"] == tuned["pooling"] == pooling
            found[pooling] = evaluate(path, [later["ask"]], replace(QUICK, pooling=pooling, controls=False))
            assert found[pooling]["conditions"]["pooling"] == pooling
        assert found["mean"]["quality"]["cosine_mean"] != found["cls"]["quality"]["cosine_mean"]

    def test_of_a_model_that_gives_no_embeddings_is_refused(self, bert_database: Path, later: dict[str, Path]) -> None:
        with pytest.raises(DataError, match="gives classes, so there is nothing to pool"):
            evaluate(bert_database, [later["ask"]], replace(QUICK, pooling="cls"))

    def test_may_be_a_function_of_the_output_and_the_mask(self, bert_database: Path, later: dict[str, Path]) -> None:
        by_class, by_vector = (
            evaluate(bert_database, [later["ask"]], replace(QUICK, answer=answer, threshold=0.0))
            for answer in (lambda output, mask: output.logits.argmax(1), lambda output, mask: output.logits[:, :3])
        )
        stock = evaluate(bert_database, [later["ask"]], replace(QUICK, threshold=0.0, controls=False))
        assert by_class["quality"]["changed"] == stock["quality"]["changed"] > 0.0
        assert by_class["quality"]["changed_means"] == "another class"
        assert by_class["conditions"]["pooling"] == "function"
        assert 0.0 < by_vector["quality"]["cosine_mean"] < 1.0
        assert by_vector["quality"]["changed_means"] == "cosine below 0.98"
        with pytest.raises(AttmemoError, match=r"embeddings .* or of classes"):
            evaluate(bert_database, [later["ask"]], replace(QUICK, answer=lambda output, mask: 1))
