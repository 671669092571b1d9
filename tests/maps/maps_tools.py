"""Models with databases of their maps, and what of a batch is served."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attmemo import Database, Memoization, memoize
from attmemo.embed.training import TrainOptions
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import LoadedModel, Tokens, collate, load_model, tokenize
from attmemo.profiler.train import train_database

MAX_LENGTH = 48
LOOKUPS = ("layer", "sequence")
Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A family: its bare model, its database, and texts that are stored, new, or of a length that is not stored."""

    family: str
    bare: LoadedModel
    database: Database
    stored: list[Tokens]
    fresh: list[Tokens]
    short: list[Tokens]

    def model(self, implementation: str | None = None) -> nn.Module:
        """A bare model of one's own."""
        model = copy.deepcopy(self.bare.model)
        if implementation is not None:
            model.set_attn_implementation(implementation)  # type: ignore[operator]
        return model

    def serve(self, threshold: float | Sequence[float], *, model: nn.Module | None = None, **options: Any) -> Any:
        """A memoized model; always tried, so that nothing depends on this machine's speed."""
        options = {"database": self.database, "gate": False} | options
        return memoize(model or self.model(options.pop("implementation", None)), threshold, **options)

    def inputs(self, items: Sequence[Tokens], padded: int = 0) -> Inputs:
        """A batch in this order, padded to its longest text or to `padded`."""
        found = collate(self.bare, items)
        more = max(0, padded - found["input_ids"].shape[1])
        return {name: nn.functional.pad(value, (0, more)) for name, value in found.items()}


@contextmanager
def opened(request: pytest.FixtureRequest, folder: Path, family: str) -> Iterator[Case]:
    bare = load_model(request.getfixturevalue(f"tiny_{family}"))
    lines = request.getfixturevalue("log_lines")
    # Exact search: HNSW now and then misses the very record that is asked for, which is not what is tested here.
    path = shutil.copytree(request.getfixturevalue(f"{family}_database"), folder / "db")
    train_database(path, TrainOptions(steps=20, backend="flat"), profile=False)
    with Database(path) as database:
        stored = tokenize(bare, lines, MAX_LENGTH)
        known = {tuple(item.ids) for item in stored}
        fresh = [
            item
            for item in tokenize(bare, list(generate_log(150, seed=77)), MAX_LENGTH)
            if tuple(item.ids) not in known and len(item) in database.lengths
        ]
        cut = [(item, n) for item, n in zip(stored, (7, 19, 30, 19, 7, 23), strict=False)]
        short = [Tokens(i, [*item.ids[: n - 1], item.ids[-1]], None) for i, (item, n) in enumerate(cut)]
        assert len({len(item) for item in stored}) > 3
        assert len(fresh) > 20
        assert not {len(item) for item in short} & set(database.lengths)
        yield Case(family, bare, database, stored, fresh, short)


@pytest.fixture(scope="module", params=["bert", "deberta"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    with opened(request, tmp_path_factory.mktemp("case"), request.param) as found:
        yield found


def logits(model: Any, inputs: Inputs) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(**inputs).logits
    return found


def states(model: Any, inputs: Inputs) -> Tensor:
    """What leaves the last layer, ``[B, L, H]``: every token, where logits see the first one only."""
    with torch.inference_mode():
        found: Tensor = model.base_model(**inputs).last_hidden_state
    return found


def valid_states(model: Any, inputs: Inputs) -> list[Tensor]:
    """The same, each row cut to its valid tokens."""
    found = states(model, inputs)
    lengths = inputs["attention_mask"].sum(1).tolist()
    return [row[:n] for row, n in zip(found, lengths, strict=True)]


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5) -> bool:
    """Equal within a share of the range."""
    return bool((a - b).abs().max() <= tolerance * b.abs().max())


def handle_of(model: Any) -> Memoization:
    handle: Memoization = model.attmemo
    return handle
