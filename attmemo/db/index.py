"""Nearest-neighbour search over embeddings: per layer, one index for each token length or one for all records.

faiss HNSW by default, hnswlib behind the same face, and an exact flat search that is the oracle of both and serves
lengths with few records. All indexes of a layer lie in one safetensors container, whose digest is checked first. A
digest proves nothing if the manifest was forged too, and neither library validates all that it loads. So every link
of a graph is checked before faiss sees the graph, and hnswlib gets only vectors.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from attmemo.db.catalogue import Snapshot
from attmemo.errors import DatabaseCorruptError

Backend = Literal["faiss", "hnswlib", "flat"]
BACKENDS: Final = ("faiss", "hnswlib", "flat")
LINKS: Final = 16  # HNSW M: edges per node
EF_CONSTRUCTION: Final = 80
EF_SEARCH: Final = 64
# Vectors of one length from which a graph is built; for fewer exact search is as fast, and misses nothing.
EXACT_BELOW: Final = 2000
_LOOKED_AT: Final = 64  # neighbours of a query at first, where only some records may be found
_RECHECKED = 8  # candidates beside those asked for whose distance is computed anew
_FLAT, _GRAPH = "flat", "index"  # what an entry of the container holds

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


class FlatIndex:
    """Exact search; the oracle, and for up to some thousand vectors about as fast as a graph."""

    def __init__(self, vectors: Vectors) -> None:
        self.vectors: Vectors = np.require(vectors, np.float32, ["C", "W"])  # torch warns about read-only memory
        # About their mean, since what the expansion of |q - v|^2 cancels grows with the distance from the origin.
        self._mean = self.vectors.mean(0) if len(vectors) else np.zeros(self.vectors.shape[1:], np.float32)
        self._transposed = torch.from_numpy(self.vectors - self._mean).T
        self._norms = self._transposed.square().sum(0)

    def __len__(self) -> int:
        return len(self.vectors)

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Vectors]:
        """Positions and Euclidean distances ``[q, k]``, nearest first; none is position -1, distance inf."""
        # By torch, on its threads: numpy's product would wake a second pool that fights the first for the cores.
        with torch.autocast("cpu", enabled=False):  # the model's precision is not the distances'
            moved = torch.from_numpy(queries - self._mean)
            squares = torch.addmm(self._norms, moved, self._transposed, alpha=-2.0)  # [q, R], less |q|^2
        near = min(k + _RECHECKED, len(self.vectors))
        some: Ids = squares.topk(near, dim=1, largest=False, sorted=False).indices.sort(dim=1).values.numpy()
        # |q - v| from the difference itself: the expansion above cancels to noise for near-equal vectors. A sequence's
        # nearest then does not depend on the batch it is asked in, unless more are equally near than are looked at.
        distances = np.linalg.norm(queries[:, None] - self.vectors[some], axis=2)
        order = np.argsort(distances, axis=1, kind="stable")[:, :k]
        return _padded(np.take_along_axis(some, order, 1), np.take_along_axis(distances, order, 1), k)

    def dump(self) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self.vectors.tobytes(), np.uint8)


class FaissIndex:
    """faiss HNSW over raw float32 vectors, Euclidean."""

    def __init__(self, index: Any) -> None:
        index.hnsw.efSearch = EF_SEARCH
        self._index = index

    def __len__(self) -> int:
        return int(self._index.ntotal)

    @classmethod
    def build(cls, vectors: Vectors) -> FaissIndex:
        import faiss

        index = faiss.IndexHNSWFlat(vectors.shape[1], LINKS)
        index.hnsw.efConstruction = EF_CONSTRUCTION
        # A parallel build links nodes in the order of the clock; one thread gives the same graph every time. The
        # number is put back: faiss may share its OpenMP runtime with torch, whose matmuls would slow down for good.
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(1)
        try:
            index.add(np.ascontiguousarray(vectors, np.float32))
        finally:
            faiss.omp_set_num_threads(threads)
        return cls(index)

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Vectors]:
        squares, order = self._index.search(np.ascontiguousarray(queries, np.float32), k)
        return order, np.where(order < 0, np.float32(np.inf), np.sqrt(np.maximum(squares, 0.0)))

    def dump(self) -> npt.NDArray[np.uint8]:
        import faiss

        raw: npt.NDArray[np.uint8] = faiss.serialize_index(self._index)
        return raw

    @classmethod
    def load(cls, raw: npt.NDArray[np.uint8], dimension: int) -> FaissIndex:
        import faiss

        _check_graph(raw, dimension)
        try:
            index = faiss.deserialize_index(raw)
        except RuntimeError as error:
            raise ValueError(f"faiss cannot read an index: {error}") from error
        return cls(index)


class HnswlibIndex:
    """hnswlib. Only vectors are stored: its files hold addresses that it would follow unchecked."""

    def __init__(self, vectors: Vectors) -> None:
        import hnswlib

        self._index = hnswlib.Index("l2", vectors.shape[1])
        self._index.init_index(len(vectors), ef_construction=EF_CONSTRUCTION, M=LINKS, random_seed=0)
        self._index.add_items(np.ascontiguousarray(vectors, np.float32), np.arange(len(vectors)), num_threads=1)
        self._index.set_num_threads(1)

    def __len__(self) -> int:
        return int(self._index.get_current_count())

    def search(self, queries: Vectors, k: int) -> tuple[Ids, Vectors]:
        found = min(k, len(self))
        # hnswlib raises when it cannot fill k results from a beam of ef.
        self._index.set_ef(max(EF_SEARCH, found))
        order, squares = self._index.knn_query(np.ascontiguousarray(queries, np.float32), found, num_threads=1)
        return _padded(order.astype(np.int64), np.sqrt(np.maximum(squares, 0.0)), k)

    def dump(self) -> npt.NDArray[np.uint8]:
        vectors = self._index.get_items(np.arange(len(self)), return_type="numpy")
        return np.frombuffer(np.ascontiguousarray(vectors, np.float32).tobytes(), np.uint8)


VectorIndex = FlatIndex | FaissIndex | HnswlibIndex  # vectors under consecutive positions


def build_index(vectors: Vectors, backend: Backend) -> VectorIndex:
    """An index over ``[m, d]`` vectors, deterministic for the same vectors in the same order."""
    if backend == "flat":
        return FlatIndex(vectors)
    return FaissIndex.build(vectors) if backend == "faiss" else HnswlibIndex(vectors)


def load_index(raw: npt.NDArray[np.uint8], dimension: int, backend: Backend) -> VectorIndex:
    """What `dump` of an index wrote, only for bytes whose digest was checked; ValueError if it is something else."""
    if backend == "faiss":
        return FaissIndex.load(raw, dimension)
    return build_index(_vectors(raw, dimension), backend)


class LayerIndex:
    """All indexes of a layer, by token length, each with the records of its positions."""

    def __init__(self, indexes: Mapping[int, tuple[VectorIndex, Ids]]) -> None:
        self._indexes = dict(indexes)
        self.lengths = frozenset(indexes)  # token lengths that can be found

    @classmethod
    def build(cls, vectors: Vectors, lengths: Ids, backend: Backend, longest: int | None = None) -> LayerIndex:
        """Index embeddings ``[R, d]`` of records, those of each length ``[R]`` up to `longest` tokens apart."""
        kept = (n for n in np.unique(lengths).tolist() if longest is None or n <= longest)
        groups = {n: np.flatnonzero(lengths == n).astype(np.int64) for n in kept}
        return cls({
            length: (build_index(vectors[found], backend if len(found) >= EXACT_BELOW else "flat"), found)
            for length, found in groups.items()
        })  # fmt: skip

    def search(self, length: int, queries: Vectors, k: int = 1) -> tuple[Ids, Vectors]:
        """Records of a length, and distances, ``[q, k]``; record -1 where there is none."""
        if length not in self._indexes:
            return np.full((len(queries), k), -1, np.int64), np.full((len(queries), k), np.inf, np.float32)
        index, records = self._indexes[length]
        order, distances = index.search(queries, k)
        return np.where(order < 0, -1, records[order]), distances.astype(np.float32)

    def search_where(
        self, length: int, queries: Vectors, allows: Callable[[Ids, Ids], npt.NDArray[np.bool_]]
    ) -> tuple[Ids, Vectors]:
        """The nearest record that is allowed, and its distance ``[q]``; -1 if there is none.

        `allows` gets records ``[n, k]`` and the numbers of their queries ``[n]``, and says which records are. More and
        more neighbours are looked at until one of them is.
        """
        records, distances = np.full(len(queries), -1, np.int64), np.full(len(queries), np.inf, np.float32)
        left = np.arange(len(queries))
        count = len(self._indexes[length][0]) if length in self._indexes else 0
        k = min(_LOOKED_AT, count)
        while len(left) and k:
            found, near = self.search(length, queries[left], k)
            allowed = (found >= 0) & allows(found, left)
            first, some = allowed.argmax(1), allowed.any(1)
            rows = np.flatnonzero(some)
            records[left[rows]], distances[left[rows]] = found[rows, first[rows]], near[rows, first[rows]]
            left = left[~some]
            k = min(8 * k, count) if k < count else 0
        return records, distances

    def save(self, file: Path, owner: Mapping[str, str] | None = None) -> None:
        """Write the container; `owner` says whose the file is, for messages."""
        tensors: dict[str, npt.NDArray[Any]] = {}
        for length, (index, records) in self._indexes.items():
            tensors[f"{length}.{_FLAT if isinstance(index, FlatIndex) else _GRAPH}"] = index.dump()
            tensors[f"{length}.ids"] = records
        save_file(tensors, str(file), dict(owner or {}))

    @classmethod
    def load(cls, file: Path, dimension: int, backend: str, records: Snapshot, next_id: int) -> LayerIndex:
        """Read the container; DatabaseCorruptError if it is none, or names other ids or lengths than there are."""

        def corrupt(why: str) -> DatabaseCorruptError:
            return DatabaseCorruptError(f"{file}: {why}", f"attmemo train-embedder {file.parent.parent}")

        if backend not in BACKENDS:
            raise corrupt(f"unknown index backend {backend!r}")
        try:
            tensors = load_file(str(file))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            # AttributeError: a type of number that safetensors knows and numpy does not, such as F8_E4M3.
            raise corrupt(f"not an index container: {error}") from error
        found: dict[int, tuple[VectorIndex, Ids]] = {}
        for name, raw in tensors.items():
            text, _, part = name.partition(".")
            if part not in (_FLAT, _GRAPH):
                continue
            ids = tensors.get(f"{text}.ids")
            sound = text.isdecimal() and raw.dtype == np.uint8 and raw.ndim == 1
            if not sound or ids is None or ids.dtype != np.int64 or ids.ndim != 1 or not len(ids):
                raise corrupt(f"malformed entry {name!r}")
            length = int(text)
            if length in found:
                raise corrupt(f"two indexes for length {text}")
            if ids.min() < 0 or ids.max() >= next_id:
                raise corrupt(f"names record {ids.max()} of {next_id}")
            if len(np.unique(ids)) != len(ids):
                raise corrupt(f"names a record of length {text} twice")
            try:
                index = load_index(raw, dimension, "flat" if part == _FLAT else backend)  # type: ignore[arg-type]
            except ValueError as error:
                raise corrupt(str(error)) from error
            if len(index) != len(ids):
                raise corrupt(f"{len(index)} vectors of length {text} for {len(ids)} records")
            if (records.lengths[ids] != length).any():
                raise corrupt(f"names a record of another length than {text}")
            found[length] = index, ids
        return cls(found)


def _padded(order: Ids, distances: npt.NDArray[Any], k: int) -> tuple[Ids, Vectors]:
    missing = k - order.shape[1]
    if missing > 0:
        order = np.pad(order, ((0, 0), (0, missing)), constant_values=-1)
        distances = np.pad(distances, ((0, 0), (0, missing)), constant_values=np.inf)
    return order, distances.astype(np.float32)


def _vectors(raw: npt.NDArray[np.uint8], dimension: int) -> Vectors:
    if raw.nbytes % (4 * dimension):
        raise ValueError("an index has another dimension or kind")
    vectors = np.frombuffer(raw.tobytes(), np.float32).reshape(-1, dimension)
    if not np.isfinite(vectors).all():
        raise ValueError("an index has vectors that are not finite")
    return vectors


def _check_graph(raw: npt.NDArray[np.uint8], dimension: int) -> None:
    """Whether bytes are an HNSW graph as faiss writes one of `FaissIndex.build`; ValueError says what is not.

    faiss would follow a link to a vector that is none, and read as many of them as the bytes say there are.
    """
    data, at = memoryview(raw.tobytes()), 0

    def take(layout: str) -> tuple[Any, ...]:
        nonlocal at
        values = struct.unpack_from("<" + layout, data, at)
        at += struct.calcsize("<" + layout)
        return values

    def array(kind: str) -> npt.NDArray[Any]:
        nonlocal at
        (count,) = take("Q")
        width = np.dtype(kind).itemsize
        if count > (len(data) - at) // width:
            raise ValueError("an index ends before it should")
        found: npt.NDArray[Any] = np.frombuffer(data, kind, count, at)
        at += count * width
        return found

    try:
        # Name, dimension, vectors, two unused numbers, whether it is trained, metric (1: Euclidean).
        head = take("4siqqqBi")
        array("<f8")  # probabilities of levels, for building
        room, levels, offsets, links = array("<i4"), array("<i4"), array("<u8"), array("<i4")
        entry, top, *_ = take("5i")
        tail = take("4siqqqBi")
        vectors = array("<f4")
    except struct.error as error:
        raise ValueError(f"an index ends before it should: {error}") from error
    count = len(levels)
    shape = (dimension, count)
    if head[0] != b"IHNf" or tail[0] != b"IxF2" or (head[1], head[2]) != shape or (tail[1], tail[2]) != shape:
        raise ValueError("an index has another dimension or kind")
    if (head[5], head[6], tail[5], tail[6]) != (1, 1, 1, 1) or at != len(data) or len(vectors) != count * dimension:
        raise ValueError("an index does not hold as many vectors as it says")
    if not np.isfinite(vectors).all():
        raise ValueError("an index has vectors that are not finite")
    # How many links fit below each level: 2 M of the lowest, M of each above.
    if room.tolist() != [0, *range(2 * LINKS, 2 * LINKS + LINKS * (len(room) - 1), LINKS)] or len(room) < 2:
        raise ValueError("an index has levels of another size")
    if count == 0:
        raise ValueError("an index has no vectors")
    if levels.min() < 1 or levels.max() >= len(room) or top != levels.max() - 1:
        raise ValueError("an index has levels that do not exist")
    if not 0 <= entry < count or levels[entry] != top + 1:
        raise ValueError("an index is entered where it has no vector")
    sizes = room[levels].astype(np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    if len(links) != starts[-1] or not np.array_equal(offsets, starts.astype(np.uint64)):
        raise ValueError("an index has links that do not lie in their places")
    if links.min() < -1 or links.max() >= count:
        raise ValueError("an index links to a vector that it does not have")
    level = np.searchsorted(room, np.arange(len(links)) - np.repeat(starts[:-1], sizes), side="right") - 1
    if (levels[links] <= level)[links >= 0].any():
        raise ValueError("an index links to a vector on a level where it is not")
