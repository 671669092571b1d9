"""FastSeq Fig. 1: where the time of beam search goes, before and after."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

import torch
from fastseq_shapes import SHAPES, SPECIAL, make_tokenizer
from matplotlib.figure import Figure as Plot
from transformers import DynamicCache, EncoderDecoderCache, NoRepeatNGramLogitsProcessor

from attmemo import fastseq
from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.plots import PAPER, legend, sheet

# seconds in the paper's profile, and shares after the optimisations
PAPER_SECONDS = {"post-process": 6.8, "n-gram": 4.5, "cache": 3.5, "decode": 3.0}
PARTS = ("encode", "decode", "cache", "n-gram", "post-process", "other")


def measure(run: Run) -> Found:
    return run.part("fastseq-profile", lambda: _profile(run))


def _profile(run: Run) -> Found:
    shape, length, new, batch = run.size(("bart-large", 512, 50, 4), ("tiny", 8, 3, 2))
    torch.manual_seed(0)
    model: Any = SHAPES[shape]().eval()
    tokenizer = make_tokenizer(model.config)
    ids = torch.randint(len(SPECIAL), model.config.vocab_size, (batch, length))
    settings: dict[str, Any] = {
        "attention_mask": torch.ones_like(ids), "num_beams": 4, "max_new_tokens": new, "min_new_tokens": new,
        "no_repeat_ngram_size": 3, "do_sample": False,
    }  # fmt: skip
    fast: Any = fastseq.wrap(model)
    with _clocks(model) as spent:
        start = time.perf_counter()
        tokens = model.generate(ids, **settings)
        middle = time.perf_counter()
        tokenizer.batch_decode(tokens, skip_special_tokens=True)
        end = time.perf_counter()
    stock = {"encode": spent["encode"], "decode": spent["decode"], "cache": spent["cache"], "n-gram": spent["n-gram"]}
    stock |= {"post-process": end - middle, "other": middle - start - sum(stock.values())}
    start = time.perf_counter()
    same = torch.equal(fast.generate(ids, **settings), tokens)
    after = time.perf_counter() - start
    return {
        "shape": shape, "length": length, "new": new, "batch": batch, "beams": 4, "stock": stock,
        "fastseq_seconds": after, "same": same,
    }  # fmt: skip


@contextmanager
def _clocks(model: Any) -> Iterator[dict[str, float]]:
    """Seconds of the parts of the original generation, while inside: their functions are timed by name."""
    spent: dict[str, float] = defaultdict(float)
    deep: list[str] = []  # the cache of an encoder-decoder asks two others: count the outer call alone

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            if part in deep:
                return function(*args, **more)
            deep.append(part)
            start = time.perf_counter()
            try:
                return function(*args, **more)
            finally:
                deep.remove(part)
                spent[part] += time.perf_counter() - start

        return call

    with ExitStack() as undo:
        for owner, name, part in (
            (model.model.encoder, "forward", "encode"),
            (model.model.decoder, "forward", "decode"),
            (model.lm_head, "forward", "decode"),
            (EncoderDecoderCache, "reorder_cache", "cache"),
            (DynamicCache, "reorder_cache", "cache"),
            (NoRepeatNGramLogitsProcessor, "__call__", "n-gram"),
        ):
            before = getattr(owner, name)
            own = isinstance(owner, torch.nn.Module)
            setattr(owner, name, timed(before, part))
            undo.callback(owner.__dict__.pop, name) if own else undo.callback(setattr, owner, name, before)
        yield spent


def _shares(found: Found) -> dict[str, float]:
    total = sum(found["stock"].values())
    return {name: found["stock"][name] / total for name in PARTS}


def claims(found: Found) -> list[Claim]:
    shares = _shares(found)
    around = 1.0 - shares["encode"] - shares["decode"]
    return [
        Claim(
            "more than 80 % of the time of beam search is no encoding and no decoding",
            "more than 80 % (fairseq 0.9, V100)",
            f"{percent(around)}: cache {percent(shares['cache'])}, n-gram {percent(shares['n-gram'], 1)}, "
            "post-process "
            f"{percent(shares['post-process'], 2)}", judge(around > 0.8),
            "the original today, on a CPU: decoding is the time",
        ),
        Claim(
            "after the optimisations most of the time is encoding and decoding",
            "post-process 38 % → 1 %, n-gram 25 % → 1 %",
            f"{sum(found['stock'].values()):.1f} → {found['fastseq_seconds']:.1f} s in all, the same tokens",
            judge(found["same"], found["fastseq_seconds"] < sum(found["stock"].values())),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"{found['shape']}, random weights, float32, batch {found['batch']}, {found['beams']} beams, "
        f"{found['length']} source tokens, {found['new']} new ones, n-gram 3; one run. Decode includes the "
        "projection of the cross-attention states for each beam. Paper: fairseq 0.9.0, BART, batch 32, V100. "
        f"{where(found)}."
    )


def rows(found: Found) -> str:
    shares = _shares(found)
    total = sum(PAPER_SECONDS.values())
    lines: list[tuple[object, ...]] = [
        (
            name, f"{found['stock'][name]:.2f}", percent(shares[name], 1), PAPER_SECONDS.get(name, ""),
            percent(PAPER_SECONDS[name] / total) if name in PAPER_SECONDS else "",
        )
        for name in PARTS
    ]  # fmt: skip
    lines.append(("all", f"{sum(found['stock'].values()):.2f}", "", f"{total:.1f}", ""))
    lines.append(("all, with fastseq", f"{found['fastseq_seconds']:.2f}", "", "", ""))
    return table(("part", "original here, s", "share", "paper before, s", "share of these"), lines)


def why(found: Found) -> str:
    return (
        "The paper's profile is that of a GPU that waits: for Python, for copies to the CPU, for text. On a CPU "
        "the matrix products take longer and nothing waits, and the original has learned since 2021: n-grams are "
        "blocked with tensors, and a text is decoded by a fast tokenizer. What is left of the paper's list is the "
        "cache. Its reordering is copying; its larger cost is hidden in decoding, because cross-attention states are "
        "computed and read once a beam."
    )


def draw(found: Found) -> Plot:
    figure, axes = sheet(2, "Beam search of BART-large: where the time goes", 4.8)
    shares = _shares(found)
    axes[0].barh(list(PARTS), [100 * shares[name] for name in PARTS], color="#2f6c99")
    axes[0].set(title="here: original, CPU", xlabel="% of the time")
    total = sum(PAPER_SECONDS.values())
    axes[1].barh(
        list(PARTS), [100 * PAPER_SECONDS.get(name, 0.0) / total for name in PARTS], color=PAPER,
        label="paper (encode and other not told)",
    )  # fmt: skip
    axes[1].set(title="paper: before, V100", xlabel="% of the parts told")
    for own in axes:
        own.invert_yaxis()
    legend(axes[1], loc="lower right")
    return figure


FIGURE = Figure(
    "fastseq_fig1", "FastSeq Fig. 1: the time of beam search", measure, claims, caption, rows, why, draw, quiet=True
)
