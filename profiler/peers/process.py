"""A path in a process of its own: its memory is known, and if it dies the others go on."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.errors import AttmemoError
from attmemo.profiler.models import Tokens
from attmemo.profiler.peers.paths import FILES, PATHS, Order, Ready, Route, why_not
from attmemo.system.machine import trim

PATIENCE: Final = 900.0
"""Seconds that a path may take to become ready, or for one batch."""


class PathError(Exception):
    """A path cannot go on; the message says why in a line."""


class PathProcess:
    """The process of a path, from outside; `log` takes what it prints."""

    def __init__(self, order: Order, log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["attmemo.profiler.peers.process", *order.modules])
        self._own, other = context.Pipe()
        self._process = context.Process(target=_answer, args=(other, order, log), daemon=False)
        self._process.start()
        other.close()

    def make(self, file: str) -> float:
        """Make a converted model (of `FILES`). Seconds."""
        return self._call("make", file)  # type: ignore[no-any-return]

    def load(self, route: Route) -> float:
        """Make a path ready and have it answer once. Seconds."""
        return self._call("load", route)  # type: ignore[no-any-return]

    def ask(self, texts: Sequence[Tokens]) -> tuple[float, Tensor]:
        """Seconds from tokens to answers, padding included, and the answers ``[B, …]`` in float32."""
        seconds, given = self._call("ask", texts)
        return seconds, torch.from_numpy(given)

    def memory(self) -> int:
        """Resident bytes, less those before the path was loaded."""
        return self._call("memory")  # type: ignore[no-any-return]

    def stats(self) -> dict[str, Any]:
        """What a memoized model counts; empty for other paths."""
        return self._call("stats")  # type: ignore[no-any-return]

    def close(self) -> None:
        """End the process."""
        self._own.close()
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _call(self, name: str, *arguments: Any) -> Any:
        """PathError: it failed, died or takes too long."""
        try:
            self._own.send((name, arguments))
            if not self._own.poll(PATIENCE):
                raise PathError(f"took more than {PATIENCE:.0f} s")
            found, error = self._own.recv()
        except (EOFError, OSError):
            self._process.join(5.0)
            raise PathError(f"its process died{_cause(self._process.exitcode)}") from None
        if error is not None:
            raise PathError(error)
        return found


def _cause(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    return f" of {signal.Signals(-code).name}" + (", mostly for want of memory" if code == -signal.SIGKILL else "")


class Processes:
    """The processes of a run: what they read is converted once, and all of them are ended with the context."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._made: dict[str, float | PathError] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, name: str, order: Order | None = None) -> tuple[PathProcess, dict[str, float]]:
        """A path that can be asked, and the seconds that this took. PathError: why it cannot."""
        route, order = PATHS[name], order or self.order
        reason = why_not(name, order)
        if reason is not None:
            raise PathError(reason)
        converting = self._make(route.file)
        process = self._begin(name, order)
        try:
            return process, {"converting_s": converting, "loading_s": process.load(route)}
        except PathError:
            process.close()
            raise

    def _make(self, file: str | None) -> float:
        """Seconds that a converted model took, with those that it is made of. A failure is not tried again."""
        if file is None:
            return 0.0
        before = self._make(FILES[file][0])
        if file not in self._made:
            process = self._begin(file, self.order)
            try:
                self._made[file] = process.make(file)
            except PathError as error:
                self._made[file] = error
            finally:
                process.close()
        made = self._made[file]
        if isinstance(made, PathError):
            raise made
        return before + made

    def _begin(self, name: str, order: Order) -> PathProcess:
        process = PathProcess(order, self.order.folder / f"{name}.txt")
        self._stack.callback(process.close)
        return process


def _answer(connection: Connection, order: Order, log: Path) -> None:
    """What the process does until the other end is closed."""
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    warnings.simplefilter("ignore")
    torch.set_num_threads(order.threads)
    worker = _Worker(order)
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        except Exception as error:  # what was sent cannot be read here
            connection.send((None, reason(error)))
            continue
        try:
            answer: tuple[Any, str | None] = getattr(worker, name)(*arguments), None
        except Exception as error:  # whatever another library raises
            answer = None, reason(error)
        connection.send(answer)


class _Worker:
    def __init__(self, order: Order) -> None:
        self._order = order
        with torch.inference_mode():  # what every path loads of torch is not the path's memory
            nn.TransformerEncoderLayer(32, 2, 32, batch_first=True).eval()(torch.zeros(2, 8, 32))
        self._before = _resident()
        self._ready: Ready | None = None

    def make(self, file: str) -> float:
        start = time.perf_counter()
        FILES[file][1](self._order)
        return time.perf_counter() - start

    def load(self, route: Route) -> float:
        start = time.perf_counter()
        self._ready = route.ready(self._order)
        if not route.anew:
            self.ask(self._order.first[:1])
        seconds = time.perf_counter() - start
        gc.collect()
        trim()  # what only loading took
        return seconds

    def ask(self, texts: Sequence[Tokens]) -> tuple[float, np.ndarray]:  # tensors would be shared, not sent
        assert self._ready is not None
        with torch.inference_mode():
            start = time.perf_counter()
            given = self._ready.way(texts)
            seconds = time.perf_counter() - start
            if hasattr(self._ready.handle, "flush"):
                # A pause, as long as checks and records need that a guard lays aside for it: it lays aside all it can
                # where it sees pauses, and the turns of the other paths are such.
                self._ready.handle.flush()
        return seconds, given.float().numpy()

    def memory(self) -> int:
        return _resident() - self._before

    def stats(self) -> dict[str, Any]:
        handle = self._ready.handle if self._ready else None
        return {} if handle is None else handle.stats()


def reason(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    said = text[0][:120] if text else "no message"
    return said if isinstance(error, AttmemoError) else f"{type(error).__name__}: {said}"


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
