"""The tables of docs/peers.md, and docs/peers.png, made from docs/peers.json alone; so of docs/peers-avx512.json."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import matplotlib as mpl
import numpy as np
from marked import table
from matplotlib.figure import Figure
from peers_inputs import MODELS, PAGES
from results.files import standing

from attmemo.profiler.peers import sentences, title_of, verdicts
from attmemo.profiler.peers.paths import CACHE, PATHS
from attmemo.profiler.peers.verdict import SURE
from attmemo.profiler.plots import GREY, STYLE, png
from attmemo.profiler.way_plots import color_of
from attmemo.wording import counted

__all__ = ["draw", "sentences", "text"]

Run = Mapping[str, Any]
FEW = 0.1  # share of the texts that records served, below which reuse is exact blocks
BUSY = 0.1  # share of the processors that other programs took
RULES = """How to read the tables:

* A number without a unit is a speed: the original model, with texts in the order of arrival, has 1.
* The best peer is the fastest method that is not attmemo's. A method does not count if its answers show, with {sure:g}
  % confidence, more changes than the budget of {budget:g} %. On few texts one change does not show that.
* *sorted*: a window of texts in the order of their lengths, for work that can wait.
* *cache*: a cache of exact duplicates in front of the exact method that was fastest on the first part. It counts as
  attmemo's where that method is attmemo exact, else as a peer.
* *changed*: answers unlike those of the original model in float32: another class, or a cosine below {cosine:g}. Behind
  it, of embeddings, the mean cosine and the lowest 1 %.
