"""A test that cannot fail proves nothing: each bug that is put into the reference is noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from seeded_bugs import BUGS

HERE = Path(__file__).resolve().parent


def run(bug: str) -> subprocess.CompletedProcess[str]:
    """The tests that hold the reference against a judge who shares no code with it; native code is left out."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "seeded_bugs"]
    command += ["-k", "reference and not instruction_sets", "test_ops_attention.py", "test_ops_store.py"]
    environment = {**os.environ, "SEEDED_BUG": bug, "PYTHONPATH": str(HERE)}
    return subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600, check=False
    )


@pytest.mark.slow
def test_the_reference_as_it_is_passes() -> None:
    done = run("")
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_noticed(bug: str) -> None:
    done = run(bug)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]  # 1: a test failed; others: pytest did
    assert "FAILURES" in done.stdout
