"""AttMEMO Table 2: thresholds of the three levels, here found by the tuner."""

from __future__ import annotations

from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.levels import MODELS, tuned

PAPER_ROWS = {
    "BERT": (0.98, 0.97, 0.96), "RoBERTa": (0.97, 0.96, 0.95), "DeBERTa": (0.9995, 0.9993, 0.9990),
    "GPT-2": (0.9995, 0.99935, 0.9992),
}  # fmt: skip


def measure(run: Run) -> Found:
    models = {}
    for name in MODELS:
        found = tuned(run, name)
        keys = ("level", "budget", "thresholds", "certified", "observed", "upper_bound", "served", "judged")
        levels = [{key: row[key] for key in keys} for row in found["levels"]]
        models[name] = {"stored": found["stored"], "tuned_on": found["tuned_on"], "levels": levels}
    return {"models": models}


def _spread(thresholds: list[float]) -> str:
    """The least and the greatest threshold of the layers that are served."""
    used = [value for value in thresholds if value < 1.0]
    if not used:
        return "nothing served"
    low, high = min(used), max(used)
    layers = f"{len(used)} of {len(thresholds)} layers"
    return f"{low:.2f} ({layers})" if high - low < 0.005 else f"{low:.2f} to {high:.2f} ({layers})"


def claims(found: Found) -> list[Claim]:
    said = "; ".join(
        f"{MODELS[name]}: {_spread(part['levels'][1]['thresholds'])}" for name, part in found["models"].items()
    )
    used = [
        [value for level in part["levels"] for value in level["thresholds"] if value < 1.0]
        for part in found["models"].values()
    ]
    kept = all(row["observed"] <= row["budget"] for part in found["models"].values() for row in part["levels"])
    return [
        Claim(
            "each model needs thresholds of its own", "0.96 to 0.98 (BERT), 0.9990 to 0.9995 (DeBERTa)",
            f"moderate: {said}", judge(len({min(values, default=1.0) for values in used}) > 1),
        ),
        Claim(
            "thresholds lie between 0.95 and 1", "0.95 to 0.9995",
            f"{min(min(values, default=1.0) for values in used):.2f} to "
            f"{max(max(values, default=1.0) for values in used):.2f}",
            judge(all(min(values, default=1.0) >= 0.95 for values in used)),
            "scores here are of valid tokens; rows of padding would raise them",
        ),
        Claim(
            "an autotuner could find the thresholds", "suggested, not made",
            "made: `attmemo tune` keeps a budget of changed answers" if kept else "made, but a budget was exceeded",
            judge(kept),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    parts = "; ".join(
        f"{MODELS[name]}: {part['stored']:,} records, tuned on {part['tuned_on']} texts, of which "
        f"{part['levels'][0]['judged']} certify" for name, part in found["models"].items()
    )  # fmt: skip
    return (
        f"{parts}. One lookup a sequence, one threshold a layer on the predicted score (Eq. 1 over valid tokens), "
        "gate off in the paper's table and on in the tuner. The paper's thresholds were set by hand. "
        f"{where(found)}."
    )


def rows(found: Found) -> str:
    lines: list[tuple[object, ...]] = []
    for name, part in found["models"].items():
        for row in part["levels"]:
            lines.append(
                (
                    MODELS[name], row["level"], percent(row["budget"]), _spread(row["thresholds"]),
                    percent(row["served"], 1), percent(row["observed"], 2),
                    f"{percent(row['upper_bound'], 1)} ({'certified' if row['certified'] else 'not certified'})",
                )
            )  # fmt: skip
    levels = ("conservative", "moderate", "aggressive")
    lines += [
        (f"paper: {name}", *("", "", ", ".join(map(str, values)), "", "", "")) for name, values in PAPER_ROWS.items()
    ]
    head = (
        "model",
        "level",
        "budget of changed answers",
        "thresholds",
        "calls served",
        "changed",
        "upper bound, 95 %",
    )
    return table(head, lines) + f"\n\nThe paper's three values are those of the levels {', '.join(levels)}."


def why(found: Found) -> str:
    return (
        "A threshold is a number on the scale of one embedder and one way to count padding. So the paper's values "
        "cannot be compared with ours, and cannot be carried from model to model; DeBERTa's 0.9995 beside BERT's "
        "0.98 shows this within the paper. What can be compared is the budget: the share of answers that may "
        "change. The tuner takes the budget, tests thresholds on texts that are not in the database, and certifies "
        "a bound."
    )


FIGURE = Figure("table2", "AttMEMO Table 2: thresholds", measure, claims, caption, rows, why)
