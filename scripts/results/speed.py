"""Tables of the service, of streams, of rows of a prepared database, and of maps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bench_streams
from marked import table

from attmemo.wording import percent
from results.files import NONE, measured, only, short

SERVERS = {
    "rows": "this service, guard certified", "none": "this service, `--reuse none`: exact",
    "genai": "FastAPI around OpenVINO GenAI", "infinity": "infinity, on torch",
    "plain": "FastAPI around sentence-transformers",
}  # fmt: skip
CASES = {
    "lines of OpenSSH, MiniLM": "lines-OpenSSH", "lines of HDFS": "lines-HDFS",
    "lines of HDFS, `threshold=0.52`": "lines-HDFS-threshold52", "lines of BGL": "lines-BGL",
    "lines of Apache": "lines-Apache", "questions of banking77, MiniLM": "text-banking77",
    "reviews of IMDB": "text-imdb", "windows of 4 log lines, six-layer DeBERTa-v2": "deberta-windows",
    "BERT-base shape, 1 × 128": "bert-1x128", "BERT-base shape, 8 × 128": "bert-8x128",
    "BERT-base shape, 32 × 128": "bert-32x128", "BERT-base shape, 8 × 512": "bert-8x512",
    "DeBERTa-v3-base shape, 8 × 512": "deberta-base-8x512",
}  # fmt: skip
"""Of docs/rows-measured.md: how a row begins, its case of rows.json."""
PREPARED = {
    "lines of HDFS, MiniLM": "lines-HDFS", "lines of OpenSSH, MiniLM": "lines-OpenSSH",
    "lines of Apache, MiniLM": "lines-Apache", "windows of log lines, DeBERTa-v2 with six layers": "deberta-windows",
    "8 × 512 tokens, DeBERTa-v3-base shape": "deberta-base-8x512", "8 × 128 tokens, BERT-base shape": "bert-8x128",
    "8 × 512 tokens, BERT-base shape": "bert-8x512", "1 × 128 tokens, BERT-base shape": "bert-1x128",
    "reviews of IMDB, MiniLM": "text-imdb",
}  # fmt: skip
"""The same of docs/streams-measured.md."""
MAPS = [
    ("deberta", "tuned", "windows of 4 lines of 8 logs, six-layer DeBERTa-v2 classifier"),
    ("openssh", "fixed", "OpenSSH log, MiniLM-L6 embeddings"), ("openssh", "tuned", "the same"),
    ("hdfs", "fixed", "HDFS log, the same"), ("hdfs", "tuned", "the same"),
    ("bgl", "fixed", "BGL log, the same"), ("bgl", "tuned", "the same"),
]  # fmt: skip
"""Cases of maps.json."""
LAYERS = [
    ("DeBERTa-v2", "deberta-v2", 512, 8), ("DeBERTa-v2", "deberta-v2", 128, 8), ("DeBERTa-v2", "deberta-v2", 128, 1),
    ("BERT, fused attention", "bert", 512, 8), ("BERT, fused attention", "bert", 128, 1),
]  # fmt: skip


class Case:
    """One case of rows.json: the milliseconds of its methods, and how many times as fast one is as another."""

    def __init__(self, name: str, dtype: str = "bfloat16", machine: str = "") -> None:
        cases = measured("rows.json")
        self.paths: Mapping[str, Any] = (cases[machine] if machine else cases)[f"{name}-{dtype}-{dtype}"]["paths"]
        self.ms: dict[str, float] = {method: path["ms"] for method, path in self.paths.items()}
        peers = {method: ms for method, ms in self.ms.items() if method not in ("packed", "rows")}
        self.peer = min(peers.values())
        self.exact = min(ms for method, ms in peers.items() if "int8" not in method)
        self.share = self.paths.get("rows", {}).get("stats", {}).get("share_computed")

    def times(self, method: str) -> str:
        """Milliseconds, and behind a slash those with texts in the order of their lengths."""
        return " / ".join(f"{self.ms[one]:.2f}" for one in (method, f"{method}, sorted") if one in self.ms) or NONE

    def cosines(self, method: str = "rows") -> str:
        """Mean and 1st percentile; empty if the method was not measured."""
        one = self.paths.get(method)
        return "" if one is None else f"{one['cosine_mean']:.4f}, {one['cosine_p1']:.4f}"


def service(file: str) -> list[str]:
    found, rows = measured(file), []
    assert found["rows"]["guard"]["state"] == "certified"
    batches = "batches_of_32" in found["none"]
    for server, label in SERVERS.items():
        if server in found:
            one = found[server]
            assert [part["clients"] for part in one["single"]] == [64, 8, 1], "the head of the table says so"
            beside = f" ({one['share_computed']:.2f} of the tokens recomputed)" if server == "rows" else ""
            cells = [
                f"{short(part['lines_per_second'])}, {short(part['p50_ms'])} ms, {short(part['p99_ms'])} ms"
                for part in one["single"]
            ]
            cells += [short(one["batches_of_32"]["lines_per_second"])] if batches else []
            rows.append([label + beside, *cells])
    head = "| 64 clients: lines a second, median, 99th percentile | 8 clients | 1 client"
    return table(head + " | 2 clients, batches of 32: lines a second" * batches, rows)


def found_of_services() -> list[str]:
    """What the tables of services say at 64 clients."""
    files = [measured(name) for name in ("service.json", "service-bfloat16.json", "service-avx512.json")]
    rates = [{way: one["single"][0]["lines_per_second"] for way, one in file.items() if way in SERVERS}
             for file in files]  # fmt: skip
    gains = [one["rows"] / one["none"] for one in rates]
    amx = rates[1]
    return [
        f"* With a certified guard and a filled database the service answers {min(gains):.1f} to {max(gains):.1f} "
        "times as many lines a second as the exact service, at 64 clients. While the guard collects evidence, it is "
        "slower than the exact one.",
        f"* With 64 clients the exact service answers {amx['none'] / amx['infinity']:.1f} times as many lines a "
        f"second as infinity, and {amx['none'] / amx['genai']:.1f} times as many as FastAPI around OpenVINO GenAI "
        "(bfloat16, AMX).",
    ]


def reuse() -> list[str]:
    """What reuse gives, in short, for docs/measured.md."""
    rows, data = [], []
    for unit, file in (("AMX", "workloads-amx.json"), ("no matrix unit", "workloads.json")):
        data.append(f"[{unit}]({file}): commit {measured(file)['commit']}")
        for name, one in measured(file)["streams"].items():
            over = one["rows"]["over exact"], one["rows at half load"]["over exact"]
            halves = [f"{1 / part['first half']:.2f}, {1 / part['second half']:.2f}" for part in over]
            rows.append((f"{name}, {unit}", *halves))
    head = "stream, processor | speed without pauses, exact = 1: first half, second half | with pauses"
    return [*table(head, rows), "; ".join(data)]


def streams(file: str) -> list[str]:
    return bench_streams.table(measured(file)["streams"]).splitlines()


def prepared() -> list[str]:
    rows = []
    for label, name in PREPARED.items():
        case = Case(name)
        stock, reused, cosine = case.ms["stock"], NONE, NONE
        if "rows" in case.ms:
            reused = f"{stock / case.ms['rows']:.2f} ({percent(case.share)})"
            cosine = f"{case.paths['rows']['cosine_mean']:.4f}"
        rows.append((label, "1", f"{stock / case.exact:.2f}", f"{stock / case.ms['packed']:.2f}", reused, cosine))
    head = '| original model | best exact peer | `"none"` | `"rows"` (tokens recomputed) | cosine of rows, mean'
    return table(head, rows)


def rows(dtype: str, machine: str = "") -> list[str]:
    found, half = [], dtype == "bfloat16"
    peer = f"OpenVINO {'bf16' if half else 'f32'}"
    for label, name in CASES.items():
        case = Case(name, dtype, machine)
        stock, packed = case.ms["stock"], case.ms["packed"]
        cells = [case.times(method) for method in ("stock", "torch.compile", peer, "OpenVINO int8")]
        cells.append(f"{packed:.2f}, **{stock / packed:.2f}**, {case.exact / packed:.2f}")
        reused = NONE
        if "rows" in case.ms:
            own = case.ms["rows"]
            over = [f"{case.exact / own:.2f}"] * (not half) + [f"{case.peer / own:.2f}"]
            reused = ", ".join([f"{case.share:.2f}", f"{own:.2f}", f"**{stock / own:.2f}**", *over])
        cells.append(reused)
        if half:
            own, other = case.cosines(), case.cosines("OpenVINO int8")
            cells.append(f"{own} ({other})" if other else own or NONE)
        found.append([label, *cells])
    over = "over the original, " + "over the best exact path, " * (not half) + "over the best peer"
    head = (
        f"requests, model | original model | torch.compile | OpenVINO {dtype} | OpenVINO int8 | packed: ms, "
        f"over the original, over the best exact path | rows: share computed, ms, {over}"
    )
    return table(head + " | cosine of rows (OpenVINO int8): mean, 1st percentile" * half, found)


def chosen() -> list[str]:
    found, logs = measured("chosen-rows.json"), ("HDFS", "OpenSSH", "Apache", "Mac")
    cells = (
        [rule, *(", ".join((f"{one['share']:.3f}", f"{one['mean']:.4f}", f"{one['p1']:.4f}")) for one in by_log)]
        for rule, by_log in ((rule, [found[log][rule] for log in logs]) for rule in found["HDFS"])
    )
    return table(f"share of rows, mean, 1st percentile | {' | '.join(logs)}", cells)


def drift() -> list[str]:
    found, logs = measured("drift.json"), ("OpenSSH", "HDFS", "BGL", "Apache", "Mac")
    labels = {"0.0": "rows as they are in the record", "1.0": "**moved by the mean times the correlation**"}
    cells = (
        [label, *(f"{found[log][move]['below .98']:.3f}, {found[log][move]['mean']:.4f}" for log in logs)]
        for move, label in labels.items()
    )
    return table(f"| the first 300 lines of {' | '.join(logs)}", cells)


def maps() -> list[str]:
    cases, found = measured("maps.json"), list[tuple[str, ...]]()
    known = {(name, kind) for name, case in cases.items() for kind in ("fixed", "tuned") if kind in case}
    assert known == {(name, kind) for name, kind, _ in MAPS}, "a case is missing"
    for name, kind, label in MAPS:
        one = cases[name][kind]
        quality, time = one["quality"], one["time"]
        answers = f"{percent(quality['changed'], 1)} changed; "
        if quality["accuracy_exact"] is None:
            answers += f"cosine mean {quality['cosine_mean']:.3f}, 1st percentile {quality['cosine_p1']:.3f}"
        else:
            answers += f"accuracy {quality['accuracy_exact']:.3f} → {quality['accuracy_memoized']:.3f}"
        assert one["in_database"] == 0
        found.append((
            label, str(one["threshold"]) if kind == "fixed" else "tuned, 1 %",
            f"{percent(one['served'])} ({percent(one['exhaustive'])})",
            f"{time['speedup']:.2f} ({time['speedup_low']:.2f}–{time['speedup_high']:.2f})", answers,
        ))  # fmt: skip
    return table("data, model | threshold | calls reused (exhaustive search) | speed | answers", found)


def most() -> list[str]:
    """What maps save where every sequence is reused."""
    found = []
    for label, family, length, count in LAYERS:
        one = only(measured("bench-twelve-layers.json")["rows"], family=family, length=length, batch=count)
        found.append((label, f"{length} × {count}", f"{one['speedup']:.2f}", percent(one["overhead"], 1)))
    return table("model | tokens × batch | speed | lookup and fetch, share of the exact attention's time", found)


def cores() -> list[str]:
    paths = measured("rows.json")["lines-OpenSSH-bfloat16-bfloat16"]["paths"]
    share = paths["rows"]["stats"]["share_computed"]
    labels = {"stock": "original model", "packed": "packed blocks (exact)", "rows": f"rows, {percent(share)} computed"}
    times = {label: paths[method]["ms"] for method, label in labels.items()}
    cells = ((label, f"{ms:.2f}", f"{1e3 / ms / 2:,.0f}", f"{2e3 * ms / 3600:.2f}") for label, ms in times.items())
    return table("| ms a line, two cores | lines a second and core | core-hours for a million lines", cells)


def against_a_gpu() -> list[str]:
    speeds, other = measured("gpu-embed.json")["lines_per_second"], measured("rows.json")["another machine"]
    paths = other["lines-OpenSSH-bfloat16-bfloat16"]["paths"]
    own = {
        "two cores, from tokens: the original model, sorted": "stock, sorted", "two cores, packed blocks": "packed",
        "two cores, rows": "rows",
    }  # fmt: skip
    at_once = [f"{speeds[f'tokens to embeddings, {count} at once']:,.0f}" for count in (1, 32, 1024)]
    text = f"{speeds['text to embeddings, 1024 at once']:,.0f}"
    cells = [
        ["H100, from tokens", *at_once], ["H100, from text, the tokenizer on three cores", NONE, NONE, text],
        *([label, NONE, f"{1e3 / paths[method]['ms']:,.0f}", NONE] for label, method in own.items()),
    ]  # fmt: skip
    return table("| one at a time | 32 at once | 1,024 at once", cells)
