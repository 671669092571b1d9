"""One stream of texts through several ways of computing the same answers, batch by batch, timed in turns.

The reused way is the one that a user gets: `memoize(model, database=":memory:", reuse="rows", budget=…)`, with its
guard, its verifications and its filling. Every answer that it gives is compared with the exact one.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from attmemo.guard.certificate import certifies, highest_rate
from attmemo.memoization import memoize
from attmemo.profiler.answers import changed
from attmemo.profiler.models import LoadedModel, Tokens
from attmemo.profiler.peers.paths import MIN_COSINE, PATHS, Ask, Cache, Order, another, memoize_rows, timed, way_of
from attmemo.profiler.peers.process import PathError, Processes
from attmemo.profiler.turns import alternate

STOCK: Final = "stock"
PACKED: Final = "exact, packed"
ROWS: Final = "rows, guarded"
CACHE: Final = "packed, behind a cache"
OPENVINO: Final = "OpenVINO"
ONNX: Final = "ONNX Runtime, float32"
MAPS: Final = "attention maps"
APPROXIMATE: Final = (ROWS, MAPS)
"""Ways whose answers may differ from the exact ones. All others are exact up to rounding."""
EVERY: Final = 4  # one batch of so many is computed by all ways
_MOST_SAMPLES: Final = 1 << 16
_PRECISIONS: Final = {"float32": "f32", "bfloat16": "bf16"}  # as OpenVINO calls them


@dataclass(frozen=True, slots=True)
class Lap:
    """One batch."""

    texts: int
    tokens: int
    rows: int  # computed by the reused way, verification included
    served: int  # texts whose answers came from records
    state: str  # of the guard, before the batch: "learning", "certified" or "alarm"
    seconds: dict[str, float]  # of each way that was asked
    changed: dict[str, int]  # answers unlike the exact ones


@dataclass(frozen=True, slots=True)
class Standing:
    """What can be said of some laps."""

    texts: int
    ms: dict[str, float]  # a text, of each way; the stock model's over the batches that all ways computed
    speed: dict[str, float]  # of each way over the stock model, over the same batches; rows: by way of packed blocks
    over: dict[str, float]  # speed of the reused way over that of each way
    changed: dict[str, float]  # share of the answers of each way
    rows: float  # share of the rows that the reused way computed
    served: float


def standing(laps: Sequence[Lap]) -> Standing | None:
    """Times and shares of some laps; None if no batch of them was computed by all ways."""
    whole = [lap for lap in laps if STOCK in lap.seconds]
    if not whole:
        return None
    names = [name for name in whole[0].seconds if all(name in lap.seconds for lap in whole)]

    def spent(name: str, among: Sequence[Lap]) -> float:
        return sum(lap.seconds[name] for lap in among)

    # Batches that all ways compute are few, and what rows take differs from batch to batch.
    both = [lap for lap in laps if PACKED in lap.seconds]
    speed = {name: spent(STOCK, whole) / spent(name, whole) for name in names}
    speed[ROWS] = speed[PACKED] * spent(PACKED, both) / spent(ROWS, both)
    stock = 1e3 * spent(STOCK, whole) / sum(lap.texts for lap in whole)
    ms = {name: stock / faster for name, faster in speed.items()}
    over = {name: speed[ROWS] / speed[name] for name in names}
    differ = {}
    for name in names:
        among = [lap for lap in laps if name in lap.seconds]
        differ[name] = sum(lap.changed[name] for lap in among) / sum(lap.texts for lap in among)
    texts = sum(lap.texts for lap in laps)
    rows = sum(lap.rows for lap in laps) / sum(lap.tokens for lap in laps)
    return Standing(texts, ms, speed, over, differ, rows, sum(lap.served for lap in laps) / texts)


def samples_needed(guard: Mapping[str, Any]) -> int | None:
    """About how many verified answers the certificate needs in all, if no further one changes; None: too many.

    As `attmemo.guard.Guard.certified` asks it, of the statistics of a guard.
    """
    least = int(guard["changed"])
    could = guard["reused"] + guard["verified"] - guard["verified_afterwards"]

    def enough(samples: int) -> bool:
        highest = highest_rate(least, samples - least, guard["confidence"])
        return certifies(highest, could, guard["requests"], guard["budget"])

    samples = range(least, _MOST_SAMPLES + 1)
    place = bisect_left(samples, True, key=enough)
    return samples[place] if place < len(samples) else None


@contextmanager
def other_runtimes(loaded: LoadedModel, texts: Sequence[Tokens]) -> Iterator[tuple[dict[str, Ask], list[str]]]:
    """Other runtimes that are installed, each in a process of its own, and why one of them takes no part.

    `texts` show the model's inputs. OpenVINO computes in the model's precision, ONNX Runtime in float32.
    """
    found: dict[str, Ask] = {}
    notes = []
    with TemporaryDirectory() as folder:
        order = Order(
            loaded.name, loaded.dtype, loaded.pooling, torch.get_num_threads(), Path(folder), list(texts),
            (len(texts),), modules=("transformers", type(loaded.model).__module__),
        )  # fmt: skip
        with Processes(order) as processes:
            for name, path in ((OPENVINO, f"openvino-{_PRECISIONS[loaded.dtype]}"), (ONNX, "onnx")):
                if find_spec(PATHS[path].needs[0]) is not None:
                    try:
                        found[name] = processes.open(path)[0].ask
                    except PathError as error:
                        notes.append(f"{name} takes no part: {error}")
            yield found, notes


class Race:
    """The ways side by side, and what they took so far: `laps`.

    The stock model is the one that is given, other ways of this library get copies; `peers` are further ways by name.
    Packed blocks and rows compute all batches, the other ways one of `every`: the stream lasts longer.
    """

    def __init__(self, loaded: LoadedModel, peers: Mapping[str, Ask], budget: float, every: int = EVERY) -> None:
        packed, rows = another(loaded), another(loaded)
        memoize(packed.model, reuse="none")
        self._kind, self._handle = loaded.kind, memoize_rows(rows, budget)
        exact = timed(way_of(packed))
        self.cache = Cache(exact)
        self._often: dict[str, Ask] = {PACKED: exact, ROWS: timed(way_of(rows))}
        self._seldom: dict[str, Ask] = {STOCK: timed(way_of(loaded)), **peers, CACHE: self.cache}
        self.laps: list[Lap] = []
        self.failed: dict[str, str] = {}  # peers that broke off, and why
        self.every = every

    def warm_up(self, texts: Sequence[Tokens]) -> None:
        """Ask every way once, uncounted; nothing is learned of these texts."""
        self._ask([name for name in self._often | self._seldom if name not in (ROWS, CACHE)], texts)

    @property
    def guard(self) -> dict[str, Any]:
        """Statistics of the guard."""
        found: dict[str, Any] = self._handle.stats()["guard"]
        return found

    def stats(self) -> dict[str, Any]:
        """Statistics of the reused way."""
        return self._handle.stats()  # type: ignore[no-any-return]

    def run(self, texts: Sequence[Tokens]) -> Lap:
        """One batch through the ways, in another order each time."""
        turn = len(self.laps)
        whole = turn % self.every == 0
        ways = self._often | self._seldom if whole else self._often
        before = self._handle.stats()
        seconds, given = self._ask(alternate(list(ways), turn // self.every if whole else turn), texts)
        after, exact = self._handle.stats(), given[PACKED]
        if not whole:
            self.cache.learn(texts, exact)
        differ = {name: int(changed(self._kind, exact, seen, MIN_COSINE).sum()) for name, seen in given.items()}
        served = [stats["reused"] + stats["repeated"] for stats in (before, after)]
        lap = Lap(
            len(texts), sum(map(len, texts)), after["rows_computed"] - before["rows_computed"], served[1] - served[0],
            before["guard"]["state"], seconds, differ,
        )  # fmt: skip
        self.laps.append(lap)
        return lap

    def _ask(self, names: Iterable[str], texts: Sequence[Tokens]) -> tuple[dict[str, float], dict[str, Tensor]]:
        """Seconds and answers of these ways; one that fails takes no further part."""
        seconds: dict[str, float] = {}
        given: dict[str, Tensor] = {}
        with torch.inference_mode():
            for name in names:
                try:
                    seconds[name], given[name] = (self._often | self._seldom)[name](texts)
                except PathError as error:
                    self.failed[name] = str(error)
        for name in self.failed:
            self._seldom.pop(name, None)
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

    def result(self) -> dict[str, Any]:
        """All laps and what can be said of them, JSON-able."""
        certified = [lap for lap in self.laps if lap.state == "certified"]
        begin = 2 * len(self.laps) // 3 // self.every * self.every  # a batch that all ways computed
        late = self.laps[begin:]
        parts = {"all": standing(self.laps), "certified": standing(certified), "last third": standing(late)}
        stats = self._handle.stats()
        return {
            "parts": {name: found and asdict(found) for name, found in parts.items()},
            "duplicates": self.cache.share, "min_cosine": MIN_COSINE,
            "guard": stats["guard"], "records": stats["records"], "record_bytes": stats["record_bytes"],
            "every": self.every,
            "laps": [asdict(lap) for lap in self.laps],
        }  # fmt: skip
