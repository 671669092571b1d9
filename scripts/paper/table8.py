"""AttMEMO Table 8 and Fig. 14: a pruned model, from docs/study-pruned.json."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper.frame import Claim, Figure, Found, Run, document, judge, percent, table
from paper.plots import PAPER, bars, legend, sheet

BASE, LEVELS = 90.31, {"conservative": 89.69, "moderate": 88.12, "aggressive": 82.97}
SAVED = 0.19  # of the time, mean of three models at the conservative level
WAYS = {"padded, eager": "padded to 128, eager", "best": "without padding, on today's best path"}


def measure(run: Run) -> Found:
    study = document("study-pruned")
    return {key: study[key] for key in ("conditions", "data", "pruning", "models")}


def _drops(found: Found, name: str) -> list[float]:
    """Points of accuracy by level, and the same for every batch size: the study asserts it."""
    levels = found["models"][name]["levels"]
    return [100 * (next(iter(row["accuracy"].values())) - row["accuracy_exact"]) for row in levels]


def _saved(found: Found, name: str, way: str) -> list[float]:
    """Share of the time that each level saves."""
    ms = found["models"][name]["times"]["ms"]
    return [1 - ms[f"{way}, {level}"] / ms[f"{way}, exact"] for level in LEVELS]


def claims(found: Found) -> list[Claim]:
    pruned = found["models"]["pruned"]["levels"]
    drops = _drops(found, "pruned")
    same = all(len(set(row["accuracy"].values())) == 1 for part in found["models"].values() for row in part["levels"])
    paper = [value - BASE for value in LEVELS.values()]
    return [
        Claim(
            "accuracy of a model with 85 % of its weights pruned, by level",
            ", ".join(f"{value:+.2f}" for value in paper) + " points",
            ", ".join(f"{drop:+.2f}" for drop in drops) + " points; calls served "
            + ", ".join(percent(row["hit_rate"]) for row in pruned),
            judge(drops[0] > -1.0, drops[1] > -3.0, drops[2] > -8.0),
        ),
        Claim("hits and accuracy are the same for every batch size", "1, 32, 64", "1, 8, 32: the same", judge(same)),
        Claim(
            "a pruned model becomes 19 % faster (Fig. 14)", "19 % at the conservative level",
            "by level " + "; ".join(
                f"{', '.join(f'{100 * saved:+.0f} %' for saved in _saved(found, 'pruned', way))} {said}"
                for way, said in WAYS.items()
            ) + " (batch 32)",
            judge(_saved(found, "pruned", "best")[0] >= SAVED, _saved(found, "pruned", "padded, eager")[1] > 0.05),
            "few free sentences hit at the conservative level; zeros are multiplied like other numbers",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    seen, times = found["conditions"], found["models"]["pruned"]["times"]
    return (
        f"minilm-sst2, {percent(found['pruning']['sparsity'])} of the weights of its linear layers pruned by "
        f"magnitude; {found['data']['stored']:,} phrases stored, {found['data']['asked']} dev sentences, one lookup "
        f"a sequence, gate off, valid tokens; {seen['threads']} thread, torch {seen['torch']} "
        "(scripts/study_pruned.py, [a pruned classifier](study-pruned.md)). Times: the first "
        f"{times['texts']} sentences in batches of {times['batch_size']}, {times['threads']} threads, load "
        f"{times['load']:g} before."
    )


def rows(found: Found) -> str:
    lines: list[tuple[object, ...]] = []
    for name, part in found["models"].items():
        for row in part["levels"]:
            accuracies = " / ".join(f"{100 * value:.2f}" for value in row["accuracy"].values())
            exact = f"{100 * row['accuracy_exact']:.2f}"
            ms = part["times"]["ms"]
            times = [f"{ms[f'{way}, exact']:.1f} → {ms[way + ', ' + row['level']]:.1f}" for way in WAYS]
            lines.append((name, row["level"], f"{row['threshold']:g}", percent(row["hit_rate"], 1), exact, accuracies,
                          percent(row["changed"], 1), *times))  # fmt: skip
    lines += [
        ("paper: pruned", level, "", "", BASE, f"{value} / {value} / {value}", "",
         "-19 %" if level == "conservative" else "", "")
        for level, value in LEVELS.items()
    ]  # fmt: skip
    head = ("model", "level", "threshold", "calls served", "exact, %", "accuracy by batch size, %", "changed answers",
            "padded, eager, ms a text", "best path, ms a text")  # fmt: skip
    return table(head, lines)


def why(found: Found) -> str:
    return (
        "The loss at each level has the paper's size. The pruned model's maps are more alike than those of the "
        "dense model, so that more calls are served at the same threshold. Batch sizes change nothing, as in the "
        "paper: which record serves a sequence does not depend on the others of its batch. Zeros are stored and "
        "multiplied like other numbers, so pruning itself saves no time; what a hit saves is what it saves in the "
        "dense model."
    )


def draw(found: Found) -> Plot:
    figure, axes = sheet(2, "The pruned model, by level", 5.2)
    paper = [value - BASE for value in LEVELS.values()]
    bars(axes[0], list(LEVELS), {"here": _drops(found, "pruned"), "paper": paper})
    axes[0].set(title="change of accuracy", ylabel="points")
    saved = {said: [100 * one for one in _saved(found, "pruned", way)] for way, said in WAYS.items()}
    bars(axes[1], list(LEVELS), {**saved, "paper": [100 * SAVED, None, None]})
    axes[1].set(title="time saved", ylabel="%")
    for own, place in zip(axes, ("lower left", "upper left"), strict=True):
        own.axhline(0, color=PAPER, linewidth=0.6)
        legend(own, loc=place)
    return figure


FIGURE = Figure("table8", "AttMEMO Table 8 and Fig. 14: pruned models", measure, claims, caption, rows, why, draw)
