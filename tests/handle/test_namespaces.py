"""Namespaces: what one tenant asks leaves nothing that another one's answers, guard or bytes could show."""

from __future__ import annotations

import asyncio
import copy
import errno
import gc
import os
import threading
from contextvars import copy_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from guarded import BASE, FIRST, SECOND, certify, field, sure, until, variant
from packed_models import Inputs, batch
from prefix_models import answer, batch_of, make, random_ids

from attmemo import memoize, unmemoize
from attmemo.db.folder import NAMED, NAMESPACES, SEGMENTS
from attmemo.db.namespaces import folder_of, named_in, write_name
from attmemo.errors import ArgumentError, AttmemoError


def broken_disk(_: Any, stream: Any) -> Any:
    stream.write("{")
    raise OSError(errno.ENOSPC, "no space left")


@pytest.fixture(scope="module", name="bare")
def _bare() -> Any:
    return sure(FAMILIES["BERT classifier"].make())


def guarded(bare: Any, **options: Any) -> Any:
    return memoize(copy.deepcopy(bare), budget=0.05, **{"gate": False, "linear": "exact", "reuse": "rows"} | options)


def ask(model: Any, inputs: Inputs, name: str | None = None) -> Any:
    """The output, in a namespace; what is to be kept is kept when this returns."""
    with torch.inference_mode():
        if name is None:
            found = model(**inputs)
        else:
            with model.attmemo.namespace(name):
                found = model(**inputs)
    assert model.attmemo.flush()
    return found


def teach(model: Any, name: str) -> None:
    """Have a namespace know a change at each of two places, and be certified."""
    for inputs in (BASE, variant(FIRST), variant(SECOND)):
        ask(model, inputs, name)
    certify(SimpleNamespace(attmemo=model.attmemo.spaces.open(name)))


def told(model: Any, name: str | None) -> dict[str, Any]:
    found: dict[str, Any] = model.attmemo.stats() if name is None else model.attmemo.namespaces()[name]
    assert not found["failures"]
    return found


def broken(*_: Any, **__: Any) -> Any:
    raise MemoryError("no memory")


class TestRecords:
    def test_records_of_one_namespace_serve_it_and_no_other(self, bare: Any) -> None:
        model = guarded(bare)
        teach(model, "a")
        ask(model, variant(FIRST, SECOND), "a")
        assert told(model, "a")["reused"] > 0
        for name in ("b", None):
            ask(model, BASE, name)
            found = told(model, name)
            assert found["rows_computed"] == found["tokens"] > 0
            assert found["served"] == 0

    def test_an_equal_text_of_another_namespace_has_the_bits_of_a_model_that_saw_nothing(self, bare: Any) -> None:
        model, fresh = guarded(bare), memoize(copy.deepcopy(bare), reuse="none")
        teach(model, "a")
        for inputs in (variant(FIRST, SECOND), BASE):
            assert torch.equal(field(ask(model, inputs, "b")), field(ask(fresh, inputs)))

    def test_what_was_asked_without_a_namespace_serves_none(self, bare: Any) -> None:
        model = guarded(bare)
        ask(model, BASE)
        ask(model, BASE, "a")
        assert told(model, "a")["served"] == 0
        ask(model, BASE)
        assert told(model, None)["repeated"] == len(BASE["input_ids"])

    def test_a_namespace_within_another_one_is_the_inner_one_and_reuse_off_holds_within(self, bare: Any) -> None:
        model = guarded(bare)
        ask(model, BASE, "b")
        with model.attmemo.namespace("a"):
            ask(model, BASE, "b")
        assert told(model, "b")["repeated"] == len(BASE["input_ids"])
        assert told(model, "a")["sequences"] == 0
        with model.attmemo.observe(reuse=False) as seen:
            ask(model, BASE, "b")
        assert sum(seen.rows) == sum(seen.tokens)

    def test_rows_to_compute_are_those_of_the_namespace(self, bare: Any) -> None:
        model = guarded(bare)
        ask(model, BASE, "a")
        ids = [BASE["input_ids"][0, : int(BASE["attention_mask"][0].sum())].tolist()]
        with model.attmemo.namespace("a"):
            assert model.attmemo.rows_to_compute(ids) == [0]
        with model.attmemo.namespace("b"):
            assert model.attmemo.rows_to_compute(ids) == [len(ids[0])]
        assert model.attmemo.rows_to_compute(ids) == [len(ids[0])]

    def test_what_is_learned_in_idle_times_is_of_its_namespace(self, bare: Any) -> None:
        """With the gate on, records are made while no request runs."""
        model = guarded(bare, gate=True)
        for number in range(8):
            ask(model, variant(FIRST, by=number + 1), "a")
        assert until(lambda: model.attmemo.flush() and told(model, "a")["records"] > 0)
        assert told(model, None)["records"] == 0


