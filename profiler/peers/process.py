"""The process of a path, from outside and from inside, and what paths read that is converted once."""

from __future__ import annotations

import gc
import resource
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.profiler.models import Tokens
from attmemo.profiler.peers.paths import FILES, PATHS, Order, Ready, Route, why_not
from attmemo.profiler.process import Process, ProcessError
from attmemo.system.machine import trim

PATIENCE: Final = 900.0
"""Seconds that a path may take to become ready, or for one batch."""


class PathProcess(Process):
    """The process of a path, from outside; `log` takes what it prints."""

    def __init__(self, order: Order, log: Path) -> None:
        super().__init__(_Worker, order, log=log, modules=(__name__, *order.modules), patience=PATIENCE)

    def make(self, file: str) -> float:
        """Make a converted model (of `FILES`). Seconds."""
        return self.call(_Worker.make, file)

    def load(self, route: Route) -> float:
        """Make a path ready and have it answer once. Seconds."""
        return self.call(_Worker.load, route)

    def ask(self, texts: Sequence[Tokens]) -> tuple[float, Tensor]:
        """Seconds from tokens to answers, padding included, and the answers ``[B, …]`` in float32."""
        seconds, given = self.call(_Worker.ask, texts)
        return seconds, torch.from_numpy(given)

    def memory(self) -> int:
        """Resident bytes, less those before the path was loaded."""
        return self.call(_Worker.memory)

    def stats(self) -> dict[str, Any]:
        """What a memoized model counts; empty for other paths."""
        return self.call(_Worker.stats)


class Processes:
    """The processes of a run: what they read is converted once, and all of them are ended with the context."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self._made: dict[str, float | ProcessError] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, name: str, order: Order | None = None) -> tuple[PathProcess, dict[str, float]]:
        """A path that can be asked, and the seconds that this took. ProcessError: why it cannot."""
        route, order = PATHS[name], order or self.order
        reason = why_not(name, order)
        if reason is not None:
            raise ProcessError(reason)
        converting = self._make(route.file)
        process = self._begin(name, order)
        try:
            return process, {"converting_s": converting, "loading_s": process.load(route)}
        except ProcessError:
            process.close()
            raise

    def _make(self, file: str | None) -> float:
        """Seconds that a converted model took, with those that it is made of. A failure is not tried again."""
        if file is None:
            return 0.0
        before = self._make(FILES[file][0])
        if file not in self._made:
            try:
                with self._begin(file, self.order) as process:
                    self._made[file] = process.make(file)
            except ProcessError as error:
                self._made[file] = error
        made = self._made[file]
        if isinstance(made, ProcessError):
            raise made
        return before + made

    def _begin(self, name: str, order: Order) -> PathProcess:
        return self._stack.enter_context(PathProcess(order, self.order.folder / f"{name}.txt"))


class _Worker:
    def __init__(self, order: Order) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(order.threads)
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


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
