"""Pairs of records to learn from: which ones, and how similar their maps are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from attmemo.db import KIND_MAP, Database
from attmemo.embed.stored import Ints, by_length, in_blocks, read_map_rows, release
from attmemo.errors import DatabaseError

_LABEL_ITEMS = 8192  # numbers of a map that a label looks at: rows are sampled, Eq. 1 is a mean over rows

Pairs = tuple[Ints, Ints]
"""Positions in a sample of records, left and right."""


def draw_pairs(
    database: Database, records: Ints, coordinates: Tensor, near: int, random: int, generator: np.random.Generator
) -> Pairs:
    """Pairs of one length: each record with its nearest ones by coordinates, and with random ones."""
    left, right = [], []
    for rows in by_length(database, records).values():
        m = len(rows)
        if m < 2:
            continue
        these = coordinates[torch.from_numpy(rows)]
        distance = torch.cdist(these, these).fill_diagonal_(float("inf"))
        neighbours = distance.topk(min(near, m - 1), largest=False).indices.numpy()
        others = generator.integers(0, m - 1, size=(m, min(random, m - 1)))
        others += others >= np.arange(m)[:, None]  # any record but itself
        both = np.concatenate([neighbours, others], 1)
        left.append(np.repeat(rows, both.shape[1]))
        right.append(rows[both.ravel()])
    if not left:
        raise DatabaseError(
            f"{database.path}: no two training records have the same token length, so none can serve another.",
            "build from more data, or with a smaller --max-length",
        )
    return np.concatenate(left), np.concatenate(right)


def label_pairs(database: Database, records: Ints, pairs: Pairs, told: Callable[[int], None]) -> Tensor:
    """Similarity of every pair in every layer, ``[layers, P]``, from some rows of each map (AttMEMO, Eq. 1)."""
    model = database.manifest.model
    left, right = pairs
    labels = torch.zeros(model.layers, len(left))
    place = np.zeros(len(records), np.int64)
    lengths = database.records.lengths[records]
    for layer in range(model.layers):
        for length, rows in by_length(database, records).items():
            mine = np.flatnonzero(lengths[left] == length)
            if not len(mine):
                continue
            place[rows] = np.arange(len(rows))
            sampled = sampled_rows(model.heads, length)
            maps = torch.empty(len(rows), sampled.numel() * length)
            for part in in_blocks(rows, model.heads * length * length):
                for row in part:
                    maps[place[row]] = read_map_rows(database, layer, int(records[row]), sampled).flatten()
                release(database, KIND_MAP, length)
            for part in in_blocks(mine, maps.shape[1]):
                first, second = (maps[torch.from_numpy(place[side[part]])] for side in (left, right))
                distance = torch.linalg.vector_norm(first - second, ord=1, dim=1)
                labels[layer, torch.from_numpy(part)] = 1.0 - distance / (2.0 * sampled.numel())
        told(layer + 1)
    return labels


def sampled_rows(heads: int, length: int) -> Tensor:
    """Row numbers for each head, ``[heads, k]``: evenly spread, and other ones in each head.

    The first and the last token are special ones in most models. A grid that always takes both judges by them.
    """
    count = max(1, min(length, _LABEL_ITEMS // (heads * length)))
    shift = (torch.arange(heads)[:, None] + 0.5) / heads
    return ((torch.arange(count) + shift) * length / count).long().clamp_max(length - 1)
