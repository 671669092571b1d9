"""Work in a process of its own: values and errors come back, and a process that died says of what."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from attmemo.profiler.process import Process, ProcessDied, ProcessError, apart


class Unreadable:
    """It can be sent, but not read."""

    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("x",)


def test_a_function_runs_apart_and_its_value_comes_back() -> None:
    assert apart(os.getpid) != os.getpid()
    with pytest.raises(ProcessError, match=r"^ValueError: invalid literal for int\(\) with base 10: 'x'$"):
        apart(int, "x")


def test_a_worker_that_cannot_do_one_thing_does_the_next() -> None:
    with Process(list, [3]) as process:
        with pytest.raises(ProcessError, match=r"^ValueError: "):
            process.call(list.remove, 4)
        with pytest.raises(ProcessError, match=r"^ValueError: "):
            process.call(list.append, Unreadable())
        process.call(list.append, 5)
        assert process.call(list.copy) == [3, 5]


def test_a_process_that_died_says_of_what() -> None:
    with Process(int, signal.SIGTERM) as process:
        for _ in range(2):
            with pytest.raises(ProcessDied, match=r"^its process died of SIGTERM$"):
                process.call(signal.raise_signal)
    with pytest.raises(ProcessDied, match=r"^its process died of SIGKILL, mostly for want of memory$"):
        apart(signal.raise_signal, signal.SIGKILL)


def test_an_answer_that_came_too_late_is_not_that_of_the_next_call(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with Process(Path, tmp_path / "pipe") as process:
        process.patience = 0.01
        with pytest.raises(ProcessError, match=r"^took more than 0 s$"):
            process.call(Path.read_text)  # it waits until something is written
        (tmp_path / "pipe").write_text("late")
        process.patience = None
        assert process.call(Path.is_fifo) is True


def test_what_is_printed_there_is_in_the_log(tmp_path: Path) -> None:
    with Process(print, "said", log=tmp_path / "log"):
        pass
    assert (tmp_path / "log").read_text() == "said\n"
