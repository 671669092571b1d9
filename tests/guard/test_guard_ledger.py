"""What a guard has learned survives a restart and is shared by processes, and no file can make it unsafe."""

from __future__ import annotations

import logging
import multiprocessing
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from attmemo.guard.file import DAMAGED, Ledger, all_in
from attmemo.guard.guard import Guard
from attmemo.guard.keeper import Keeper
from attmemo.guard.margin import SEEN
from attmemo.guard.verdict import Verdict
from attmemo.kernels.plan import Evidence

SETTINGS = {"budget": 0.01, "confidence": 0.95, "answer": "auto"}
FAR = 3600.0


def gap(slot: int, value: int, word: int = 0) -> Any:
    """One change: a value in place of value 0."""
    columns = {"slot": [slot], "value": [value], "former": [0], "change": [1000 * slot + value]}
    return SimpleNamespace(
        **{name: np.array(column, np.uint64) for name, column in columns.items()}, word=np.array([word], np.uint8)
    )


def verify(guard: Guard, slot: int, values: Sequence[int], changed: bool = False) -> None:
    for value in values:
        guard.decide([Evidence.FULLY])
        guard.compared(Verdict.SAMPLE, gap(slot, value), Evidence.FULLY, None, changed)


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "guard" / "one.safetensors", SETTINGS)


def test_what_was_learned_survives_a_restart(ledger: Ledger) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 7, range(1, 40))
    Keeper(guard, ledger, FAR).close()
    other = Guard(0.01, 0.95, seed=0)
    Keeper(other, ledger, FAR).close()
    assert other.verified.ask(gap(7, 3)) == Evidence.FULLY
    assert other.verified.ask(gap(8, 3)) == Evidence.UNKNOWN
    assert other.certificate.counts == guard.certificate.counts
    assert other.certificate.highest == guard.certificate.highest
    assert other.state().since == pytest.approx(guard.state().since)


def test_the_margin_survives_a_restart(ledger: Ledger) -> None:
    guard, own = Guard(0.01, 0.95, seed=0), gap(7, 3)
    verify(guard, 7, range(1, 40))
    first = guard.margin.least
    guard.decide([Evidence.FULLY] * 5000)
    for _ in range(SEEN):
        guard.compared(Verdict.SERVE, own, Evidence.FULLY, first - 0.01, False)
    learned = guard.margin.least
    assert learned < first
    Keeper(guard, ledger, FAR).close()
    other = Guard(0.01, 0.95, seed=0)
    Keeper(other, ledger, FAR).close()
    assert other.margin.least == learned


def test_counts_of_two_processes_are_added_once(ledger: Ledger) -> None:
    first, second = Guard(0.01, 0.95, seed=0), Guard(0.01, 0.95, seed=1)
    for _ in range(3):
        verify(first, 1, range(10))
        first.sync(ledger)
        verify(second, 2, range(20))
        second.sync(ledger)
        second.sync(ledger)
    first.sync(ledger)
    assert first.certificate.counts.same == second.certificate.counts.same == 90
    assert first.certificate.counts.requests == 90
    assert first.verified.ask(gap(2, 5)) == second.verified.ask(gap(1, 5)) == Evidence.FULLY


def test_what_served_answers_cost_is_shared_once_however_low_the_bounds_fall(ledger: Ledger) -> None:
    """Answers were charged under high bounds, and samples lower these: in each process, and again by joining both."""
    guards = [Guard(0.01, 0.95, seed=seed, drawn=0.0) for seed in range(3)]
    for turn in range(4):
        for number, guard in enumerate(guards):
            verify(guard, number, range(30))
            for _ in range(60):
                guard.certificate.spend([1], [True], [False])
            guard.sync(ledger)
            fresh = Guard(0.01, 0.95, seed=9)
            fresh.sync(ledger)  # one that only looks takes nothing away
            counts = fresh.certificate.counts
            assert counts.charged >= fresh.certificate.cost >= 0.0
            assert fresh.certificate.cost <= 0.01 * counts.requests + 3 * fresh.certificate.highest
            assert counts.lowest == fresh.certificate.highest
            if turn:
                assert counts.served > 0
    for guard in guards:
        guard.sync(ledger)
    assert len({guard.certificate.cost for guard in guards}) == 1
    assert len({guard.certificate.counts.served for guard in guards}) == 1


