"""Models that are served rows of records, made-up records, and a store that is offered them."""

from __future__ import annotations

import copy
import ctypes
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from packed_models import (
    batch,
    pair,
    rows_database,
)
from torch import Tensor

from attmemo import memoize
from attmemo.db.encodings import quantize
from attmemo.kernels.align import Rule
from attmemo.rows.candidate import Offer
from attmemo.rows.layout import Placed, RowLayout
from attmemo.rows.live_store import GrowingRows

LAYERS, HEADS, WIDTH = 2, 2, 8
FLOAT = (torch.float32, torch.float32)
Tokens = npt.NDArray[np.int32]


def record(seed: int, n: int = 5, layers: int = LAYERS, width: int = WIDTH) -> tuple[Tokens, Tensor, Tensor]:
    """Tokens, rows and last hidden states of a sequence like no other."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 1000 * (seed + 1) + np.arange(n, dtype=np.int32)
    rows = torch.randn(layers, 2, n, width, generator=generator)
    return tokens, rows, torch.randn(n, width, generator=generator)


def offers_of(*records: tuple[Tokens, Tensor, Tensor], notes: bytes = b"") -> list[Offer]:
    """What a request hands over that has computed these sequences in one batch."""
    found = []
    for place, (tokens, rows, last) in enumerate(records):
        own = RowLayout(len(rows), rows.shape[-1], HEADS, (rows.dtype, last.dtype))
        offer = Offer.of(tokens, own, np.empty(own.nbytes(len(tokens)), np.uint8), 0)
        offer.rows.copy_(rows)
        offer.last.copy_(last)
        offer.note = notes[place : place + 1]
        found.append(offer)
    return found


def layout(storage: tuple[torch.dtype, torch.dtype] = FLOAT, heads: int = HEADS, **shape: int) -> RowLayout:
    return RowLayout(shape.get("layers", LAYERS), shape.get("width", WIDTH), heads, storage)


def at(address: int, rows: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
    """A copy of rows in memory."""
    octets = bytearray(ctypes.string_at(address, rows * row_bytes))
    return torch.frombuffer(octets, dtype=dtype).view(rows, -1).clone()


def fetched(found: Placed, place: int, layers: int = LAYERS) -> tuple[Tensor, Tensor]:
    """Rows ``[layers, 2, n, H]`` and last hidden states of one place, decoded if they are in 8 bits."""
    rows = []
    for number in range(layers):
        layer, planes = found.layer(number), []
        n = int(layer.rows[place])
        for begins, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
            plane = at(int(begins[place]), n, layer.row_bytes, layer.dtype).float()
            if scales is not None:
                each = at(int(scales[place]), n, layer.scale_row_bytes, torch.float32)
                plane *= each.repeat_interleave(plane.shape[1] // each.shape[1], 1)
            planes.append(plane)
        rows.append(torch.stack(planes))
    begins, dtype = found.last()
    width = rows[0].shape[-1]
    return torch.stack(rows), at(int(begins[place]), n, width * dtype.itemsize, dtype).float()


def as_stored(rows: Tensor, storage: torch.dtype, heads: int) -> Tensor:
    """What a type of storage leaves of rows."""
    if storage is not torch.int8:
        return rows.to(storage).float()
    codes, scales = quantize(rows, heads)
    return codes.float() * scales.repeat_interleave(rows.shape[-1] // heads, -1)


def numbers(*found: int) -> npt.NDArray[np.int64]:
    return np.array(found, np.int64)


def find(store: GrowingRows, tokens: Tokens) -> npt.NDArray[np.int64]:
    """The record of these very tokens, or -1; asking does not count as use. Others may share a sketch by chance."""
    found = store.index.best(tokens, numbers(0, len(tokens)), Rule(near=0, edges=False, ends=False))
    return np.where(found.computed == 0, found.record, -1)



STORED = [30, 20, 33, 11, 25, 20]


class Case:
    """A bare model, the same with packed blocks, a batch, and a database of its rows."""

    def __init__(self, name: str, folder: Path, storage: str = "float32", dtype: torch.dtype = torch.float32) -> None:
        self.name, self.storage = name, storage
        self.bare, self.packed = pair(name, dtype)
        self.stored = batch(STORED, 3)
        self.path = rows_database(self.bare, [self.stored], folder / "db", storage)

    def serve(self, threshold: Any = 0.5, path: Any = None, **options: Any) -> Any:
        """A model of one's own that is served; always looked up, so that nothing depends on this machine's speed."""
        options = {"gate": False, "budget": None} | options
        return memoize(copy.deepcopy(self.bare), threshold, path or self.path, **options)


@pytest.fixture(scope="module", name="case")
def _case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("BERT", tmp_path_factory.mktemp("bert-rows"))


@pytest.fixture(params=["BERT", "ModernBERT"], scope="module", name="both")
def _both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("both-rows"))


@pytest.fixture(name="path")
def _path(both: Case, tmp_path: Path) -> Path:
    """A copy of the database, to be damaged."""
    return Path(shutil.copytree(both.path, tmp_path / "db"))
