"""The numbers and the plot of README.md, and the tables of docs/measured.md, made from the JSON files in docs/.

python scripts/first_page.py                       # after a new measurement: both pages and docs/first-page.png
python scripts/first_page.py --measure ../shared   # measures all that they show before: two hours on two cores
python scripts/first_page.py --measure ../shared --short   # only the methods of README.md: a few minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
from marked import replace_measured
from matplotlib.figure import Figure
from peers_inputs import FIRST
from peers_page import reuses
from results.files import DOCS

from attmemo.profiler.peers.paths import PATHS, REUSE
from attmemo.profiler.peers.verdict import Verdict, verdicts
from attmemo.profiler.plots import GREY, INK, STYLE, png
from attmemo.profiler.way_plots import color_of
from attmemo.system.machine import conditions

MODELS: Final = {
    "minilm": "MiniLM, embedder", "deberta-loghub": "DeBERTa-v2, 6 layers, classifier",
    "minilm-sst2": "MiniLM, classifier", "bert-base": "BERT-base shape", "deberta-v3-base": "DeBERTa-v3-base shape",
    "bge-small": "BGE-small shape", "modernbert-base": "ModernBERT-base shape",
    "qwen3-embedding": "Qwen3-Embedding-0.6B shape, 6 layers",
}  # fmt: skip
SHOWN: Final = {
    "exact: `memoize(model)`": ("none", "speed", True), "8 bits: `linear=\"int8\"`": ("none-int8", "speed", False),
    "reuse: `budget=0.01`": ("rows", "late_speed", False),
}  # fmt: skip
"""Modes by their label: the method, which of its speeds, and whether it is compared with exact peers alone."""
PEERS: Final = {True: GREY, False: "#c3ced5"}
"""Colours of peers, exact ones and all."""
FILES: Final = {True: ("peers", "workloads-amx"), False: ("peers-avx512", "workloads")}
"""Results beside other runtimes and of workloads, by whether the processor has AMX. README.md shows those with."""
SIZE: Final = 8
"""Texts at once, of the numbers of README.md."""
Run = Mapping[str, Any]
Cell = Mapping[str, Any]


def cells_of(run: Run, size: int, key: str = "speed") -> list[Cell]:
    """Cells of a batch size that have this speed, in the order of arrival and without a cache."""
    cells = [cell for cell in run["cells"] if cell["batch"] == size and cell.get(key) is not None]
    return [cell for cell in cells if not cell["by_length"] and cell["path"] != "cache"]


def speed_of(run: Run, path: str, size: int, key: str = "speed") -> float:
    """How many times as fast one method is as the original model."""
    return float(next(cell[key] for cell in cells_of(run, size, key) if cell["path"] == path))


def best_peer(run: Run, size: int, key: str = "speed", *, exact: bool = False) -> Cell:
    """The fastest method that is not attmemo's and keeps the budget; with `exact` among exact ones."""
    cells = [cell for cell in cells_of(run, size, key) if cell["path"] not in REUSE and not PATHS[cell["path"]].other]
    kept = [cell for cell in cells if run["model"]["random"] or cell["quality"].get("changed", 0.0) <= run["budget"]]
    return max((c for c in kept if not exact or run["paths"][c["path"]]["exact"]), key=lambda c: float(c[key]))


def machine_of(conditions: Mapping[str, Any]) -> str:
    """A machine in words."""
    unit = "AMX" if "amx_bf16" in conditions["features"] else "no matrix unit"
    return f"{conditions['threads']} cores, {conditions['cpu'].replace('(R)', '').replace(' Processor', '')}, {unit}"


def first_run(peers: Mapping[str, Any]) -> Run:
    """The run that the first page shows."""
    return next(
        run for run in peers["runs"] if (run["model"]["name"], run["stream"]["name"], run["model"]["dtype"]) == FIRST
    )


