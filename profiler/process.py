"""Work in a process of its own: its memory is known, and if it dies the others go on."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self, TypeVar

from attmemo.errors import AttmemoError

T = TypeVar("T")


class ProcessError(Exception):
    """What runs in a process cannot go on; the message says why in a line."""


class ProcessDied(ProcessError):
    """The process itself has ended."""


class Process:
    """A process with a worker that is called; it ends with the context. ProcessError: no worker can be made.

    Parameters
    ----------
    make : callable
        Called there with `arguments`; gives the worker.
    log : Path, optional
        Takes what is printed there.
    modules : sequence of str
        Imported once; each process begins as a copy of one that did. Default: every process imports for itself.
    patience : float, optional
        Seconds that a call may take, that of `make` too. Default: no limit.
    """

    def __init__(
        self, make: Callable[..., object], *arguments: Any, log: Path | None = None, modules: Sequence[str] = (),
        patience: float | None = None,
    ) -> None:  # fmt: skip
        self.patience = patience
        self._owed = 0  # answers that have not come
        context: Any = multiprocessing.get_context("forkserver" if modules else "spawn")
        context.set_forkserver_preload(list(modules))
        self._own, other = context.Pipe()
        self._process = context.Process(target=_answer, args=(other, log), daemon=False)
        self._process.start()
        other.close()
        try:
            self.call(make, *arguments)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, method: Callable[..., T], *arguments: Any) -> T:
        """Call a method of the worker's class, or another function of a module that takes the worker first.

        ProcessError: it raised, or takes too long. ProcessDied: its process died.
        """
        try:
            self._own.send((method, arguments))
            self._owed += 1
            while self._owed:  # first come the answers to calls that took too long
                if not self._own.poll(self.patience):
                    raise ProcessError(f"took more than {self.patience:.0f} s")
                answer: tuple[T, str | None] = self._own.recv()
                self._owed -= 1
        except (EOFError, OSError):
            self._process.join(5.0)
            raise ProcessDied(f"its process died{_cause(self._process.exitcode)}") from None
        found, error = answer
        if error is not None:
            raise ProcessError(error)
        return found

    def close(self) -> None:
        """End the process."""
        self._own.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call one function in a process of its own. ProcessError: it raised, or its process died."""
    with Process(function, *arguments) as process:
        found: T = process.call(_itself)
    return found


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    said = text[0][:120] if text else "no message"
    return said if isinstance(error, AttmemoError) else f"{type(error).__name__}: {said}"


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    return f" of {signal.Signals(-code).name}" + (", mostly for want of memory" if code == -signal.SIGKILL else "")


def _itself(worker: Any) -> Any:
    return worker


def _answer(pipe: Connection, log: Path | None) -> None:
    """What the process does until the other end is closed: the first call makes the worker that the others take."""
    if log is not None:
        with log.open("ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
    worker: list[Any] = []
    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        except Exception as error:  # what was sent cannot be read here
            pipe.send((None, reason(error)))
            continue
        try:
            found = function(*worker, *arguments)
            if not worker:
                worker, found = [found], None
            pipe.send((found, None))
        except Exception as error:  # whatever another library raises
            pipe.send((None, reason(error)))
