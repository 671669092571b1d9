"""The vector indexes: three backends with one face, which never mix lengths and never name a record that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from attmemo.db import BACKENDS, Backend, FlatIndex, LayerIndex
from attmemo.db import index as db_index
from attmemo.db.catalogue import Snapshot
from attmemo.db.index import build_index, load_index
from attmemo.errors import DatabaseCorruptError


@pytest.fixture(autouse=True)
def graphs_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers hold what the backend builds, however few the vectors, except where a test says otherwise."""
    monkeypatch.setattr(db_index, "EXACT_BELOW", 0)

Vectors = npt.NDArray[np.float32]
Found = tuple[npt.NDArray[np.int64], Vectors]
DIMENSION = 24


def clustered(count: int, seed: int = 0) -> Vectors:
    """Points in clusters, as embeddings of near-copies are."""
    generator = np.random.default_rng(seed)
    centres = generator.normal(size=(30, DIMENSION))
    return (centres[generator.integers(0, 30, count)] + 0.1 * generator.normal(size=(count, DIMENSION))).astype(
        np.float32
    )


def records(lengths: npt.ArrayLike) -> Snapshot:
    """What a container is loaded for: records of these lengths."""
    found = np.asarray(lengths, np.int64)
    zeros = np.zeros(len(found), np.int64)
    return Snapshot(found, zeros, zeros, zeros, zeros, np.zeros((len(found), 0), np.uint64))


SIXTY = records(np.arange(60) % 3 + 4)


def same(one: Found, two: Found) -> bool:
    """Whether two searches found the same, bit for bit."""
    return np.array_equal(one[0], two[0]) and np.array_equal(one[1], two[1])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    return request.param  # type: ignore[no-any-return]


def test_a_record_finds_itself(backend: Backend) -> None:
    """Asked for a stored vector, the answer is its own position at distance 0."""
    vectors = clustered(600)
    order, distances = build_index(vectors, backend).search(vectors, 1)
    assert (order[:, 0] == np.arange(600)).mean() >= 0.99
    assert float(np.quantile(distances, 0.99)) < 1e-3


def test_the_nearest_is_found(backend: Backend) -> None:
    """Recall at 1 against exhaustive search on clustered vectors, and true distances."""
    vectors, queries = clustered(1500), clustered(300, seed=1)
    exact = np.linalg.norm(queries[:, None] - vectors, axis=2)
    order, distances = build_index(vectors, backend).search(queries, 1)
    assert (distances[:, 0] <= exact.min(1) * (1 + 1e-4)).mean() >= 0.95
    assert np.allclose(distances[:, 0], exact[np.arange(300), order[:, 0]], rtol=1e-3, atol=1e-4)


def test_neighbours_come_sorted(backend: Backend) -> None:
    """The k neighbours are sorted, distinct, and at their true distance."""
    vectors, queries = clustered(400), clustered(20, seed=2)
    order, distances = build_index(vectors, backend).search(queries, 10)
    assert order.shape == distances.shape == (20, 10)
    assert order.dtype == np.int64
    assert (np.diff(distances, axis=1) >= 0).all()
    assert all(len(set(row)) == 10 for row in order.tolist())
    assert np.allclose(distances, np.linalg.norm(queries[:, None] - vectors[order], axis=2), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("count", [1, 3])
def test_missing_neighbours_are_position_minus_one(backend: Backend, count: int) -> None:
    """k larger than the index: the missing ones are position -1 at distance inf, as from every backend."""
    vectors = clustered(count)
    order, distances = build_index(vectors, backend).search(clustered(5, seed=3), 8)
    assert order.shape == distances.shape == (5, 8)
    assert (order[:, count:] == -1).all()
    assert np.isinf(distances[:, count:]).all()
    assert sorted(order[0, :count].tolist()) == list(range(count))
    assert np.isfinite(distances[:, :count]).all()


def test_no_query_gives_no_neighbour(backend: Backend) -> None:
    """A batch without a single eligible row."""
    order, distances = build_index(clustered(10), backend).search(np.zeros((0, DIMENSION), np.float32), 3)
    assert order.shape == distances.shape == (0, 3)


def test_the_same_vectors_give_the_same_index(backend: Backend) -> None:
    """Building twice gives the same bytes, or at least the same answers: a rebuilt database behaves as before."""
    vectors, queries = clustered(500), clustered(100, seed=4)
    one, two = build_index(vectors, backend), build_index(vectors, backend)
    assert np.array_equal(one.dump(), two.dump())
    assert same(one.search(queries, 5), two.search(queries, 5))


def test_a_loaded_index_answers_as_before(backend: Backend) -> None:
    """dump and load: the same answers, bit for bit."""
    vectors, queries = clustered(500), clustered(100, seed=5)
    built = build_index(vectors, backend)
    loaded = load_index(built.dump(), DIMENSION, backend)
    assert len(built) == len(loaded) == 500
    assert same(built.search(queries, 4), loaded.search(queries, 4))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    asked=st.integers(1, 8),
    k=st.integers(1, 6),
    backend=st.sampled_from(["flat", "faiss"]),
)
def test_another_length_is_never_found(lengths: list[int], asked: int, k: int, backend: Backend) -> None:
    """A query of one length is answered by records of that length only; a length that is not there by nothing."""
    stored = np.array(lengths, np.int64)
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(len(lengths), 5)).astype(np.float32)
    vectors[:] += stored[:, None] * 0  # all lengths share one cloud: only the book-keeping separates them
    index = LayerIndex.build(vectors, stored, backend)
    assert index.lengths == frozenset(lengths)
    order, distances = index.search(asked, vectors[:3], k)
    there = int((stored == asked).sum())
    assert (order[:, there:] == -1).all()
    assert np.isinf(distances[:, there:]).all()
    assert (order[:, : min(there, k)] >= 0).all()
    assert all(stored[record] == asked for record in order[order >= 0])
    exact = [np.linalg.norm(vectors[:3] - vectors[r], axis=1) for r in np.flatnonzero(stored == asked)]
    if exact:
        assert np.allclose(distances[:, 0], np.min(exact, axis=0), atol=1e-4)


