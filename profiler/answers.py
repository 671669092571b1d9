"""Running texts through a model and comparing what comes out: answers, and whether they changed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.db import Database
from attmemo.engine import Lookup
from attmemo.memoization import Memoization, memoize, unmemoize
from attmemo.profiler.models import LoadedModel, Tokens, answers, batches, collate

Batch = tuple[list[Tokens], dict[str, Tensor]]


def prepare(loaded: LoadedModel, tokens: Sequence[Tokens], size: int) -> list[Batch]:
    """Batches of similar length, collated once: all paths are asked with the same ones."""
    return [(batch, collate(loaded, batch)) for batch in batches(tokens, size)]


def ask(
    loaded: LoadedModel,
    prepared: Sequence[Batch],
    *,
    after: Callable[[list[Tokens]], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Tensor:
    """Answers of all texts, in the order of rows: ``[Q, C]`` or ``[Q, V]`` (logits), ``[Q, H]`` (unit embeddings).

    Parameters
    ----------
    after : callable, optional
        Called after each batch, with its texts.
    progress : callable, optional
        Called with the number of texts done.
    """
    out: Tensor | None = None
    total, done = sum(len(batch) for batch, _ in prepared), 0
    with torch.inference_mode():
        for batch, inputs in prepared:
            given = answers(loaded, inputs)
            if out is None:
                out = torch.zeros(total, given.shape[1])
            out[[item.row for item in batch]] = given
            if after is not None:
                after(batch)
            done += len(batch)
            if progress is not None:
                progress(done)
    return torch.zeros(0, 1) if out is None else out


@contextmanager
def serving(loaded: LoadedModel, database: Database, lookup: Lookup, *, gate: bool = False) -> Iterator[Memoization]:
    """The model memoized while inside, at threshold 0; bare afterwards."""
    memoize(loaded.model, 0.0, database, lookup=lookup, gate=gate)
    try:
        yield loaded.model.attmemo  # type: ignore[misc]
    finally:
        unmemoize(loaded.model)


def perplexity(loaded: LoadedModel, prepared: Sequence[Batch], most: int = 1 << 27) -> tuple[float | None, int]:
    """Perplexity of a language model on the texts themselves, teacher-forced, and how many tokens it was asked for.

    Every valid token but the first of each text counts alike: exp of their mean negative log-likelihood, in nats; None
    if there is none. Of a memoized model it flatters, if anything: each map was looked up with the whole text in view,
    the tokens that are yet to be predicted too.

    Parameters
    ----------
    most : int
        Logits to hold at once. A batch that has more is run several times, for some positions each: split by rows it
        would not be the batch that the gate was asked about.
    """
    model: Any = loaded.model
    total, count = 0.0, 0
    with torch.inference_mode():
        for _, inputs in prepared:
            ids = inputs["input_ids"]
            rows, length = ids.shape
            targets = ids[:, 1:].masked_fill(inputs["attention_mask"][:, 1:] == 0, -100)  # [B, L - 1]
            step = max(1, most // (rows * int(model.config.vocab_size)))
            for first in range(0, length - 1, step):
                kept = torch.arange(first, min(first + step, length - 1))
                whole = step >= length - 1  # then no argument that some model might not know
                some = {} if whole else {"logits_to_keep": kept}
                logits = model(**inputs, use_cache=False, **some).logits
                wanted = targets[:, kept]
                total += float(
                    nn.functional.cross_entropy(
                        logits[:, : len(kept)].flatten(0, 1).float(), wanted.flatten(), reduction="sum"
                    )
                )
                count += int((wanted >= 0).sum())
    return (math.exp(total / count) if count else None), count


def changed(kind: str, exact: Tensor, given: Tensor, min_cosine: float) -> Tensor:
    """Which answers differ: another class or next token, or an embedding with a cosine to the exact one below that."""
    if kind != "encoder":
        return exact.argmax(1) != given.argmax(1)
    return cosine(exact, given) < min_cosine


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each pair of rows."""
    return nn.functional.cosine_similarity(a, b, dim=1)


def harm(kind: str, exact: Tensor, given: Tensor) -> Tensor:
    """How far answers are apart, continuous: total variation of the probabilities, or one minus the cosine."""
    if kind != "encoder":
        return 0.5 * (exact.softmax(1) - given.softmax(1)).abs().sum(1)
    return 1.0 - cosine(exact, given)


def time_passes(
    loaded: LoadedModel,
    prepared: Sequence[Batch],
    paths: dict[str, Callable[[], nn.Module | None]],
    repeats: int,
    tick: Callable[[], None] | None = None,
    started: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Seconds of a pass over all batches, per path and repeat, interleaved batch by batch.

    Parameters
    ----------
    paths : dict of callable
        Called before a path's turn; switches it on, and returns the model to ask (None: `loaded.model`).
        The order alternates from batch to batch, so that no path always runs on the other's warm caches.
    tick : callable, optional
        Called after each repeat.
    started : callable, optional
        Called once, after the uncounted round and before the first that counts.
    """
    spent = {name: [0.0] * repeats for name in paths}
    names = list(paths)
    with torch.inference_mode():
        for name in names:  # once around, uncounted
            answers(loaded, prepared[0][1], paths[name]())
        if started is not None:
            started()
        for repeat in range(repeats):
            for turn, (_, inputs) in enumerate(prepared):
                shift = (turn + repeat) % len(names)
                for name in names[shift:] + names[:shift]:
                    model = paths[name]()
                    start = time.perf_counter()
                    answers(loaded, inputs, model)
                    spent[name][repeat] += time.perf_counter() - start
            if tick is not None:
                tick()
    return spent
