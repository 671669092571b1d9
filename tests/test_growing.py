"""Records that come while a model serves: what is fetched is what was added, memory is bounded, the used ones stay."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from packed_tools import MODELS, batch, rows_database
from test_align import BARE
from torch import Tensor

from attmemo import Database, DatabaseError
from attmemo.db import KIND_ROWS
from attmemo.db.forms import quantize
from attmemo.kernels.align import Rule
from attmemo.kernels.changes import changes as changes_of
from attmemo.memory import free_memory
from attmemo.profiler.row_controls import read_record
from attmemo.reuse.growing import SHARE, GrowingRows
from attmemo.reuse.row_store import DatabaseRows, Fetched

LAYERS, HEADS, WIDTH = 2, 2, 8
FLOAT = (torch.float32, torch.float32)
Tokens = npt.NDArray[np.int32]


def record(seed: int, n: int = 5, layers: int = LAYERS, width: int = WIDTH) -> tuple[Tokens, Tensor, Tensor]:
    """Tokens, rows and last hidden states of a sequence like no other."""
    generator = torch.Generator().manual_seed(seed)
    tokens = 1000 * (seed + 1) + np.arange(n, dtype=np.int32)
    rows = torch.randn(layers, 2, n, width, generator=generator)
    return tokens, rows, torch.randn(n, width, generator=generator)


def size_of(n: int = 5) -> int:
    """Bytes of such a record in float32: rows, last hidden states and tokens."""
    return (2 * LAYERS + 1) * n * WIDTH * 4 + n * 4


def store_for(count: int, base: DatabaseRows | None = None) -> GrowingRows:
    """A store with room for so many records of five tokens."""
    return GrowingRows(FLOAT, HEADS, base, max_bytes=count * size_of() + size_of() // 2)


def at(address: int, rows: int, row_bytes: int, dtype: torch.dtype) -> Tensor:
    """A copy of rows in memory."""
    octets = bytearray(ctypes.string_at(address, rows * row_bytes))
    return torch.frombuffer(octets, dtype=dtype).view(rows, -1).clone()


def fetched(found: Fetched, place: int, layers: int = LAYERS) -> tuple[Tensor, Tensor]:
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


def rounded(rows: Tensor, storage: torch.dtype, heads: int) -> Tensor:
    """What a type of storage leaves of rows."""
    if storage is not torch.int8:
        return rows.to(storage).float()
    codes, scales = quantize(rows, heads)
    return codes.float() * scales.repeat_interleave(rows.shape[-1] // heads, -1)


def numbers(*found: int) -> npt.NDArray[np.int64]:
    return np.array(found, np.int64)


def find(store: GrowingRows, tokens: Tokens) -> npt.NDArray[np.int64]:
    """The record of these very tokens, or -1; asking does not count as use. Others may share a sketch by chance."""
    found = store.index.best(tokens, numbers(0, len(tokens)), BARE)
    return np.where(found.computed == 0, found.record, -1)


def holds(store: GrowingRows, seed: int) -> bool:
    """Whether this record can be found."""
    return bool(find(store, record(seed)[0])[0] >= 0)


def held(store: GrowingRows, most: int) -> list[int]:
    """Those of the first records that can be found."""
    return [seed for seed in range(most) if holds(store, seed)]


class TestAlone:
    def test_what_is_fetched_is_what_was_added(self) -> None:
        store = store_for(9)
        added = [record(seed, 3 + seed) for seed in range(5)]
        for one in added:
            store.add(*one)
        order = numbers(3, -1, 0, 4, 4)
        found = store.fetch(order)
        for place, number in enumerate(order.tolist()):
            if number < 0:
                assert found.layer(0).rows[place] == found.layer(0).keys[place] == found.last()[0][place] == 0
                continue
            rows, last = fetched(found, place)
            assert torch.equal(rows, added[number][1])
            assert torch.equal(last, added[number][2])
            assert store.index.tokens_of(number).tolist() == added[number][0].tolist()
        assert len(store) == len(store.index) == 5
        assert store.nbytes == sum(size_of(3 + seed) for seed in range(5))

    @pytest.mark.parametrize("storage", [torch.float16, torch.bfloat16, torch.int8])
    def test_records_are_kept_in_the_type_of_the_storage(self, storage: torch.dtype) -> None:
        store = GrowingRows((storage, torch.float16), HEADS)
        tokens, rows, last = record(1)
        store.add(tokens, rows, last)
        found = fetched(store.fetch(numbers(0)), 0)
        assert torch.equal(found[0], rounded(rows, storage, HEADS))
        assert torch.equal(found[1], last.half().float())
        assert store.fetch(numbers(0)).layer(0).dtype == storage

    def test_rows_that_were_fetched_outlive_their_record(self) -> None:
        store = store_for(1)
        store.add(*record(0))
        found = store.fetch(numbers(0))
        store.add(*record(1))
        store.add(*record(2))
        assert torch.equal(fetched(found, 0)[0], record(0)[1])

    def test_without_a_limit_it_takes_a_share_of_the_free_memory(self) -> None:
        store = GrowingRows(FLOAT, HEADS)
        assert 0 < store.max_bytes <= 2 * SHARE * free_memory()

    def test_a_closed_store_holds_nothing(self) -> None:
        store = store_for(3)
        store.add(*record(0))
        store.close()
        assert (len(store), store.nbytes) == (0, 0)
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(0))

    def test_a_record_that_the_index_refuses_leaves_no_trace(self) -> None:
        store = store_for(9)
        tokens, rows, last = record(0)
        with pytest.raises(ValueError, match="int32"):
            store.add(tokens.astype(np.int64), rows, last)  # type: ignore[arg-type]
        store.add(*record(1))
        assert len(store) == len(store.index) == 1
        found = find(store, record(1)[0])
        assert torch.equal(fetched(store.fetch(found), 0)[0], record(1)[1])


class TestBound:
    def test_bytes_are_never_above_the_limit(self) -> None:
        store, random = store_for(4), np.random.default_rng(0)
        for seed in range(100):
            store.add(*record(seed, int(random.integers(1, 12))))
            assert store.nbytes <= store.max_bytes
            assert len(store) == len(store.index)
            alive = [number for number in range(seed + 1) if number in store.index]
            assert store.nbytes == sum(size_of(len(store.index.tokens_of(number))) for number in alive)
        assert len(store) > 0

    def test_a_record_larger_than_all_memory_is_left_out_and_drops_nothing(self) -> None:
        store = store_for(3)
        for seed in range(3):
            store.add(*record(seed))
        store.add(*record(7, 40))
        assert len(store) == 3
        assert all(holds(store, seed) for seed in range(3))
        nothing = GrowingRows(FLOAT, HEADS, max_bytes=0)
        nothing.add(*record(0))
        assert len(nothing) == len(nothing.index) == 0

    def test_a_record_of_just_the_limit_fits(self) -> None:
        store = GrowingRows(FLOAT, HEADS, max_bytes=size_of())
        store.add(*record(0))
        store.add(*record(1))
        assert (len(store), store.nbytes) == (1, size_of())
        assert holds(store, 1)

    def test_the_oldest_goes_first_if_none_is_used(self) -> None:
        store = store_for(3)
        for seed in range(7):
            store.add(*record(seed))
            assert held(store, 9) == list(range(max(seed - 2, 0), seed + 1))

    def test_what_was_used_outlives_what_was_not(self) -> None:
        store = store_for(4)
        for seed in range(4):
            store.add(*record(seed))
        for seed in range(4, 40):
            store.fetch(numbers(1))
            store.add(*record(seed))
        assert holds(store, 1)
        assert not any(holds(store, seed) for seed in (0, 2, 3))

    def test_one_use_is_good_for_one_pass_of_the_hand(self) -> None:
        store = store_for(3)
        for seed in range(3):
            store.add(*record(seed))
        store.fetch(numbers(0, 2))
        store.add(*record(3))  # the hand passes 0 and drops 1
        assert held(store, 9) == [0, 2, 3]
        store.add(*record(4))  # passes 2 and drops 3
        assert held(store, 9) == [0, 2, 4]
        store.add(*record(5))  # the hand goes on to the newest, 4, before it begins again
        assert held(store, 9) == [0, 2, 5]
        store.fetch(numbers(5))
        store.add(*record(6))  # passes 5 and drops 0, which was not used again
        assert held(store, 9) == [2, 5, 6]

    def test_if_all_were_used_one_goes_nevertheless(self) -> None:
        store = store_for(3)
        for seed in range(3):
            store.add(*record(seed))
        store.fetch(numbers(0, 1, 2))
        store.add(*record(3))
        assert held(store, 9) == [1, 2, 3]

    def test_one_large_record_drops_several(self) -> None:
        store = store_for(4)
        for seed in range(4):
            store.add(*record(seed))
        store.add(*record(4, 14))
        assert len(store) == len(store.index) == 2
        assert store.nbytes <= store.max_bytes


class TestDropped:
    def test_a_dropped_record_is_an_error_and_never_another_record(self) -> None:
        store = store_for(2)
        for seed in range(5):
            store.add(*record(seed))
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(4, 0))
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(99))
        assert torch.equal(fetched(store.fetch(numbers(4)), 0)[0], record(4)[1])

    def test_a_record_whose_changes_cannot_be_told_any_more_cannot_be_fetched(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread found it before. Without gaps it would be served as an input that did not change."""
        store = store_for(1)
        store.add(*record(0))
        tokens, starts = record(0)[0].copy(), numbers(0, 5)
        tokens[2] += 500
        near = store.index.candidates(tokens, starts)
        found = store.index.align(tokens, starts, near, Rule()).record
        assert found.tolist() == [0]
        own, seen = store.index.remove, list[str]()

        def remove(number: int) -> None:
            own(number)
            changes, _ = store.index.changes(tokens, starts, near, found, Rule(), np.zeros(0, np.uint8))
            try:
                store.fetch(found)
                seen.append(f"fetched, {len(changes)} changes")
            except DatabaseError:
                seen.append("dropped")

        monkeypatch.setattr(store.index, "remove", remove)
        store.add(*record(1))
        assert seen in (["dropped"], ["fetched, 1 changes"])

    def test_changes_are_those_between_an_input_and_its_record(self) -> None:
        store = store_for(2)
        store.add(*record(0))
        tokens, starts = record(0)[0].copy(), numbers(0, 5)
        tokens[2] += 500
        near, kinds = store.index.candidates(tokens, starts), np.zeros(0, np.uint8)
        found, there = store.index.changes(tokens, starts, near, numbers(0), Rule(), kinds)
        partner = np.array([0, 1, -1, 3, 4], np.int32)
        expected = changes_of(tokens, starts, numbers(0), record(0)[0], numbers(0, 5), partner, kinds)
        assert len(found) == 1
        assert there.tolist() == [True]
        assert all(np.array_equal(a, b) for a, b in zip(found.columns, expected.columns, strict=True))
        found, there = store.index.changes(tokens, starts, near, numbers(-1), Rule(), kinds)
        assert len(found) == 0
        assert there.tolist() == [False]


