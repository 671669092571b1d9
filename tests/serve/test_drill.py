"""`attmemo drill`: it passes where the alarm works, and fails where it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_line import attmemo, succeed
from services import living, tiny

from attmemo.cli.drill import WORDS, line
from attmemo.guard.guard import Guard


@pytest.mark.parametrize("classes", [None, 3, 1], ids=["embedding", "classifier", "reranker"])
def test_the_drill_of_a_sound_guard_passes(classes: int | None, tmp_path: Path) -> None:
    model = tiny(tmp_path, classes)
    found = json.loads(succeed("drill", model, "--budget", "0.05", "--json", "-", "--quiet"))
    assert found["passed"], found
    assert found["samples"] <= found["promised"] <= len(WORDS)
    assert found["reused"] >= len(WORDS)


def test_the_drill_fails_where_the_alarm_does_not_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(tmp_path, 3)
    monkeypatch.setattr(Guard, "_alarm", lambda _: None)
    result = attmemo("drill", model, "--budget", "0.05", "--json", "-", "--quiet")
    assert result.exit_code == 1
    checks = json.loads(result.stdout)["checks"]
    assert not checks["the alarm rose within the promised number of samples"]
    assert not checks["/health says alarm"]


def test_health_says_where_the_guard_stands_where_there_is_one(tmp_path: Path) -> None:
    model = tiny(tmp_path, 3)
    with living(model) as live:
        assert live.get("/health").headers["x-attmemo-guard"] == "learning"
    with living(model, database=None, budget=0) as live:
        assert "x-attmemo-guard" not in live.get("/health").headers


def test_lines_of_two_kinds_have_their_numbers_in_two_slots() -> None:
    assert len({line(kind, 10).split()[0] for kind in range(len(WORDS))}) == len(WORDS)
