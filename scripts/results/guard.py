"""Tables of docs/guard-measured.md: what a guard reused, what it cost, what was taken away from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from marked import table

from attmemo.wording import percent
from results.files import NONE, measured, share

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
"""The rows of the first table: what they begin with, a case and what guarded it."""


def streams() -> list[str]:
    rows = []
    for stream, way, case, guard in STREAMS:
        runs = list(measured("guard.json")[case][guard].values())
        names = ("lines", "tokens", "served", "served_late", "changed", "rows")
        total = {name: sum(run[name] for run in runs) for name in names}
        lines, worst = total["lines"], max(run["changed"] / run["lines"] for run in runs)
        rows.append((
            stream, way, f"{lines:,}", f"{total['served'] / lines:.3f}", f"{2 * total['served_late'] / lines:.3f}",
            percent(total["changed"] / lines, 2), percent(worst, 2), f"{total['rows'] / total['tokens']:.3f}",
        ))  # fmt: skip
    return table("stream | | lines | reused | second half of each log | changed | worst log | tokens recomputed", rows)


def each_log() -> list[str]:
    guard = measured("guard.json")
    cases = {
        "lines": guard["lines"]["guard"], "windows of 4 lines": guard["windows"]["guard"],
        "lines, each log alone": guard["alone"], "embeddings": guard["embeddings"]["guard"],
    }  # fmt: skip

    def cell(run: dict[str, Any] | None) -> str:
        if run is None:
            return NONE
        return f"{run['served'] / run['lines']:.3f}, {percent(run['changed'] / run['lines'], 2)}"

    rows = ([name, *(cell(logs.get(log)) for log in LOGS)] for name, logs in cases.items())
    return table(f"stream | {' | '.join(LOGS)}", rows)


def samples() -> list[str]:
    rows = [
        (size, part, percent(one["drawn"], 1), f"{one['ms']['guard']:.2f}", f"{one['ms']['nothing drawn']:.2f}",
         f"{one['over_nothing_drawn']:.3f}")
        for size, parts in measured("guard.json")["overhead"]["sizes"].items() for part, one in parts.items()
    ]  # fmt: skip
    return table("lines at once | lines | drawn | a line, ms | nothing drawn | times as long", rows)


def predictors() -> list[str]:
    rows = [
        (name, f"{one['answers']:,}", str(one["changed"]), *(f"{area:.2f}" for area in one["area"].values()))
        for name, one in measured("guard.json")["predictors"].items()
    ]
    return table("answers | looked at | changed | the margin | share of tokens recomputed | words changed", rows)


def curve(name: str, what: str) -> list[str]:
    """The share of answers of at least a margin, and of these the changed ones."""
    steps: Sequence[Sequence[float]] = measured("guard.json")["predictors"][name]["curve"]
    rows = [
        ["share of the answers", *(share(kept) for _, kept, _ in steps)],
        ["of these changed", *(percent(changed, 2) for _, _, changed in steps)],
    ]
    return table(f"{name}: {what} of at least | {' | '.join(f'{least:g}' for least, *_ in steps)}", rows)


def switches() -> list[str]:
    rows = []
    for logs, parts in measured("guard.json")["switch"].items():
        half = len(parts) // 2
        served = (", ".join(str(part["served"]) for part in some) for some in (parts[:half], parts[half:]))
        rows.append((logs.replace(", ", ", then "), *served))
    return table("stream | first log | second log", rows)


def alarms() -> list[str]:
    found = measured("guard.json")["simulated"]["alarm_after"]
    rows = [
        [label, *(f"{one[name]:,.0f}" for one in found.values())]
        for label, name in (("median", "median"), ("90th percentile", "p90"))
    ]
    return table(f"true rate | {' | '.join(percent(float(rate)) for rate in found)}", rows)


def ablations() -> list[str]:
    rows = []
    for one in measured("guard-ablations.json")["rows"]:
        parts = (one[name]["rows"] / one[name]["tokens"] for name in ("logs", "growing", "instructed", "pairs"))
        logs, *others = (f"{part:.3f}" for part in parts)
        rows.append((one["what"], str(one["seed"]), logs, str(one["logs"]["changed"]), *others))
    return table("| seed | tokens recomputed, logs | changed | growing texts | behind an instruction | pairs", rows)