def readme(peers: Mapping[str, Any], workloads: Mapping[str, Any]) -> str:
    """The numbers of README.md: one of each mode, at one batch size."""
    run = first_run(peers)
    name, stream = f"{FILES[True][1]}.json", run["stream"]
    rows = []
    for label, (path, key, exact) in SHOWN.items():
        peer = best_peer(run, SIZE, key, exact=exact)
        kept = key.replace("speed", "quality")
        quality = next(one[kept] for one in cells_of(run, SIZE) if one["path"] == path)
        changed = f"{round(quality['changed'] * quality['texts']):,} of {quality['texts']:,}"
        own = f"**{speed_of(run, path, SIZE, key):.2f}**"
        rows.append(f"| {label} | {own} | {peer[key]:.2f}, {PATHS[peer['path']].title} | {changed} |")
    streams = list(workloads["streams"].values())
    full = [time for one in streams for time in one["rows"]["over exact"].values()]
    half = [time for one in streams for time in one["rows at half load"]["over exact"].values()]
    return "\n".join([
        "| mode | speed, original model = 1 | best peer | answers changed |", "|---|---|---|---|", *rows, "",
        f"{MODELS[run['model']['name']]}, {run['model']['dtype']}; {stream['name']} log lines of "
        f"{stream['tokens_mean']:.0f} tokens, {SIZE} at once; {machine_of(run['conditions'])}; original model: "
        f"transformers on PyTorch; reuse: last third of the lines ([data](docs/peers.json), {commits([run])}).",
        "",
        f"Reuse can cost time: on {len(streams)} streams, with nothing stored at first, it takes {min(full):.2f} to "
        f"{max(full):.2f} of exact mode's time without pauses, {min(half):.2f} to {max(half):.2f} with pauses "
        f"([data](docs/{name}), commit {workloads['commit']}).",
    ])  # fmt: skip


def commits(runs: Iterable[Run]) -> str:
    """The commits that runs were measured with."""
    found = {one.get("version", "") for run in runs for one in (run["conditions"], *run.get("joined", []))}
    known = sorted(found - {""})
    unknown = ["commit not recorded"] if "" in found else []
    return "; ".join([f"commit{'s' * (len(known) > 1)} {', '.join(known)}"] * bool(known) + unknown)