def _learn(path: Path, slot: int) -> None:
    guard = Guard(0.01, 0.95, seed=slot)
    ledger = Ledger(path, SETTINGS)
    guard.sync(ledger)
    for _ in range(10):
        verify(guard, slot, range(5))
        guard.sync(ledger)


def test_processes_that_write_at_once_lose_nothing(ledger: Ledger) -> None:
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_learn, args=(ledger.path, slot)) for slot in range(1, 5)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    guard = Guard(0.01, 0.95)
    guard.sync(ledger)
    assert guard.certificate.counts.same == 200
    assert all(guard.verified.ask(gap(slot, 3)) == Evidence.FULLY for slot in range(1, 5))


def test_an_alarm_of_one_process_voids_the_counts_of_all(ledger: Ledger) -> None:
    first, second = Guard(0.01, 0.95, seed=0), Guard(0.01, 0.95, seed=1)
    verify(first, 1, range(400))
    first.sync(ledger)
    second.sync(ledger)
    assert second.certified
    while first.state().name != "alarm":
        verify(first, 1, [1], changed=True)
    first.sync(ledger)
    verify(second, 2, range(5))
    second.sync(ledger)
    assert not second.certified
    assert second.state().name == "alarm"
    assert second.certificate.counts.same + second.certificate.counts.changed < 5 + 400


def test_other_settings_start_anew(ledger: Ledger) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 1, range(20))
    guard.sync(ledger)
    assert Ledger(ledger.path, SETTINGS | {"answer": "cls"}).read() is None
    assert ledger.read() is not None


@pytest.mark.parametrize("damage", ["cut", "noise", "empty", "absent"])
def test_a_damaged_file_costs_what_was_learned_and_no_more(ledger: Ledger, damage: str) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 1, range(400))
    guard.sync(ledger)
    whole = ledger.path.read_bytes()
    if damage == "absent":
        ledger.path.unlink()
    else:
        ledger.path.write_bytes({"cut": whole[: len(whole) // 2], "noise": b"\x07" * 100, "empty": b""}[damage])
    other = Guard(0.01, 0.95)
    other.sync(ledger)
    assert not other.certified
    assert other.verified.ask(gap(1, 3)) == Evidence.UNKNOWN
    assert all_in(ledger.path.parent), "the file was written anew"


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_a_damaged_file_is_set_aside_and_named_once(
    ledger: Ledger, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 1, range(400))
    guard.sync(ledger)
    whole = ledger.path.read_bytes()
    bad = {"cut": whole[: len(whole) // 2], "noise": b"\x07" * 100, "empty": b""}[damage]
    ledger.path.write_bytes(bad)
    for _ in range(2):
        other = Guard(0.01, 0.95, seed=0)
        keeper = Keeper(other, ledger, FAR)
        verify(other, 1, range(5))
        keeper.close()
    assert caplog.text.count("set aside") == 1
    (aside,) = [file for file in ledger.path.parent.iterdir() if DAMAGED in file.name]
    assert aside.read_bytes() == bad
    stored = ledger.read()
    assert stored is not None
    assert stored.counts["same"] == 10


def test_no_flipped_bit_changes_what_is_known(ledger: Ledger) -> None:
    """Of any byte: the file is damaged, or it says the same. A wrong count would certify what was never verified."""
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 1, range(20))
    guard.sync(ledger)
    whole, expected = ledger.path.read_bytes(), ledger.read()
    assert expected is not None
    generator, damaged = random.Random(0), 0
    for at in range(len(whole)):
        ledger.path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << generator.randrange(8)]) + whole[at + 1 :])
        found = ledger.read()
        damaged += found is None
        if found is not None:
            assert (found.epoch, found.since, found.counts) == (expected.epoch, expected.since, expected.counts)
            assert all(np.array_equal(found.hashes[name], array) for name, array in expected.hashes.items())
    assert damaged > 0.8 * len(whole)


def test_a_file_of_another_version_is_not_taken_for_a_damaged_one(ledger: Ledger) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    guard.sync(ledger)
    with safe_open(ledger.path, "numpy") as file:
        told = file.metadata()
    save_file({"other": np.zeros(3)}, ledger.path, told | {"version": "99"})
    assert ledger.set_aside() is None


def test_a_folder_that_cannot_be_written_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "guard").write_text("a file where the folder should be")
    guard = Guard(0.01, 0.95, seed=0)
    with caplog.at_level(logging.WARNING, "attmemo"):
        keeper = Keeper(guard, Ledger(tmp_path / "guard" / "one.safetensors", SETTINGS), FAR)
        verify(guard, 1, range(5))
        keeper.close()
    assert len([record for record in caplog.records if "not kept" in record.getMessage()]) == 1
    assert guard.verified.ask(gap(1, 3)) == Evidence.FULLY


