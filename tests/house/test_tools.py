"""The tools of the tests: a child that dies must not pass for one that does not."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from children import in_child, run_child
from databases import LENGTHS, contents, fill, findings, sequence, train_by_hand


def test_a_child_that_dies_fails_its_caller_unless_that_was_declared() -> None:
    crash = lambda: ctypes.string_at(0)  # noqa: E731
    assert run_child(crash, signals=["SIGSEGV"]).signal == "SIGSEGV"
    with pytest.raises(AssertionError, match="SIGSEGV"):
        run_child("import ctypes, faulthandler; faulthandler.disable(); ctypes.string_at(0)")
    with pytest.raises(AssertionError, match="KeyError: 7"):
        run_child(lambda: {}[7])  # type: ignore[misc]
    with pytest.raises(AssertionError, match="code 3"):
        run_child(lambda: os._exit(3))
    assert "KeyError: 7" in (run_child("{}[7]", may_raise=True).error or "")
    assert run_child(lambda: [1, "two"]).result == [1, "two"]
    assert run_child("result = number + 1", number=1).result == 2
    assert run_child(lambda: time.sleep(30), timeout=1, signals=["SIGALRM"]).signal == "SIGALRM"


def test_a_dead_child_is_seen() -> None:
    """If the tools took a signal for success, no crash test below would ever fail."""
    assert in_child(lambda: None) == 0
    assert in_child(lambda: os.kill(os.getpid(), signal.SIGKILL)) == -signal.SIGKILL
    assert in_child(lambda: [][0], quiet=True) == 1


def test_records_are_distinguishable() -> None:
    """If two synthetic records were alike, a swap would go unseen."""
    bodies = [torch.cat([t.flatten() for part in sequence(n, 4) for t in part]).numpy() for n in range(4)]
    assert all(not np.array_equal(bodies[a], bodies[b]) for a in range(4) for b in range(a))


def test_the_small_database_is_whole(tmp_path: Path) -> None:
    """If the database that the damage tests start from were damaged, they would prove nothing."""
    path = train_by_hand(fill(tmp_path / "db"))
    assert findings(path) == []
    assert sorted(contents(path)) == [(0, row) for row in range(len(LENGTHS))]
