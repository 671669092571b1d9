"""Tables of the service, streams, rows and maps have the numbers of the JSON files beside the pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from docs_tools import Row, check_table, measured, only

from attmemo.profiler.race import CACHE, ONNX, OPENVINO, PACKED, ROWS

FLOAT32 = "service.json"
SERVERS = {
    "rows": "this service, guard certified (", "none": "this service, `--reuse none`: exact",
    "genai": "FastAPI around OpenVINO GenAI", "infinity": "infinity, on torch",
    "plain": "FastAPI around sentence-transformers",
}  # fmt: skip
CASES = {  # of docs/rows-measured.md: how a row begins, its case
    "lines of OpenSSH, MiniLM": "lines-OpenSSH", "lines of HDFS": "lines-HDFS",
    "lines of HDFS, `threshold=0.52`": "lines-HDFS-threshold52", "lines of BGL": "lines-BGL",
    "lines of Apache": "lines-Apache", "questions of banking77, MiniLM": "text-banking77",
    "reviews of IMDB": "text-imdb", "windows of 4 log lines, six-layer DeBERTa-v2": "deberta-windows",
    "BERT-base shape, 1 × 128": "bert-1x128", "BERT-base shape, 8 × 128": "bert-8x128",
    "BERT-base shape, 32 × 128": "bert-32x128", "BERT-base shape, 8 × 512": "bert-8x512",
    "DeBERTa-v3-base shape, 8 × 512": "deberta-base-8x512",
}  # fmt: skip
WAYS = {  # of docs/streams-measured.md
    "lines of HDFS, MiniLM": "lines-HDFS", "lines of OpenSSH, MiniLM": "lines-OpenSSH",
    "lines of Apache, MiniLM": "lines-Apache", "windows of log lines, DeBERTa-v2 with six layers": "deberta-windows",
    "8 × 512 tokens, DeBERTa-v3-base shape": "deberta-base-8x512", "8 × 128 tokens, BERT-base shape": "bert-8x128",
    "8 × 512 tokens, BERT-base shape": "bert-8x512", "1 × 128 tokens, BERT-base shape": "bert-1x128",
    "reviews of IMDB, MiniLM": "text-imdb",
}  # fmt: skip
MAPS = [
    ("deberta", "tuned"), ("openssh", "fixed"), ("openssh", "tuned"), ("hdfs", "fixed"), ("hdfs", "tuned"),
    ("bgl", "fixed"), ("bgl", "tuned"),
]  # fmt: skip
"""Cases of maps.json, in the order of the table."""
BATCHES = ("bert-1x128", "bert-8x128", "bert-32x128", "bert-8x512", "deberta-base-8x512")
SHARES = ("bert-8x128", "bert-8x512", "bert-1x128")
"""Cases of docs/streams-measured.md that are told with the share of rows that is computed."""
LAYERS = [
    ("DeBERTa-v2", "deberta-v2", 512, 8), ("DeBERTa-v2", "deberta-v2", 128, 8), ("DeBERTa-v2", "deberta-v2", 128, 1),
    ("BERT, fused attention", "bert", 512, 8), ("BERT, fused attention", "bert", 128, 1),
]  # fmt: skip


class Case:
    """One case of docs/rows.json: the milliseconds of its ways, and how many times as fast one is as another."""

    def __init__(self, name: str, dtype: str = "bfloat16", machine: str = "") -> None:
        cases = measured("rows.json")
        self.paths = (cases[machine] if machine else cases)[f"{name}-{dtype}-{dtype}"]["paths"]
        self.ms: dict[str, float] = {way: path["ms"] for way, path in self.paths.items()}
        peers = {way: ms for way, ms in self.ms.items() if way not in ("packed", "rows")}
        self.peer = min(peers.values())
        self.exact = min(ms for way, ms in peers.items() if "int8" not in way)
        self.share = self.paths.get("rows", {}).get("stats", {}).get("share_computed")

    def cosines(self, way: str = "rows") -> list[float]:
        """Mean and 1st percentile of a way; none if it was not measured."""
        return [self.paths[way]["cosine_mean"], self.paths[way]["cosine_p1"]] if way in self.paths else []


def service(file: str) -> Iterator[Row]:
    found = measured(file)
    assert found["rows"]["guard"]["state"] == "certified"
    for way, label in SERVERS.items():
        if way not in found and way in ("genai", "infinity"):
            continue  # they are measured on one of the machines
        one = found[way]
        assert [part["clients"] for part in one["single"]] == [64, 8, 1]
        values = [part[name] for part in one["single"] for name in ("lines_per_second", "p50_ms", "p99_ms")]
        batches = [] if file == FLOAT32 else [one["batches_of_32"]["lines_per_second"]]
        yield [label + f"{one['share_computed']:.2f}" if way == "rows" else label], [*values, *batches]


def streams(file: str) -> Iterator[Row]:
    for name, stream in measured(file)["streams"].items():
        every, late = stream["parts"]["all"], stream["parts"]["last third"]
        speeds = [every["speed"][way] for way in (OPENVINO, ONNX, PACKED, CACHE, ROWS)]
        yield [name], [*speeds, late["speed"][ROWS], 100 * every["changed"][ROWS]]


def ways() -> Iterator[Row]:
    for label, name in WAYS.items():
        case = Case(name)
        stock = case.ms["stock"]
        reused = [stock / case.ms["rows"]] if "rows" in case.ms else []
        reused += [100 * case.share] if name in SHARES else []
        yield [label], [1, stock / case.exact, stock / case.ms["packed"], *reused, *case.cosines()[:1]]


def rows(dtype: str, machine: str = "") -> Iterator[Row]:
    for label, name in CASES.items():
        # Where all texts have one length, the first table has no times of sorted ones.
        case, turns = Case(name, dtype, machine), 1 if name in BATCHES and dtype == "bfloat16" and not machine else 2
        values = list[float]()
        for way in ("stock", "torch.compile", f"OpenVINO {'bf16' if dtype == 'bfloat16' else 'f32'}", "OpenVINO int8"):
            values += [case.ms[one] for one in (way, f"{way}, sorted")[:turns] if one in case.ms]
        packed = case.ms["packed"]
        values += [packed, case.ms["stock"] / packed, case.exact / packed]
        if "rows" in case.ms:
            own = case.ms["rows"]
            values += [case.share, own, case.ms["stock"] / own]
            values += [case.exact / own] * (dtype == "float32") + [case.peer / own]
        if dtype == "bfloat16":
            values += case.cosines() + case.cosines("OpenVINO int8")
        yield [label], values


def chosen() -> Iterator[Row]:
    found = measured("chosen-rows.json")
    for way in found["HDFS"]:
        logs = (found[log][way] for log in ("HDFS", "OpenSSH", "Apache", "Mac"))
        yield [way], [one[name] for one in logs for name in ("share", "mean", "p1")]


def drift() -> Iterator[Row]:
    found = measured("drift.json")
    for label, share in (("rows as they are in the record", "0.0"), ("**moved by the mean", "1.0")):
        logs = (found[log][share] for log in ("OpenSSH", "HDFS", "BGL", "Apache", "Mac"))
        yield [label], [one[name] for one in logs for name in ("below .98", "mean")]


def maps() -> Iterator[Row]:
    found = measured("maps.json")
    assert set(MAPS) == {(name, kind) for name, case in found.items() for kind in ("fixed", "tuned") if kind in case}
    for name, kind in MAPS:
        one, quality = found[name][kind], found[name][kind]["quality"]
        values = [100 * share for share in (one["served"], one["exhaustive"]) if share is not None]
        values += [one["time"][key] for key in ("speedup", "speedup_low", "speedup_high")]
        values += [100 * quality["changed"]]
        if quality["accuracy_exact"] is None:
            values += [quality["cosine_mean"], 1, quality["cosine_p1"]]  # 1: of "1st percentile"
        else:
            values += [quality["accuracy_exact"], quality["accuracy_memoized"]]
        assert one["in_database"] == 0
        yield ["", str(one["threshold"]) if kind == "fixed" else "tuned, 1 %"], values


def most() -> Iterator[Row]:
    for label, family, length, count in LAYERS:
        one = only(measured("bench-twelve-layers.json")["rows"], family=family, length=length, batch=count)
        yield [label, f"{length} × {count}"], [one["speedup"], 100 * one["overhead"]]


TABLES: list[tuple[str, str, Iterator[Row]]] = [
    ("service-measured.md", "float32, MiniLM-L6, lines of OpenSSH", service(FLOAT32)),
    ("service-measured.md", "In bfloat16, two cores with AMX", service("service-bfloat16.json")),
    ("service-measured.md", "In bfloat16, two cores with AVX-512", service("service-avx512.json")),
    ("streams-measured.md", "| original = 1 |", streams("streams-avx512.json")),
    ("streams-measured.md", "With AMX, in bfloat16", streams("streams.json")),
    ("streams-measured.md", "The same in float32", streams("streams-float32.json")),
    ("streams-measured.md", "| | original model | best exact peer |", ways()),
    ("streams-measured.md", "| data, model | threshold |", maps()),
    ("streams-measured.md", "| model | tokens × batch |", most()),
    ("rows-measured.md", "| requests, model | original model |", rows("bfloat16")),
    ("rows-measured.md", "The same in float32, on two cores", rows("float32")),
    ("rows-measured.md", "The same in bfloat16, on two cores", rows("bfloat16", "without a matrix unit")),
    ("rows-measured.md", "| share of rows, mean, 1st percentile |", chosen()),
    ("rows-measured.md", "| | the first 300 lines of OpenSSH", drift()),
]


@pytest.mark.parametrize(("name", "head", "expected"), TABLES, ids=[f"{name}: {head}" for name, head, _ in TABLES])
def test_each_number_of_a_table_was_measured(name: str, head: str, expected: Iterator[Row]) -> None:
    check_table(name, head, expected)