STORED = [9, 12, 7]


@pytest.fixture(scope="module", name="prepared", params=["float32", "int8"])
def _prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("growing")
    return rows_database(MODELS["BERT"](), [batch(STORED, 3)], folder / "db", request.param)


@pytest.fixture(name="base")
def _base(prepared: Path) -> Iterator[tuple[Database, DatabaseRows]]:
    with Database(prepared) as database:
        yield database, DatabaseRows(database)


def shape_of(database: Database) -> dict[str, int]:
    """Layers and width of its rows."""
    kind = next(kind for kind in database.manifest.known_kinds if kind.name == KIND_ROWS)
    return {"layers": kind.layers, "width": int(kind.shape[-1])}


class TestBesideAPreparedBase:
    def check(self, database: Database, found: Fetched, place: int, number: int) -> None:
        """One place holds what the database holds."""
        rows, last = fetched(found, place, shape_of(database)["layers"])
        stored = read_record(database, number)
        expected = stored.rows.float()
        if stored.scales is not None:
            expected *= stored.scales.repeat_interleave(expected.shape[-1] // stored.scales.shape[-1], -1)
        assert torch.equal(rows, expected)
        assert torch.equal(last, stored.last.float())

    def test_both_are_fetched_in_one_batch(self, base: tuple[Database, DatabaseRows]) -> None:
        database, prepared = base
        shape = shape_of(database)
        store = GrowingRows(prepared.storage, 4, prepared, max_bytes=1 << 20)
        own = [record(seed, 6, **shape) for seed in range(2)]
        for one in own:
            store.add(*one)
        assert store.index is prepared.index
        assert len(store.index) == len(STORED) + 2
        assert len(store) == 2
        found = store.fetch(numbers(4, 1, -1, 3, 0))
        for place, number in ((1, 1), (4, 0)):
            self.check(database, found, place, number)
        for place, seed in ((0, 1), (3, 0)):
            rows, last = fetched(found, place, shape["layers"])
            assert torch.equal(rows, rounded(own[seed][1], prepared.storage[0], 4))
            assert torch.equal(last, own[seed][2].to(prepared.storage[1]).float())
        assert found.layer(1).rows.tolist() == [6, STORED[1], 0, 6, STORED[0]]

    def test_each_alone_is_fetched_too(self, base: tuple[Database, DatabaseRows]) -> None:
        database, prepared = base
        shape = shape_of(database)
        store = GrowingRows(prepared.storage, 4, prepared, max_bytes=1 << 20)
        self.check(database, store.fetch(numbers(-1, 2)), 1, 2)
        store.add(*record(0, 6, **shape))
        self.check(database, store.fetch(numbers(2, -1)), 0, 2)
        rows, _ = fetched(store.fetch(numbers(-1, 3)), 1, shape["layers"])
        assert torch.equal(rows, rounded(record(0, 6, **shape)[1], prepared.storage[0], 4))

    def test_prepared_records_are_never_dropped(self, base: tuple[Database, DatabaseRows]) -> None:
        database, prepared = base
        shape = shape_of(database)
        most = 3 * (2 * shape["layers"] + 2) * 6 * shape["width"] * prepared.storage[0].itemsize
        store = GrowingRows(prepared.storage, 4, prepared, max_bytes=most)
        for seed in range(20):
            store.add(*record(seed, 6, **shape))
        assert 0 < len(store) < 4
        assert len(store.index) == len(STORED) + len(store)
        for number in range(len(STORED)):
            self.check(database, store.fetch(numbers(number)), 0, number)
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(0, len(STORED)))


