"""What could serve: the nearest record of each sequence of a batch.

An embedder turns hidden states into vectors, an index finds the nearest stored vector. The hard key is the number of
valid tokens: a record of another length is never found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.db import SEQUENCE, Database
from attmemo.db.index import LayerIndex
from attmemo.embed.calibration import Calibration
from attmemo.embed.siamese import SiameseEmbedder, load_embedders
from attmemo.errors import DatabaseCorruptError

LookupName = Literal["layer", "sequence"]
"""One lookup in each attention layer, as in the paper, or one for each sequence, at the first layer."""
Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Found:
    """The nearest record of each sequence: numbers of records (-1: none) and distances of embeddings."""

    records: npt.NDArray[np.int64]  # [B]
    distances: npt.NDArray[np.float32]  # [B], inf where there is no record


class Lookup:
    """Embedders, indexes and calibration curves of one database.

    Parameters
    ----------
    database : Database
        With a trained embedder.
    name : {"layer", "sequence"}
        Which lookups will be asked for.

    Attributes
    ----------
    curves : list of Calibration
        For each attention layer: from a distance to a predicted similarity score.

    Raises
    ------
    EmbedderMissingError, DatabaseCorruptError
        The embedder, an index or a curve is missing or damaged. All of them are read now and not in the first request.
    """

    def __init__(self, database: Database, name: LookupName) -> None:
        self._database = database
        model, ref = database.manifest.model, database.embedder_ref()
        embedders = load_embedders(database.derived(ref.weights), model.hidden)
        self._embedders: dict[int, SiameseEmbedder] = {}
        for owner in [SEQUENCE] if name == "sequence" else range(model.layers):
            if owner not in embedders:
                raise DatabaseCorruptError(
                    f"{database.path}: there is no embedder for layer {owner}.",
                    f"attmemo train-embedder {database.path}",
                )
            database.index(owner)
            self._embedders[owner] = embedders[owner]
        self.curves = [
            _curve(ref.calibration, SEQUENCE if name == "sequence" else layer, layer, database)
            for layer in range(model.layers)
        ]

    def find(self, owner: int, hidden: Tensor, lengths: Sequence[int]) -> Found:
        """Embed hidden states and search the index.

        Parameters
        ----------
        owner : int
            Attention layer, or -1 for the lookup once per sequence.
        hidden : Tensor
            Hidden states that enter the layer (the first layer for -1), ``[B, L, H]``; valid tokens come first.
        lengths : sequence of int
            Valid tokens of each sequence.

        Raises
        ------
        DatabaseError
            The database was closed.
        """
        index, embedder = self._database.index(owner), self._embedders[owner]
        records = np.full(len(lengths), -1, np.int64)
        distances = np.full(len(lengths), np.inf, np.float32)
        # The embedder sees no token behind the longest record of its training: such a distance says nothing.
        known = [place for place, n in enumerate(lengths) if n <= embedder.longest and n in index.lengths]
        if known:
            kept = np.asarray([lengths[place] for place in known])
            vectors = embedder.embed(hidden[known] if len(known) < len(lengths) else hidden, kept.tolist()).numpy()
            for length in np.unique(kept).tolist():
                of_length = np.flatnonzero(kept == length)
                places = np.asarray(known)[of_length]
                records[places], distances[places] = self._nearest(index, length, vectors[of_length], places)
            # The index proposes, the record decides.
            stored = self._database.records.lengths[records]
            wrong = (records >= 0) & (stored != np.asarray(lengths))
            records[wrong], distances[wrong] = -1, np.inf
        return Found(records, distances)

    def _nearest(
        self, index: LayerIndex, length: int, vectors: Vectors, places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], Vectors]:
        """Record and distance ``[q]`` of vectors of one length; `places`: which sequences of the batch these are."""
        records, distances = index.search(length, vectors)
        return records[:, 0], distances[:, 0]


class LookupInTime(Lookup):
    """A lookup as it was when each text came: a text finds no record that was stored after it, nor its own.

    Attributes
    ----------
    before : int64 [B]
        For each sequence of the next batch: a record is found if its `places_in_time` is less.
    later : bool
        Whether later records are found, too. A text still does not find its own.
    """

    def __init__(self, database: Database, name: LookupName) -> None:
        super().__init__(database, name)
        self._order = places_in_time(database.records.sources, database.records.rows)
        self.before, self.later = np.empty(0, np.int64), False

    def _nearest(
        self, index: LayerIndex, length: int, vectors: Vectors, places: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], Vectors]:
        own = self.before[places]

        def allows(records: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
            times, mine = self._order[records], own[rows][:, None]
            return times != mine if self.later else times < mine

        return index.search_where(length, vectors, allows)


def places_in_time(sources: npt.ArrayLike, rows: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """Numbers that grow with time: files in the order in which they were stored, rows in the order of a file."""
    return (np.asarray(sources, np.int64) << 40) + np.asarray(rows, np.int64)


def _curve(calibration: dict[str, Any], owner: int, layer: int, database: Database) -> Calibration:
    curves = calibration.get(str(owner))
    data = curves.get(str(layer)) if isinstance(curves, dict) else None
    return Calibration.from_dict(data, f"{database.path}: calibration {owner}.{layer}")
