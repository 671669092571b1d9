"""The run behind a table: processes of paths that take turns over one stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attmemo.errors import AttmemoError
from attmemo.profiler.cells.cached import Cached
from attmemo.profiler.cells.conditions import Others, measured_under
from attmemo.profiler.cells.paths import CACHE, FILES, PATHS, STOCK, Order, why_not
from attmemo.profiler.cells.process import PathError, PathProcess
from attmemo.profiler.cells.stream import Stream, Turn
from attmemo.profiler.cells.tally import Tally, cell, counts
from attmemo.profiler.models import LoadedModel, Tokens
from attmemo.profiler.turns import Progress, alternate

_PILOT: Final = 3  # batches of the first part that show which exact path is the fastest
_WHOLE: Final = 32  # texts in a batch of the reference

Ask = Callable[[Sequence[Tokens]], tuple[float, np.ndarray]]
Key = tuple[str, bool]  # a path, and whether its texts come in the order of their lengths


class Table:
    """One run over one stream.

    Parameters
    ----------
    loaded : LoadedModel
        Its weights are not needed.
    stream : Stream
    order : Order
    names : sequence of str
        The paths that take part; the stock model always does.
    tell : callable
    """

    def __init__(
        self, loaded: LoadedModel, stream: Stream, order: Order, names: Sequence[str], tell: Progress
    ) -> None:  # fmt: skip
        self._loaded, self._stream, self._order, self._tell = loaded, stream, order, tell
        self._names = [name for name in PATHS if name in names or name == STOCK]
        self._cached = CACHE in names
        self._open: dict[str, PathProcess] = {}
        self._made: dict[str, float | PathError] = {}
        self._exact = torch.zeros(0)
        self._stack = ExitStack()
        self.paths: dict[str, dict[str, Any]] = {}
        self.cells: list[dict[str, Any]] = []

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def result(self) -> dict[str, Any]:
        """Make everything ready and measure. AttmemoError: the stock model itself fails."""
        conditions = measured_under()
        conditions["runs"] = []
        begun, others = time.monotonic(), Others()
        for done, name in enumerate(self._names):
            self._tell("making ready", done, len(self._names))
            self._set_up(name)
        self._tell("making ready", len(self._names), len(self._names))
        conditions["set_up"] = {"seconds": time.monotonic() - begun, "others": others.share()}
        try:
            if STOCK not in self._open:
                raise PathError(self.paths[STOCK]["left_out"])
            self._exact = self._reference()
            for size in self._order.batch:
                begun, others = time.monotonic(), Others()
                self._measure(size)
                run = {"batch": size, "seconds": time.monotonic() - begun, "others": others.share()}
                conditions["runs"].append(run)
        except PathError as error:
            what = f"the stock model {self._order.model} failed: {error}"
            raise AttmemoError(what, f"check the model: attmemo families {self._order.model}") from error
        return {"conditions": conditions, "paths": self.paths, "cells": self.cells}

    def _set_up(self, name: str) -> None:
        """Convert and load; what fails is written down."""
        route, found = PATHS[name], self.paths.setdefault(name, {"title": PATHS[name].title})
        found["exact"] = self._order.dtype in route.exact
        reason = why_not(name, self._order)
        try:
            if reason is not None:
                raise PathError(reason)
            converting = self._make(route.file)
            process = self._begin(name)
            try:
                found |= {"converting_s": converting, "loading_s": process.load(route)}
            except PathError:
                process.close()
                raise
            self._open[name] = process
        except PathError as error:
            found["left_out"] = str(error)

    def _make(self, file: str | None) -> float:
        """Seconds that a converted model took, with those that it is made of. A failure is not tried again."""
        if file is None:
            return 0.0
        before = self._make(FILES[file][0])
        if file not in self._made:
            process = self._begin(file)
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

    def _begin(self, name: str, order: Order | None = None) -> PathProcess:
        process = PathProcess(order or self._order, self._order.folder / f"{name}.txt")
        self._stack.callback(process.close)
        return process

    def _reference(self) -> Tensor:
        """Answers of the stock model in float32, one for each text."""
        process = self._open[STOCK]
        if self._order.dtype != "float32":
            process = self._begin("reference", replace(self._order, dtype="float32"))
            process.load(PATHS[STOCK])
        ordered, parts = sorted(self._stream.texts, key=len), []
        for at in range(0, len(ordered), _WHOLE):
            self._tell("exact answers", at, len(ordered))
            parts.append(process.ask(ordered[at : at + _WHOLE])[1])
        self._tell("exact answers", len(ordered), len(ordered))
        if process is not self._open[STOCK]:
            process.close()
        places = torch.tensor([text.row for text in ordered]).argsort()
        return torch.from_numpy(np.concatenate(parts))[places]

    def _measure(self, size: int) -> None:
        """All cells of one batch size."""
        if size != self._order.batch[0]:
            for name in [name for name in self._open if PATHS[name].anew]:
                self._open.pop(name).close()
                self._set_up(name)
        best = self._pilot(size)
        asks: dict[str, Ask] = {name: process.ask for name, process in self._open.items()}
        cache = Cached(best, self._open[best].ask) if self._cached and best is not None else None
        if cache is not None:
            asks[CACHE] = cache
        tallies, failed = self._pass(size, asks, cache)
        if STOCK in failed:
            raise PathError(failed[STOCK])
        found = self._described(cache, failed)
        places = [*PATHS, CACHE]
        for (name, by_length), tally in sorted(tallies.items(), key=lambda item: places.index(item[0][0])):
            one: dict[str, Any] = {"path": name, "batch": size, "by_length": by_length}
            if name in failed:
                self.cells.append(one | {"left_out": failed[name]})
            else:
                one |= cell(tally, tallies[STOCK, False], self._loaded.kind, self._exact, self._stream.whole)
                self.cells.append(one | found[name])
        for name in failed:  # a process that fails once is not asked again
            if name in self._open:
                self._open.pop(name).close()
                self.paths[name]["left_out"] = failed[name]

    def _described(self, cache: Cached | None, failed: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Memory and counts of every path; one whose process is gone joins those that failed."""
        found: dict[str, dict[str, Any]] = {}
        for name, process in self._open.items():
            try:
                found[name] = {"memory": process.memory(), "counts": counts(process.stats())}
            except PathError as error:
                failed.setdefault(name, str(error))
        if cache is not None:
            behind = found.get(cache.behind)
            if behind is None:
                failed.setdefault(CACHE, failed[cache.behind])
            else:
                memory = behind["memory"] + cache.nbytes
                found[CACHE] = {"behind": cache.behind, "found": cache.found, "memory": memory}
        return found

    def _pilot(self, size: int) -> str | None:
        """The exact path that is the fastest on some batches of the first part; also warms all paths up."""
        first, spent = self._order.first, {}
        starts = [place * max(0, len(first) - size) // max(1, _PILOT - 1) for place in range(_PILOT)]
        for name, process in self._open.items():
            if PATHS[name].anew:
                continue
            batches = [(first[at : at + size] * size)[:size] for at in (starts[0], *starts)]
            try:
                seconds = [process.ask(batch)[0] for batch in batches]
            except PathError:
                continue  # it fails again in its turn, and is written down there
            if self._order.dtype in PATHS[name].exact:
                spent[name] = sum(seconds[1:])
        return min(spent, key=lambda name: spent[name]) if spent else None

    def _pass(
        self, size: int, asks: dict[str, Ask], cache: Cached | None
    ) -> tuple[dict[Key, Tally], dict[str, str]]:  # fmt: skip
        """The stream through the paths, in another order for each batch."""
        every: list[Key] = [(name, False) for name in asks if name != CACHE and PATHS[name].every]
        keys = every + [(name, False) for name in asks if (name, False) not in every]
        keys += [(name, True) for name in asks if name != CACHE and PATHS[name].by_length and size > 1]
        tallies: dict[Key, Tally] = {key: Tally() for key in keys}
        failed: dict[str, str] = {}
        for number, turn in enumerate(self._stream.turns(size)):
            self._tell(f"batches of {size}", turn.window, self._stream.windows)
            now = keys if turn.whole else every
            for key in alternate(now, number):
                if key[0] not in failed:
                    self._take(turn, key, asks[key[0]], tallies[key], failed)
            if cache is not None and not turn.whole:
                cache.learn(turn.texts, self._exact)
        self._tell(f"batches of {size}", self._stream.windows, self._stream.windows)
        return tallies, failed

    @staticmethod
    def _take(turn: Turn, key: Key, ask: Ask, tally: Tally, failed: dict[str, str]) -> None:
        texts = turn.by_length if key[1] else turn.texts
        try:
            tally.add(turn, texts, *ask(texts))
        except PathError as error:
            failed[key[0]] = str(error)