def test_index_and_store_agree_while_threads_add_and_fetch() -> None:
    """What is fetched for a record has the rows of its tokens, or is said to be dropped."""
    store, wrong, done = store_for(8), list[str](), threading.Event()
    newest, served = [0], np.zeros(2, np.int64)

    def add(first: int) -> None:
        for seed in range(first, first + 300):
            tokens, rows, last = record(seed)
            store.add(tokens, rows.fill_(float(tokens[0])), last)
            newest.append(seed)
            if store.nbytes > store.max_bytes:
                wrong.append("too many bytes")

    def fetch(reader: int) -> None:
        random = np.random.default_rng(reader)
        while not done.is_set() or not served[reader]:
            tokens = record(int(random.choice(newest[-12:])))[0]
            number = find(store, tokens)
            try:
                found = store.fetch(number) if number[0] >= 0 else None
            except DatabaseError:
                continue
            if found is None:
                continue
            served[reader] += 1
            if not bool((fetched(found, 0)[0] == float(tokens[0])).all()):
                wrong.append(f"rows of another record for {tokens[0]}")

    readers = [threading.Thread(target=fetch, args=(reader,)) for reader in range(2)]
    writers = [threading.Thread(target=add, args=(300 * writer,)) for writer in range(3)]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join()
    done.set()
    for thread in readers:
        thread.join()
    assert not wrong
    assert len(store) == len(store.index) == 8
    alive = [number for number in range(900) if number in store.index]
    for number in alive:
        rows, _ = fetched(store.fetch(numbers(number)), 0)
        assert bool((rows == float(store.index.tokens_of(number)[0])).all())
