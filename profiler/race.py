"""One stream of texts through several methods of computing the same answers, batch by batch, timed in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import log, sqrt
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from attmemo.profiler.models import LoadedModel, Tokens
from attmemo.profiler.peers.paths import Ask, Order, absent_packages
from attmemo.profiler.peers.process import Processes
from attmemo.profiler.process import ProcessError
from attmemo.profiler.turns import alternate

STOCK: Final = "stock"
PACKED: Final = "exact, packed"
INT8: Final = "8 bits"
ROWS: Final = "rows, guarded"
CACHE: Final = "packed, behind a cache"
OPENVINO: Final = "OpenVINO"
ONNX: Final = "ONNX Runtime, float32"
OPENVINO_INT8: Final = "OpenVINO, 8 bits"
ONNX_INT8: Final = "ONNX Runtime, 8 bits"
TITLES: Final = {STOCK: "original model", PACKED: "exact", ROWS: "reuse"}
"""Methods for readers, where they have another name in files."""
EVERY: Final = 4  # one batch of so many is computed by all methods
PAYS: Final = 1.05
"""Speed over another method from which a method is said to pay."""
_PRECISIONS: Final = {"float32": "f32", "bfloat16": "bf16"}  # as OpenVINO calls them


@dataclass(frozen=True, slots=True)
class Lap:
    """One batch."""

    texts: int
    tokens: int
    rows: int  # computed by the method that reuses, verification included
    served: int  # texts whose answers came from records
    state: str  # of the guard, before the batch: "learning", "certified", "alarm", or "" without one
    seconds: dict[str, float]  # of each method that was asked
    changed: dict[str, int]  # answers unlike the exact ones


@dataclass(frozen=True, slots=True)
class Standing:
    """What can be said of some laps."""

    texts: int
    ms: dict[str, float]  # a text, of each method; the original model's over the batches that all methods computed
    speed: dict[str, float]  # over the original model, over the same batches; of reuse: by way of packed blocks
    changed: dict[str, float]  # share of the answers of each method
    rows: float  # share of the rows that the method that reuses computed
    served: float


def standing(laps: Sequence[Lap]) -> Standing | None:
    """Times and shares of some laps; None if no batch of them was computed by all methods."""
    whole = [lap for lap in laps if STOCK in lap.seconds]
    if not whole:
        return None
    names = [name for name in whole[0].seconds if all(name in lap.seconds for lap in whole)]

    def spent(name: str, among: Sequence[Lap]) -> float:
        return sum(lap.seconds[name] for lap in among)

    speed = {name: spent(STOCK, whole) / spent(name, whole) for name in names}
    if ROWS in speed:  # batches that all methods compute are few, and what rows take differs from batch to batch
        both = [lap for lap in laps if PACKED in lap.seconds]
        speed[ROWS] = speed[PACKED] * spent(PACKED, both) / spent(ROWS, both)
    stock = 1e3 * spent(STOCK, whole) / sum(lap.texts for lap in whole)
    ms = {name: stock / faster for name, faster in speed.items()}
    differ = {}
    for name in names:
        among = [lap for lap in laps if name in lap.seconds]
        differ[name] = sum(lap.changed[name] for lap in among) / sum(lap.texts for lap in among)
    texts = sum(lap.texts for lap in laps)
    rows = sum(lap.rows for lap in laps) / sum(lap.tokens for lap in laps)
    return Standing(texts, ms, speed, differ, rows, sum(lap.served for lap in laps) / texts)


def faster_than(laps: Sequence[Lap], name: str, other: str) -> tuple[float, bool]:
    """How many times as fast one method is as another over laps of both, and whether that is beyond noise.

    It is where it is `PAYS` at least, and the mean of the laps' ratios is two standard errors from 1.
    """
    both = [lap.seconds for lap in laps if {name, other} <= lap.seconds.keys()]
    if len(both) < 2:
        return 1.0, False
    ratio = sum(one[other] for one in both) / sum(one[name] for one in both)
    logs = [log(one[other] / one[name]) for one in both]
    return ratio, ratio >= PAYS and fmean(logs) > 2.0 * stdev(logs) / sqrt(len(logs))


@contextmanager
def other_runtimes(loaded: LoadedModel, texts: Sequence[Tokens]) -> Iterator[tuple[dict[str, Ask], list[str]]]:
    """Other runtimes that are installed, each in a process of its own, and why one of them takes no part.

    `texts` show the model's inputs. OpenVINO computes in the model's precision, ONNX Runtime in float32; both in 8
    bits too.
    """
    found: dict[str, Ask] = {}
    notes = []
    with TemporaryDirectory() as folder:
        order = Order(
            loaded.name, loaded.dtype, loaded.pooling, torch.get_num_threads(), Path(folder), list(texts),
            (len(texts),), modules=("transformers", type(loaded.model).__module__),
        )  # fmt: skip
        with Processes(order) as processes:
            for name, path in (
                (OPENVINO, f"openvino-{_PRECISIONS[loaded.dtype]}"), (OPENVINO_INT8, "openvino-int8"),
                (ONNX, "onnx"), (ONNX_INT8, "onnx-int8"),
            ):  # fmt: skip
                if not absent_packages(path):
                    try:
                        found[name] = processes.open(path)[0].ask
                    except ProcessError as error:
                        notes.append(f"{name} takes no part: {error}")
            yield found, notes


class Race:
    """Methods side by side, and what they took so far: `laps`.

    Parameters
    ----------
    ways : mapping
        Methods by name, `STOCK` and `PACKED` among them.
    differ : callable
        Given exact answers and those of a method: how many differ.
    often : collection of str
        Methods that compute all batches; the others compute one of `every`, so the stream lasts longer. Default: all.
    handle : Memoization, optional
        Of the method that reuses.
    keep : bool
        Keep the answers of each method: `kept`.
    """

    def __init__(
        self, ways: Mapping[str, Ask], differ: Callable[[Tensor, Tensor], int], *, often: Collection[str] = (),
        every: int = EVERY, handle: Any = None, keep: bool = False,
    ) -> None:  # fmt: skip
        self._ways, self._differ = dict(ways), differ
        self._often, self.every = set(often or ways), every
        self._handle, self._keep = handle, keep
        self.laps: list[Lap] = []
        self.kept: dict[str, list[Tensor]] = {name: [] for name in ways}
        self.failed: dict[str, str] = {}  # methods that broke off, and why

    def warm_up(self, texts: Sequence[Tokens]) -> None:
        """Ask every method that learns nothing once, uncounted."""
        self._ask([name for name in self._ways if name not in (ROWS, CACHE)], texts)

    @property
    def guard(self) -> dict[str, Any] | None:
        """Statistics of the guard, if there is one."""
        return None if self._handle is None else self._handle.stats()["guard"]

    def _counts(self) -> tuple[int, int, str]:
        """Rows computed, texts served, and the state of the guard."""
        if self._handle is None:
            return 0, 0, ""
        stats = self._handle.stats()
        return stats["rows_computed"], stats["served"], stats["guard"]["state"]

    def run(self, texts: Sequence[Tokens]) -> Lap:
        """One batch through the methods, in another order each time."""
        turn = len(self.laps)
        whole = turn % self.every == 0
        names = [name for name in self._ways if whole or name in self._often]
        rows, served, state = self._counts()
        seconds, given = self._ask(alternate(names, turn // self.every if whole else turn), texts)
        after = self._counts()
        differ = {name: self._differ(given[PACKED], seen) for name, seen in given.items()}
        lap = Lap(
            len(texts), sum(map(len, texts)), after[0] - rows, after[1] - served, state,
            {name: seconds[name] for name in names if name in seconds}, differ,
        )  # fmt: skip
        self.laps.append(lap)
        if self._keep:
            for name, answers in given.items():
                self.kept[name].append(answers)
        self.answered(texts, given, whole)
        return lap

    def answered(self, texts: Sequence[Tokens], given: Mapping[str, Tensor], whole: bool) -> None:
        """Called behind each batch with its answers; `whole`: of all methods."""

    def _ask(self, names: Iterable[str], texts: Sequence[Tokens]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Seconds and answers of these methods; one that fails takes no further part."""
        seconds: dict[str, float] = {}
        given: dict[str, Tensor] = {}
        with torch.inference_mode():
            for name in names:
                try:
                    seconds[name], given[name] = self._ways[name](texts)
                except ProcessError as error:
                    self.failed[name] = str(error)
                    del self._ways[name]
        return seconds, given

    def run_all(
        self, batches: Iterable[Sequence[Tokens]], seconds: float, after: Callable[[Race], None] | None = None
    ) -> None:
        """Batches until they end, or until so many seconds are over; calls `after` behind each."""
        end = time.monotonic() + seconds
        for batch in batches:
            self.run(batch)
            if after is not None:
                after(self)
            if time.monotonic() >= end:
                break

    @property
    def late(self) -> list[Lap]:
        """The last third of the laps, from a batch on that all methods computed."""
        return self.laps[2 * len(self.laps) // 3 // self.every * self.every :]

    def result(self) -> dict[str, Any]:
        """All laps and what can be said of them, JSON-able."""
        parts = {"all": standing(self.laps), "last third": standing(self.late)}
        found: dict[str, Any] = {
            "parts": {name: part and asdict(part) for name, part in parts.items()}, "every": self.every,
            "failed": self.failed, "laps": [asdict(lap) for lap in self.laps],
        }  # fmt: skip
        if self._handle is not None:
            stats = self._handle.stats()
            found |= {name: stats[name] for name in ("guard", "records", "record_bytes", "pays")}
        return found
