"""AttMEMO Fig. 12: similarity against the length that inputs are cut and padded to."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper import sst2
from paper.exhaustive import best_padded, best_valid, padded_maps
from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.plots import PAPER, legend, sheet

MEANS = {16: 0.79, 128: 0.87}  # the paper's text; 32 and 64 are in the plots only


def measure(run: Run) -> Found:
    stored_count, asked_count, lengths = run.size((1000, 150, (16, 32, 64, 128)), (30, 8, (16, 32)))
    loaded = sst2.model(run)
    texts = [sst2.sentences(run, *which)[0] for which in (("train", stored_count, 8), ("test_labeled", asked_count))]
    rows = []
    for length in lengths:
        stored, asked = (sorted(sst2.tokens(loaded, part, length), key=len) for part in texts)
        width = max(map(len, [*stored, *asked]))
        maps = [padded_maps(loaded, part, length, width) for part in (stored, asked)]
        padded = [float(best_padded(q, r)[0].mean()) for r, q in zip(*maps, strict=True)]
        valid = [float(scores[scores >= 0].mean()) for scores in best_valid(loaded, stored, asked)]
        share = sum(map(len, asked)) / (length * len(asked))
        rows.append({"length": length, "padded": padded, "valid": valid, "share_of_valid_tokens": share})
        run.tell(f"length {length}")
    return {"stored": stored_count, "asked": asked_count, "rows": rows}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def claims(found: Found) -> list[Claim]:
    first, last = found["rows"][0], found["rows"][-1]
    padded, valid = ([_mean(row[key]) for row in (first, last)] for key in ("padded", "valid"))
    return [
        Claim(
            "longer inputs are more similar", f"mean {MEANS[16]} at 16 tokens, {MEANS[128]} at 128",
            f"padded {padded[0]:.2f} → {padded[1]:.2f}; valid tokens {valid[0]:.2f} → {valid[1]:.2f}",
            judge(padded[1] > padded[0], valid[1] > valid[0]), "what grows is the padding",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"minilm-sst2, {found['stored']:,} train phrases of at least 8 words stored, {found['asked']} test sentences "
        f"asked, cut to so many tokens and padded to them with a mask (first head, as in the paper), or compared over "
        f"valid tokens (all heads). Means over all layers. Paper: BERT-base, 10,000 stored. {where(found)}."
    )


def rows(found: Found) -> str:
    return table(
        ("tokens", "share that is no padding", "padded: mean over layers", "valid tokens: mean over layers", "paper"),
        [
            (
                row["length"], percent(row["share_of_valid_tokens"]), f"{_mean(row['padded']):.3f}",
                f"{_mean(row['valid']):.3f}", MEANS.get(row["length"], "in the plot only"),
            )
            for row in found["rows"]
        ],
    )  # fmt: skip


def why(found: Found) -> str:
    last = found["rows"][-1]
    return (
        f"At {last['length']} tokens only {percent(last['share_of_valid_tokens'])} of an input is text. From 32 "
        "tokens on the similarity of padded maps grows with the share of padding; over valid tokens it does not "
        "grow, since no sentence has more tokens than fit. At 16 tokens most sentences are cut, and nothing is "
        "padded. Longer text, without padding, is another question ([benchmarks](measured.md))."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "Similarity against the padded length")
    lengths = [row["length"] for row in found["rows"]]
    axes.plot(lengths, [_mean(row["padded"]) for row in found["rows"]], "o-", label="padded, first head")
    axes.plot(lengths, [_mean(row["valid"]) for row in found["rows"]], "s-", label="valid tokens, all heads")
    axes.plot(list(MEANS), list(MEANS.values()), "D", color=PAPER, label="paper (padded)")
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set(xlabel="tokens, padding included", ylabel="mean similarity of the best record", ylim=(0, 1))
    legend(axes, loc="lower right")
    return figure


FIGURE = Figure("fig12", "AttMEMO Fig. 12: similarity against length", measure, claims, caption, rows, why, draw)
