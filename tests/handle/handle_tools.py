"""A small model and what it answers, for tests of `memoize`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from attmemo.embed.training import TrainOptions
from attmemo.profiler.models import LoadedModel, collate, load_model, tokenize
from attmemo.profiler.train import train_database

Inputs = dict[str, Tensor]


@pytest.fixture(scope="module")
def flat_database(bert_database: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With exact search: HNSW now and then misses the very record that is asked for."""
    path = shutil.copytree(bert_database, tmp_path_factory.mktemp("flat") / "db")
    train_database(path, TrainOptions(steps=20, backend="flat"), profile=False)
    return Path(path)


@pytest.fixture
def loaded(tiny_bert: str) -> LoadedModel:
    return load_model(tiny_bert)


@pytest.fixture
def model(loaded: LoadedModel) -> Any:
    return loaded.model


@pytest.fixture
def inputs(loaded: LoadedModel, log_lines: list[str]) -> Inputs:
    """Eight stored texts."""
    return collate(loaded, tokenize(loaded, log_lines[:8], 48))


@pytest.fixture
def exact(tiny_bert: str, inputs: Inputs) -> Tensor:
    """What the bare model says."""
    return logits(load_model(tiny_bert).model, inputs)


def logits(model: Any, inputs: Inputs) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(**inputs).logits
    return found
