"""Tuning on what was added to a database after the training: each text as it would have been served when it came."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attmemo import Database, DataError, memoize
from attmemo.db import SEQUENCE, DatabaseWriter
from attmemo.embed.indexing import learned_below
from attmemo.embed.lookup import LookupInTime, places_in_time
from attmemo.embed.training import TrainOptions
from attmemo.errors import StorageFullError, TuningError
from attmemo.perfmodel.tuner import upper_bound
from attmemo.profiler.answers import ask, changed, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import load_model, tokenize
from attmemo.profiler.open import first_inputs
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune

LINES = 80


@pytest.fixture(scope="module")
def recent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A later log of the same services. Its second half repeats the first one."""
    file = tmp_path_factory.mktemp("recent") / "recent.log"
    lines = list(generate_log(700, seed=5))[300 : 300 + LINES // 2]
    file.write_text("".join(f"{line}\n" for line in lines * 2))
    return file


@pytest.fixture
def grown(bert_database: Path, recent: Path, tmp_path: Path) -> Path:
    """A trained database, with this log added after the training."""
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    with Database(path) as database:
        model, storage = database.manifest.model, database.manifest.storage
    build_database(load_model(model.name), [recent], path, BuildOptions(model.max_length, storage=storage))
    return path


def embedder_of(path: Path) -> Any:
    """What the manifest says of the embedder."""
    with Database(path) as database:
        return database.embedder_ref()


def test_a_text_finds_the_nearest_record_that_was_stored_before_it(grown: Path, recent: Path) -> None:
    tune(grown, [recent], TuneOptions(budget=0.5))
    with Database(grown) as database:
        loaded = load_model(database.manifest.model.name)
        tokens = tokenize(loaded, recent.read_text().splitlines(), database.manifest.model.max_length)
        lookup, records = LookupInTime(database, "sequence"), database.records
        source = len(database.manifest.sources) - 1
        time = places_in_time(records.sources, records.rows)
        repeated = 0
        for item in tokens:
            (hidden,) = first_inputs(loaded, [item])
            lookup.before = places_in_time([source], [item.row])
            found = lookup.find(SEQUENCE, hidden[None], [len(item)])
            early = np.flatnonzero((records.lengths == len(item)) & (time < lookup.before[0]))
            record = int(found.records[0])
            assert record in early if len(early) else record == -1
            repeated += item.row >= LINES // 2 and float(found.distances[0]) < 1e-3
        assert repeated == LINES // 2, "the first half was stored before the second"


def test_a_text_never_finds_its_own_record(grown: Path, recent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every pass: those that order the layers, those that choose, those that judge."""
    import attmemo.profiler.tune as module

    passes = []

    def spied(*args: Any, **kwargs: Any) -> torch.Tensor:
        before, after = kwargs["before"], kwargs.get("after")
        passes.append((before is not None, after is not None))
        return ask(*args, **kwargs)

    monkeypatch.setattr(module, "ask", spied)
    finding = LookupInTime.find

    def find(self: LookupInTime, *args: Any) -> Any:
        found = finding(self, *args)
        order = places_in_time(self._database.records.sources, self._database.records.rows)
        there = found.records >= 0
        times, own = order[found.records[there]], self.before[there]
        assert (times != own if self.later else times < own).all()
        found_any.append(int(there.sum()))
        return found

    found_any: list[int] = []
    monkeypatch.setattr(LookupInTime, "find", find)
    tune(grown, [recent], TuneOptions(budget=0.5))
    assert sum(found_any) > LINES
    assert passes.count((False, True)) == 2, "only the exact passes, of the texts that choose and of those that judge"


def test_what_was_added_is_judged_and_serves_afterwards(grown: Path, recent: Path) -> None:
    before = embedder_of(grown)
    result = tune(grown, [recent], TuneOptions(budget=0.5))
    assert (result["total"], result["in_time"], result["in_database"]) == (LINES, LINES, 0)
    after = embedder_of(grown)
    with Database(grown) as database:
        assert before.next_id < after.next_id == len(database)
        assert (before.weights, learned_below(before)) == (after.weights, learned_below(after))
        loaded = load_model(database.manifest.model.name)
        tokens = tokenize(loaded, recent.read_text().splitlines(), database.manifest.model.max_length)
        prepared = prepare(loaded, tokens, 16)
        exact = ask(loaded, prepared)
        memoize(loaded.model, "auto", database, gate=False)
        given = ask(loaded, prepared)
        stats: dict[str, Any] = loaded.model.attmemo.stats()  # type: ignore[union-attr,operator,assignment]
    assert stats["hit_rate"] >= result["served"], "every text finds its own record by now"
    assert not changed("classifier", exact, given, 0.98).any()


def test_what_the_embedder_was_trained_on_is_refused(grown: Path, recent: Path, service_log: Path) -> None:
    with pytest.raises(DataError, match="what the embedder was trained on"):
        tune(grown, [service_log], TuneOptions(budget=0.5))
    train_database(grown, TrainOptions(steps=0), profile=False)
    with pytest.raises(DataError, match="what the embedder was trained on"):
        tune(grown, [recent], TuneOptions(budget=0.5))


def test_files_that_are_not_in_the_database_come_last(grown: Path, recent: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.log"
    fresh = list(generate_log(800, seed=9))[700:740]
    other.write_text("".join(f"{line}\n" for line in [*fresh, recent.read_text().splitlines()[0]]))
    result = tune(grown, [other, recent], TuneOptions(budget=0.5))
    assert (result["total"], result["in_time"], result["in_database"]) == (LINES + len(fresh), LINES, 1)


def test_a_database_that_cannot_be_indexed_stays_as_it_was(
    grown: Path, recent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import attmemo.embed.indexing as module

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    before = embedder_of(grown)
    files = {file.name for file in grown.iterdir()}
    monkeypatch.setattr(module.LayerIndex, "save", full)
    with pytest.raises(StorageFullError):
        tune(grown, [recent], TuneOptions(budget=0.5))
    assert embedder_of(grown) == before
    assert {file.name for file in grown.iterdir()} == files
    DatabaseWriter.reopen(grown).close()


def test_how_much_more_the_grown_database_serves_is_told_without_a_look_at_answers(
    grown: Path, recent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text of one half has a twin in the other one: the second half finds it, afterwards the first half, too."""
    import attmemo.profiler.tune as module

    seen: list[Any] = []

    class Watched(module._Growth):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.append(self)

    monkeypatch.setattr(module, "_Growth", Watched)
    result = tune(grown, [recent], TuneOptions(budget=0.5))
    (growth,) = seen
    twins = 1e-3  # rounding apart
    then, now = ((distances <= twins).sum() for distances in (growth._then, growth._now))
    assert now == result["judged"], "each has a twin among all records"
    assert 0 < then < now
    assert growth([twins, -1.0]) == now / then
    assert growth([-1.0, -1.0]) == 1.0
    assert result["growth"] == growth(result["radii"])


def test_a_candidate_that_serves_no_more_has_a_growth_of_its_own(
    grown: Path, recent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No text's earlier record lies between two radii, but a later record may: then more is served afterwards."""
    import attmemo.profiler.tune as module

    monkeypatch.setattr(module._Growth, "__call__", lambda self, radii: 1.0 + max(radii))
    result = tune(grown, [recent], TuneOptions(budget=0.5, limit=6, fineness=100))
    assert len(result["path"]) > 100
    for step in result["path"][1:]:
        plain = upper_bound(round(step["changed"] * result["judged"]), result["judged"])
        assert step["upper_bound"] == pytest.approx((1.0 + max(step["radii"])) * plain)


def test_texts_that_an_earlier_file_holds_are_left_out(
    bert_database: Path, recent: Path, service_log: Path, tmp_path: Path
) -> None:
    """A log that grew is stored as another file, and its first lines would find themselves."""
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    with Database(path) as database:
        model, storage = database.manifest.model, database.manifest.storage
    loaded, options = load_model(model.name), BuildOptions(model.max_length, storage=storage)
    log = tmp_path / "grown.log"
    log.write_text("".join(service_log.read_text().splitlines(True)[:50]) + recent.read_text())
    build_database(loaded, [log], path, options)
    result = tune(path, [log], TuneOptions(budget=0.5))
    assert (result["total"], result["in_time"], result["in_database"]) == (LINES, LINES, 50)
    again = tmp_path / "again.log"
    again.write_text(log.read_text() + "one more line\n")
    build_database(loaded, [again], path, options)
    result = tune(path, [again], TuneOptions(budget=0.9, allow_uncertified=True))
    assert (result["total"], result["in_database"]) == (1, LINES + 50)


def test_thresholds_that_were_chosen_for_fewer_records_are_dropped(
    bert_database: Path, recent: Path, tmp_path: Path
) -> None:
    path = Path(shutil.copytree(bert_database, tmp_path / "db"))
    other = tmp_path / "other.log"
    other.write_text("".join(f"{line}\n" for line in list(generate_log(800, seed=9))[700:760]))
    tune(path, [other], TuneOptions(budget=0.5))
    with Database(path) as database:
        model, storage = database.manifest.model, database.manifest.storage
        before = database.manifest.tuning
    assert before is not None
    build_database(load_model(model.name), [recent], path, BuildOptions(model.max_length, storage=storage))
    for file, options in ((tmp_path / "none.log", {}), (recent, {"lookup": "layer"})):
        with pytest.raises((DataError, TuningError)):
            tune(path, [file], TuneOptions(budget=0.5, **options))
        with Database(path) as database:
            assert database.manifest.tuning == before, "a bad request changes nothing"
            assert database.embedder_ref().next_id < len(database)
    with pytest.raises(TuningError, match="certified"):
        tune(path, [recent], TuneOptions(budget=0.001))
    with Database(path) as database:
        assert database.manifest.tuning is None