def benchmarks(peers: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The table of docs/measured.md; `other`: the same pairs on a processor without a matrix unit."""
    machines = {"AMX": _measured(peers), "no matrix unit": _measured(other)}
    columns = [f"{title}: {mode} (best peer)" for title in machines for mode in ("exact", "8 bits")]
    lines = [f"| model | batch | {' | '.join(columns)} |", f"|---|---|{len(columns) * '---|'}"]
    for name, title in MODELS.items():
        own = {kind: [run for run in runs if run["model"]["name"] == name] for kind, runs in machines.items()}
        for size in machines["AMX"][0]["batch"]:
            cells = [
                _beside_peer(runs, path, size, exact=path == "none")
                for runs in own.values() for path in ("none", "none-int8")
            ]  # fmt: skip
            lines.append(f"| {title} | {size} | {' | '.join(cells)} |")
    lines.append("")
    for title, runs in machines.items():
        streams = dict.fromkeys(run["stream"]["name"] for run in runs)
        judged = [(run, one) for run in runs for one in verdicts(run)]
        seen = dict.fromkeys(machine_of(run["conditions"]) for run in runs)
        lines += [
            f"* {title}: {'; '.join(seen)}; {len(runs)} runs, bfloat16, of the streams {', '.join(streams)}; "
            f"{commits(runs)}. Fastest of all, sorted texts and caches included: {_winners(judged)}."
        ]
    return "\n".join(lines)


def _measured(found: Mapping[str, Any]) -> list[Run]:
    return [run for run in found["runs"] if run["model"]["dtype"] == FIRST[2] and "failed" not in run]


def _beside_peer(runs: Sequence[Run], path: str, size: int, *, exact: bool) -> str:
    """Medians of the streams: the speed of a method, and that of the best peer; bold: the faster one."""
    if not runs:
        return "–"
    own = statistics.median(speed_of(run, path, size) for run in runs)
    peer = statistics.median(float(best_peer(run, size, exact=exact)["speed"]) for run in runs)
    return f"**{own:.2f}** ({peer:.2f})" if own >= peer else f"{own:.2f} (**{peer:.2f}**)"


def _winners(judged: Sequence[tuple[Run, Verdict]]) -> str:
    """How often which kind of method won."""
    kinds = {"a peer": 0, "exact": 0, "8 bits": 0, "reuse": 0}
    for _, one in judged:
        if one.peer_wins or one.own is None:
            kinds["a peer"] += 1
        else:
            path = one.own.get("behind", one.own["path"])
            reused = path == "maps" or reuses(one.own)
            kinds["reuse" if reused else "8 bits" if path.endswith("int8") else "exact"] += 1
    return ", ".join(f"{kind} in {count}" for kind, count in kinds.items()) + f" of {len(judged)} cases"


def draw(run: Run) -> bytes:
    """Bars of the first page, by batch size: each mode, and the best peer behind it."""
    sizes = run["batch"]
    bars = []
    rivals = ("best exact peer", "best peer", None)
    for (label, (path, key, exact)), rival in zip(SHOWN.items(), rivals, strict=True):
        late = ", last third" * (key == "late_speed")
        own = [speed_of(run, path, size, key) for size in sizes]
        bars.append((f"attmemo, {label.split(':')[0]}{late}", color_of(path), own))
        if rival:
            bars.append((rival, PEERS[exact], [float(best_peer(run, size, exact=exact)["speed"]) for size in sizes]))
    with mpl.rc_context(STYLE | {"xtick.labelsize": 12, "ytick.labelsize": 12, "legend.fontsize": 11}):
        figure = Figure((6.0, 4.2), dpi=120, layout="constrained")
        axes = figure.subplots()
        for place, (label, color, speeds) in enumerate(bars):
            at = [number + 0.175 * (place - 2) for number in range(len(speeds))]
            drawn = axes.bar(at, speeds, 0.165, color=color, label=label)
            axes.bar_label(drawn, fmt="%.1f", fontsize=10)
        axes.axhline(1.0, color=INK, linewidth=1, linestyle="--")
        axes.set_xticks(range(len(sizes)), [f"batch {size}" for size in sizes])
        axes.set_ylabel("speed, original model = 1", fontsize=11)
        axes.legend(loc="upper left", ncols=2)
        axes.set_ylim(top=1.4 * max(max(speeds) for _, _, speeds in bars))
        figure.suptitle(
            f"{MODELS[run['model']['name']]}, {run['stream']['name']} log lines\n{machine_of(run['conditions'])}",
            fontsize=11, color=INK, x=0.01, ha="left",
        )  # fmt: skip
        return png(figure)


def read(name: str) -> Any:
    """A JSON file in docs/."""
    return json.loads((DOCS / name).read_text("utf-8"))


def measure(shared: Path, *, short: bool) -> None:
    """Run the benchmarks that the pages show of this kind of processor; with `short` those of README.md alone."""
    scripts = Path(__file__).parent
    peers, workloads = FILES["amx_bf16" in conditions()["features"]]
    run = partial(subprocess.run, check=True)
    asked = "--first" if short else "--pages"
    run([sys.executable, scripts / "bench_peers.py", shared, DOCS, asked, "--name", peers])
    if not short:
        output = DOCS / f"{workloads}.json"
        run([sys.executable, scripts / "bench_workloads.py", shared, output, *read(output.name)["streams"]])
        run([sys.executable, scripts / "result_pages.py"])


def main() -> None:
    """Write both pages and the plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=Path, metavar="SHARED", help="measure first; texts and models lie in SHARED")
    parser.add_argument("--short", action="store_true", help="measure only the table of README.md")
    args = parser.parse_args()
    if args.measure is not None:
        measure(args.measure, short=args.short)
    peers, others = (read(f"{name}.json") for name, _ in FILES.values())
    workloads = read(f"{FILES[True][1]}.json")
    replace_measured(DOCS.parent / "README.md", readme(peers, workloads))
    replace_measured(DOCS / "measured.md", benchmarks(peers, others))
    (DOCS / "first-page.png").write_bytes(draw(first_run(peers)))


if __name__ == "__main__":
    main()
