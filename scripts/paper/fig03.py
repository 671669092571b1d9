"""AttMEMO Fig. 3: how similar the most similar stored map is, by layer."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure as Plot

from paper import sst2
from paper.exhaustive import best_padded, best_valid, padded_maps
from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.plots import PAPER, legend, sheet

BAND = 0.492  # of the maps of layer 0 lie between 0.7 and 0.9
PADDED, VALID = "padded to 128, first head", "valid tokens, all heads"


def measure(run: Run) -> Found:
    stored_count, asked_count, length = run.size((3000, 300, 128), (40, 10, 64))
    loaded = sst2.model(run)
    stored, asked = (
        sorted(sst2.tokens(loaded, sst2.sentences(run, part, count)[0]), key=len)
        for part, count in (("train", stored_count), ("test_labeled", asked_count))
    )
    width = max(map(len, [*stored, *asked]))
    records, queries = (padded_maps(loaded, items, length, width) for items in (stored, asked))
    run.tell("maps captured")
    scores = {PADDED: [best_padded(*pair)[0] for pair in zip(queries, records, strict=True)]}
    scores[VALID] = best_valid(loaded, stored, asked)
    ways = {name: [_spread(values.clamp_min(0.0).tolist()) for values in by] for name, by in scores.items()}
    tokens = sum(map(len, asked)) / len(asked)
    return {"stored": len(stored), "asked": len(asked), "padded_to": length, "mean_tokens": tokens, "ways": ways}


def _spread(values: list[float]) -> dict[str, Any]:
    """Mean, and the shares that the paper speaks of."""
    count = len(values)
    places = [min(19, int(value * 20)) for value in values]
    return {
        "mean": sum(values) / count,
        "between_.7_and_.9": sum(0.7 <= value < 0.9 for value in values) / count,
        "from_.7": sum(value >= 0.7 for value in values) / count,
        "histogram": [places.count(place) / count for place in range(20)],
    }


def claims(found: Found) -> list[Claim]:
    padded, valid = found["ways"][PADDED], found["ways"][VALID]
    first, means = padded[0]["between_.7_and_.9"], [row["mean"] for row in valid]
    high = [row["from_.7"] for row in padded]
    return [
        Claim(
            "many maps of layer 0 have a record with a similarity of 0.7 to 0.9", percent(BAND, 1),
            f"{percent(first)} padded ({percent(high[0])} from 0.7 on), "
            f"{percent(valid[0]['between_.7_and_.9'])} over valid tokens",
            judge(high[0] >= BAND, valid[0]["from_.7"] >= BAND), "rows of padding are alike in all maps",
        ),
        Claim(
            "similarity differs by layer", "4 layers shown",
            f"means from {min(means):.2f} to {max(means):.2f} over valid tokens",
            judge(max(means) - min(means) > 0.05),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"minilm-sst2 (6 layers), {found['stored']:,} random train phrases stored, {found['asked']} test sentences "
        f"asked, exhaustive search; padded to {found['padded_to']} tokens with a mask, first head, as in the paper; "
        "and over valid tokens, records of the same length, all heads. Paper: BERT-base, 60,000 stored, 600 asked. "
        f"{where(found)}."
    )


def rows(found: Found) -> str:
    head = ("layer", *(f"{name}: {what}" for name in found["ways"] for what in ("mean", "0.7–0.9", "≥ 0.7")))
    keys = ("between_.7_and_.9", "from_.7")
    lines = []
    for layer in range(len(found["ways"][PADDED])):
        cells: list[object] = [layer]
        for way in found["ways"].values():
            cells += [f"{way[layer]['mean']:.3f}", *(percent(way[layer][key]) for key in keys)]
        lines.append(cells)
    return table(head, lines)


def why(found: Found) -> str:
    padded, valid = ([row["mean"] for row in found["ways"][name]] for name in (PADDED, VALID))
    return (
        f"A sentence here has {found['mean_tokens']:.0f} tokens, so most of the rows of a padded map belong to "
        "padding. Rows of padding look at the same few tokens in every map, and Eq. 1 counts them like the others. "
        f"Padded, the mean similarity is {min(padded):.2f} to {max(padded):.2f}; over valid tokens, "
        f"{min(valid):.2f} to {max(valid):.2f}. A query over valid tokens has fewer records to choose from, because "
        "a record serves only its own length, and has to match in all heads, not in one. The database is smaller "
        "than the paper's, which lowers both."
    )


def draw(found: Found) -> Plot:
    figure, axes = sheet(2, "Similarity of the best record, by layer", 5.4)
    middles = [0.05 * place + 0.025 for place in range(20)]
    for own, (name, way) in zip(axes, found["ways"].items(), strict=True):
        for layer, row in enumerate(way):
            own.plot(middles, [100 * share for share in row["histogram"]], "o-", label=f"layer {layer}", markersize=3)
        own.axvspan(0.7, 0.9, color=PAPER, alpha=0.1, label=f"paper, layer 0: {percent(BAND, 1)} in here")
        own.set(title=name, xlabel="similarity score (bins of 0.05)", ylabel="% of the queries", xlim=(0, 1))
        legend(own, loc="upper left")
    return figure


FIGURE = Figure("fig03", "AttMEMO Fig. 3: similarity by layer", measure, claims, caption, rows, why, draw)
