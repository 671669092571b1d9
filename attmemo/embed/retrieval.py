"""What an embedder finds for held-out records, and the curves that are fitted to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attmemo.db import KIND_MAP, SEQUENCE, Database, FlatIndex
from attmemo.embed.calibration import Calibration, fit_calibration
from attmemo.embed.siamese import SiameseEmbedder
from attmemo.embed.similarity import similarity_score
from attmemo.embed.stored import Ints, Vectors, by_length, embed_records, release
from attmemo.errors import DatabaseError

NEIGHBOURS = 3
"""Retrievals for each held-out query that a curve is fitted to."""


@dataclass
class Retrieved:
    """What Q queries found, at k neighbour ranks; scores by layer that the lookup serves."""

    lengths: Ints  # [Q]
    records: Ints  # [Q, k], -1 where there is no record of that length
    distances: Vectors  # [Q, k], inf likewise
    scores: Vectors  # [Q, k, layers], true similarity, -1 likewise

    def mean_best(self) -> float:
        """Mean similarity of the nearest records."""
        first = self.scores[self.records[:, 0] >= 0, 0]
        return float(first.mean()) if len(first) else 0.0


def layers_of(database: Database, layer: int) -> list[int]:
    """The layers that a lookup serves: its own, or all for the once-per-sequence lookup."""
    return list(range(database.manifest.model.layers)) if layer == SEQUENCE else [layer]


class Judge:
    """Retrieval by several embedders, with the true similarity of what they find; a pair is scored once.

    The records `asked` search the records `stored`. A record never finds itself.
    """

    def __init__(self, database: Database, stored: Ints, asked: Ints) -> None:
        self.database = database
        self.stored, self.asked = stored, asked
        self._known: dict[tuple[int, int, int], float] = {}  # layer, query, record

    def retrieve(
        self, layer: int, embedders: Mapping[str, SiameseEmbedder]
    ) -> tuple[str, Retrieved, dict[str, float]]:
        """The embedder that finds the most similar records, what it finds, and the mean similarity of each.

        Of equal ones the last is taken.
        """
        known = list(embedders.values())
        sides = (embed_records(self.database, layer, ids, known) for ids in (self.stored, self.asked))
        outcomes = {name: self._search(layer, *vectors) for name, *vectors in zip(embedders, *sides, strict=True)}
        for found in outcomes.values():
            self._score(layer, found, 1)  # the nearest record decides; the others are scored for one embedder only
        quality = {name: found.mean_best() for name, found in outcomes.items()}
        best = max(reversed(quality), key=quality.__getitem__)
        self._score(layer, outcomes[best], NEIGHBOURS)
        return best, outcomes[best], quality

    def _search(self, layer: int, vectors: Vectors, queries: Vectors) -> Retrieved:
        shape = len(self.asked), NEIGHBOURS
        found = Retrieved(
            self.database.records.lengths[self.asked],
            np.full(shape, -1, np.int64),
            np.full(shape, np.inf, np.float32),
            np.full((*shape, len(layers_of(self.database, layer))), -1.0, np.float32),
        )
        where = by_length(self.database, self.stored)
        for length, rows in by_length(self.database, self.asked).items():
            there = where.get(length)
            if there is None:
                continue
            order, near = FlatIndex(vectors[there]).search(queries[rows], NEIGHBOURS + 1)
            for row, positions, distances in zip(rows, order, near, strict=True):
                # A training record that asks finds itself first: skip it.
                records = np.where(positions < 0, -1, self.stored[there[positions]])
                kept = np.flatnonzero((records >= 0) & (records != self.asked[row]))[:NEIGHBOURS]
                found.records[row, : len(kept)] = records[kept]
                found.distances[row, : len(kept)] = distances[kept]
        return found

    def _score(self, layer: int, found: Retrieved, ranks: int) -> None:
        for row, query in enumerate(self.asked.tolist()):
            for column, at in enumerate(layers_of(self.database, layer)):
                for rank, record in enumerate(found.records[row, :ranks].tolist()):
                    if record >= 0:
                        found.scores[row, rank, column] = self._similarity(at, query, record)
            release(self.database, KIND_MAP, int(found.lengths[row]))

    def _similarity(self, layer: int, query: int, record: int) -> float:
        known = self._known.get((layer, query, record))
        if known is None:
            maps = (self.database.map(layer, r) for r in (query, record))
            known = self._known[layer, query, record] = float(similarity_score(*maps))
        return known


def calibrate(
    found: Retrieved, layers: Sequence[int], coverage: float
) -> tuple[dict[int, Calibration], dict[int, list[tuple[int, float]]]]:
    """Of each layer the curve, and for every query (length, predicted score; -1 where nothing was found)."""
    known = found.records >= 0
    if not known.any():
        raise DatabaseError(
            "no held-out sequence has a training record of its length, so nothing can be calibrated.",
            "build from more data",
        )
    curves, held = {}, {}
    served, first = known[:, 0], found.distances[:, 0]
    for column, layer in enumerate(layers):
        # Farther neighbours too: each is the nearest in a database without the ones before it.
        curves[layer] = fit_calibration(found.distances[known], found.scores[..., column][known], coverage)
        predicted = np.full(len(first), -1.0)
        predicted[served] = curves[layer].predict(first[served])
        held[layer] = list(zip(found.lengths.tolist(), predicted.tolist(), strict=True))
    return curves, held
