"""Which records should a database that fills itself take in, and which should go: simulated on token ids, no model.

    python scripts/simulate_filling.py SHARED OUT CASE…      all cases: --help
    python scripts/simulate_filling.py SHARED OUT --table    the tables of what OUT holds

`SHARED` holds `data/loghub_2k`, `data/imdb` and `data/ag_news`. Each case writes OUT/CASE.json. A record is an input;
it has the bytes of its rows. A request is served if the best record leaves at most half of its rows to compute. Any
other is computed, and may be stored. The stream "mixed" is all logs, interleaved, and one tenth of texts that never
come again. Nothing is timed.
"""

from __future__ import annotations

import abc
import argparse
import collections
import csv
import functools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measured_at import write_record
from transformers import AutoTokenizer
from workloads import lines_of

from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import NO_KINDS, Kinds
from attmemo.profiler.demo import model_path
from attmemo.rows.index import DEFAULT, TokenIndex

Tokens = npt.NDArray[np.int32]
Requests = list[tuple[Tokens, bool]]  # and whether it is a line of a log

LINES = ("OpenSSH", "HDFS", "BGL", "Apache", "Mac")
LOGS = (*LINES, "Thunderbird", "Android", "Hadoop")
THRESHOLD = 0.5
ROW_BYTES = (6 * 2 + 1) * 384 * 4  # MiniLM: keys and values of six layers, and the last output
RECENT = 500
SEGMENTS = 32


@dataclass(eq=False)
class Record:
    """An input that was computed."""

    number: int
    tokens: Tokens
    size: int
    used: int = 0


# Streams


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(model_path())


def encoded(texts: Sequence[str], longest: int) -> list[Tokens]:
    ids = tokenizer()(list(texts), truncation=True, max_length=longest)["input_ids"]
    return [np.array(one, np.int32) for one in ids]


@functools.cache
def log(shared: Path, name: str) -> list[Tokens]:
    """All lines of a log, in order of time."""
    return encoded(lines_of(shared / "data", name), 256)


@functools.cache
def other_texts(shared: Path) -> list[Tokens]:
    """Reviews and news that never come again, 64 tokens each at most, shuffled."""
    with (shared / "data" / "imdb" / "train_subset.jsonl").open() as file:
        texts = [json.loads(line)["text"] for line in file]
    with (shared / "data" / "ag_news" / "test.csv").open(newline="") as file:
        texts += [f"{row[1]} {row[2]}" for row in csv.reader(file)]
    order = np.random.default_rng(0).permutation(len(texts))
    return encoded([texts[place] for place in order], 64)


def stream(shared: Path, kind: str) -> Requests:
    """All logs, interleaved; `kind` says with what beside them."""
    generator = np.random.default_rng(0)
    logs = [log(shared, name) for name in LOGS]
    turns = generator.permutation(np.repeat(np.arange(len(logs)), [len(lines) for lines in logs]))
    each = [iter(lines) for lines in logs]
    lines = [next(each[turn]) for turn in turns]
    share = {"mixed": 0.1, "three tenths other text": 0.3}.get(kind, 0.0)
    count = round(len(lines) * share / (1 - share))
    is_line = generator.permutation(np.arange(len(lines) + count) < len(lines))
    rest, others = iter(lines), iter(other_texts(shared)[:count] if count else [])
    return [(next(rest), True) if one else (next(others), False) for one in is_line]


# What is taken in


def asked(index: TokenIndex, tokens: Tokens, rule: Rule = DEFAULT, kinds: Kinds = NO_KINDS) -> tuple[int, int]:
    """The record that serves an input, and the rows it leaves to compute; -1 and all rows if none does."""
    count = len(tokens)
    found = index.best(tokens, np.array([0, count], np.int64), rule, kinds=kinds)
    record, computed = int(found.record[0]), int(found.computed[0])
    serves = record >= 0 and computed <= THRESHOLD * count and computed < count
    return (record, computed) if serves else (-1, count)


class Recent:
    """The last so many token sequences, without rows; one goes when it is found."""

    def __init__(self) -> None:
        self.index = TokenIndex()
        self.numbers: collections.OrderedDict[int, None] = collections.OrderedDict()

    def add(self, tokens: Tokens) -> None:
        self.numbers[self.index.add(tokens)] = None
        if len(self.numbers) > RECENT:
            self.index.remove(self.numbers.popitem(last=False)[0])

    def pop(self, tokens: Tokens) -> bool:
        """Whether one of them would have served this."""
        number, _ = asked(self.index, tokens)
        if number < 0:
            return False
        self.index.remove(number)
        del self.numbers[number]
        return True


