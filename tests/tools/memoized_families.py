"""A model of a family, memoized with a database of its own maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, Family, inputs_of
from torch import Tensor, nn

from attmemo import memoize
from attmemo.embed.training import TrainOptions
from attmemo.models import adapter_for
from attmemo.profiler.build import build_from_inputs
from attmemo.profiler.train import train_database

STORED = [9, 12, 9, 7, 12, 16, 9, 12, 7, 16]  # valid tokens of the records
NEAR = 1e-5


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the attention layers' part of the model gives, ``[B, L, H]``."""
    with torch.inference_mode():
        found: Tensor = adapter_for(model)[0].host(model)(**inputs).last_hidden_state
    return found


def gap(seen: Tensor, expected: Tensor) -> float:
    """Greatest difference, relative to the range."""
    return float((seen - expected).abs().max() / expected.abs().max())


class Case:
    """A model of a family, a database of a batch of inputs, and another batch that is not in it."""

    def __init__(self, name: str, folder: Path, storage: str = "float32", dtype: torch.dtype = torch.float32) -> None:
        self.family: Family = FAMILIES[name]
        self.model = self.family.make().to(dtype)
        self.stored = self._inputs(STORED, 0, dtype)
        self.other = self._inputs([9, 12, 7], 5, dtype)
        self.path = build_from_inputs(
            self.model, (self.rows(self.stored, [row]) for row in range(len(STORED))), folder / "db",
            storage=storage, inputs="all" if storage != "uint8" else "auto", held_out=0.0,
        )  # fmt: skip
        train_database(self.path, TrainOptions(steps=5), profile=False)

    def _inputs(self, lengths: list[int], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = inputs_of(self.family, lengths, seed)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}

    def rows(self, inputs: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
        """Some rows, with no more padding than they need."""
        taken = {name: value[rows] for name, value in inputs.items()}
        if self.family.kind == "tokens":
            longest = int(taken["attention_mask"].sum(1).max())
            taken = {name: value[:, :longest] for name, value in taken.items()}
        return taken

    def lengths(self, inputs: dict[str, Tensor]) -> list[int]:
        if self.family.kind == "tokens":
            return [int(n) for n in inputs["attention_mask"].sum(1)]
        whole = output(self.model, inputs)
        return [whole.shape[1]] * len(whole)

    def serve(self, threshold: float | list[float] = 0.0, **options: Any) -> Any:
        memoize(self.model, threshold=threshold, database=self.path, gate=False, **options)
        return self.model.attmemo

    def mixed(self) -> tuple[dict[str, Tensor], list[int]]:
        """Two stored sequences and one of a length that no record has (tokens), or a new image between stored ones."""
        if self.family.kind == "tokens":
            own = inputs_of(self.family, [12, 11, 9], 9)
            for row, record in ((0, 1), (2, 2)):
                n = STORED[record]
                own["input_ids"][row, :n] = self.stored["input_ids"][record, :n]
            return own, [0, 2]
        name = next(iter(self.stored))
        return {name: torch.cat([self.stored[name][1:2], self.other[name][:1], self.stored[name][2:3]])}, [0, 2]
