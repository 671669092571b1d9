"""The tools of the tests: a child that dies must not pass for one that does not."""

from __future__ import annotations

import ctypes
import os
import time

import pytest
from helpers import run_child


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
