"""Tables of the guard, of databases that fill themselves and of decisions have the numbers of their records."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
from docs_tools import Row, check_table, measured, numbers, page, table_rows

from attmemo.db.slot_kinds import KIND_MAP, LENGTH, TRIANGLE, SlotKind
from attmemo.db.slots import SlotClass
from attmemo.mmap import layout

GUARD, FILLING, SIMULATED = measured("guard.json"), measured("filling.json"), measured("filling-simulated.json")
LOGS = ("OpenSSH", "HDFS", "BGL", "Apache", "Android", "Hadoop", "Mac", "Thunderbird")
STREAMS = [
    ("lines of 8 logs", "**the guard**", "lines", "guard"), ("", "the same, seed 1", "seed 1", "guard"),
    ("", "the same, seed 2", "seed 2", "guard"),
    ("", "whole at once below the margin", "lines", "whole below the margin"),
    ("", "with `near=1`", "near", "guard"),
    ("", "without the certificate: verified changes and the margin alone", "lines", "no certificate"),
    ("", "without the margin", "lines", "no margin"),
    ("", "no guard: whatever supplies 0.4 of the tokens", "lines", "no guard"),
    ("windows of 4 lines", "**the guard**", "windows", "guard"), ("", "no guard", "windows", "no guard"),
    ("embeddings of 4 logs", "**the guard**", "embeddings", "guard"),
    ("", "whole at once below the cosine", "embeddings", "whole below the margin"),
    ("", "without the certificate", "embeddings", "no certificate"),
    ("", "without the margin", "embeddings", "no margin"), ("", "no guard", "embeddings", "no guard"),
]  # fmt: skip
"""The rows of the table: what they begin with, a case and what guarded it."""
MODELS = {"MiniLM": "minilm", "six-layer DeBERTa-v2 classifier": "deberta", "the same": "deberta"}
STORED = ("every miss", "one miss in two", "seen twice", "every miss, batches of 32",
          "the same, asked again before storing")  # fmt: skip
POLICIES = {
    "records: FIFO": "records: FIFO", "records: LRU": "records: LRU", "records: SIEVE": "records: SIEVE",
    "records: S3-FIFO": "records: S3-FIFO", "segments: carry 0": "segments, nothing carried",
    "segments: carry 0.5": "**segments, half carried**", "segments: carry 1": "segments, all carried",
    "segments: small queue, carry 0.5": "segments, a small queue in front (S3-FIFO), half carried",
}  # fmt: skip
LAYERS, HEADS = 12, 12
SHAPES = {"whole maps": (HEADS, LENGTH, LENGTH), "lower triangles": (HEADS, TRIANGLE)}


def sums(logs: dict[str, dict[str, Any]]) -> list[float]:
    """Lines, served, served of second halves, changed in percent, of the worst log too, and rows computed."""
    runs = list(logs.values())
    total = {name: sum(run[name] for run in runs) for name in ("lines", "served", "served_late", "changed", "rows")}
    lines, worst = total["lines"], max(run["changed"] / run["lines"] for run in runs)
    shares = total["served"] / lines, 2 * total["served_late"] / lines, 100 * total["changed"] / lines, 100 * worst
    return [lines, *shares, total["rows"] / sum(run["tokens"] for run in runs)]


def guarded() -> Iterator[Row]:
    for stream, way, case, guard in STREAMS:
        yield [stream, way], sums(GUARD[case][guard])


def each_log() -> Iterator[Row]:
    cases = {
        "lines": GUARD["lines"]["guard"], "windows of 4 lines": GUARD["windows"]["guard"],
        "lines, each log alone": GUARD["alone"], "embeddings": GUARD["embeddings"]["guard"],
    }  # fmt: skip
    for name, logs in cases.items():
        runs = [logs[log] for log in LOGS if log in logs]
        pairs = ((run["served"] / run["lines"], 100 * run["changed"] / run["lines"]) for run in runs)
        yield [name], [number for pair in pairs for number in pair]


def samples() -> Iterator[Row]:
    for size, parts in GUARD["overhead"]["sizes"].items():
        for part, one in parts.items():
            ms = one["ms"]
            yield [size, part], [100 * one["drawn"], ms["guard"], ms["nothing drawn"], one["over_nothing_drawn"]]


def predictors() -> Iterator[Row]:
    for name, one in GUARD["predictors"].items():
        yield [name], [one["answers"], one["changed"], *one["area"].values()]


def curve(name: str) -> Iterator[Row]:
    steps = GUARD["predictors"][name]["curve"]
    yield ["share of the answers"], [share for _, share, _ in steps]
    yield ["of these changed"], [100 * share for _, _, share in steps]


def switches() -> Iterator[Row]:
    for logs, parts in GUARD["switch"].items():
        yield [logs.replace(", ", ", then ")], [part["served"] for part in parts]


def alarms() -> Iterator[Row]:
    for label, name in (("median", "median"), ("90", "p90")):
        yield [label], [one[name] for one in GUARD["simulated"]["alarm_after"].values()]


def ablations() -> Iterator[Row]:
    for one in measured("guard-ablations.json")["rows"]:
        shares = [one[name]["rows"] / one[name]["tokens"] for name in ("logs", "growing", "instructed", "pairs")]
        yield [one["what"]], [one["seed"], shares[0], one["logs"]["changed"], *shares[1:]]


def cold() -> Iterator[Row]:
    for name, *_ in table_rows(page("filling-measured.md"), "| model, log | simulated"):
        model, _, log = name.partition(", ")
        one = FILLING["cold"][f"{MODELS[model]}, {log}"]
        yield [name], [one[way] for way in ("simulated", "no guard", "no guard, records", "guard", "guard, records")]


def costs() -> Iterator[Row]:
    table = table_rows(page("filling-measured.md"), "| requests (of each model) | stored")
    for (name, *_), one in zip(table, FILLING["cost"].values(), strict=True):
        own, control = one["filling"], one.get("control", {})
        shown = numbers(name[name.rindex("(") :])
        assert prod(int(number.replace(",", "")) for number in shown) == own["requests"]
        sequences = own["requests"] * (32 if "32 at once" in name else 1)
        times = [own[way] for way in ("median", "mean", "99th percentile")]
        times += [control[way] for way in ("median", "99th percentile") if control]
        yield [name], [own["offered"]["kept"] / sequences, own["rows"], *times]


def soon() -> Iterator[Row]:
    for one in FILLING["soon"].values():
        yield [""], [one["requests"], one["record_bytes"] / 1e6, one["records"], one["median"], one["longest"]]


def admitted() -> Iterator[Row]:
    found = SIMULATED["admission"]
    for name in STORED:
        runs = (found[log][name] for log in ("OpenSSH", "HDFS", "BGL", "Apache", "Mac"))
        shares = ((one["served"] / one["lines"], one["records"], one["rows"] / one["tokens"]) for one in runs)
        yield [""], [number for share in shares for number in share]


def bounded() -> Iterator[Row]:
    """Lines served within a bound, as a share of those that an unbounded database serves."""
    found = SIMULATED["eviction"]
    runs = {(one["stream"], one["part"], one["policy"]): one["served"] for one in found["runs"]}
    columns = [*(("mixed", part) for part in (2, 3, 6, 24)), ("three tenths other text", 3)]
    assert len(runs) == len(POLICIES) * len(columns)
    for policy, label in POLICIES.items():
        shares = [runs[kind, part, policy] / found["unbounded"][kind]["served"] for kind, part in columns]
        yield [label], shares


def in_a_gib() -> Iterator[Row]:
    """Sequences whose maps fill a GiB, with what pads a slot to the next one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "page_size", lambda: 4096)
        for tokens in (512, 128):
            whole = 0.0
            for label, shape in SHAPES.items():
                kinds = [SlotKind(KIND_MAP, LAYERS, dtype, shape) for dtype in ("float32", "float16", "uint8")]
                counts = [(1 << 30) / (LAYERS * SlotClass.make(kind, tokens).stride) for kind in kinds]
                whole = whole or counts[0]
                yield [str(tokens), label], [*counts, *([counts[-1] / whole] if tokens == 512 else [])]


