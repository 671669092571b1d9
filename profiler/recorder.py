"""Making records: what a build asks of each kind of reuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from attmemo.profiler.models import Tokens

Slots = Mapping[str, Sequence[Tensor]]
"""Tensors of each kind of slot, by layer: one record of maps."""


@dataclass(frozen=True, slots=True)
class Form:
    """How records are stored."""

    storage: str
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a text stands: the digest of its file, its row there, and whether it is held out."""

    source: str
    row: int
    held_out: bool


class Admission:
    """Says which texts are stored, and remembers what was: all of them, unless a kind of reuse knows better."""

    there = 0  # texts that were left out since an earlier run has stored them

    def before(self, place: Place, tokens: Tokens) -> bool:
        """Whether the model is to be asked about a text. Called once for each, in the order of the data."""
        return True

    def after(self, place: Place, slots: Any) -> bool:
        """Whether the record that the model gave is to be stored."""
        return True

    def stored(self, record: int, slots: Any) -> None:
        """A record was stored under this number."""

    def save(self) -> None:
        """What was stored so far was published."""


class Recorder(AbstractContextManager["Recorder"], Protocol):
    """Runs a model so that it gives records. Outside of the context the model is as it was."""

    form: Form

    def run(self, inputs: Mapping[str, Tensor]) -> list[Any]:
        """One exact forward; the records of its sequences, over valid tokens."""

    def admission(self, admit: float | None, writer: Any) -> Admission:
        """What leaves out texts that a record already stands for; `admit` is how well it must do so."""
