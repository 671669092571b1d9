"""Running texts through a model and comparing what comes out: answers, and whether they changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.db import Database
from attmemo.embed.lookup import LookupName
from attmemo.guard.answers import SCORE_STEP, AnswerRule
from attmemo.maps.handle import MapMemoization
from attmemo.memoization import memoize, unmemoize
from attmemo.profiler.models import LoadedModel, Tokens, answers, batches, collate
from attmemo.profiler.turns import Progress, silent

Batch = tuple[list[Tokens], dict[str, Tensor]]
KEPT: Final = 32  # tokens of a language model's answer
ANSWERS: Final[dict[str, AnswerRule]] = {
    "class": "class", "score": "score", "tagger": "spans", "mean": "mean", "cls": "cls"
}  # fmt: skip
"""Answers that a guard reads, by how the application pools, or what the model is."""


def prepare(loaded: LoadedModel, tokens: Sequence[Tokens], size: int, *, sort: bool = True) -> list[Batch]:
    """Batches of similar length, or in the order given, collated once: all paths are asked with the same ones."""
    found = batches(tokens, size) if sort else (list(tokens[n : n + size]) for n in range(0, len(tokens), size))
    return [(batch, collate(loaded, batch)) for batch in found]


def ask(
    loaded: LoadedModel, prepared: Sequence[Batch], *, before: Callable[[list[Tokens]], None] | None = None,
    after: Callable[[list[Tokens]], None] | None = None, tell: Progress = silent, what: str = "answers",
) -> Tensor:  # fmt: skip
    """Answers of all texts, in the order of rows; calls `before` and `after` with each batch, `tell` behind it.

    Answers are as `answers` gives them, but of a language model the `KEPT` likeliest tokens and their probabilities
    ``[Q, K, 2]``: logits of the whole vocabulary would take gigabytes.
    """
    found: list[Tensor] = []
    rows: list[int] = []
    total = sum(len(batch) for batch, _ in prepared)
    with torch.inference_mode():
        for batch, inputs in prepared:
            if before is not None:
                before(batch)
            given = answers(loaded, inputs)
            found.append(likeliest(given) if loaded.kind == "language-model" else given)
            rows += [item.row for item in batch]
            if after is not None:
                after(batch)
            tell(what, len(rows), total)
        return torch.cat(found)[torch.tensor(rows).argsort()] if found else torch.zeros(0, 1)


def likeliest(logits: Tensor) -> Tensor:
    """The likeliest tokens of logits ``[B, V]`` and their probabilities ``[B, K, 2]``, the likeliest first."""
    found = logits.softmax(1).topk(min(KEPT, logits.shape[1]))
    return torch.stack([found.indices.float(), found.values], 2)  # a float32 holds numbers up to 16.7 million exactly


@contextmanager
def serving(
    loaded: LoadedModel, database: Database, lookup: LookupName, *, gate: bool = False
) -> Iterator[MapMemoization]:
    """The model memoized while inside, at threshold 0; bare afterwards."""
    memoize(loaded.model, 0.0, database, lookup=lookup, gate=gate)
    try:
        yield loaded.model.attmemo  # type: ignore[misc]
    finally:
        unmemoize(loaded.model)


def perplexity(loaded: LoadedModel, prepared: Sequence[Batch], most: int = 1 << 27) -> tuple[float | None, int]:
    """Perplexity of a language model on the texts themselves, teacher-forced, and how many tokens it was asked for.

    Every valid token but the first of each text counts alike: exp of their mean negative log-likelihood, in nats; None
    if there is none. Of a memoized model it flatters, if anything: each map was looked up with the whole text in view.
    A batch with more than `most` logits is run several times, for some positions each: split by rows it would not be
    the batch that the gate was asked about.
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
                given, wanted = logits[:, : len(kept)].flatten(0, 1).float(), targets[:, kept].flatten()
                total += float(nn.functional.cross_entropy(given, wanted, reduction="sum"))
                count += int((wanted >= 0).sum())
    return (math.exp(total / count) if count else None), count


def changed(kind: str, exact: Tensor, given: Tensor, min_cosine: float) -> Tensor:
    """Which answers differ: another class, other spans, another next token, a score that moved by more than a step, or
    an embedding with a lower cosine."""
    if exact.ndim == 1:
        return exact != given
    if kind == "language-model":
        return exact[:, 0, 0] != given[:, 0, 0]
    if kind == "classifier":
        return harm(kind, exact, given) > SCORE_STEP if exact.shape[1] == 1 else exact.argmax(1) != given.argmax(1)
    return cosine(exact, given) < min_cosine


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of each pair of rows."""
    return nn.functional.cosine_similarity(a, b, dim=1)


def harm(kind: str, exact: Tensor, given: Tensor) -> Tensor:
    """How far answers are apart, from 0: total variation of the probabilities, of scores too, or one minus the cosine.

    Of next tokens only the likeliest are known: a token outside a list counts as impossible there.
    """
    if exact.ndim == 1:
        return (exact != given).float()
    if kind == "language-model":
        parts = zip(torch.split(exact, 1024), torch.split(given, 1024), strict=True)
        return torch.cat([_variation_of_lists(one, other) for one, other in parts])
    if kind == "classifier" and exact.shape[1] == 1:
        return (exact.sigmoid() - given.sigmoid()).abs()[:, 0]
    if kind == "classifier":
        return 0.5 * (exact.softmax(1) - given.softmax(1)).abs().sum(1)
    return 1.0 - cosine(exact, given)


def _variation_of_lists(one: Tensor, other: Tensor) -> Tensor:
    """Total variation of distributions of which lists ``[Q, K, 2]`` of tokens and probabilities are known."""
    p, q = one[..., 1], other[..., 1]
    both = one[:, :, None, 0] == other[:, None, :, 0]
    found = (both * q[:, None, :]).sum(2)  # the other's probabilities of the tokens of the one
    alone = q.sum(1) - found.sum(1)
    return 0.5 * ((p - found).abs().sum(1) + alone + (p.sum(1) - q.sum(1)).abs())