TABLES: list[tuple[str, str, Iterator[Row]]] = [
    ("guard-measured.md", "| stream | | lines | reused", guarded()),
    ("guard-measured.md", "| stream | OpenSSH | HDFS", each_log()),
    ("guard-measured.md", "| lines at once | lines | drawn", samples()),
    ("guard-measured.md", "| answers | looked at | changed | the margin", predictors()),
    ("guard-measured.md", "| classes: margin of", curve("classes")),
    ("guard-measured.md", "| vectors: cosine of", curve("vectors")),
    ("guard-measured.md", "| stream | first log | second log", switches()),
    ("guard-measured.md", "| true rate | 2 % | 3 %", alarms()),
    ("guard-measured.md", "| | seed | tokens recomputed, logs", ablations()),
    ("filling-measured.md", "| model, log | simulated", cold()),
    ("filling-measured.md", "| requests (of each model) | stored", costs()),
    ("filling-measured.md", "| model, tokens | requests | record", soon()),
    ("filling-measured.md", "| stored | OpenSSH | HDFS", admitted()),
    ("filling-measured.md", "| policy | 1/2 |", bounded()),
    ("decisions.md", "| tokens | shape | float32 |", in_a_gib()),
]


@pytest.mark.parametrize(("name", "head", "expected"), TABLES, ids=[f"{name}: {head}" for name, head, _ in TABLES])
def test_each_number_of_a_table_was_measured(name: str, head: str, expected: Iterator[Row]) -> None:
    check_table(name, head, expected)


def test_the_budget_was_kept_over_all_lines_and_nearly_in_each_log() -> None:
    for case in ("lines", "near", "windows", "embeddings"):
        *_, changed, worst, _ = sums(GUARD[case]["guard"])
        assert changed <= 1.0
        assert worst <= 2.0


def test_no_adversary_was_served_before_it_was_verified() -> None:
    kinds = GUARD["adversaries"].values()
    assert sum(kind["asked"] for kind in kinds) > 0
    assert sum(kind["served"] for kind in kinds) == 0
