"""The self-check of answers: there is one for each sequence, and the model gives the same answer twice."""

from __future__ import annotations

import torch
from torch import nn

from attmemo.adapters import Adapter
from attmemo.adapters.check import checking
from attmemo.errors import AdapterCheckError
from attmemo.guard import Answers


def check_answers(model: nn.Module, answers: Answers, adapter: Adapter, encoder: nn.Module) -> None:
    """Read the answers of a small batch, twice.

    Raises
    ------
    ValueError
        The rule finds no answers in the model's output.
    AdapterCheckError
        The model gives another answer to the same input: what is random cannot be guarded.
    """
    inputs, lengths = adapter.sample(encoder)
    with checking(model, "a small batch cannot be run"), torch.inference_mode():
        outputs = [model(dict(inputs)) if isinstance(model, nn.Sequential) else model(**inputs) for _ in range(2)]
    mask = inputs["attention_mask"]
    try:
        first, second = (answers.read(output, mask) for output in outputs)
    except ValueError:
        raise
    except Exception as error:  # a function of the caller's may raise anything
        raise ValueError(f"answer={answers.name} failed: {type(error).__name__}: {error}") from error
    if len(first.values) != len(lengths):
        raise ValueError(f"answer={answers.name} gives {len(first.values)} answers to {len(lengths)} sequences")
    if any(answers.differ(first, place, second, place) for place in range(len(lengths))):
        raise AdapterCheckError(
            f"{type(model).__name__} contradicts itself: it gives two answers to the same input.",
            "a model in evaluation mode without randomness, or budget=None",
        )
    answers.are_vectors = first.are_vectors
