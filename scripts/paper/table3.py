"""AttMEMO Table 3 and Fig. 13: databases of three sizes, what they cost and what they give."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as Plot

from attmemo.db.index import build_index
from attmemo.profiler.answers import ask, changed, prepare, serving
from attmemo.profiler.models import LoadedModel, Tokens
from paper import sst2
from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.plots import PAPER, legend, sheet

# sequences of 512 tokens: GB of the database, hours of training, seconds of indexing
PAPER_ROWS = {4000: (575, 1.0, 192), 6000: (855, 1.5, 278), 8000: (1130, 3.0, 454)}
GAINS = {"BERT": (0.023, 0.018), "DeBERTa": (0.065, 0.18), "RoBERTa": (0.115, 0.14), "GPT-2": (0.05, 0.056)}
THRESHOLD = 0.7


def measure(run: Run) -> Found:
    sizes, asked_count = run.size(((1500, 3000, 6000), 872), ((40, 60, 80), 10))
    loaded = sst2.model(run)
    texts, labels = sst2.sentences(run, "dev", asked_count)
    asked = sst2.tokens(loaded, texts)
    rows = []
    for size in sizes:
        cost = sst2.database(run, size)[1]
        times = ("build_seconds", "build_cpu_seconds", "train_seconds", "train_cpu_seconds")
        kept = {key: cost[key] for key in ("bytes", *times)}
        found = [layer["held_out_similarity_trained"] for key, layer in cost["layers"].items() if key != "-1"]
        row = {"stored": size, "similarity": sum(found) / len(found), **kept}
        rows.append(row | _serve(run, loaded, size, asked, labels) | _index(size))
    return {"asked": asked_count, "threshold": THRESHOLD, "rows": rows}


def _serve(run: Run, loaded: LoadedModel, size: int, asked: list[Tokens], labels: Any) -> dict[str, Any]:
    prepared = prepare(loaded, asked, 32)
    with sst2.open_database(run, size) as database:
        exact = ask(loaded, prepared)
        with serving(loaded, database, "layer") as handle:
            handle.planner.set_thresholds([THRESHOLD] * handle.engine.layers)
            handle.reset_stats()
            answers = ask(loaded, prepared)
            stats = handle.stats()
    lookup = sum(row["ms_lookup"] for row in stats["layers"]) / max(1, sum(row["queries"] for row in stats["layers"]))
    return {
        "rate": stats["hit_rate"], "accuracy_exact": sst2.accuracy(exact, labels),
        "accuracy": sst2.accuracy(answers, labels), "lookup_us": 1e3 * lookup,
        "changed": float(changed(loaded.kind, exact, answers, 0.98).float().mean()),
    }  # fmt: skip


def _index(size: int) -> dict[str, float]:
    """Seconds of the graph of one layer's vectors, as `table` of the paper has for all; and of a search in it."""
    draw = np.random.default_rng(0)
    vectors = draw.standard_normal((size, 128), np.float32)
    before = torch.get_num_threads()
    start = time.perf_counter()
    index = build_index(vectors, "faiss")
    built = time.perf_counter() - start
    asked = vectors[draw.integers(size, size=256)] + 0.05
    start = time.perf_counter()
    for query in asked:
        index.search(query[None], 1)
    spent = (time.perf_counter() - start) / len(asked)
    torch.set_num_threads(before)
    return {"index_seconds": built, "search_us": 1e6 * spent}


def padded_bytes(sequences: int, length: int, layers: int = 12, heads: int = 12) -> int:
    """Dense padded maps in float32, as the paper stores them."""
    return 4 * sequences * layers * heads * length * length