@pytest.mark.parametrize("error", [OSError("disk full"), SafetensorError("disk full")])
def test_a_file_that_cannot_be_written_counts_nothing_twice(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    first = Guard(0.01, 0.95, seed=0)
    verify(first, 1, range(100))
    first.sync(ledger)
    second = Guard(0.01, 0.95, seed=1)
    verify(second, 2, range(7))

    def full(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("attmemo.guard.file.save_file", full)
        for _ in range(5):
            with pytest.raises(OSError, match="disk full"):
                second.sync(ledger)
            assert second.certificate.counts.same == 107
    second.sync(ledger)
    stored = ledger.read()
    assert stored is not None
    assert stored.counts["same"] == 107


def test_a_file_without_all_arrays_is_not_read(ledger: Ledger) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 1, range(20))
    guard.sync(ledger)
    stored = ledger.read()
    assert stored is not None
    ledger.write(replace(stored, hashes={name: array for name, array in stored.hashes.items() if name != "harm"}))
    assert ledger.read() is None
    Guard(0.01, 0.95).sync(ledger)


@pytest.mark.parametrize("shared_before", [True, False])
def test_a_forked_child_leaves_to_its_parent_what_the_parent_has_not_shared(
    ledger: Ledger, shared_before: bool
) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    if shared_before:
        guard.sync(ledger)
    verify(guard, 1, range(10))
    guard.leave_to_parent()  # what a child calls
    for _ in range(2):
        verify(guard, 2, range(3))
        guard.sync(ledger)
    stored = ledger.read()
    assert stored is not None
    assert stored.counts["same"] == 6


def test_a_guard_can_be_read_from_its_file(ledger: Ledger) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 1, range(400))
    guard.sync(ledger)
    [(settings, learned)] = all_in(ledger.path.parent)
    assert settings == SETTINGS
    assert Guard.of(0.01, 0.95, learned).stats()["says"] == guard.stats()["says"]
    assert "certified" in guard.stats()["says"]


def test_a_file_of_another_version_is_not_read(ledger: Ledger) -> None:
    guard = Guard(0.01, 0.95, seed=0)
    verify(guard, 7, range(1, 40))
    Keeper(guard, ledger, FAR).close()
    with safe_open(ledger.path, "numpy") as file:
        told = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(arrays | {"values": arrays["values"][:, :2].copy()}, ledger.path, told | {"version": "1"})
    assert ledger.read() is None
    save_file(arrays | {"values": arrays["values"][:, :2].copy()}, ledger.path, told)
    assert ledger.read() is None
    save_file(arrays, ledger.path, told)
    assert ledger.read() is not None
