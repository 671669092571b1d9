"""What an answer is, and when two answers differ.

An answer is read from the model's own output: the class of its logits, the spans that its tags of tokens mark, a
score, an embedding pooled as the application pools it, what a classifier of scikit-learn makes of that embedding, or
what a function makes of the output. Numbers of whole type are classes: another class is another answer. Such a number
stands for a list of spans. Vectors differ if their cosine is below a bound, scores if one moved by more than a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.errors import AnswerError, ArgumentError
from attmemo.forward.batch_slices import mask_in
from attmemo.guard.spans import Spans, spans_in
from attmemo.rows.token_kinds import find_tokenizer


class Classifier(Protocol):
    """A fitted classifier of scikit-learn, or one with its methods."""

    classes_: npt.NDArray[Any]

    def predict(self, vectors: npt.NDArray[np.float32], /) -> npt.NDArray[Any]:
        """Return the classes of vectors ``[B, H]``."""


AnswerName = Literal["auto", "class", "spans", "score", "mean", "cls"]
AnswerRule = AnswerName | Callable[[Any], Tensor] | Classifier
NAMES: Final = get_args(AnswerName)
SCORE_STEP: Final = 0.05
"""A score, from 0 to 1, that moved farther is another answer."""
SCORE_COSINE: Final = 0.98
"""Scores are kept as angles: those that are so far apart have this cosine. The greatest angle is below a full turn."""

_LEAST: Final = 1e-16  # the product of two lengths that is as good as none
FUNCTION: Final = "give answer= a function of the model's output that returns classes [B] or vectors [B, H]"


@dataclass(frozen=True, slots=True)
class Read:
    """The answers of a batch."""

    values: Tensor  # [B] classes or [B, H] vectors
    margins: Tensor | None  # [B]: between the probabilities of the two best classes; of spans: the least of a text
    are_scores: bool = False  # as vectors [B, 2]

    def of(self, place: int) -> Read:
        """One answer alone."""
        margins = None if self.margins is None else self.margins[place : place + 1]
        return Read(self.values[place : place + 1], margins, self.are_scores)

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
    rule : {"auto", "class", "spans", "score", "mean", "cls"}, callable or Classifier
        What an answer is; see `attmemo.memoize`.
    min_cosine : float
        Vectors with a lower cosine are different answers.

    Raises
    ------
    ArgumentError
        The rule is none of these, or `min_cosine` is not in [-1, 1].
    """

    def __init__(self, rule: AnswerRule, min_cosine: float) -> None:
        classifies = not callable(rule) and hasattr(rule, "predict")
        if not classifies and not callable(rule) and rule not in NAMES:
            what = f"answer must be one of {', '.join(NAMES)}, a function, or a classifier; got {rule!r}."
            raise ArgumentError(what, FUNCTION)
        if classifies and not hasattr(rule, "classes_"):
            what = f"answer={type(rule).__name__} has no classes_: it is no classifier, or not fitted."
            raise ArgumentError(what, "fit it first, on vectors of this model; for a regressor give a function")
        if not isinstance(min_cosine, int | float) or not -1.0 <= min_cosine <= 1.0:
            raise ArgumentError(f"min_cosine must be a number in [-1, 1]; got {min_cosine!r}.", "min_cosine=0.98")
        self.rule, self.min_cosine = rule, float(min_cosine)
        self._classifier: Any = rule if classifies else None
        self.are_vectors = self.are_scores = False  # known once a first answer was read
        self.spans: Spans | None = None
        self._scores = rule == "score"  # whether a single logit is a score

    def meet(self, model: Any, tokenizer: Any = None) -> None:
        """Learn from a model's class and configuration what its logits are; its tokenizer knows special tokens."""
        config = getattr(model, "config", None)
        tags = self.rule == "auto" and "ForTokenClassification" in type(model).__name__
        if tags or self.rule == "spans":
            self.spans = spans_in(config, tokenizer or find_tokenizer(model))
        elif self.rule == "auto":
            one = getattr(config, "num_labels", None) == 1
            self._scores = one and getattr(config, "problem_type", None) != "regression"

    def mask_in(self, given: Mapping[str, Any]) -> Tensor | None:
        """The attention mask among a model's arguments, as `read` takes it: of spans -1 at special tokens."""
        mask = mask_in(given)
        if self.spans is None or mask is None or mask.dim() != 2:
            return mask
        return self.spans.of_text(mask, given.get("input_ids"))

    @property
    def name(self) -> str:
        """The rule in a word."""
        own = type(self.rule).__name__ if self._classifier is not None else "function"
        return self.rule if isinstance(self.rule, str) else getattr(self.rule, "__qualname__", own)

    def read(self, output: Any, mask: Tensor | None) -> Read:
        """The answers in a model's output.

        Parameters
        ----------
        output : model output, mapping, tuple or Tensor
        mask : Tensor or None
            What `mask_in` finds among the model's arguments, ``[B, L]``; used by ``"mean"`` and spans.

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
        if self._classifier is not None:
            return _judged(self._classifier, self._vectors(output, mask))
        if self.spans is not None:
            tags = _logits(output, 3)
            if tags is None:
                raise AnswerError(f"answer={self.name!r} needs logits of tokens; this output has none.", FUNCTION)
            return Read(*self.spans.read(tags, mask))
        logits = None if self.rule in ("mean", "cls") else _logits(output)
        if logits is not None:
            return _scores(logits) if self._scores else _classes(logits)
        if self.rule in ("class", "score"):
            raise AnswerError(f"answer={self.rule!r} needs a model with logits; this output has none.", FUNCTION)
        return Read(self._vectors(output, mask), None)

    def _vectors(self, output: Any, mask: Tensor | None) -> Tensor:
        """The vectors ``[B, H]`` in an output whose answers are vectors, or are made of them."""
        pooled = _get(output, "sentence_embedding") if self._takes_sentences else None
        if pooled is not None:
            return pooled.detach().float().clone()
        hidden = _hidden_in(output)
        if hidden is None:
            what = f"an output of type {type(output).__name__} holds no hidden states to pool."
            raise AnswerError(what, FUNCTION)
        hidden = hidden.detach().float()
        if self.rule == "cls":
            return hidden[:, 0].clone()
        if mask is None or mask.dim() != 2 or _is_whole(mask):
            return hidden.mean(1)
        valid = mask.to(hidden.dtype)[:, :, None]
        return (hidden * valid).sum(1) / valid.sum(1).clamp(min=1.0)

    @property
    def _takes_sentences(self) -> bool:
        """Whether an embedding that the model has pooled itself is the answer, or what it is made of."""
        return self.rule == "auto" or self._classifier is not None

    def pooled_from(self, output: Any) -> Tensor | None:
        """The hidden states ``[B, L, H]`` that the answers are pooled from; None if answers are something else."""
        if callable(self.rule) or self.rule in ("class", "score") or self.spans is not None:
            return None
        if self.rule == "auto" and _logits(output) is not None:
            return None
        if self._takes_sentences and _get(output, "sentence_embedding") is not None:
            return None
        return _hidden_in(output)

    def differ(self, a: Read, place: int, b: Read, other: int, share: float = 1.0) -> bool:
        """Whether one answer of `a` is another answer than one of `b`; vectors: at this share of the distance."""
        first, second = a.values[place], b.values[other]
        if not first.is_floating_point():
            return not torch.equal(first, second)
        if torch.equal(first, second) and bool(first.isfinite().all()):
            return False  # also for zeros, which have no cosine
        least = SCORE_COSINE if a.are_scores else self.min_cosine
        return not 1.0 - cosines(first[None], second[None])[0] <= share * (1.0 - least)


def answer_of(model: Any, rule: AnswerRule) -> AnswerRule:
    """The rule for a wrapper: of SetFit its own classifier, where that takes vectors as the model gives them."""
    head: Any = getattr(model, "model_head", None)
    other = any(getattr(model, name, None) for name in ("normalize_embeddings", "multi_target_strategy"))
    classifies = hasattr(head, "classes_") and hasattr(head, "predict") and not other
    return head if classifies and isinstance(rule, str) and rule == "auto" else rule


def is_class_of_first_row(rule: AnswerRule, config: Any) -> bool:
    """Whether an answer that is a class is read from the first row, by the head of a model with this configuration.

    A function may read it from all rows, and spans are read from all.
    """
    pooling = getattr(config, "classifier_pooling", "cls")  # of ModernBERT; other heads take the first row
    return rule in ("auto", "class") and getattr(config, "num_labels", 2) > 1 and pooling == "cls"


def cosines(some: Tensor, others: Tensor) -> list[float]:
    """The cosines of pairs of vectors ``[N, H]``; that of zeros is 0."""
    a, b = some.double().numpy(), others.double().numpy()  # torch's own operator takes longer than a line's look-up
    lengths = np.sqrt(np.einsum("ij,ij->i", a, a)), np.sqrt(np.einsum("ij,ij->i", b, b))
    with np.errstate(invalid="ignore", over="ignore"):  # infinite numbers: NaN is another answer
        found: list[float] = (np.einsum("ij,ij->i", a, b) / np.maximum(lengths[0] * lengths[1], _LEAST)).tolist()
    return found


def _logits(output: Any, dimensions: int = 2) -> Tensor | None:
    """The logits of an output, also with return_dict=False: there they are known by their dimensions."""
    found = _get(output, "logits")
    if found is None and isinstance(output, tuple) and output and isinstance(output[0], Tensor):
        found = output[0] if output[0].dim() == dimensions else None
    return found


def _hidden_in(output: Any) -> Tensor | None:
    """The hidden states ``[B, L, H]`` of an output."""
    hidden = _get(output, "last_hidden_state")
    if hidden is None and isinstance(output, Mapping):
        hidden = output.get("token_embeddings")
    if hidden is None and isinstance(output, tuple) and output:
        hidden = output[0]
    return hidden if isinstance(hidden, Tensor) and hidden.dim() == 3 else None


def _is_whole(mask: Tensor) -> bool:
    """Whether a mask of whole numbers has no padding: a mean is one operation then, and six with weights."""
    return not mask.is_floating_point() and mask.device.type == "cpu" and bool(mask.numpy().all())


def _get(output: Any, name: str) -> Tensor | None:
    found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
    return found if isinstance(found, Tensor) else None


def _judged(classifier: Any, vectors: Tensor) -> Read:
    """The classes that a classifier finds, and how sure it is of them, if it says so."""
    given = vectors.numpy()
    places = {label: place for place, label in enumerate(classifier.classes_.tolist())}
    values = torch.tensor([places[label] for label in classifier.predict(given).tolist()])
    if hasattr(classifier, "predict_proba"):
        shares = torch.from_numpy(np.asarray(classifier.predict_proba(given), np.float32))
    elif hasattr(classifier, "decision_function"):
        scores = torch.from_numpy(np.asarray(classifier.decision_function(given), np.float32))
        shares = (torch.stack([-scores, scores], 1) if scores.dim() == 1 else scores).softmax(-1)
    else:
        return Read(values, None)
    best = shares.topk(2, -1).values
    return Read(values, best[:, 0] - best[:, 1])


def _classes(logits: Tensor) -> Read:
    if logits.dim() != 2 or logits.shape[1] < 2:
        raise AnswerError(f"logits {tuple(logits.shape)} are no classes of sequences.", FUNCTION)
    best = logits.detach().float().softmax(-1).topk(2, -1).values
    return Read(logits.argmax(-1), best[:, 0] - best[:, 1])


def _scores(logits: Tensor) -> Read:
    """Scores from 0 to 1 as vectors ``[B, 2]``, whose cosine tells how far two are apart."""
    if logits.dim() != 2 or logits.shape[1] != 1:
        raise AnswerError(f"logits {tuple(logits.shape)} are no scores of sequences.", FUNCTION)
    angles = logits.detach().float().sigmoid()[:, 0] * (math.acos(SCORE_COSINE) / SCORE_STEP)
    return Read(torch.stack([angles.cos(), angles.sin()], 1), None, are_scores=True)