def claims(found: Found) -> list[Claim]:
    first, last = found["rows"][0], found["rows"][-1]
    times = last["stored"] / first["stored"]
    each = last["bytes"] / last["stored"]
    search = last["search_us"] / first["search_us"] - 1
    before = found["rows"][-2]
    grown = last["rate"] - before["rate"]
    return [
        Claim(
            "8,000 sequences of 512 tokens need 1.13 TB", "1130 GB (141 MB a sequence)",
            f"{each / 1e6:.2f} MB a sequence of SST-2, 6 layers, half precision, no padding",
            judge(each > 141e6), "nearly all of the paper's bytes are padding",
        ),
        Claim(
            "training the embedder takes an hour and more", "1 to 3 h",
            f"{first['train_seconds'] / 60:.1f} to {last['train_seconds'] / 60:.1f} min",
            judge(last["train_seconds"] > 3600),
            "linear layers, principal components first",
        ),
        Claim(
            "an index is built in minutes", "192 to 454 s",
            f"{first['index_seconds']:.2f} to {last['index_seconds']:.2f} s a layer",
            judge(last["index_seconds"] * 6 > 192),
            "one vector of 128 numbers a sequence",
        ),
        Claim(
            "a database of twice the size serves more",
            "memoization rate +2.3 % (BERT) to +11.5 % (RoBERTa)",
            f"{percent(before['rate'], 1)} → {percent(last['rate'], 1)} "
            f"({100 * grown:+.1f} points) at a threshold of {found['threshold']:g}; mean similarity of what is found "
            f"{before['similarity']:.3f} → {last['similarity']:.3f}",
            judge(grown > 0.005, last["similarity"] > before["similarity"] + 0.005),
            "free sentences: twice the records bring hardly nearer ones at these sizes",
        ),
        Claim(
            "the time of a search hardly depends on the size", "less than 1 % for twice the size",
            f"{100 * search:+.0f} % for {times:.0f} times the size", judge(search < 0.25, search < 0.02),
            "the logarithm of the size",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        "minilm-sst2, train phrases of at least 8 words (valid tokens, float16), lookup in every layer at a "
        f"threshold of {found['threshold']:g}, {found['asked']} dev sentences in batches of 32, gate off. Seconds "
        "are wall time beside other work. Index: faiss HNSW, one layer's random vectors of 128 dimensions, one "
        f"query a call. {where(found)}."
    )


def rows(found: Found) -> str:
    head = (
        "sequences", "GB", "build, s (CPU s)", "training, s (CPU s)", "index of a layer, s", "search, µs",
        "mean similarity", "memoization rate", "changed answers", "accuracy (exact)",
    )  # fmt: skip
    lines: list[tuple[object, ...]] = [
        (
            f"{row['stored']:,}", f"{row['bytes'] / 1e9:.2f}",
            f"{row['build_seconds']:.0f} ({row['build_cpu_seconds']:.0f})",
            f"{row['train_seconds']:.0f} ({row['train_cpu_seconds']:.0f})", f"{row['index_seconds']:.2f}",
            f"{row['search_us']:.0f}", f"{row['similarity']:.3f}", percent(row["rate"], 1), percent(row["changed"], 1),
            f"{row['accuracy']:.3f} ({row['accuracy_exact']:.3f})",
        )
        for row in found["rows"]
    ]  # fmt: skip
    lines += [
        (f"paper: {count:,} of 512", size, "", f"about {hours:g} h", seconds, "", "", "", "", "")
        for count, (size, hours, seconds) in PAPER_ROWS.items()
    ]
    return table(head, lines)


def why(found: Found) -> str:
    first, last = found["rows"][0], found["rows"][-1]
    formula = padded_bytes(8192, 512) / 2**30
    return (
        f"The paper's sizes are those of dense padded maps in float32: the formula gives {formula:.0f} GiB for "
        "8,192 sequences. Without padding, and in half precision, a sequence of SST-2 takes "
        f"{last['bytes'] / last['stored'] / 1e6:.2f} MB in six layers. So no big memory is needed for this data "
        f"set. From {first['stored']:,} to {last['stored']:,} phrases the mean similarity of what is found "
        f"(held-out phrases, all layers) goes from {first['similarity']:.3f} to {last['similarity']:.3f}, and the "
        f"memoization rate from {percent(first['rate'], 1)} to {percent(last['rate'], 1)}. Thresholds apply to "
        "predicted scores, and each database has curves of its own, so that the rate moves by a point without any "
        "reason in the data. The paper's rates grow by 2 to 12 points; its records hold paddings that match more "
        "easily."
    )


def draw(found: Found) -> Plot:
    figure, axes = sheet(2, "A larger database", 4.8)
    sizes = [row["stored"] for row in found["rows"]]
    axes[0].plot(sizes, [100 * row["rate"] for row in found["rows"]], "o-", label="here")
    start = found["rows"][-2]
    for name, (gain, _) in GAINS.items():
        axes[0].plot(
            [start["stored"], 2 * start["stored"]], [100 * start["rate"], 100 * (start["rate"] + gain)], ":",
            color=PAPER, linewidth=1,
        )  # fmt: skip
        axes[0].annotate(
            f"paper: {name}", (2 * start["stored"], 100 * (start["rate"] + gain)), fontsize=7, color=PAPER
        )
    axes[0].set(title="memoization rate", xlabel="sequences stored", ylabel="%")
    axes[0].margins(x=0.25)
    axes[1].loglog(sizes, [row["bytes"] / 1e9 for row in found["rows"]], "o-", label="here (SST-2, no padding)")
    axes[1].plot(
        list(PAPER_ROWS), [row[0] for row in PAPER_ROWS.values()], "D-", color=PAPER, label="paper (512 tokens)"
    )
    axes[1].set(title="size", xlabel="sequences stored", ylabel="GB")
    axes[1].set_xticks([*sizes, *list(PAPER_ROWS)[::2]], [f"{size:,}" for size in (*sizes, *list(PAPER_ROWS)[::2])])
    legend(axes[1], loc="center left")
    return figure


FIGURE = Figure(
    "table3", "AttMEMO Table 3 and Fig. 13: the size of the database", measure, claims, caption, rows, why, draw
)
