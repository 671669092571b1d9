"""docs/peers.md and docs/peers.png, made from docs/peers.json alone."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from peers_inputs import MODELS, STREAMS

from attmemo.profiler.peers import sentences, title_of, verdicts
from attmemo.profiler.peers.paths import CACHE, PATHS
from attmemo.profiler.peers.verdict import SURE
from attmemo.profiler.plots import GREY, ORANGE, STYLE, png
from attmemo.profiler.way_plots import color_of

__all__ = ["draw", "sentences", "text"]

Run = Mapping[str, Any]
FEW = 0.1  # share of the texts that records served, below which rows are packed blocks
BUSY = 0.1  # share of the processors that other programs took
HEAD = """# Beside other runtimes

Time, quality, memory and set-up of every way to the same answers: the stock model, `torch.compile`, OpenVINO, ONNX
Runtime, attmemo, and a cache of exact duplicates. On your own model and texts:

```sh
pip install openvino nncf onnxruntime onnx onnxscript   # the runtimes that you want to see; none is needed
attmemo bench peers MODEL FILE
attmemo bench peers MODEL FILE --batch 1,8 --paths stock,openvino-int8,none,rows --output peers.json --plot peers.png
```

FILE has texts in the order in which they came. The first fifth prepares 8-bit forms and warms all paths up. The paths
then take turns on the same batches, each in a process of its own. All answer some windows of the stream; attmemo rows
answers every text, begins with nothing at each batch size, and so has learned what came before each window.

This page is made from `docs/peers.json`, which `scripts/bench_peers.py` writes.
"""
RULES = """How to read the tables:

* A number without a unit is a speed: the stock model in the order of arrival has 1.
* The best peer is the fastest path that is not of attmemo. A path does not count if its answers show, with {sure:g} %
  confidence, more changes than the budget of {budget:g} %. On few texts one change does not show that.
* *sorted*: a window of texts in the order of their lengths, for work that can wait.
* *cache*: a cache of exact duplicates in front of the exact path that was fastest on the first part. The cache counts
  as attmemo where that path is attmemo none, else as a peer.
* *changed*: answers unlike those of the stock model in float32: another class, or a cosine below {cosine:g}. Behind
  it, of embeddings, the mean cosine and the lowest 1 %.
* *late*: rows in the window of the last third of the stream, where the guard has learned the most.
"""
RANDOM = (
    "The weights of this shape are random. Its speeds mean what they say; its answers mean nothing, so every path "
    "counts, whatever it changes.\n"
)


def text(found: Mapping[str, Any]) -> str:
    """The page. `found` is what docs/peers.json holds."""
    runs = [run for run in found["runs"] if "failed" not in run]
    parts = [HEAD, _who_wins(runs), "![Speed of each path on each stream](peers.png)\n"]
    if runs:
        parts.append(RULES.format(budget=100 * runs[0]["budget"], cosine=runs[0]["min_cosine"], sure=100 * SURE))
    for title, group in _groups(runs).items():
        random = RANDOM if group[0]["model"].get("random") else ""
        parts += [f"## {title}\n", random, _speeds(group), _paths(group)]
    parts += [_failures(found["runs"]), _conditions(runs)]
    return "\n".join(part.rstrip() + "\n" for part in parts if part)


def _groups(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Runs of each model and number type."""
    found: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        found[f"{MODELS[run['model']['name']]}, {run['model']['dtype']}"].append(run)
    return dict(found)


def _who_wins(runs: list[Run]) -> str:
    """Where a peer wins comes first."""
    cases = [(run, one) for run in runs for one in verdicts(run)]
    lost = sum(one.peer_wins for _, one in cases)
    lines = ["## Who wins\n", f"A peer wins in {lost} of {len(cases)} cases, attmemo in {len(cases) - lost}."]
    lines += [_caution(runs), ""]
    lines += _by_model(runs, "A peer wins", lambda run: [_margin(one) for one in verdicts(run) if one.peer_wins])
    lines += ["", *_ratios(runs, late=False), _late(runs)]
    return "\n".join(lines)


