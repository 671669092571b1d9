"""Tables of docs/filling-measured.md: databases that fill themselves. And how many maps fill a GiB."""

from __future__ import annotations

from unittest import mock

from marked import table

from attmemo.db.slot_kinds import KIND_MAP, LENGTH, TRIANGLE, SlotKind
from attmemo.db.slots import SlotClass
from attmemo.mmap import layout
from results.files import NONE, measured

COLD = {
    "MiniLM, OpenSSH": "minilm, OpenSSH", "MiniLM, HDFS": "minilm, HDFS", "MiniLM, BGL": "minilm, BGL",
    "MiniLM, Apache": "minilm, Apache", "MiniLM, Mac": "minilm, Mac",
    "six-layer DeBERTa-v2 classifier, OpenSSH": "deberta, OpenSSH", "the same, HDFS": "deberta, HDFS",
}  # fmt: skip
COSTS = {
    "texts that are never alike, one at a time": "texts that are never alike, one at a time (8,000)",
    "texts that are never alike, 32 at once": "the same, 32 at once (160)",
    "lines of five logs, one at a time": "lines of five logs, one at a time (8,000)",
    "lines of five logs, 32 at once": "the same, 32 at once (160)",
    "lines one at a time, a bound of 256 MiB": "lines one at a time, a bound of 256 MiB: records go (8,000)",
    "lines 32 at once, a bound of 256 MiB": "the same, 32 at once (160)",
    "never alike from an empty database on, one at a time":
        "never alike from an empty database on, one at a time (4 times 2,000)",
    "never alike from an empty database on, 32 at once": "the same, 32 at once (4 times 120)",
}  # fmt: skip
SOON = {
    "MiniLM, 1 at once": "MiniLM, 40, one at a time", "MiniLM, 32 at once": "MiniLM, 40, 32 at once",
    "BERT-base, 1 at once": "BERT-base, 128, one at a time", "BERT-base, 1 of 512": "BERT-base, 512, one at a time",
}  # fmt: skip
STORED = {
    "every miss": "**what no record supplies enough of**", "one miss in two": "one in two of these",
    "seen twice": "these when seen twice", "every miss, batches of 32": "batches of 32, all of these",
    "the same, asked again before storing": "batches of 32, none that another of the batch serves",
}  # fmt: skip
POLICIES = {
    "records: FIFO": "records: FIFO", "records: LRU": "records: LRU", "records: SIEVE": "records: SIEVE",
    "records: S3-FIFO": "records: S3-FIFO", "segments: carry 0": "segments, nothing carried",
    "segments: carry 0.5": "**segments, half carried**", "segments: carry 1": "segments, all carried",
    "segments: small queue, carry 0.5": "segments, a small queue in front (S3-FIFO), half carried",
}  # fmt: skip
BOUNDS = {"1/2": ("mixed", 2), "1/3": ("mixed", 3), "1/6": ("mixed", 6), "1/24": ("mixed", 24),
          "30 % other texts, 1/3": ("three tenths other text", 3)}  # fmt: skip
LAYERS, HEADS = 12, 12
SHAPES = {"whole maps": (HEADS, LENGTH, LENGTH), "lower triangles": (HEADS, TRIANGLE)}


def cold() -> list[str]:
    rows = []
    for label, name in COLD.items():
        one = measured("filling.json")["cold"][name]
        rows.append((
            label, f"{one['simulated']:.3f}", f"{one['no guard']:.3f}", f"{one['no guard, records']:,}",
            f"{one['guard']:.3f}", f"{one['guard, records']:,}",
        ))  # fmt: skip
    return table("model, log | simulated | in the library, no guard | records | with the guard | records", rows)


def costs() -> list[str]:
    rows, found = [], measured("filling.json")["cost"]
    assert found.keys() == COSTS.keys(), "a case is missing"
    for name, label in COSTS.items():
        one = found[name]
        own, control = one["filling"], one.get("control", {})
        sequences = own["requests"] * (32 if "32 at once" in name else 1)
        times = [own[way] for way in ("rows", "median", "mean", "99th percentile")]
        beside = [f"{control[way]:.3f}" if control else NONE for way in ("median", "99th percentile")]
        kept = own["offered"]["kept"] / sequences
        rows.append((label, f"{kept:.2f}", *(f"{time:.3f}" for time in times), *beside))
    head = "requests (of each model) | stored | rows | median | mean | 99th percentile | "
    return table(head + "control: median | 99th percentile", rows)


def soon() -> list[str]:
    rows = []
    for name, label in SOON.items():
        one = measured("filling.json")["soon"][name]
        seconds = (f"{one[key]:.2f} s" for key in ("median", "longest"))
        megabytes = f"{one['record_bytes'] / 1e6:.2g} MB"
        rows.append((label, f"{one['requests']:,}", megabytes, str(one["records"]), *seconds))
    return table("model, tokens | requests | record | stored | median | longest", rows)


def admitted() -> list[str]:
    found = measured("filling-simulated.json")["admission"]
    rows = [
        [label, *(
            f"{one['served'] / one['lines']:.3f} / {one['records']:,} / {one['rows'] / one['tokens']:.3f}"
            for one in (log[name] for log in found.values())
        )]
        for name, label in STORED.items()
    ]  # fmt: skip
    return table(f"stored | {' | '.join(found)}", rows)


def bounded() -> list[str]:
    """Lines served within a bound, as a share of those that an unbounded database serves."""
    found = measured("filling-simulated.json")["eviction"]
    runs = {(one["stream"], one["part"], one["policy"]): one["served"] for one in found["runs"]}
    assert len(runs) == len(POLICIES) * len(BOUNDS), "a policy is missing"
    rows = [
        [label, *(f"{runs[*bound, policy] / found['unbounded'][bound[0]]['served']:.3f}" for bound in BOUNDS.values())]
        for policy, label in POLICIES.items()
    ]
    return table(f"policy | {' | '.join(BOUNDS)}", rows)


def in_a_gib() -> list[str]:
    """Sequences whose maps fill a GiB, with what pads a slot to the next one, where a page has 4 KiB."""
    rows = []
    with mock.patch.object(layout, "page_size", return_value=4096):
        for tokens, beside in ((512, True), (128, False)):
            most = 0.0
            for label, shape in SHAPES.items():
                kinds = [SlotKind(KIND_MAP, LAYERS, dtype, shape) for dtype in ("float32", "float16", "uint8")]
                counts = [(1 << 30) / (LAYERS * SlotClass.make(kind, tokens).stride) for kind in kinds]
                most = most or counts[0]
                over = "float32" if label == "whole maps" else "whole float32 maps"
                said = f" ({counts[-1] / most:.1f} times {over})" * beside
                rows.append((str(tokens), label, *(f"{count:.1f}" for count in counts[:2]), f"{counts[2]:.1f}{said}"))
    return table("tokens | shape | float32 | float16 | uint8", rows)