def test_near_copies_are_at_distance_zero() -> None:
    """Vectors far from the origin that differ a little: the exact index does not lose the difference to rounding."""
    vectors = np.full((2, DIMENSION), 1000.0, np.float32)
    vectors[1, 0] += 0.25
    order, distances = FlatIndex(vectors).search(vectors[:1] + np.float32(0), 2)
    assert distances[0].tolist() == [0.0, 0.25]
    assert sorted(order[0].tolist()) == [0, 1]


# -- containers


@pytest.fixture
def saved(backend: Backend, tmp_path: Path) -> tuple[Path, Backend, LayerIndex]:
    """A container of 60 records in three lengths."""
    index = LayerIndex.build(clustered(60), np.arange(60, dtype=np.int64) % 3 + 4, backend)
    index.save(tmp_path / "layer.safetensors")
    return tmp_path / "layer.safetensors", backend, index


def test_a_loaded_container_answers_as_before(saved: tuple[Path, Backend, LayerIndex]) -> None:
    """save and load: record ids and distances as before."""
    file, backend, index = saved
    loaded = LayerIndex.load(file, DIMENSION, backend, SIXTY, 60)
    assert loaded.lengths == index.lengths == {4, 5, 6}
    for length in (4, 5, 6, 7):
        assert same(index.search(length, clustered(60), 3), loaded.search(length, clustered(60), 3))


@pytest.mark.parametrize("next_id", [0, 1, 59])
def test_a_container_of_a_later_generation_is_refused(saved: tuple[Path, Backend, LayerIndex], next_id: int) -> None:
    """An index of a later generation beside an older manifest: refused."""
    file, backend, _ = saved
    with pytest.raises(DatabaseCorruptError, match=rf"names record \d+ of {next_id}"):
        LayerIndex.load(file, DIMENSION, backend, SIXTY, next_id)


def _rewritten(file: Path, **changes: Any) -> None:
    tensors = load_file(str(file)) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, str(file))


@pytest.mark.parametrize(
    "changes",
    [
        {"4.ids": None},
        {"4.ids": np.zeros(0, np.int64)},
        {"4.ids": np.arange(20, dtype=np.int32)},
        {"4.ids": np.arange(20, dtype=np.int64).reshape(2, 10)},
        {"4.ids": np.arange(-1, 19, dtype=np.int64)},
        {"4.ids": np.arange(19, dtype=np.int64)},
        {"4.ids": np.arange(21, dtype=np.int64)},
        {"x.index": np.zeros(4, np.uint8)},
        {"²a.index": np.zeros(4, np.uint8)},
        {"9.index": np.zeros(4, np.float32), "9.ids": np.zeros(1, np.int64)},
        {"9.index": np.zeros((2, 2), np.uint8), "9.ids": np.zeros(1, np.int64)},
    ],
    ids=str,
)
def test_a_container_that_does_not_fit_itself_is_refused(
    saved: tuple[Path, Backend, LayerIndex], changes: dict[str, Any]
) -> None:
    """Ids missing, empty, of another type, negative, too few, too many; names that are none: refused."""
    file, backend, _ = saved
    _rewritten(file, **changes)
    with pytest.raises(DatabaseCorruptError):
        LayerIndex.load(file, DIMENSION, backend, SIXTY, 60)


@pytest.mark.parametrize("backend", ["faiss", "flat"])
@pytest.mark.parametrize("raw", [b"", b"x", b"IHNf" + b"\0" * 40, b"\xff" * 1000], ids=["empty", "x", "head", "ones"])
def test_bytes_of_another_library_are_refused(backend: Backend, raw: bytes) -> None:
    """What is no index, behind a digest that fits: an error of this library where the backend tells."""
    body = np.frombuffer(raw, np.uint8)
    if backend == "flat" and len(raw) % (4 * DIMENSION) == 0:
        assert len(load_index(body, DIMENSION, backend)) == 0
        return
    with pytest.raises(ValueError, match="index"):
        load_index(body, DIMENSION, backend)


