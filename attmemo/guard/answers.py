"""What an answer is, and when two answers differ.

An answer is read from the model's own output: the class of its logits, an embedding pooled as the application pools
it, or what a function makes of the output. Numbers of whole type are classes: another class is another answer. Vectors
differ if their cosine is below a bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import torch
from torch import Tensor

from attmemo.errors import AnswerError, ArgumentError

AnswerRule = Literal["auto", "class", "mean", "cls"] | Callable[[Any], Tensor]
NAMES = ("auto", "class", "mean", "cls")

FUNCTION: Final = "give answer= a function of the model's output that returns classes [B] or vectors [B, H]"


@dataclass(frozen=True, slots=True)
class Read:
    """The answers of a batch."""

    values: Tensor  # [B] classes or [B, H] vectors
    margins: Tensor | None  # [B]: between the probabilities of the two best classes

    def of(self, place: int) -> Read:
        """One answer alone."""
        return Read(self.values[place : place + 1], None if self.margins is None else self.margins[place : place + 1])

    def margin(self, place: int) -> float | None:
        """The margin of one answer; None if there is none."""
        return None if self.margins is None else float(self.margins[place])

    @property
    def are_vectors(self) -> bool:
        """Whether the answers are vectors."""
        return self.values.is_floating_point()


class Answer(NamedTuple):
    """One answer, and how sure it is."""

    read: Read
    number: int  # in `read`
    margin: float | None

    @property
    def vector(self) -> Tensor:
        """The answer, if it is a vector."""
        return self.read.values[self.number]

    @property
    def alone(self) -> Answer:
        """The same without the rest of its batch."""
        return Answer(self.read.of(self.number), 0, self.margin)


class Answers:
    """Reads answers and compares them.

    Parameters
    ----------
    rule : {"auto", "class", "mean", "cls"} or callable
        What an answer is; see `attmemo.memoize`.
    min_cosine : float
        Vectors with a lower cosine are different answers.

    Raises
    ------
    ArgumentError
        The rule is none of these, or `min_cosine` is not in [-1, 1].
    """

    def __init__(self, rule: AnswerRule, min_cosine: float) -> None:
        if not callable(rule) and rule not in NAMES:
            raise ArgumentError(f"answer must be one of {', '.join(NAMES)}, or a function; got {rule!r}.", FUNCTION)
        if not isinstance(min_cosine, int | float) or not -1.0 <= min_cosine <= 1.0:
            raise ArgumentError(f"min_cosine must be a number in [-1, 1]; got {min_cosine!r}.", "min_cosine=0.98")
        self.rule, self.min_cosine = rule, float(min_cosine)
        self.are_vectors = False  # known once a first answer was read

    @property
    def name(self) -> str:
        """The rule in a word."""
        return self.rule if isinstance(self.rule, str) else getattr(self.rule, "__qualname__", "function")

    def read(self, output: Any, mask: Tensor | None) -> Read:
        """The answers in a model's output.

        Parameters
        ----------
        output : model output, mapping, tuple or Tensor
        mask : Tensor or None
            The attention mask ``[B, L]`` that the model was given; used by ``"mean"``.

        Raises
        ------
        AnswerError
            There is no such answer in the output.
        """
        if callable(self.rule):
            values = self.rule(output)
            if not isinstance(values, Tensor) or values.dim() not in (1, 2) or not len(values):
                seen = f"{type(values).__name__} {tuple(values.shape)}" if isinstance(values, Tensor) else repr(values)
                what = f"answer={self.name} must return a tensor [B] of classes or [B, H]; got {seen:.80}."
                raise AnswerError(what, FUNCTION)
            if values.is_floating_point() and values.dim() != 2:
                what = f"answer={self.name} returned one number a sequence; expected vectors [B, H] or whole numbers."
                raise AnswerError(what, "whole numbers: (output.logits[:, 0] > 0).long()")
            return Read(values.detach().clone(), None)
        hidden = self.pooled_from(output)
        if hidden is None:
            logits = _logits(output)
            if logits is not None and self.rule in ("auto", "class"):
                return _classes(logits)
            if self.rule == "class":
                raise AnswerError("answer='class' needs a model with logits; this output has none.", FUNCTION)
            pooled = _get(output, "sentence_embedding") if self.rule == "auto" else None
            if pooled is not None:
                return Read(pooled.detach().float().clone(), None)
            what = f"an output of type {type(output).__name__} holds no hidden states to pool."
            raise AnswerError(what, FUNCTION)
        hidden = hidden.detach().float()
        if self.rule == "cls":
            return Read(hidden[:, 0].clone(), None)
        if mask is None or mask.dim() != 2 or _is_whole(mask):
            return Read(hidden.mean(1), None)
        valid = mask.to(hidden.dtype)[:, :, None]
        return Read((hidden * valid).sum(1) / valid.sum(1).clamp(min=1.0), None)

    def pooled_from(self, output: Any) -> Tensor | None:
        """The hidden states ``[B, L, H]`` that the answers are pooled from; None if answers are something else."""
        if callable(self.rule) or self.rule == "class":
            return None
        if self.rule == "auto" and (_logits(output) is not None or _get(output, "sentence_embedding") is not None):
            return None
        hidden = _get(output, "last_hidden_state")
        if hidden is None and isinstance(output, Mapping):
            hidden = output.get("token_embeddings")
        if hidden is None and isinstance(output, tuple) and output:
            hidden = output[0]
        return hidden if isinstance(hidden, Tensor) and hidden.dim() == 3 else None

    def differ(self, a: Read, place: int, b: Read, other: int, share: float = 1.0) -> bool:
        """Whether one answer of `a` is another answer than one of `b`; vectors: at this share of the distance."""
        first, second = a.values[place], b.values[other]
        if not first.is_floating_point():
            return not torch.equal(first, second)
        if torch.equal(first, second) and bool(first.isfinite().all()):
            return False  # also for zeros, which have no cosine
        return not 1.0 - cosines(first[None], second[None])[0] <= share * (1.0 - self.min_cosine)


def is_class_of_first_row(rule: AnswerRule, config: Any) -> bool:
    """Whether an answer that is a class is read from the first row, by the head of a model with this configuration.

    A function may read it from all rows.
    """
    pooling = getattr(config, "classifier_pooling", "cls")  # of ModernBERT; other heads take the first row
    return rule in ("auto", "class") and getattr(config, "num_labels", 2) > 1 and pooling == "cls"


def cosines(some: Tensor, others: Tensor) -> list[float]:
    """The cosines of pairs of vectors ``[N, H]``."""
    found: list[float] = torch.nn.functional.cosine_similarity(some.double(), others.double(), dim=1).tolist()
    return found


def _logits(output: Any) -> Tensor | None:
    """The logits of an output, also with return_dict=False."""
    found = _get(output, "logits")
    if found is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        found = output[0] if output[0].dim() == 2 else None
    return found


def _is_whole(mask: Tensor) -> bool:
    """Whether a mask of whole numbers has no padding: a mean is one operation then, and six with weights."""
    return not mask.is_floating_point() and mask.device.type == "cpu" and bool(mask.numpy().all())


def _get(output: Any, name: str) -> Tensor | None:
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def _classes(logits: Tensor) -> Read:
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise AnswerError(f"logits {tuple(logits.shape)} are no classes of sequences.", FUNCTION)
    best = logits.detach().float().softmax(-1).topk(2, -1).values
    return Read(logits.argmax(-1), best[:, 0] - best[:, 1])
