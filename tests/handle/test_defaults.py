"""What `memoize` does when little is said: exact and nothing written; a budget and a place are given by name."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from packed_models import MODELS, batch, has_types, rows_database

from attmemo import Database, DatabaseError, memoize, unmemoize
from attmemo.db import cache_directory, filling_path
from attmemo.db.pools.filling import is_filling
from attmemo.errors import ArgumentError, DatabaseNotFoundError
from attmemo.fingerprint import fingerprint, model_fields
from attmemo.profiler.models import load_model

LENGTHS = [30, 20, 33, 16]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory and the cache directory lie here, so that whatever is written is seen."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module", name="classifier")
def _classifier() -> Any:
    return FAMILIES["BERT classifier"].make()


@pytest.fixture(scope="module", name="embedder")
def _embedder() -> Any:
    return MODELS["BERT"]()


def answers(model: Any, seed: int = 3) -> torch.Tensor:
    """The first output for a batch, once what became a record can be found."""
    with torch.inference_mode():
        found: torch.Tensor = model(**batch(LENGTHS, seed, types=has_types(model)))[0]
    flush = getattr(model.attmemo, "flush", None)
    assert flush is None or flush()
    return found


def written(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


class TestNothingSaid:
    @pytest.mark.parametrize("given", [{}, {"budget": 0}, {"budget": 0.0}, {"fill": False}], ids=str)
    @pytest.mark.parametrize("name", ["BERT", "BERT classifier", "DeBERTa-v3", "ModernBERT"])
    def test_answers_have_the_bits_of_packed_blocks_and_nothing_is_written(
        self, name: str, given: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        bare = MODELS[name]()
        packed, model = memoize(copy.deepcopy(bare), reuse="none"), memoize(bare, **given)
        assert model.attmemo.reuse == "none"
        for seed in (3, 4, 3):
            assert torch.equal(answers(model, seed), answers(packed, seed))
        stats = model.attmemo.stats()
        assert (stats["sequences"], stats["ineligible"]) == (3 * len(LENGTHS), {})
        assert not written(tmp_path)
        assert not caplog.text

    def test_a_database_in_the_cache_directory_is_left_alone(self, classifier: Any) -> None:
        unmemoize(memoize(copy.deepcopy(classifier), database="auto", budget=0.01))
        rows_database(classifier, [batch(LENGTHS)], cache_directory() / "prepared")
        before = {file: file.stat().st_mtime_ns for file in written(cache_directory())}
        for given in ({}, {"budget": 0.01}):
            model = memoize(copy.deepcopy(classifier), **given)  # type: ignore[arg-type]
            answers(model)
            assert (model.attmemo.database, model.attmemo.stats().get("folder")) == (None, None)
            unmemoize(model)
        assert {file: file.stat().st_mtime_ns for file in written(cache_directory())} == before


class TestBudget:
    def test_alone_reuses_rows_in_memory_where_answers_are_classes(self, classifier: Any, tmp_path: Path) -> None:
        model = memoize(copy.deepcopy(classifier), budget=0.01, gate=False, linear="exact")
        assert model.attmemo.reuse == "rows"
        assert model.attmemo.guarded.guard.budget == 0.01
        first = answers(model)
        assert torch.equal(answers(model), first)
        assert model.attmemo.stats()["repeated"] == len(LENGTHS)
        assert not written(tmp_path)

    def test_a_threshold_beside_it_is_that_of_rows(self, classifier: Any) -> None:
        assert memoize(copy.deepcopy(classifier), 0.75, budget=0.01).attmemo.threshold == 0.75

    def test_alone_leaves_vectors_exact_and_says_why_once(
        self, embedder: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        packed = memoize(copy.deepcopy(embedder), reuse="none")
        model = memoize(copy.deepcopy(embedder), budget=0.01, linear="exact")
        assert model.attmemo.reuse == "none"
        for seed in (3, 4, 3):
            assert torch.equal(answers(model, seed), answers(packed, seed))
        (said,) = [record.getMessage() for record in caplog.records]
        assert "nothing is reused" in said
        assert "BertModel gives vectors" in said
        assert "reuse='rows' or answer='mean' reuses rows all the same" in said
        assert not written(tmp_path)

    @pytest.mark.parametrize(
        "given",
        [
            {"answer": "mean"}, {"answer": "cls"}, {"answer": lambda output: output.last_hidden_state[:, 0]},
            {"reuse": "rows"}, {"database": ":memory:"}, {"database": "new"}, {"database": "auto"}, {"fill": "new"},
        ],
        ids=["mean", "cls", "function", "rows", "memory", "path", "auto", "fill"],
    )  # fmt: skip
    def test_with_an_answer_rows_or_a_place_by_name_vectors_come_from_records(
        self, embedder: Any, given: dict[str, Any]
    ) -> None:
        model = memoize(copy.deepcopy(embedder), budget=0.01, gate=False, linear="exact", max_bytes=1 << 24, **given)
        assert model.attmemo.reuse == "rows"
        answers(model)
        answers(model)
        assert model.attmemo.stats()["repeated"] == len(LENGTHS)
        unmemoize(model)

    def test_a_function_that_gives_classes_of_an_embedder_needs_no_other_word(self, embedder: Any) -> None:
        model = memoize(copy.deepcopy(embedder), budget=0.01, answer=lambda out: out.last_hidden_state[:, 0].argmax(1))
        assert model.attmemo.reuse == "rows"


class TestPlace:
    @pytest.mark.parametrize("which", ["classifier", "embedder"])
    def test_a_path_that_does_not_exist_is_begun_under_a_budget(
        self, which: str, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        bare, place = request.getfixturevalue(which), tmp_path / "new" / "own"
        for turn in range(2):
            model = memoize(copy.deepcopy(bare), database=place, budget=0.01, gate=False, max_bytes=1 << 24)
            assert model.attmemo.stats()["folder"] == str(place)
            assert model.attmemo.stats()["records"] == turn * len(LENGTHS)
            answers(model)
            unmemoize(model)
        assert is_filling(place)
        assert not cache_directory().exists()

    @pytest.mark.parametrize(
        "given",
        [{}, {"budget": None}, {"budget": 0.01, "fill": False}, {"budget": 0.01, "fill": "other"}, {"reuse": "maps"}],
        ids=str,
    )
    def test_a_path_that_does_not_exist_is_an_error_where_nothing_may_be_begun(
        self, classifier: Any, given: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(DatabaseNotFoundError, match="new does not exist"):
            memoize(copy.deepcopy(classifier), database=tmp_path / "new", **given)
        assert not written(tmp_path)

    @pytest.mark.parametrize("kind", ["prepared", "fills itself"])
    def test_rows_of_a_database_are_refused_without_a_budget(
        self, classifier: Any, kind: str, tmp_path: Path
    ) -> None:
        place, model = tmp_path / "db", copy.deepcopy(classifier)
        if kind == "prepared":
            rows_database(classifier, [batch(LENGTHS)], place)
        else:
            unmemoize(memoize(copy.deepcopy(classifier), database=place, budget=0.01))
        for given in ({}, {"fill": False}, {"budget": 0.0}):
            with pytest.raises(ArgumentError, match="db keeps rows: to reuse them can change answers") as caught:
                memoize(model, database=place, **given)  # type: ignore[arg-type]
            assert "budget=0.01" in caught.value.hint
        assert "attmemo" not in model.__dict__
        memoize(model, database=place, budget=None, fill=False)
        assert (model.attmemo.reuse, model.attmemo.guarded) == ("rows", None)

    @pytest.mark.parametrize("opened", [False, True])
    def test_maps_of_a_database_are_refused_with_a_budget(
        self, tiny_bert: str, bert_database: Path, opened: bool
    ) -> None:
        model: Any = load_model(tiny_bert).model
        with Database(bert_database) as database:
            with pytest.raises(ArgumentError, match="keeps maps, which no budget guards") as caught:
                memoize(model, 0.5, database if opened else bert_database, budget=0.01)
            assert f"attmemo tune {bert_database} --budget 0.01" in caught.value.hint
            assert "attmemo" not in model.__dict__
            assert len(database) > 0, "the caller's database stays open"
        assert memoize(model, 0.5, bert_database).attmemo.reuse == "maps"


class TestAuto:
    def test_without_a_budget_it_is_the_database_of_maps_and_with_one_that_of_rows(
        self, tiny_bert: str, bert_database: Path
    ) -> None:
        model: Any = load_model(tiny_bert).model
        own = filling_path(fingerprint(model_fields(model)))
        maps = shutil.copytree(bert_database, cache_directory() / "maps")
        for given in ({"threshold": 0.5}, {"threshold": 0.5, "database": "auto"}):
            memoize(model, **given)
            assert Path(model.attmemo.database.path) == maps
            assert not own.exists()
        for given in ({}, {"threshold": 0.5}):
            memoize(model, database="auto", budget=0.01, **given)  # type: ignore[arg-type]
            assert model.attmemo.stats()["folder"] == str(own)
        rows = rows_database(load_model(tiny_bert).model, [batch(LENGTHS)], cache_directory() / "rows")
        for budget in (0.01, None):
            memoize(model, database="auto", budget=budget, fill=False)
            assert Path(model.attmemo.database.path) == rows
        unmemoize(model)

    @pytest.mark.parametrize("given", [{}, {"budget": None}, {"budget": 0.01, "fill": False}], ids=str)
    def test_nothing_is_begun_where_nothing_may_be(
        self, classifier: Any, given: dict[str, Any], tmp_path: Path
    ) -> None:
        with pytest.raises(DatabaseError, match="no database"):
            memoize(copy.deepcopy(classifier), database="auto", **given)
        assert not written(tmp_path)
