"""Running texts through a model and comparing what comes out: answers, and whether they changed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
    """Answers of all texts, ``[Q, C]`` (logits) or ``[Q, H]`` (unit embeddings), in the order of rows.

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
def serving(loaded: LoadedModel, database: Database, lookup: Lookup) -> Iterator[Memoization]:
    """The model memoized while inside, without a gate and at threshold 0; bare afterwards."""
    memoize(loaded.model, 0.0, database, lookup=lookup, gate=False)
    try:
        yield loaded.model.attmemo  # type: ignore[misc]
    finally:
        unmemoize(loaded.model)


def changed(kind: str, exact: Tensor, given: Tensor, min_cosine: float) -> Tensor:
    """Which answers differ: another class, or an embedding whose cosine to the exact one is below `min_cosine`."""
    if kind == "classifier":
        return exact.argmax(1) != given.argmax(1)
    return cosine(exact, given) < min_cosine


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each pair of rows."""
    return nn.functional.cosine_similarity(a, b, dim=1)


def harm(kind: str, exact: Tensor, given: Tensor) -> Tensor:
    """How far answers are apart, continuous: total variation of class probabilities, or one minus the cosine."""
    if kind == "classifier":
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
