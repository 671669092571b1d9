"""A model that is watched, and the threads of a pipeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from generators import LINES, make_model

BEAMS = {"num_beams": 3, "max_new_tokens": 8, "no_repeat_ngram_size": 3}
TEXTS = [*LINES[:9], "", *LINES[9:20], "  \t", *LINES[20:33]]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: make_model(family) for family in ("bart", "t5", "gpt2")}


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    """The pipeline's threads have ended soon after a test."""
    yield
    deadline = time.monotonic() + 300
    while any(thread.name.startswith(("ahead", "behind")) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


class Watched:
    """A model that notes the rows it is asked for, and may fail."""

    def __init__(self, model: Any, before: Callable[[int, torch.Tensor], None] = lambda call, ids: None) -> None:
        self.model = model
        self.before = before
        self.rows: list[int] = []

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        self.before(len(self.rows), input_ids)
        self.rows.append(len(input_ids))
        return self.model.generate(input_ids=input_ids, **options)


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "in.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