def _ratios(runs: list[Run], *, late: bool) -> list[str]:
    """A table of how many times as fast the best way of attmemo is as the best peer."""
    streams = [stream for stream in STREAMS if any(run["stream"]["name"] == stream for run in runs)]
    lines = [
        "How many times as fast the fastest way of attmemo is as the fastest peer"
        f"{', in the last third of each stream' if late else ''}. Batches of "
        f"{', '.join(map(str, max((run['batch'] for run in runs), key=len, default=[])))}; bold: the peer is faster.",
        "", f"| | {' | '.join(streams)} |", f"|{(1 + len(streams)) * '---|'}",
    ]  # fmt: skip
    for title, group in _groups(runs).items():
        of = {run["stream"]["name"]: verdicts(run, late=late) for run in group}
        cells = [", ".join(map(_ratio, of.get(name, []))).strip("–, ") or "–" for name in streams]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return [*lines, ""]


def _ratio(one: Any) -> str:
    if one.own is None or one.peer is None:
        return "–"
    found = f"{one.own[one.key] / one.peer[one.key]:.2f}"
    return f"**{found}**" if one.peer_wins else found


def _by_model(runs: list[Run], what: str, said: Callable[[Run], list[str]]) -> list[str]:
    """A line for each model: what is said of its streams."""
    lines = []
    for title, group in _groups(runs).items():
        places = [f"{run['stream']['name']} ({'; '.join(words)})" for run in group if (words := said(run))]
        if places:
            lines.append(f"* {what} with {title}: {', '.join(places)}.")
    return lines


def _late(runs: list[Run]) -> str:
    """Where reuse of rows is the fastest of all ways, once the guard has learned."""
    cases = [one for run in runs for one in verdicts(run, late=True) if one.own or one.peer]
    if not cases:
        return ""
    won, lost = sum(map(_rows_win, cases)), sum(one.peer_wins for one in cases)
    lines = [
        "Of the windows that all ways answer, the last one lies in the last third of the stream, where the guard has "
        "learned the most (streams of few texts have none). There reuse of rows is the fastest of all ways within the "
        f"budget in {won} of {len(cases)} cases, another way of attmemo in {len(cases) - won - lost}, "
        f"a peer in {lost}.",
        "",
    ]
    lines += _by_model(runs, "Rows are the fastest late in the stream", lambda run: [
        f"{_margin(one)}{_beside(run, one)}" for one in verdicts(run, late=True) if _rows_win(one)
    ])  # fmt: skip
    return "\n".join([*lines, "", *_ratios(runs, late=True)])


def _rows_win(one: Any) -> bool:
    return not one.peer_wins and _reuses(one.own)