def test_another_dimension_is_refused() -> None:
    """An index of other vectors: refused at load, not at the first search."""
    raw = build_index(clustered(20), "faiss").dump()
    with pytest.raises(ValueError, match="another dimension"):
        load_index(raw, DIMENSION + 1, "faiss")
    with pytest.raises(ValueError, match="another dimension"):
        load_index(build_index(clustered(20), "flat").dump(), 7, "flat")


def test_a_file_that_is_no_container_is_refused(tmp_path: Path) -> None:
    """Not safetensors; a library that is not known."""
    (tmp_path / "x").write_bytes(b"nothing of the kind")
    with pytest.raises(DatabaseCorruptError, match="not an index container"):
        LayerIndex.load(tmp_path / "x", DIMENSION, "faiss", SIXTY, 1)
    with pytest.raises(DatabaseCorruptError, match="not an index container"):
        LayerIndex.load(tmp_path / "nowhere", DIMENSION, "faiss", SIXTY, 1)
    with pytest.raises(DatabaseCorruptError, match="unknown index backend 'annoy'"):
        LayerIndex.load(tmp_path / "x", DIMENSION, "annoy", SIXTY, 1)


def test_building_does_not_slow_torch_down() -> None:
    """faiss builds on one thread to be deterministic, and puts the number of OpenMP threads back."""
    import faiss

    before = faiss.omp_get_max_threads()
    build_index(clustered(50), "faiss")
    assert faiss.omp_get_max_threads() == before


def test_every_stored_vector_is_found_where_records_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph misses one now and then; below the limit every stored vector is found, whatever the backend."""
    monkeypatch.setattr(db_index, "EXACT_BELOW", 200)
    vectors = np.concatenate([clustered(150), clustered(250)])
    lengths = np.repeat(np.array([3, 4]), [150, 250])
    LayerIndex.build(vectors, lengths, "faiss").save(tmp_path / "container")
    kinds = {name for name in load_file(str(tmp_path / "container")) if not name.endswith("ids")}
    assert kinds == {"3.flat", "4.index"}
    loaded = LayerIndex.load(tmp_path / "container", DIMENSION, "faiss", records(lengths), 400)
    found, distances = loaded.search(3, vectors[:150])
    assert np.array_equal(vectors[found[:, 0]], vectors[:150])
    assert (distances[:, 0] == 0.0).all()


def test_two_indexes_for_one_length_are_refused(tmp_path: Path) -> None:
    LayerIndex.build(clustered(30), np.full(30, 4), "flat").save(tmp_path / "one")
    tensors = load_file(str(tmp_path / "one"))
    save_file(tensors | {"4.index": tensors["4.flat"]}, str(tmp_path / "two"))
    with pytest.raises(DatabaseCorruptError, match="two indexes for length 4"):
        LayerIndex.load(tmp_path / "two", DIMENSION, "flat", records([4] * 30), 30)


def test_the_nearest_does_not_depend_on_the_rest_of_the_batch() -> None:
    """Vectors far from the origin and close together: the expanded square would cancel to noise."""
    vectors = clustered(300) * np.float32(1e-3) + np.float32(50.0)
    index = FlatIndex(vectors)
    together = index.search(vectors[:40], 1)[0][:, 0]
    assert together.tolist() == [int(index.search(vectors[i : i + 1], 1)[0][0, 0]) for i in range(40)]
    assert np.array_equal(vectors[together], vectors[:40])


@pytest.mark.parametrize("looked_at", [1, 4, 64])
def test_of_the_earlier_records_the_nearest_is_found(
    backend: Backend, looked_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many neighbours lie before it that are not early enough; none if no record is."""
    monkeypatch.setattr(db_index, "_LOOKED_AT", looked_at)
    generator = np.random.default_rng(3)
    vectors, order = clustered(90), generator.permutation(90).astype(np.int64)
    lengths = np.arange(90) % 3 + 4
    index = LayerIndex.build(vectors, lengths, backend)
    before = np.array([0, 1, 5, 40, 90] * 6, np.int64)

    def allows(found: npt.NDArray[np.int64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        return order[found] < before[rows][:, None]

    records, distances = index.search_where(5, vectors[:30], allows)
    for query, record, distance, time in zip(vectors[:30], records, distances, before, strict=True):
        early = np.flatnonzero((lengths == 5) & (order < time))
        apart = np.linalg.norm(vectors[early] - query, axis=1)
        if not len(early):
            assert (record, distance) == (-1, np.inf)
            continue
        assert record in early
        assert distance == pytest.approx(apart.min(), abs=1e-4)
    assert index.search_where(99, vectors[:2], allows)[0].tolist() == [-1, -1]
