"""AttMEMO Fig. 15: similarity in a decoder, from docs/study-decoder.json."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper.frame import Claim, Figure, Found, Run, document, judge, percent, table
from paper.plots import PAPER, bars, legend, sheet

LATER = 0.24  # of the maps of layer 15 are above 0.5


def measure(run: Run) -> Found:
    study = document("study-decoder")
    kinds = {}
    for kind, part in study["kinds"].items():
        layers = []
        for row in part["similarity"]["by_layer"]:
            best = row["scores"]["best"]
            shares = {f"above_{bound}": sum(value > bound for value in best) / len(best) for bound in (0.5, 0.6)}
            layers.append({"mean": sum(best) / len(best), **shares})
        kinds[kind] = {"stored": part["stored"], "asked": part["asked"], "layers": layers}
    return {"conditions": study["conditions"], "length": study["length"], "kinds": kinds}


def _words(shares: dict[str, float]) -> str:
    return ", ".join(f"{kind} {percent(share)}" for kind, share in shares.items())


def claims(found: Found) -> list[Claim]:
    first = {kind: part["layers"][0]["above_0.6"] for kind, part in found["kinds"].items()}
    middle = {kind: part["layers"][2]["above_0.5"] for kind, part in found["kinds"].items()}
    falls = [part["layers"][0]["mean"] > part["layers"][2]["mean"] for part in found["kinds"].values()]
    return [
        Claim(
            "in layer 0 of a decoder all maps have a record above 0.6", "100 %", _words(first),
            judge(*(share > 0.99 for share in first.values())),
        ),
        Claim(
            "a layer in the middle has less to offer", "24 % above 0.5 in layer 15 of 32",
            f"layer 2 of 5: {_words(middle)}", judge(*falls),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    counts = ", ".join(f"{kind} {part['stored']:,} / {part['asked']}" for kind, part in found["kinds"].items())
    return (
        f"stories260K (Llama, 5 layers), chunks of {found['length']} tokens without padding, stored / asked: "
        f"{counts}; exhaustive search, all heads; {found['conditions']['threads']} thread "
        "(scripts/study_decoder.py, [a decoder's prefill](study-decoder.md)). Paper: LLaMA-7B, SST-2 in 2,048 tokens, "
        "2,778 stored, 288 asked."
    )


def rows(found: Found) -> str:
    lines = [
        (kind, layer, f"{row['mean']:.3f}", percent(row["above_0.5"]), percent(row["above_0.6"]))
        for kind, part in found["kinds"].items()
        for layer, row in enumerate(part["layers"])
    ]
    return table(("text", "layer", "mean of the best", "above 0.5", "above 0.6"), lines)


def why(found: Found) -> str:
    return (
        "The paper's inputs are sentences in 2,048 tokens; how they are filled it does not say. Chunks of running "
        "text have no padding here. Text of the model's own kind and free prose have few near relatives; prompts "
        "made from templates have many. The maps of the first layer are the most alike, as in the paper."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "A decoder's best records: share above 0.5, by layer", 6.4)
    kinds = found["kinds"]
    layers = [str(layer) for layer in range(len(next(iter(kinds.values()))["layers"]))]
    series = {kind: [100 * row["above_0.5"] for row in part["layers"]] for kind, part in kinds.items()}
    bars(axes, layers, series)
    axes.axhline(100 * LATER, color=PAPER, linestyle="--", linewidth=1, label="paper: layer 15 of 32, 24 %")
    axes.set(xlabel="layer", ylabel="% of the queries", ylim=(0, 130))
    legend(axes, ncols=3, loc="upper left")
    return figure


FIGURE = Figure("fig15", "AttMEMO Fig. 15: similarity in a decoder", measure, claims, caption, rows, why, draw)
