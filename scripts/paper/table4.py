"""AttMEMO Table 4: where the time of one self-attention layer goes, with memoization and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure as Plot
from torch import nn

from attmemo.db.index import build_index
from attmemo.embed.siamese import CHANNELS, DIMENSION, SiameseEmbedder
from attmemo.profiler.turns import interleave
from paper.frame import Claim, Figure, Found, Run, judge, table, where
from paper.layers import cell, eager
from paper.parts.limits import threads_kept
from paper.plots import PAPER, sheet

# milliseconds: with memoization, without
PAPER_MS: dict[str, tuple[float | None, float | None]] = {
    "embedding": (38.4, None), "search": (1.0, None), "fetch": (15.1, None), "Q": (None, 32.2), "K": (None, 32.2),
    "V": (32.2, 32.2), "map (QKᵀ, softmax)": (None, 423.3), "other (A·V …)": (163.6, 47.3), "total": (250.3, 567.2),
}  # fmt: skip


def measure(run: Run) -> Found:
    batch, length = run.size((64, 512), (2, 512))
    found = cell(run, "bert", length, batch)
    rows = found["rows"]
    alone = run.part("attention-parts", lambda: _parts(*run.size((batch, length, 12, 64), (2, 16, 2, 4))))["ms"]
    totals = {
        "eager": eager(found)["attention_ms_per_layer"], "fused": rows["exact"]["attention_ms_per_layer"],
        "hit without lookup and fetch": rows["ceiling"]["attention_ms_per_layer"],
        "lookup": rows["memoized-layer"]["lookup_ms_per_layer"],
        "served": rows["memoized-layer"]["serve_ms_per_layer"],
    }  # fmt: skip
    return {"batch": batch, "length": length, "load": found["conditions"]["load"], "parts": alone, "module": totals}


def _parts(batch: int, length: int, heads: int, width: int) -> Found:
    """Milliseconds of each operation by itself."""
    torch.manual_seed(0)
    hidden = heads * width
    states, linear = torch.randn(batch, length, hidden), nn.Linear(hidden, hidden)
    query, key, value = torch.randn(3, batch, heads, length, width)
    mask = torch.zeros(batch, 1, 1, length)
    maps = (query[:, :, :, :1] * 0).expand(batch, heads, length, length).softmax(-1)
    embedder = SiameseEmbedder(
        torch.randn(hidden, CHANNELS), torch.zeros(CHANNELS), torch.randn(length * CHANNELS, DIMENSION),
        torch.eye(DIMENSION),
    )  # fmt: skip
    vectors = np.random.default_rng(0).standard_normal((8192, DIMENSION), np.float32)
    lengths = [length] * batch
    with threads_kept(), torch.inference_mode():
        index = build_index(vectors, "faiss")
        jobs: dict[str, Callable[[int], Any]] = {
            "embedding": lambda _: embedder.embed(states, lengths),
            "search": lambda _: index.search(vectors[:batch], 1),
            "projection (one of Q, K, V)": lambda _: linear(states),
            "map (QKᵀ, softmax), eager": lambda _: (query @ key.transpose(2, 3) * width**-0.5 + mask).softmax(-1),
            "A·V": lambda _: maps @ value,
            "map and A·V, fused": lambda _: nn.functional.scaled_dot_product_attention(query, key, value, mask),
        }
        spent = interleave(jobs, 3)
    return {"ms": {name: one.ms for name, one in spent.items()}}


def _with(found: Found) -> float:
    return float(found["module"]["lookup"] + found["module"]["served"])


def _map(found: Found) -> float:
    """Milliseconds of the map inside of the eager module: what its other operations leave."""
    parts = found["parts"]
    return float(found["module"]["eager"] - 3 * parts["projection (one of Q, K, V)"] - parts["A·V"])


def claims(found: Found) -> list[Claim]:
    parts, module = found["parts"], found["module"]
    old, new = module["eager"] / _with(found), module["fused"] / _with(found)
    share = _map(found) / module["eager"]
    return [
        Claim(
            "a served layer is 2.27 times as fast", "567.2 → 250.3 ms",
            f"{module['eager']:.0f} ms eager, {module['fused']:.0f} ms fused → {_with(found):.0f} ms served "
            f"({old:.2f}x, {new:.2f}x)", judge(old >= 2.27, new >= 2.27), "the map is no longer the most of the time",
        ),
        Claim(
            "the map (QKᵀ, softmax) is three quarters of a layer's time", "423.3 of 567.2 ms (75 %)",
            f"{_map(found):.0f} of {module['eager']:.0f} ms eager ({100 * share:.0f} %; by itself "
            f"{parts['map (QKᵀ, softmax), eager']:.0f} ms); fused, map and A·V take "
            f"{parts['map and A·V, fused']:.0f} of {module['fused']:.0f} ms", judge(share >= 0.7),
        ),
        Claim(
            "of the lookup, the embedding costs most", "38.4 ms, search 1.0 ms",
            f"{parts['embedding']:.1f} ms, search {parts['search']:.1f} ms",
            judge(parts["embedding"] > parts["search"]),
        ),
        Claim(
            "the lookup costs more than the projection that it saves", "38.4 against 32.2 ms (not discussed)",
            f"{module['lookup']:.1f} against {parts['projection (one of Q, K, V)']:.1f} ms",
            judge(module["lookup"] > parts["projection (one of Q, K, V)"]), "a cheaper embedder",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"One BERT layer, batch {found['batch']}, {found['length']} tokens, no padding, float32 (maps stored in "
        "float16); operations by themselves, and the whole attention module without its output projection inside a "
        "model of two layers; the map, eager: the module's time without that of its other operations. Paper: 48 "
        "cores, 1.5 TB of Optane. "
        f"{where(found)}; load {found['load']:g} before the "
        "model."
    )


def rows(found: Found) -> str:
    parts, module = found["parts"], found["module"]
    one, other = (f"{parts[name]:.1f}" for name in ("projection (one of Q, K, V)", "A·V"))
    here: dict[str, tuple[str, str, str]] = {
        "embedding": (f"{parts['embedding']:.1f}", "", ""), "search": (f"{parts['search']:.1f}", "", ""),
        "fetch": ("none: read where it lies", "", ""), "Q": ("", one, one), "K": ("", one, one), "V": (one, one, one),
        "map (QKᵀ, softmax)": ("", f"{_map(found):.1f}", "in A·V"),
        "other (A·V …)": (f"{module['served'] - parts['projection (one of Q, K, V)']:.1f}", other,
                          f"{parts['map and A·V, fused']:.1f}"),
        "total": (f"{_with(found):.1f}", f"{module['eager']:.1f}", f"{module['fused']:.1f}"),
    }  # fmt: skip
    lines = [
        (name, "" if with_ is None else with_, "" if without is None else without, *here[name])
        for name, (with_, without) in PAPER_MS.items()
    ]
    return table(("ms", "paper: with", "paper: without", "here: served", "here: eager", "here: fused"), lines)


def why(found: Found) -> str:
    parts, module = found["parts"], found["module"]
    return (
        "The paper's 423 ms for the map are eager attention on many cores: three passes over a gigabyte. So are the "
        f"{_map(found):.0f} ms here, on two cores of a virtual machine: four tensors of 0.8 GB are asked for and "
        "given back in each layer, and the host has to find their pages. The same operations by themselves, in pages "
        f"that were there, took {parts['map (QKᵀ, softmax), eager']:.0f} ms, and longer in other runs. "
        "A fused kernel never writes the map. On two cores the projections weigh more, and these a hit saves in part "
        f"too. Served, the layer takes {_with(found):.0f} ms, of which {module['lookup']:.1f} ms are the lookup; a "
        f"hit without lookup and fetch takes {module['hit without lookup and fetch']:.0f} ms. Single operations and "
        "the module do not add up where an operation finds in the cache what the one before left there."
    )


def draw(found: Found) -> Plot:
    figure, axes = sheet(2, "One self-attention layer, ms", 4.6)
    module, parts = found["module"], found["parts"]
    one = parts["projection (one of Q, K, V)"]
    here = {
        "served": [("lookup", module["lookup"]), ("V", one), ("A·V and more", module["served"] - one)],
        "eager": [("Q, K, V", 3 * one), ("map", _map(found)), ("A·V", parts["A·V"])],
        "fused": [("Q, K, V", 3 * one), ("map and A·V", parts["map and A·V, fused"])],
    }
    paper = {
        "served": [("lookup", 39.4), ("fetch", 15.1), ("V", 32.2), ("other", 163.6)],
        "eager": [("Q, K, V", 96.6), ("map", 423.3), ("other", 47.3)],
    }
    for own, bars, title in ((axes[0], here, "here"), (axes[1], paper, "paper")):
        most = max(sum(height for _, height in stack) for stack in bars.values())
        for place, (_, stack) in enumerate(bars.items()):
            base = above = 0.0
            for step, (name, height) in enumerate(stack):
                shade = PAPER if title == "paper" else "#2f6c99"
                own.bar(place, height, 0.6, bottom=base, color=shade, alpha=(0.35, 0.6, 0.85, 1.0)[step % 4])
                own.annotate(name, (place + 0.33, max(base + height / 2, above)), fontsize=7, va="center")
                above = max(base + height / 2, above) + 0.045 * most
                base += height
        own.set_xticks(range(len(bars)), list(bars))
        own.set(title=title, ylabel="ms")
        own.margins(x=0.2)
    return figure


FIGURE = Figure(
    "table4", "AttMEMO Table 4: one attention layer", measure, claims, caption, rows, why, draw, quiet=True
)
