"""Calls of the command line, and what must hold of each."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from attmemo.cli.app import app

MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from attmemo.cli import main; main()"


def attmemo(*args: str | Path) -> Any:
    """Run a command in this process."""
    return CliRunner().invoke(app, [str(arg) for arg in args], prog_name="attmemo")


def succeed(*args: str | Path) -> str:
    """Standard output of a command that must work."""
    result = attmemo(*args)
    assert result.exit_code == 0, result.output + repr(result.exception)
    stdout: str = result.stdout
    return stdout


def refuse(*args: str | Path) -> str:
    """Standard error of a command that must be refused: a message, a next step, no traceback."""
    result = attmemo(*args)
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, SystemExit), "an exception came through"
    assert result.stdout == "" or "error:" not in result.stdout
    stderr: str = result.stderr
    assert "error: " in stderr
    assert "\n  Next: " in stderr
    assert "Traceback" not in stderr
    assert "unexpected" not in stderr
    return stderr


def ended_by(how: signal.Signals, ready: Callable[[], bool], *args: str | Path) -> tuple[int, str]:
    """Exit code and standard error of a command in a process of its own, which gets a signal once it is ready."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, args)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 500
        while not ready():
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(how)
        _, stderr = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    return process.returncode, stderr