* *late*: reuse in the window of the last third of the stream, where the guard has the most evidence.
* Rows in which a peer wins come first, with the peer in bold.
"""
RANDOM = (
    "The weights of this shape are random. Its speeds mean what they say; its answers mean nothing, so every method "
    "counts, whatever it changes.\n"
)


def text(found: Mapping[str, Any], picture: str = "peers.png") -> str:
    """What lies between the marks of the page. `found` is what docs/peers.json holds; `picture` lies beside it."""
    runs = [run for run in found["runs"] if "failed" not in run]
    parts = [_who_wins(runs), f"![Speed of each method on each stream]({picture})\n"]
    if runs:
        parts.append(RULES.format(budget=100 * runs[0]["budget"], cosine=runs[0]["min_cosine"], sure=100 * SURE))
    for title, group in _groups(runs).items():
        random = RANDOM if group[0]["model"].get("random") else ""
        parts += [f"## {title}\n", random, _speeds(group), _qualities(group), _methods(group), _set_up(group)]
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
    sizes = sorted({size for run in runs for size in run["batch"]})
    lines = [
        "How many times as fast the fastest method of attmemo is as the fastest peer"
        f"{', in the last third of each stream' if late else ''}: median of the streams, lowest and highest; bold: a "
        "peer is faster on one of them.",
        "", f"| | {' | '.join(f'batch {size}' for size in sizes)} |", f"|{(1 + len(sizes)) * '---|'}",
    ]  # fmt: skip
    for title, group in _groups(runs).items():
        judged = [one for run in group for one in verdicts(run, late=late) if one.own and one.peer]
        if judged:
            cells = (_ratio([one for one in judged if one.batch == size]) for size in sizes)
            lines.append(f"| {title} | {' | '.join(cells)} |")
    return [*lines, ""]


def _ratio(judged: list[Any]) -> str:
    if not judged:
        return "–"
    ratios = [one.own[one.key] / one.peer[one.key] for one in judged]
    found = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
    return f"**{found}**" if any(one.peer_wins for one in judged) else found


def _by_model(runs: list[Run], what: str, said: Callable[[Run], list[str]]) -> list[str]:
    """A line for each model: what is said of its streams."""
    lines = []
    for title, group in _groups(runs).items():
        places = [f"{run['stream']['name']} ({'; '.join(words)})" for run in group if (words := said(run))]
        if places:
            lines.append(f"* {what} with {title}: {', '.join(places)}.")
    return lines


def _late(runs: list[Run]) -> str:
    """Late in the stream: where a peer wins comes first, then where reuse is the fastest of all methods."""
    cases = [one for run in runs for one in verdicts(run, late=True) if one.own or one.peer]
    if not cases:
        return ""
    won, lost = sum(map(_rows_win, cases)), sum(one.peer_wins for one in cases)
    lines = [
        "Of the windows that all methods answer, the last one lies in the last third of the stream, where the guard "
        "has the most evidence (streams of few texts have none). There reuse is the fastest of all methods within the "
        f"budget in {won} of {len(cases)} cases, another method of attmemo in {len(cases) - won - lost}, "
        f"a peer in {lost}.",
        "",
    ]
    lines += _by_model(runs, "A peer wins late in the stream", lambda run: [
        _margin(one) for one in verdicts(run, late=True) if one.peer and one.peer_wins
    ])  # fmt: skip
    lines += _by_model(runs, "Reuse is the fastest late in the stream", lambda run: [
        f"{_margin(one)}{_beside(run, one)}" for one in verdicts(run, late=True) if _rows_win(one)
    ])  # fmt: skip
    return "\n".join([*lines, "", *_ratios(runs, late=True)])


def _rows_win(one: Any) -> bool:
    return not one.peer_wins and reuses(one.own)


def reuses(cell: Mapping[str, Any]) -> bool:
    """Whether a cell is one of rows, and records served some texts."""
    counts = cell.get("counts", {})
    return cell["path"] in ("rows", "rows-int8") and counts["served"] >= FEW * counts["sequences"]


def _beside(run: Run, one: Any) -> str:
    """How the fastest way of attmemo compares with packed blocks of the same arithmetic."""
    none = cell_of(run, one.own["path"].replace("rows", "none"), one.batch)
    if none is None or none[one.key] is None:
        return ""
    return f" and {one.own[one.key] / none[one.key]:.2f} times {title_of(none)}"


def _caution(runs: list[Run]) -> str:
    """What a reader must know of this state of the page; a line or none."""
    wanted = {(model, stream) for model, streams in PAGES.items() for stream in streams}
    pairs, found = len(wanted), len(wanted & {(run["model"]["name"], run["stream"]["name"]) for run in runs})
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


def _filled(title: str, head: str, rows: list[tuple[str, ...]]) -> list[str]:
    """A title and a table, without columns that say nothing; nothing, if only the first one says something."""
    names, columns = [name.strip() for name in head.split("|")], list(zip(*rows, strict=True))
    kept = [place for place, column in enumerate(columns) if not set(column) <= {"–", "none"}]
    if len(kept) < 2:
        return []
    shown = ([row[place] for place in kept] for row in rows)
    return [title, *table(" | ".join(names[place] for place in kept), shown)]


def cell_of(run: Run, path: str, size: int) -> Mapping[str, Any] | None:
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


def _judged(group: list[Run]) -> list[tuple[Run, Any]]:
    """Runs and verdicts, a row of a table for each; those in which a peer wins come first."""
    return sorted(((run, one) for run in group for one in verdicts(run)), key=lambda pair: not pair[1].peer_wins)


def _place(run: Run, one: Any) -> str:
    return f"{run['stream']['name']}, {one.batch}"


def _named(cell: Mapping[str, Any] | None, key: Callable[[Mapping[str, Any] | None], str]) -> str:
    return "none" if cell is None else f"{title_of(cell)} {key(cell)}"


def _late_too(cell: Mapping[str, Any] | None) -> str:
    late = "" if cell is None or cell["late_speed"] is None else f", late {cell['late_speed']:.2f}"
    return _speed(cell) + late


def _speeds(group: list[Run]) -> str:
    """Two tables with a row for each stream and batch size."""
    first, second = [], []
    for run, one in _judged(group):
        none, maps, rows, none8, rows8, cache = (cell_of(run, path, one.batch) for path in LINES)
        peer = _named(one.peer, _speed)
        first.append((
            _place(run, one), f"**{peer}**" if one.peer_wins else peer, _speed(none), _speed(none8), _late_too(rows),
            _late_too(rows8),
        ))  # fmt: skip
        second.append((_place(run, one), _speed(maps), _named(cache, _speed), _named(one.beyond, _speed)))
    return "\n".join([
        *_filled("Speed:\n", "stream, batch | best peer | exact | 8 bits | reuse | reuse, 8 bits", first),
        *_filled(
            "Speed of what is not attmemo's default, and of what changes more than the budget:\n",
            "stream, batch | reuse of maps | cache | faster, but changes too much", second,
        ),
    ])  # fmt: skip


def _qualities(group: list[Run]) -> str:
    """Answers of the methods of `_speeds`."""
    rows = []
    for run, one in _judged(group):
        none8, rows4, rows8, maps = (
            cell_of(run, path, one.batch) for path in ("none-int8", "rows", "rows-int8", "maps")
        )
        rows.append((_place(run, one), _quality(one.peer), *map(_quality, (none8, rows4, rows8, maps))))
    head = "stream, batch | best peer | 8 bits | reuse | reuse, 8 bits | reuse of maps"
    return "\n".join(_filled("Answers, changed:\n", head, rows))


def _methods(group: list[Run]) -> str:
    """Speed of every method, medians over the streams, and the most that it changed."""
    sizes, rows = sorted({size for run in group for size in run["batch"]}), []
    for path, route in PATHS.items():
        cells = {size: [cell for run in group if (cell := cell_of(run, path, size)) is not None] for size in sizes}
        every = [cell for own in cells.values() for cell in own]
        if not every:
            continue
        speeds = (
            f"{statistics.median(cell['speed'] for cell in own):.2f}" if own else "left out" for own in cells.values()
        )
        worst = max(every, key=lambda cell: (cell["quality"]["changed"], -cell["quality"].get("cosine_p1", 0.0)))
        rows.append((route.title, *speeds, _quality(worst)))
    head = f"method | {' | '.join(f'batch {size}' for size in sizes)} | changed, at most"
    return "\n".join(
        ["Every method, median speed of the streams, texts in the order of arrival:\n", *table(head, rows)]
    )


def _set_up(group: list[Run]) -> str:
    """Set-up and memory of each method: medians over the streams."""
    size, rows = max(group[0]["batch"]), []
    for path, route in PATHS.items():
        ready = [run["paths"][path] for run in group if "loading_s" in run["paths"].get(path, {})]
        cells = [cell for run in group if (cell := cell_of(run, path, size)) is not None]
        if ready and cells:
            convert, load = (statistics.median(one[key] for one in ready) for key in ("converting_s", "loading_s"))
            memory = statistics.median(cell["memory"] for cell in cells) / (1 << 20)
            rows.append((route.title, f"{convert:.1f}", f"{load:.1f}", f"{memory:.0f}"))
    head = "method | convert, s | load, s | memory, MiB"
    return "\n".join([f"Set-up, and memory with batches of {size}, medians:\n", *table(head, rows)])


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


def _state(cell: Mapping[str, Any]) -> str:
    """The guard's state, in the glossary's words."""
    return standing(str(cell["counts"].get("guard", {}).get("state", "–")))


def _conditions(runs: list[Run]) -> str:
    """Machine, versions, and what each pair was measured on."""
    machines: dict[str, int] = defaultdict(int)
    for run in runs:
        for found in (run["conditions"], *run.get("joined", [])):
            machines[_machine(found)] += 1
    lines = ["## Conditions\n", *(f"* {counted(count, 'run')}: {one}" for one, count in machines.items())]
    lines += [
        "", "*Other work*: the share of all processors that other programs took while cells were measured. "
        "*Guard*: its state at the end, with the largest batches; while it collects evidence, it reuses little.", "",
    ]  # fmt: skip
    rows = []
    for run in runs:
        stream, reused = run["stream"], cell_of(run, "rows", max(run["batch"]))
        rows.append((
            f"{run['model']['name']}, {run['model']['dtype']}, {stream['name']}",
            f"{stream['texts']:,}, {stream['asked_of_all']:,}", f"{stream['tokens_mean']:.0f}",
            f"{100 * stream['duplicates']:.0f} %", f"{100 * _others(run):.0f} %",
            _state(reused) if reused else "no reuse",
        ))  # fmt: skip
    head = "model, type, stream | texts, answered by all | tokens, mean | duplicates | other work | guard"
    return "\n".join([*lines, *table(head, rows)])


def _machine(found: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {number}" for name, number in found["packages"].items())
    commit = f"commit {found['version']}" if "version" in found else "commit not recorded"
    return (
        f"{commit}{', ' + found['date'] if 'date' in found else ''}; {found['cpu']} "
        f"({', '.join(found['features'])}), {found['cores']} cores, {found['threads']} threads, "
        f"Python {found['python']}; {packages}"
    )


LINES = {
    "none": ("attmemo exact", "s"), "maps": ("attmemo reuse of maps", "v"), "rows": ("attmemo reuse", "o"),
    "none-int8": ("attmemo 8 bits", "P"), "rows-int8": ("attmemo reuse, 8 bits", "*"),
    CACHE: ("cache of exact duplicates", "D"),
}  # fmt: skip


def draw(found: Mapping[str, Any]) -> bytes:
    """A panel for each batch size: the best peer and the methods of attmemo, by model and stream. A PNG."""
    runs = [run for group in _groups(run for run in found["runs"] if "failed" not in run).values() for run in group]
    sizes = sorted({size for run in runs for size in run["batch"]})
    names = [f"{run['model']['name']}, {run['stream']['name']}" for run in runs]
    with mpl.rc_context(STYLE | {"axes.grid.axis": "both"}):
        figure = Figure((3.4 * max(1, len(sizes)) + 1.6, 0.3 * len(runs) + 1.6), dpi=130, layout="constrained")
        panels = figure.subplots(1, max(1, len(sizes)), squeeze=False, sharey=True, sharex=True)[0]
        for axes, size in zip(panels, sizes, strict=False):
            _panel(axes, runs, size)
            axes.set_title(f"batches of {size}")
            axes.set_xlabel("speed, original model = 1")
        panels[0].set_yticks(range(len(runs)), names)
        panels[0].invert_yaxis()
        if runs:
            panels[0].set_xlim(0.0, 1.05 * max(axes.dataLim.xmax for axes in panels))
        handles = {label: one for axes in panels for one, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5)
        return png(figure)


def _panel(axes: Any, runs: list[Run], size: int) -> None:
    peers = [[one.peer["speed"] for one in verdicts(run) if one.batch == size and one.peer] for run in runs]
    best = [own[0] if own else np.nan for own in peers]
    axes.barh(range(len(runs)), best, 0.6, color=GREY, alpha=0.55, label="best peer within the budget")
    for path, (label, mark) in LINES.items():
        cells = [cell_of(run, path, size) for run in runs]
        speeds = [np.nan if cell is None else cell["speed"] for cell in cells]
        if not np.isnan(speeds).all():
            axes.plot(speeds, range(len(runs)), mark, color=color_of(path), label=label, markersize=5)
    axes.axvline(1.0, color=GREY, linestyle="--", linewidth=1, label="original model")
