"""The log of changed answers: what is in it, and that it holds no text and stays small."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from guarded import BASE, BOTH, LENGTHS, SECOND, Case, certify, guarded, rows_of, run, trusting, variant
from guarded import FIRST as PLACE
from packed_models import Inputs

from attmemo import memoize
from attmemo.errors import ArgumentError, DataError
from attmemo.guard.change_log import Case as Entry
from attmemo.guard.change_log import ChangeLog, digest, lines_of, summary
from attmemo.guard.verdict import Verdict

ENTRY = Entry("0" * 16, 3, "1" * 16, "fully")


@pytest.fixture(scope="module", name="case")
def _case() -> Case:
    return Case("BERT classifier")


def changing(case: Case, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A model with a log, that knows a change at one place, and whose answers all change from now on."""
    model = guarded(case.bare, log_changes=path, **options)
    for inputs in (BASE, variant(PLACE)):
        run(model, inputs)
    certify(model)
    monkeypatch.setattr(model.attmemo.guarded.answers, "differ", lambda *_: True)
    return model


def hash_of_first(inputs: Inputs) -> str:
    """The hash of the tokens of the first sequence."""
    return digest(inputs["input_ids"][0, : LENGTHS[0]].numpy().astype(np.int32))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_log_is_empty_as_long_as_no_answer_changes(case: Case, tmp_path: Path) -> None:
    path = tmp_path / "log"
    model = guarded(case.bare, log_changes=path)
    run(model, BASE)
    run(model, BASE)
    assert path.read_text() == ""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert summary(path)["changed"] == 0


def test_a_verified_answer_that_had_changed_is_a_line(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    model = changing(case, path, monkeypatch)
    model.attmemo.guarded.guard.drawn = 1.0
    before = len(lines(path))
    unknown = rows_of(BOTH, 0)
    run(model, unknown)
    found = lines(path)[before:]
    assert len(found) == 1
    assert found[0]["verdict"] == "learn"
    assert not found[0]["given"], "a change that is not known is not reused"
    assert found[0]["tokens"] == hash_of_first(unknown)
    index = model.attmemo.planner.index
    donor = digest(index.tokens_of(found[0]["record"]))
    assert found[0]["record_tokens"] == donor
    assert donor in {hash_of_first(BASE), hash_of_first(variant(PLACE))}
    assert found[0]["blamed"]
    assert found[0]["epoch"] == 0


def test_no_token_of_an_input_is_in_the_log(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    run(changing(case, path, monkeypatch), BOTH)
    keys = {"time", "tokens", "record", "record_tokens", "margin", "evidence", "verdict", "given", "blamed", "epoch"}
    assert lines(path)
    for line in lines(path):
        assert set(line) == keys
        assert all(isinstance(slot, str) and len(slot) == 16 for slot in (*line["blamed"], line["tokens"]))


def test_an_answer_that_was_given_says_so(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    model = trusting(guarded(case.bare, log_changes=path))
    for inputs in (BASE, variant(PLACE), variant(SECOND)):
        run(model, inputs)
    certify(model).attmemo.guarded.guard.drawn = 1.0
    before = len(lines(path))
    monkeypatch.setattr(model.attmemo.guarded.answers, "differ", lambda *_: True)
    run(model, BOTH)
    given = [line for line in lines(path)[before:] if line["given"]]
    assert given
    assert {line["verdict"] for line in given} == {"owe"}


def test_shadow_mode_writes_answers_that_nobody_got(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    model = changing(case, path, monkeypatch, shadow=True)
    run(model, variant(PLACE))
    assert lines(path)
    assert not any(line["given"] for line in lines(path))


def test_a_log_takes_no_more_than_two_files(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ChangeLog(path, largest=1000)
    for epoch in range(40):
        log.note(ENTRY, Verdict.OWE, 0.5, {7}, epoch, given=True)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1"]
    assert all(file.stat().st_size <= 1000 for file in tmp_path.iterdir())
    epochs = [line["epoch"] for line in lines_of(path)]
    assert epochs == list(range(epochs[0], 40)), "the newest are kept, in order"


def test_a_summary_counts_what_was_named(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = ChangeLog(path)
    log.note(ENTRY, Verdict.OWE, 0.5, {7, 8}, 0, given=True)
    log.note(ENTRY, Verdict.LEARN, None, {7}, 1, given=False)
    found = summary(path)
    assert (found["changed"], found["given"], found["inputs"], found["epochs"]) == (2, 1, 1, [0, 1])
    assert found["verdicts"] == {"owe": 1, "learn": 1}
    assert found["blamed"] == [(f"{7:016x}", 2), (f"{8:016x}", 1)]
    assert found["records"] == [("1" * 16, 2)]


def test_a_last_line_that_was_cut_off_is_left_out_and_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "log"
    ChangeLog(path).note(ENTRY, Verdict.OWE, 0.5, {7}, 0, given=True)
    path.write_bytes(path.read_bytes() + b'{"time": 1')
    assert summary(path)["changed"] == 1
    path.write_text("a text\n")
    with pytest.raises(DataError, match="line 1 is no line of a log"):
        summary(path)
    with pytest.raises(DataError, match="no such file"):
        summary(tmp_path / "none")


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = ChangeLog(path := tmp_path / "log")
    log.note(ENTRY, Verdict.OWE, 0.5, set(), 0)
    before, write = path.read_bytes(), os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda file, data: write(file, data[:20]))
        log.note(ENTRY, Verdict.OWE, 0.5, set(), 0)
    assert path.read_bytes() == before
    log.note(ENTRY, Verdict.OWE, 0.5, set(), 0)
    assert len(lines(path)) == 2


def test_a_log_that_cannot_be_written_costs_no_answer_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "folder").mkdir()
    log = ChangeLog(tmp_path / "folder" / "log")
    (tmp_path / "folder" / "log").unlink()
    (tmp_path / "folder").rmdir()
    log.note(ENTRY, Verdict.OWE, 0.5, {7}, 0, given=True)
    log.note(ENTRY, Verdict.OWE, 0.5, {7}, 0, given=True)
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"budget": 0.01, "log_changes": "/no/such/folder/log"}, "log_changes is '/no/such/folder/log', which cannot"),
        ({"log_changes": "log"}, "log_changes is about answers that a guard verifies"),
        ({"budget": 0.01, "reuse": "none", "log_changes": "log"}, "log_changes is about"),
    ],
)
def test_a_log_that_makes_no_sense_is_refused(case: Case, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        memoize(case.bare, **options)
    assert "attmemo" not in case.bare.__dict__