class Every:
    """Every miss is stored."""

    served_too = False

    def admits(self, tokens: Tokens) -> bool:
        return True


class All(Every):
    """What was served is stored too."""

    served_too = True


class OneInTwo(Every):
    """A miss is stored with probability one half."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def admits(self, tokens: Tokens) -> bool:
        return bool(self.generator.random() < 0.5)


class Twice(Every):
    """A miss is stored if a recent one that was not stored would have served it."""

    def __init__(self) -> None:
        self.recent = Recent()

    def admits(self, tokens: Tokens) -> bool:
        known = self.recent.pop(tokens)
        if not known:
            self.recent.add(tokens)
        return known


ADMISSIONS: dict[str, type[Every]] = {
    "every miss": Every, "every request": All, "one miss in two": OneInTwo, "seen twice": Twice,
}  # fmt: skip


# What goes


class Unbounded:
    """Nothing goes. The face of all policies: what was used, what comes, and which records go for it."""

    def __init__(self, bound: int) -> None:
        self.bound, self.held = bound, 0
        self.copied = self.most_copied = 0  # bytes; the second: for one record that came

    def hit(self, record: Record) -> None:
        record.used += 1

    def admit(self, record: Record) -> list[Record]:
        """Take a record in; returns those that go."""
        self.held += record.size
        return []


class Bounded(Unbounded, abc.ABC):
    """One record after the other goes, until there is room."""

    def admit(self, record: Record) -> list[Record]:
        gone = super().admit(record)
        while self.held > self.bound:
            gone.append(self.victim())
            self.held -= gone[-1].size
        self.place(record)
        return gone

    @abc.abstractmethod
    def victim(self) -> Record:
        """Take out the record that goes next."""

    @abc.abstractmethod
    def place(self, record: Record) -> None:
        """Keep a record."""


class Fifo(Bounded):
    """The oldest goes."""

    def __init__(self, bound: int) -> None:
        super().__init__(bound)
        self.queue: collections.OrderedDict[Record, None] = collections.OrderedDict()

    def victim(self) -> Record:
        return self.queue.popitem(last=False)[0]

    def place(self, record: Record) -> None:
        self.queue[record] = None


class Lru(Fifo):
    """The one that was not used for the longest time goes."""

    def hit(self, record: Record) -> None:
        self.queue.move_to_end(record)


class Sieve(Bounded):
    """A hand goes from old to new. It takes the first record that was not used since it last came by."""

    def __init__(self, bound: int) -> None:
        super().__init__(bound)
        self.queue: list[Record] = []  # oldest first
        self.hand = 0

    def victim(self) -> Record:
        while True:
            self.hand %= len(self.queue)
            record = self.queue[self.hand]
            if not record.used:
                return self.queue.pop(self.hand)
            record.used = 0
            self.hand += 1

    def place(self, record: Record) -> None:
        self.queue.append(record)


class S3Fifo(Bounded):
    """What is new has a tenth of the bytes, and moves to the rest if it was used there; else its tokens are kept."""

    def __init__(self, bound: int) -> None:
        super().__init__(bound)
        self.small: collections.deque[Record] = collections.deque()
        self.main: collections.deque[Record] = collections.deque()
        self.small_held = 0
        self.ghost = Recent()

    def hit(self, record: Record) -> None:
        record.used = min(3, record.used + 1)

    def victim(self) -> Record:
        while True:
            if self.small and (self.small_held > self.bound / 10 or not self.main):
                record = self.small.popleft()
                self.small_held -= record.size
                if not record.used:
                    self.ghost.add(record.tokens)
                    return record
                record.used = 0
            else:
                record = self.main.popleft()
                if not record.used:
                    return record
                record.used -= 1
            self.main.append(record)

    def place(self, record: Record) -> None:
        if self.ghost.pop(record.tokens):
            self.main.append(record)
        else:
            self.small.append(record)
            self.small_held += record.size


@dataclass(eq=False)
class Segment:
    """Records that were written one after the other."""

    held: int = 0
    records: list[Record] = field(default_factory=list)

    def write(self, record: Record) -> None:
        self.held += record.size
        self.records.append(record)


class Segments(Unbounded):
    """The oldest segment goes as a whole. Of its records those that were used are copied, most used first.

    A record that is larger than a segment is not taken in.

    Parameters
    ----------
    carry : float
        They take at most this share of a segment.
    small : int
        New records go to so many segments of their own. Those that are used there are carried to the others.
    """

    def __init__(self, bound: int, carry: float, small: int = 0) -> None:
        super().__init__(bound)
        self.size, self.carry = bound // SEGMENTS, carry
        self.most, self.most_small = SEGMENTS - small, small
        self.main, self.small = [Segment()], [Segment()]

    def admit(self, record: Record) -> list[Record]:
        if record.size > self.size:
            return [record]
        before, gone = self.copied, []
        if not self.most_small:
            gone = self._write(record)
        else:
            if self.small[-1].held + record.size > self.size:
                self.small.append(Segment())
            if len(self.small) > self.most_small:
                gone = self._promote(self.small.pop(0))
            self.small[-1].write(record)
        self.most_copied = max(self.most_copied, self.copied - before)
        self.held = sum(one.held for one in (*self.main, *self.small))
        return gone

    def _write(self, record: Record) -> list[Record]:
        """Append to the segments of old records."""
        gone = []
        while self.main[-1].held + record.size > self.size:
            self.main.append(Segment())
            if len(self.main) == self.most:
                gone += self._compact(self.main.pop(0))
        self.main[-1].write(record)
        return gone

    def _compact(self, segment: Segment) -> list[Record]:
        """Copy what was used to the segment that was just begun."""
        gone = []
        for record in _most_used(segment):
            if record.used and self.main[-1].held + record.size <= self.carry * self.size:
                self._copy(record)
                self.main[-1].write(record)
            else:
                gone.append(record)
        return gone

    def _promote(self, segment: Segment) -> list[Record]:
        """Copy what was used to the old ones."""
        gone = []
        for record in _most_used(segment):
            if record.used:
                self._copy(record)
                gone += self._write(record)
            else:
                gone.append(record)
        return gone

    def _copy(self, record: Record) -> None:
        record.used = 0
        self.copied += record.size


def _most_used(segment: Segment) -> list[Record]:
    return sorted(segment.records, key=lambda record: -record.used)


SMALL = 3  # of 32: a tenth
POLICIES: dict[str, Callable[[int], Unbounded]] = {
    "records: FIFO": Fifo, "records: LRU": Lru, "records: SIEVE": Sieve, "records: S3-FIFO": S3Fifo,
    **{f"segments: carry {carry}": functools.partial(Segments, carry=carry) for carry in (0, 0.5, 1)},
    "segments: small queue, carry 0.5": functools.partial(Segments, carry=0.5, small=SMALL),
}  # fmt: skip


# Simulation


def simulate(
    requests: Requests, admission: Every, policy: Unbounded, rule: Rule = DEFAULT, kinds: Kinds = NO_KINDS
) -> dict[str, Any]:
    """One pass."""
    index, records = TokenIndex(), dict[int, Record]()
    served = lines = rows = tokens = admitted = highest = 0
    for own, is_line in requests:
        number, computed = asked(index, own, rule, kinds)
        rows, tokens, lines = rows + computed, tokens + len(own), lines + is_line
        if number >= 0:
            policy.hit(records[number])
            served += is_line
        if (number < 0 or admission.served_too) and admission.admits(own):
            record = Record(index.add(own), own, ROW_BYTES * len(own))
            records[record.number] = record
            admitted += record.size
            for gone in policy.admit(record):
                index.remove(gone.number)
                del records[gone.number]
            highest = max(highest, policy.held)
    return {
        "lines": lines, "served": served, "records": len(index), "rows": rows, "tokens": tokens,
        "bound": policy.bound, "bytes": policy.held, "most_bytes": highest, "admitted": admitted,
        "copied": policy.copied, "most_copied": policy.most_copied,
    }  # fmt: skip


ENDLESS = 1 << 60


def in_batches(lines: Sequence[Tokens], size: int, again: bool) -> dict[str, Any]:
    """Every miss is stored, after its batch. `again`: unless one of the same batch, stored before it, suffices."""
    index = TokenIndex()
    served = rows = tokens = 0
    for start in range(0, len(lines), size):
        batch = lines[start : start + size]
        found = [asked(index, own) for own in batch]
        for own, (number, computed) in zip(batch, found, strict=True):
            served, rows, tokens = served + (number >= 0), rows + computed, tokens + len(own)
            if number < 0 and not (again and asked(index, own)[0] >= 0):
                index.add(own)
    return {"lines": len(lines), "served": served, "records": len(index), "rows": rows, "tokens": tokens}


def admission_case(shared: Path) -> dict[str, Any]:
    """Each log alone, without a bound."""
    found: dict[str, Any] = {}
    for name in LINES:
        lines = log(shared, name)
        found[name] = {
            stored: simulate([(line, True) for line in lines], kind(), Unbounded(ENDLESS))
            for stored, kind in ADMISSIONS.items()
        }
        found[name]["every miss, batches of 32"] = in_batches(lines, 32, again=False)
        found[name]["the same, asked again before storing"] = in_batches(lines, 32, again=True)
        print(name, {stored: one["served"] for stored, one in found[name].items()}, flush=True)
    return found


STREAMS = (*(("mixed", part) for part in (2, 3, 6, 24)), ("three tenths other text", 3))
"""Streams, and parts of the bytes that the logs alone would take."""


def eviction_case(shared: Path) -> dict[str, Any]:
    """Streams of all logs, under bounds; every miss is stored."""
    whole = simulate(stream(shared, "logs alone"), Every(), Unbounded(ENDLESS))["bytes"]
    runs = []
    ends: dict[str, dict[str, Any]] = {}
    for kind, part in STREAMS:
        requests = stream(shared, kind)
        if kind not in ends:
            ends[kind] = simulate(requests, Every(), Unbounded(ENDLESS))
        for name, policy in POLICIES.items():
            one = simulate(requests, Every(), policy(whole // part))
            runs.append({"stream": kind, "part": part, "admission": "every miss", "policy": name, **one})
            share = one["served"] / ends[kind]["served"]
            print(kind, part, name, f"{share:.3f} {one['copied'] / one['admitted']:.2f}", flush=True)
    return {"whole": whole, "unbounded": ends, "runs": runs}


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {"admission": admission_case, "eviction": eviction_case}


# Tables


def table(out: Path) -> Iterator[str]:
    """Markdown of what `out` holds."""
    if (file := out / "admission.json").exists():
        found = {log: one for log, one in json.loads(file.read_text()).items() if log != "measured"}
        yield "served / records / share of tokens recomputed"
        yield ""
        yield f"| stored | {' | '.join(found)} |"
        yield "|---" * (len(found) + 1) + "|"
        for name in next(iter(found.values())):
            cells = [
                f"{one['served'] / one['lines']:.3f} / {one['records']:,} / {one['rows'] / one['tokens']:.3f}"
                for one in (log[name] for log in found.values())
            ]
            yield f"| {name} | {' | '.join(cells)} |"
        yield ""
    if (file := out / "eviction.json").exists():
        yield from _eviction_table(json.loads(file.read_text()))


def _eviction_table(found: dict[str, Any]) -> Iterator[str]:
    yield f"All records of the logs: {found['whole'] / 1e9:.2f} GB. Without a bound:"
    yield ""
    yield "| stream | served | records | GB | rows |"
    yield "|---|---|---|---|---|"
    for kind, one in found["unbounded"].items():
        served, rows = one["served"] / one["lines"], one["rows"] / one["tokens"]
        yield f"| {kind} | {served:.3f} | {one['records']:,} | {one['bytes'] / 1e9:.2f} | {rows:.3f} |"
    groups: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for one in found["runs"]:
        groups.setdefault((one["stream"], one["part"]), []).append(one)
    for (kind, part), runs in groups.items():
        yield ""
        yield f"{kind}, bound 1/{part}:"
        yield ""
        yield "| policy | served | of unbounded | rows | records | admitted | copied a byte admitted | most at once |"
        yield "|---|---|---|---|---|---|---|---|"
        for one in runs:
            cells = (
                f"{one['served'] / one['lines']:.3f}",
                f"{one['served'] / found['unbounded'][kind]['served']:.3f}",
                f"{one['rows'] / one['tokens']:.3f}",
                f"{one['records']:,}",
                f"{one['admitted'] / one['bound']:.1f} bounds",
                f"{one['copied'] / one['admitted']:.2f}",
                f"{one['most_copied'] / one['bound']:.3f} bounds",
            )
            yield f"| {one['policy']} | {' | '.join(cells)} |"


def main() -> None:
    """Run the cases that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("cases", nargs="*", help=", ".join(CASES))
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.cases:
        if name not in CASES:
            parser.error(f"no case {name!r}: {', '.join(CASES)}")
        write_record(options.out / f"{name}.json", CASES[name](options.shared))
    if options.table:
        print("\n".join(table(options.out)))


if __name__ == "__main__":
    main()
