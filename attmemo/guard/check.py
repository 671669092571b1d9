"""The self-check of answers: there is one for each sequence, and the model gives the same answer twice."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from attmemo.errors import AdapterCheckError, AnswerError
from attmemo.guard.answers import FUNCTION, Answers
from attmemo.models import Adapter
from attmemo.models.check import checking


def check_answers(
    model: nn.Module, answers: Answers, adapter: Adapter, encoder: nn.Module, tokenizer: Any = None
) -> None:
    """Have answers meet the model, and read those of a small batch, twice.

    Raises
    ------
    AnswerError
        The model cannot be run on a plain batch, or the rule finds no answer for each sequence in what it gives out.
    AdapterCheckError
        The model gives another answer to the same input: what is random cannot be guarded.
    """
    inputs, lengths = adapter.sample(encoder)
    answers.meet(model, tokenizer)
    named = isinstance(answers.rule, str) and not getattr(getattr(model, "config", None), "return_dict", True)
    try:
        with checking(model, "a small batch cannot be run"), torch.inference_mode():
            outputs = [model(dict(inputs)) if isinstance(model, nn.Sequential) else model(**inputs) for _ in range(2)]
            if named and isinstance(outputs[0], tuple):  # names tell what a tuple hides: logits may be those of tokens
                outputs.append(model(**inputs, return_dict=True))
    except AdapterCheckError as error:
        raise AnswerError(error.what, "leave out what asks for rows: its blocks run without padding") from error
    try:
        first, second, *_ = (answers.read(output, answers.mask_in(inputs)) for output in outputs)
    except AnswerError:
        raise
    except Exception as error:  # a function of the caller's may raise anything
        raise AnswerError(f"answer={answers.name} failed: {type(error).__name__}: {error}.", FUNCTION) from error
    if len(first.values) != len(lengths):
        what = f"answer={answers.name} gives {len(first.values)} answers to {len(lengths)} sequences."
        raise AnswerError(what, FUNCTION)
    if any(answers.differ(first, place, second, place) for place in range(len(lengths))):
        raise AdapterCheckError(
            f"{type(model).__name__} contradicts itself: it gives two answers to the same input.",
            "a model in evaluation mode without randomness, or budget=None",
        )
    answers.are_vectors, answers.are_scores = first.are_vectors, first.are_scores
