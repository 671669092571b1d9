"""The key-value cache: the time of one decoding step against the context, cached and not."""

from __future__ import annotations

import math
from typing import Any

import torch
from matplotlib.figure import Figure as Plot

from attmemo.models.cache_name import CACHE_NAME
from attmemo.profiler.turns import interleave
from paper.frame import Claim, Figure, Found, Run, document, judge, table, where
from paper.parts.shapes import random_inputs, random_model
from paper.plots import legend, sheet

LAYERS = 4


def measure(run: Run) -> Found:
    contexts = run.size((128, 256, 512, 1024, 2048), (8, 16))
    hidden, heads = run.size((768, 12), (32, 2))
    rows, worst = [], 0.0
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        model: Any = random_model("gpt2", hidden, heads, contexts[-1], LAYERS, "float32")
        generator = torch.Generator().manual_seed(0)
        for context in contexts:
            ids = random_inputs("gpt2", generator, 1, context, "float32")["input_ids"]
            cache = model(ids[:, :-1], use_cache=True)[CACHE_NAME]

            def cached(_turn: int, ids: Any = ids, cache: Any = cache) -> Any:
                given = model(ids[:, -1:], **{CACHE_NAME: cache}, use_cache=True).last_hidden_state
                cache.crop(-1)
                return given

            def whole(_turn: int, ids: Any = ids) -> Any:
                return model(ids, use_cache=False).last_hidden_state

            worst = max(worst, float((cached(0)[:, -1] - whole(0)[:, -1]).abs().max()))
            spent = interleave({"cached": cached, "not cached": whole}, run.size(5, 1))
            rows.append({"context": context} | {name: one.ms for name, one in spent.items()})
    operator = [
        {"keys": row["keys"], "ms": row["milliseconds"]["float32"]}
        for row in document("attention-op")["rows"]
        if row["kind"] == "decode" and row["batch"] == 1 and row["queries"] == "float32"
    ]
    return {"layers": LAYERS, "hidden": hidden, "rows": rows, "largest_difference": worst, "operator": operator}


def _order(rows: list[Found], key: str, axis: str = "context") -> float:
    """The exponent of the growth between the last two points."""
    one, other = rows[-2:]
    return math.log(other[key] / one[key]) / math.log(other[axis] / one[axis])


def claims(found: Found) -> list[Claim]:
    last, rows = found["rows"][-1], found["rows"]
    with_, without = (_order(rows, key) for key in ("cached", "not cached"))
    operator = _order(found["operator"], "ms", "keys")
    gain = last["not cached"] / last["cached"]
    return [
        Claim(
            "a cache of keys and values turns a decoding step from O(s²) into O(s)", "O(s²·d) → O(s·d) in attention",
            f"step at {last['context']:,} tokens: {last['not cached']:.0f} → {last['cached']:.1f} ms ({gain:.0f}x); "
            f"growth s^{without:.2f} without, s^{with_:.2f} with the cache; the operator alone s^{operator:.2f}",
            judge(without > 1.0, with_ < 1.05, operator < 1.15),
        ),
        Claim(
            "queries need no cache: the output is the same", "identical",
            f"largest difference {found['largest_difference']:.1e}", judge(found["largest_difference"] < 1e-3),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"GPT-2 with random weights, {found['layers']} layers of width {found['hidden']}, batch 1, float32, no "
        "head; one new token behind a context, with the cache of transformers, and with the whole text computed "
        "again; medians. The operator: docs/attention-op.json, one layer of Llama's heads (32 on 8, 128 wide). "
        f"{where(found)}."
    )


def rows(found: Found) -> str:
    lines = [
        (
            row["context"],
            f"{row['cached']:.1f}",
            f"{row['not cached']:.1f}",
            f"{row['not cached'] / row['cached']:.0f}x",
        )
        for row in found["rows"]
    ]
    return table(("context", "cached, ms a token", "not cached, ms a token", "gain"), lines)


def why(found: Found) -> str:
    first = found["rows"][0]
    return (
        "The article gives orders, no times. A step with the cache has two parts: projections and FFN of one "
        "token, which do not depend on the context, and attention over s keys. Up to 1,024 tokens the first part "
        f"is most of the {first['cached']:.1f} ms. Without the cache, the projections and the FFN of all s tokens "
        "are computed again: linear in s, and more than the quadratic attention at these lengths."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "Time of one decoding step against the context", 6.0)
    contexts = [row["context"] for row in found["rows"]]
    for name, style in (("not cached", "s-"), ("cached", "o-")):
        axes.loglog(contexts, [row[name] for row in found["rows"]], style, label=name, base=2)
    operator = found["operator"]
    axes.loglog(
        [row["keys"] for row in operator],
        [row["ms"] for row in operator],
        "^--",
        base=2,
        label="the operator, one layer",
    )
    last = found["rows"][-1]
    for power, name in ((1, "O(s)"), (2, "O(s²)")):
        guide = [last["not cached"] * (context / contexts[-1]) ** power for context in contexts]
        axes.loglog(contexts, guide, ":", color="#b23a48", linewidth=1, base=2)
        axes.annotate(f"article: {name}", (contexts[0], guide[0]), fontsize=7, color="#b23a48", va="bottom")
    axes.set(xlabel="tokens of context", ylabel="ms")
    axes.set_yscale("log", base=10)
    legend(axes, loc="lower right")
    return figure


FIGURE = Figure(
    "kvcache", "Key-value cache: the O(s) decoding step", measure, claims, caption, rows, why, draw, quiet=True
)
