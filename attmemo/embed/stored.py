"""Stored hidden states and maps as training reads them: a sample of records, by length, in small blocks.

A block is about 4 MiB, and its mapped pages are released behind it. So neither the memory nor the resident size of the
process grows with the database; the pages stay in the page cache, where a second pass finds them.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import KIND_INPUT, KIND_MAP, Database
from attmemo.db.encodings import unpack
from attmemo.embed.siamese import SiameseEmbedder

BLOCK = 1 << 20
"""Numbers that are read at once."""

Ints = npt.NDArray[np.int64]
Vectors = npt.NDArray[np.float32]


def sample(database: Database, ids: Ints, most: int, generator: np.random.Generator) -> Ints:
    """At most `most` of the records, a longest one among them: embedders reach as far as the longest record seen."""
    if len(ids) <= most:
        return ids
    longest = ids[np.argmax(database.records.lengths[ids])]
    return np.unique(np.append(generator.choice(ids, most - 1, replace=False), longest))


def by_length(database: Database, records: Ints) -> dict[int, Ints]:
    """Positions in `records`, by token length."""
    lengths = database.records.lengths[records]
    return {int(n): np.flatnonzero(lengths == n).astype(np.int64) for n in np.unique(lengths)}


def read_inputs(database: Database, layer: int, records: Ints) -> Iterator[tuple[Ints, Tensor]]:
    """Hidden states in blocks of one length: positions in `records`, and ``[m, n, H]`` float32."""
    at = max(layer, 0)  # the once-per-sequence lookup reads what enters the first layer
    for length, places in by_length(database, records).items():
        for part in in_blocks(places, length * database.manifest.model.hidden):
            yield part, torch.stack([database.input(at, int(r)) for r in records[part]])
            release(database, KIND_INPUT, length)


def read_map_rows(database: Database, layer: int, record: int, rows: Tensor) -> Tensor:
    """Rows of a record's map, ``[heads, k, n]`` float32, of the row numbers of each head ``[heads, k]``."""
    stored = database.view(KIND_MAP, layer, record)
    heads = torch.arange(len(rows))[:, None]
    if stored.dim() == 3:
        return unpack(stored[heads, rows]).float()
    column = torch.arange(int(database.records.lengths[record]))
    before = rows[..., None]  # a lower triangle: row r begins behind r (r + 1) / 2 numbers
    place = (before * (before + 1) // 2 + column).clamp_max(stored.shape[1] - 1)
    zero = torch.zeros((), dtype=stored.dtype)
    return unpack(torch.where(column <= before, stored[heads[..., None], place], zero)).float()


def embed_records(
    database: Database, layer: int, records: Ints, embedders: Sequence[SiameseEmbedder]
) -> list[Vectors]:
    """Embeddings ``[R, d]`` of stored records by each embedder; the hidden states are read once for all of them."""
    vectors = [np.zeros((len(records), e.dimension), np.float32) for e in embedders]
    for places, hidden in read_inputs(database, layer, records):
        for found, embedder in zip(vectors, embedders, strict=True):
            found[places] = embedder.embed(hidden, [hidden.shape[1]] * len(places)).numpy()
    return vectors


def in_blocks(places: Ints, numbers: int) -> list[Ints]:
    """The same places, in parts of which each reads about `BLOCK` numbers, `numbers` a place."""
    size = max(1, BLOCK // numbers)
    return [places[start : start + size] for start in range(0, len(places), size)]


def release(database: Database, kind: str, length: int) -> None:
    """Take the mapped pages of a slot class out of this process; the next read maps them again."""
    mapping = database.arena(kind, length).mapping
    if not mapping.sealed:
        mapping.memory.madvise(mmap.MADV_DONTNEED)