def _reuses(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is one of rows, and records served some texts."""
    counts = cell.get("counts", {})
    return cell["path"] in ("rows", "rows-int8") and counts["served"] >= FEW * counts["sequences"]


def _beside(run: Run, one: Any) -> str:
    """How the fastest way of attmemo compares with packed blocks of the same arithmetic."""
    none = _cell(run, one.own["path"].replace("rows", "none"), one.batch)
    if none is None or none[one.key] is None:
        return ""
    return f" and {one.own[one.key] / none[one.key]:.2f} times {title_of(none)}"


def _caution(runs: list[Run]) -> str:
    """What a reader must know of this state of the page; a line or none."""
    pairs, found = len(MODELS) * len(STREAMS), len({(run["model"]["name"], run["stream"]["name"]) for run in runs})
    busy = sum(_others(run) > BUSY for run in runs)
    said = [f"Only {found} of {pairs} pairs of a model and a stream were measured so far."] if found < pairs else []
    if busy:
        said.append(
            f"In {busy} of {len(runs)} runs other programs took more than {100 * BUSY:g} % of the processors: read "
            "their times with care."
        )
    return " ".join(said)


def _others(run: Run) -> float:
    """The greatest share of the processors that other programs took while a column of cells was measured."""
    return float(max(one["others"] for one in run["conditions"]["runs"]))


def _margin(one: Any) -> str:
    """By how much the winner is ahead."""
    first, second = (one.peer, one.own) if one.peer_wins else (one.own, one.peer)
    if first is None or second is None:
        return f"batch {one.batch}"
    ratio = first[one.key] / second[one.key]
    return f"batch {one.batch}: {title_of(first)} {ratio:.2f} times {title_of(second)}"


def _cell(run: Run, path: str, size: int) -> Mapping[str, Any] | None:
    """The cell of a path in the order of arrival, if it has a number."""
    for cell in run["cells"]:
        if (cell["path"], cell["batch"], cell["by_length"]) == (path, size, False) and "speed" in cell:
            return cell  # type: ignore[no-any-return]
    return None


def _speed(cell: Mapping[str, Any] | None, key: str = "speed") -> str:
    return "–" if cell is None or cell[key] is None else f"{cell[key]:.2f}"


def _quality(cell: Mapping[str, Any] | None) -> str:
    if cell is None:
        return "–"
    quality = cell["quality"]
    near = f", {quality['cosine_mean']:.4f}, {quality['cosine_p1']:.4f}" if "cosine_mean" in quality else ""
    return f"{100 * quality['changed']:.1f} %{near}"


def _speeds(group: list[Run]) -> str:
    """A row for each stream and batch size."""
    lines = [
        "| stream | batch | best peer | its speed | its answers: changed | attmemo none | maps | changed | rows "
        "| rows, late | changed | none int8 | changed | rows int8 | late | changed | cache "
        "| faster, but changes more than the budget |",
        f"|{18 * '---|'}",
    ]
    for run in group:
        for one in verdicts(run):
            none, maps, rows, none8, rows8, cache = (_cell(run, path, one.batch) for path in (*LINES,))
            beyond = one.beyond
            name = "–" if one.peer is None else title_of(one.peer)
            cells = (
                run["stream"]["name"], str(one.batch), f"**{name}**" if one.peer_wins else name, _speed(one.peer),
                _quality(one.peer), _speed(none), _speed(maps), _quality(maps), _speed(rows),
                _speed(rows, "late_speed"), _quality(rows), _speed(none8), _quality(none8), _speed(rows8),
                _speed(rows8, "late_speed"), _quality(rows8),
                "–" if cache is None else f"{title_of(cache)}: {_speed(cache)}",
                "–" if beyond is None else f"{title_of(beyond)}: {_speed(beyond)} ({_quality(beyond)})",
            )  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Bold: the peer wins."]) + "\n"


def _paths(group: list[Run]) -> str:
    """Set-up and memory of each path: medians over the streams."""
    size = max(group[0]["batch"])
    lines = [
        f"Set-up and memory, medians over the streams; memory with batches of {size}:\n",
        "| path | convert, s | load, s | memory, MiB |", "|---|---|---|---|",
    ]  # fmt: skip
    for path, route in PATHS.items():
        ready = [run["paths"][path] for run in group if "loading_s" in run["paths"].get(path, {})]
        cells = [cell for run in group if (cell := _cell(run, path, size)) is not None]
        if ready and cells:
            convert, load = (statistics.median(one[key] for one in ready) for key in ("converting_s", "loading_s"))
            memory = statistics.median(cell["memory"] for cell in cells) / (1 << 20)
            lines.append(f"| {route.title} | {convert:.1f} | {load:.1f} | {memory:.0f} |")
    return "\n".join(lines) + "\n"


def _failures(runs: Iterable[Run]) -> str:
    """What has no number, with its reason."""
    found: dict[str, list[str]] = defaultdict(list)
    for run in runs:
        name, stream = MODELS[run["model"]["name"]], run["stream"]["name"]
        if "failed" in run:
            found[f"{name}, the whole pair: {run['failed']}"].append(stream)
            continue
        for path in run["paths"].values():
            if "left_out" in path:
                found[f"{name}, {path['title']}: {path['left_out']}"].append(stream)
        for cell in run["cells"]:
            if "left_out" in cell and "left_out" not in run["paths"].get(cell["path"], {}):
                what = f"{name}, {title_of(cell)}, batches of {cell['batch']}: {cell['left_out']}"
                found[what].append(stream)
    lines = [f"* {what} ({', '.join(streams)})" for what, streams in found.items()]
    return "\n".join(["## What failed or was left out\n", *(lines or ["Nothing."])]) + "\n"


def _conditions(runs: list[Run]) -> str:
    """Machine, versions, and what each pair was measured on."""
    lines = ["## Conditions\n"]
    told = dict.fromkeys(_machine(run["conditions"]) for run in runs)
    lines += [f"* {one}" for one in told]
    lines += [
        "", "*Other work*: the share of all processors that other programs took while cells were measured. "
        "*Guard*: its state at the end, with the largest batches; while it learns, it serves little. *Version*: the "
        "commit of attmemo, where it was kept.", "",
        "| model | stream | float type | texts | answered by all | tokens, mean | duplicates | other work | guard "
        "| version |", f"|{10 * '---|'}",
    ]  # fmt: skip
    for run in runs:
        stream, rows = run["stream"], _cell(run, "rows", max(run["batch"]))
        guard = rows["counts"].get("guard", {}).get("state", "–") if rows else "–"
        cells = (
            run["model"]["name"], stream["name"], run["model"]["dtype"], f"{stream['texts']:,}",
            f"{stream['asked_of_all']:,}", f"{stream['tokens_mean']:.0f}", f"{100 * stream['duplicates']:.0f} %",
            f"{100 * _others(run):.0f} %", guard, run["conditions"].get("version", "–"),
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _machine(found: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    return (
        f"{found['cpu']} ({', '.join(found['features'])}), {found['cores']} cores, {found['threads']} threads, "
        f"Python {found['python']}; {packages}"
    )


LINES = {
    "none": ("attmemo none", "s"), "maps": ("attmemo maps", "v"), "rows": ("attmemo rows", "o"),
    "none-int8": ("attmemo none, int8 layers", "P"), "rows-int8": ("attmemo rows, int8 layers", "*"),
    CACHE: ("cache of exact duplicates", "D"),
}  # fmt: skip


def draw(found: Mapping[str, Any]) -> bytes:
    """A panel for each model and batch size: the best peer and the paths of attmemo on each stream. A PNG."""
    groups = _groups(run for run in found["runs"] if "failed" not in run)
    sizes = sorted({size for group in groups.values() for run in group for size in run["batch"]})
    streams = list(dict.fromkeys(run["stream"]["name"] for group in groups.values() for run in group))
    with mpl.rc_context(STYLE):
        figure = Figure((4.0 * max(1, len(sizes)), 2.5 * max(1, len(groups)) + 0.8), dpi=130, layout="constrained")
        grid = figure.subplots(max(1, len(groups)), max(1, len(sizes)), squeeze=False, sharey="row", sharex=True)
        for row, (title, group) in zip(grid, groups.items(), strict=False):
            for axes, size in zip(row, sizes, strict=True):
                _panel(axes, group, size, streams)
                axes.set_title(f"{title if size == sizes[0] else ''}\nbatches of {size}", fontsize=9)
            row[0].set_ylabel("speed, stock = 1")
            row[0].set_ylim(0.0, 1.05 * max(axes.dataLim.ymax for axes in row))
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6)
        return png(figure)


def _panel(axes: Any, group: list[Run], size: int, streams: list[str]) -> None:
    best = dict.fromkeys(streams, np.nan)
    own: dict[str, dict[str, float]] = {path: dict(best) for path in LINES}
    for run in group:
        name = run["stream"]["name"]
        for one in verdicts(run):
            if one.batch == size and one.peer is not None:
                best[name] = one.peer["speed"]
        for path, values in own.items():
            cell = _cell(run, path, size)
            if cell is not None:
                values[name] = cell["speed"]
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1, label="stock")
    places = np.arange(len(streams))
    axes.bar(places, list(best.values()), 0.62, color=ORANGE, alpha=0.55, label="best peer within the budget")
    for shift, (path, (label, mark)) in zip(np.linspace(-0.28, 0.28, len(LINES)), LINES.items(), strict=True):
        axes.plot(places + shift, list(own[path].values()), mark, color=color_of(path), label=label, markersize=5)
    axes.set_xticks(places, streams, rotation=35, ha="right")
    axes.set_xlim(-0.6, len(streams) - 0.4)