class TestGuards:
    def test_each_namespace_has_a_certificate_of_its_own(self, bare: Any) -> None:
        model = guarded(bare)
        teach(model, "a")
        ask(model, BASE, "b")
        states = {name: told(model, name)["guard"] for name in ("a", "b", None)}
        assert [states[name]["state"] for name in ("a", "b", None)] == ["certified", "learning", "learning"]
        assert [states[name]["changes_known"] > 0 for name in ("a", "b", None)] == [True, False, False]
        assert states["b"]["verified"] == 0

    def test_an_alarm_of_one_namespace_leaves_the_others_as_they_are(self, bare: Any) -> None:
        model = guarded(bare)
        for name in ("a", "b"):
            teach(model, name)
        model.attmemo.spaces.open("a").guarded.guard.alarm()
        assert told(model, "a")["guard"]["state"] == "alarm"
        assert told(model, "b")["guard"]["state"] == "certified"

    def test_time_is_kept_for_each_namespace(self, bare: Any) -> None:
        model = guarded(bare, gate=True)
        ask(model, BASE, "a")
        accounts = {id(model.attmemo.spaces.open(name).planner.times) for name in ("a", "b")}
        assert len({*accounts, id(model.attmemo.planner.times)}) == 3

    def test_once_8_bits_serve_each_namespace_learns_anew_within_half_of_the_budget(
        self, bare: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("attmemo.handle.stack.speed_of", lambda *_: 2.0)
        model = guarded(bare, linear="auto")
        teach(model, "a")
        model.attmemo.choice._serve()
        ask(model, BASE, "b")
        ask(model, BASE, "a")
        for name in ("a", "b"):
            assert told(model, name)["guard"]["budget"] == pytest.approx(0.025)
            assert told(model, name)["linear"] == "int8"
        assert told(model, "a")["guard"]["state"] == "learning"

    def test_a_namespace_that_opens_as_8_bits_begin_to_serve_has_half_of_the_budget_too(
        self, bare: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("attmemo.handle.stack.speed_of", lambda *_: 2.0)
        model = guarded(bare, linear="auto")
        make = model.attmemo.spaces._make

        def meanwhile(name: str, nbytes: int) -> Any:
            made = make(name, nbytes)
            model.attmemo.choice._serve()  # of another thread: this namespace is not among the open ones yet
            return made

        monkeypatch.setattr(model.attmemo.spaces, "_make", meanwhile)
        ask(model, BASE, "a")
        for name in ("a", None):
            assert told(model, name)["guard"]["budget"] == pytest.approx(0.025)


class TestBytes:
    def test_all_namespaces_together_keep_the_bound(self, bare: Any) -> None:
        model, bound = guarded(bare, max_bytes=3 << 20), 3 << 20
        for turn in range(12):
            for name in (None, "a", "b", "c"):
                ask(model, batch([40, 30, 20], 100 * turn + len(name or "")), name)
                assert bytes_of(model) <= bound
        spaces = model.attmemo.namespaces()
        assert all(found["records"] > 0 for found in (*spaces.values(), model.attmemo.stats()))

    def test_what_was_not_used_for_long_goes_first(self, bare: Any) -> None:
        model = guarded(bare, max_bytes=2 << 20)
        for name in ("old", "older"):
            ask(model, batch([40, 30], 1), name)
        for name, age in (("old", 1e4), ("older", 1e5)):
            sharer = model.attmemo.spaces.admit(name).sharer
            sharer.used -= age
        seen = []
        for turn in range(60):
            ask(model, batch([40, 30, 20], turn), "new")
            spaces = model.attmemo.namespaces()
            seen.append(tuple(spaces[name]["records"] > 0 for name in ("old", "older")))
            if seen[-1] == (False, False):
                break
        assert seen[0] == (True, True)
        assert seen[-1] == (False, False) or (True, False) in seen
        assert (False, True) not in seen
        assert bytes_of(model) <= 2 << 20


def bytes_of(model: Any) -> int:
    found = (model.attmemo.stats(), *model.attmemo.namespaces().values())
    return sum(int(one["record_bytes"]) for one in found)


class TestFolders:
    def test_a_namespace_goes_on_after_a_restart(self, bare: Any, tmp_path: Path) -> None:
        model = guarded(bare, database=tmp_path / "db")
        teach(model, "tenant a")
        unmemoize(model)
        model = guarded(bare, database=tmp_path / "db")
        found = model.attmemo.namespaces()
        assert list(found) == ["tenant a"]
        assert not found["tenant a"]["open"]
        assert found["tenant a"]["record_bytes"] > 0
        ask(model, BASE, "tenant a")
        ask(model, BASE, "b")
        assert told(model, "tenant a")["repeated"] == len(BASE["input_ids"])
        assert told(model, "tenant a")["guard"]["state"] == "certified"
        assert told(model, "b")["served"] == 0
        unmemoize(model)

    def test_a_namespace_has_a_folder_that_says_whose_it_is(self, bare: Any, tmp_path: Path) -> None:
        model = guarded(bare, database=tmp_path / "db")
        ask(model, BASE, "tenant/../a")
        folder = folder_of(tmp_path / "db", "tenant/../a")
        assert named_in(tmp_path / "db") == {"tenant/../a": folder}
        assert folder.parent == tmp_path / "db" / NAMESPACES
        assert (folder / NAMED).stat().st_mode & 0o077 == 0
        assert folder.stat().st_mode & 0o077 == 0
        assert model.attmemo.stats()["records"] == 0
        unmemoize(model)

    def test_who_leaves_takes_all_of_it_along(self, bare: Any, tmp_path: Path) -> None:
        model = guarded(bare, database=tmp_path / "db")
        for name in ("a", "b"):
            teach(model, name)
        model.attmemo.forget("a")
        assert not folder_of(tmp_path / "db", "a").exists()
        assert list(model.attmemo.namespaces()) == ["b"]
        ask(model, BASE, "a")
        assert told(model, "a")["served"] == 0
        assert told(model, "a")["guard"]["changes_known"] == 0
        ask(model, BASE, "b")
        assert told(model, "b")["repeated"] > 0
        unmemoize(model)
        model = guarded(bare, database=tmp_path / "db")
        model.attmemo.forget("b")
        assert not folder_of(tmp_path / "db", "b").exists(), "one that is not open is forgotten too"
        unmemoize(model)

    def test_one_that_is_not_open_gives_way_to_those_that_are_used(self, bare: Any, tmp_path: Path) -> None:
        bound = 3 << 20
        model = guarded(bare, database=tmp_path / "db", max_bytes=bound)
        for turn in range(8):
            ask(model, batch([40, 30, 20], turn), "a")
        unmemoize(model)
        folder = folder_of(tmp_path / "db", "a")
        for place in (folder, folder / SEGMENTS):
            os.utime(place, (0, 0))  # it was not used for long
        model = guarded(bare, database=tmp_path / "db", max_bytes=bound)
        before = model.attmemo.namespaces()["a"]["record_bytes"]
        for turn in range(40):
            ask(model, batch([40, 30, 20], turn), "b")
            assert bytes_of(model) <= bound
        found = model.attmemo.namespaces()
        assert found["a"]["record_bytes"] < before < found["b"]["record_bytes"]
        unmemoize(model)


    def test_what_another_process_keeps_in_a_namespace_counts(
        self, bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("attmemo.handle.namespaces.LOOK", 0.0)
        first = guarded(bare, database=tmp_path / "db")
        ask(first, BASE, "a")
        second = guarded(bare, database=tmp_path / "db")
        before = second.attmemo.namespaces()["a"]["record_bytes"]
        for turn in range(8):
            ask(first, batch([40, 30, 20], turn), "a")
        unmemoize(first)
        ask(second, BASE)
        now = second.attmemo.namespaces()["a"]
        assert not now["open"]
        assert now["record_bytes"] >= before > 0
        assert ask(second, BASE, "a") is not None
        assert told(second, "a")["repeated"] == len(BASE["input_ids"])
        unmemoize(second)


class TestNames:
    def test_more_namespaces_than_the_limit_are_refused(self, bare: Any) -> None:
        model = guarded(bare, namespaces=2)
        for name in ("a", "b", "a"):
            ask(model, BASE, name)
        with pytest.raises(ArgumentError, match="2 namespaces already"):
            model.attmemo.namespace("c")
        model.attmemo.forget("a")
        ask(model, BASE, "c")

    @pytest.mark.parametrize("name", ["", "x" * 129, "a\nb", 7, None])
    @pytest.mark.parametrize("reuse", ["rows", "none"])
    def test_what_can_be_no_name_is_refused(self, bare: Any, name: Any, reuse: str) -> None:
        model = guarded(bare) if reuse == "rows" else memoize(copy.deepcopy(bare))
        with pytest.raises(ArgumentError, match="1 to 128 printable"):
            model.attmemo.namespace(name)
        assert model.attmemo.namespaces() == {}

    def test_a_namespace_that_does_not_exist_cannot_be_forgotten(self, bare: Any) -> None:
        for model in (guarded(bare), memoize(copy.deepcopy(bare))):
            with pytest.raises(ArgumentError, match="no namespace 'x'"):
                model.attmemo.forget("x")

    @pytest.mark.parametrize("most", [-1, True, 1.5])
    def test_a_limit_that_is_no_number_is_refused(self, bare: Any, most: Any) -> None:
        with pytest.raises(ArgumentError, match="namespaces must be"):
            memoize(copy.deepcopy(bare), namespaces=most)

    def test_two_that_are_open_in_turns_in_one_task_are_refused(self, bare: Any) -> None:
        model = guarded(bare)
        one, other = model.attmemo.namespace("a"), model.attmemo.namespace("b")
        one.__enter__()
        other.__enter__()
        with pytest.raises(AttmemoError, match="another one of the same task"):
            one.__exit__(None, None, None)
        ask(model, BASE)
        assert told(model, None)["sequences"] == len(BASE["input_ids"])

    def test_one_that_is_never_left_is_dropped_in_silence(self, bare: Any, recwarn: pytest.WarningsRecorder) -> None:
        model = guarded(bare)

        def enter() -> None:
            for name in ("a", "b"):
                model.attmemo.namespace(name).__enter__()

        copy_context().run(enter)  # as a task runs, in a context of its own
        gc.collect()
        assert not [one for one in recwarn if one.category is pytest.PytestUnraisableExceptionWarning]
        ask(model, BASE)
        assert told(model, None)["sequences"] == len(BASE["input_ids"])

    def test_one_that_cannot_be_opened_takes_no_bytes(self, bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model = guarded(bare, max_bytes=64 << 20)
        ask(model, BASE, "a")
        spaces = model.attmemo.spaces
        with monkeypatch.context() as patch:
            patch.setattr(spaces, "_make", broken)
            for _ in range(2):
                with pytest.raises(MemoryError):
                    model.attmemo.namespace("b")
        assert spaces._spaces["b"].sharer.told == 0
        ask(model, BASE, "b")
        assert told(model, "b")["records"] > 0

    def test_the_file_with_its_name_is_whole_whenever_it_is_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = folder_of(tmp_path, "a")
        write_name(folder, "a")
        monkeypatch.setattr("attmemo.db.namespaces.json.dump", broken_disk)
        write_name(folder, "a")  # the disk is full in the middle of it
        assert named_in(tmp_path) == {"a": folder}
        assert [file.name for file in folder.iterdir()] == [NAMED]

    @pytest.mark.parametrize("found", ['{"name": 5}', "5", "{}", ""])
    def test_a_file_with_another_name_is_passed_over(self, bare: Any, tmp_path: Path, found: str) -> None:
        model = guarded(bare, database=tmp_path / "db")
        ask(model, BASE, "a")
        unmemoize(model)
        (folder_of(tmp_path / "db", "a") / NAMED).write_text(found)
        assert guarded(bare, database=tmp_path / "db").attmemo.namespaces() == {}

    def test_an_error_is_counted_where_it_was(self, bare: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        model = guarded(bare)
        monkeypatch.setattr(type(model.attmemo.engine.reuse), "serve", broken)
        ask(model, BASE, "a")
        assert model.attmemo.stats()["failed"] == 0
        assert model.attmemo.namespaces()["a"]["failed"] > 0

    def test_a_model_that_keeps_nothing_takes_namespaces(self, bare: Any) -> None:
        model = memoize(copy.deepcopy(bare))
        assert torch.equal(field(ask(model, BASE, "a")), field(ask(model, BASE)))


class TestTasks:
    def test_tasks_of_one_event_loop_are_each_in_their_own_namespace(self, bare: Any) -> None:
        model = guarded(bare)

        async def asks(name: str, entered: asyncio.Barrier) -> None:
            with model.attmemo.namespace(name):
                for _ in range(2):
                    await entered.wait()  # all are inside
                    with torch.inference_mode():
                        model(**BASE)
                await entered.wait()

        async def main() -> None:
            entered = asyncio.Barrier(3)
            await asyncio.gather(*(asks(name, entered) for name in ("a", "b", "c")))
            with torch.inference_mode():
                model(**BASE)

        asyncio.run(main())
        assert model.attmemo.flush()
        count = len(BASE["input_ids"])
        assert [told(model, name)["sequences"] for name in ("a", "b", "c", None)] == [2 * count] * 3 + [count]

    def test_threads_that_a_task_asks_are_in_its_namespace_with_forwards_of_their_own(self, bare: Any) -> None:
        model, inputs = guarded(bare), [batch([30, 20, 25], seed) for seed in range(4)]
        exact = memoize(copy.deepcopy(bare), reuse="none")
        expected = [field(ask(exact, one)) for one in inputs]

        def answer(one: Inputs) -> Any:
            with torch.inference_mode():
                return field(model(**one))

        async def main() -> list[Any]:
            with model.attmemo.namespace("a"):
                return await asyncio.gather(*(asyncio.to_thread(answer, one) for one in inputs))

        for found, true in zip(asyncio.run(main()), expected, strict=True):
            assert torch.equal(found, true)
        assert model.attmemo.flush()
        assert told(model, "a")["sequences"] == sum(len(one["input_ids"]) for one in inputs)
        assert told(model, None)["sequences"] == 0


def test_threads_in_namespaces_of_their_own_get_their_own_records(bare: Any) -> None:
    model, names = guarded(bare), [f"tenant {number}" for number in range(4)]
    exact = memoize(copy.deepcopy(bare), reuse="none")
    inputs = {name: batch([30, 20, 25], 7 + number) for number, name in enumerate(names)}
    expected = {name: field(ask(exact, inputs[name])) for name in names}
    wrong: list[str] = []

    def work(own: str) -> None:
        with torch.inference_mode():
            for _ in range(6):
                with model.attmemo.namespace(own):
                    if not torch.equal(field(model(**inputs[own])).argmax(1), expected[own].argmax(1)):
                        wrong.append(own)

    threads = [threading.Thread(target=work, args=(name,)) for name in names for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.attmemo.flush()
    assert wrong == []
    for name in names:
        own = {tuple(row[:n].tolist()) for row, n in zip(
            inputs[name]["input_ids"], inputs[name]["attention_mask"].sum(1).tolist(), strict=True
        )}  # fmt: skip
        store = model.attmemo.spaces.open(name).engine.reuse.store
        assert {tuple(kept.tokens.tolist()) for kept in store.pool.records.values()} <= own
        assert told(model, name)["sequences"] == 2 * 6 * 3
    assert told(model, None)["sequences"] == 0


class TestPrefixes:
    def test_stored_prefixes_are_those_of_the_namespace(self) -> None:
        rng = np.random.default_rng(5)
        text = random_ids(rng, 70)
        model = memoize(make("Qwen3"), reuse="prefix")
        expected = answer(model, batch_of([text]))
        for name, stored in (("a", False), ("a", True), ("b", False)):
            before = model.attmemo.namespaces().get(name, {}).get("prefixes", {}).get("stored", 0)
            with model.attmemo.namespace(name):
                assert torch.equal(answer(model, batch_of([text])), expected)
            assert (told(model, name)["prefixes"]["stored"] > before) == stored
        assert told(model, "a")["prefixes"]["bytes"] == told(model, "b")["prefixes"]["bytes"] > 0
        assert told(model, None)["prefixes"]["bytes"] == 3 * told(model, "a")["prefixes"]["bytes"]

    def test_who_leaves_takes_stored_prefixes_along(self) -> None:
        rng = np.random.default_rng(6)
        text = random_ids(rng, 70)
        model = memoize(make("Qwen3"), reuse="prefix")
        for name in ("a", "b"):
            with model.attmemo.namespace(name):
                answer(model, batch_of([text]))
        model.attmemo.forget("a")
        assert told(model, None)["prefixes"]["bytes"] == told(model, "b")["prefixes"]["bytes"] > 0
        with model.attmemo.namespace("a"):
            answer(model, batch_of([text]))
        assert told(model, "a")["prefixes"]["stored"] == 0
        with model.attmemo.namespace("b"):
            answer(model, batch_of([text]))
        assert told(model, "b")["prefixes"]["stored"] > 0

