"""Records that come while a model serves: what is fetched is what was offered, bytes are bounded, used ones stay."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest
import torch
from children import in_child
from packed_models import MODELS, batch, rows_database
from rows_tools import FLOAT, HEADS, Tokens, as_stored, fetched, find, layout, numbers, offers_of, record
from stored_rows import StoredRows
from torch import Tensor

import attmemo
from attmemo import DatabaseError
from attmemo.db.pools.history import Work
from attmemo.db.pools.pool import Entry, News, Pool
from attmemo.db.pools.segment import Segment, rounded, start_of
from attmemo.guard.time_account import TimeAccount
from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import NO_KINDS
from attmemo.kernels.plan import Demand
from attmemo.rows.candidate import Offer
from attmemo.rows.layout import Placed, RowLayout
from attmemo.rows.live_store import KNOWN, GrowingRows
from attmemo.rows.store import Record

SMALLEST: Final = 1 << 14
"""Bytes of a segment of a small pool."""


def keep(store: GrowingRows, *records: tuple[Tokens, Tensor, Tensor], notes: bytes = b"") -> None:
    """Offer these as one batch, and wait for it."""
    store.offer(offers_of(*records, notes=notes))
    assert store.flush()


PER_SEGMENT: Final = (SMALLEST - start_of(64)) // rounded(layout().nbytes(5))
"""Records of five tokens in a segment."""


def store_for(segments: int, **options: Any) -> GrowingRows:
    """A store with room for so many small segments."""
    return GrowingRows(Pool(segments * SMALLEST), layout(), **options)


def held(store: GrowingRows, most: int) -> list[int]:
    """Those of the first records that can be found."""
    return [seed for seed in range(most) if find(store, record(seed)[0])[0] >= 0]


def agree(store: GrowingRows, first: int = 0) -> bool:
    """Whether what can be found and what can be fetched are the same."""
    found = [store.index.tokens_of(number) for number in range(first, store.index.next) if number in store.index]
    there = [kept.tokens for kept in store.pool.records.values()]
    return sorted(map(bytes, found)) == sorted(map(bytes, there)) and len(store) == len(found)


class TestAlone:
    @pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
    def test_what_is_fetched_is_what_was_offered_in_the_type_of_the_storage(self, storage: torch.dtype) -> None:
        last_as = torch.float32 if storage is torch.float32 else torch.float16
        store = GrowingRows(Pool(1 << 20), layout((storage, last_as)))
        added = [record(seed, 3 + seed) for seed in range(5)]
        keep(store, *added[:3])
        keep(store, *added[3:])
        order = numbers(3, -1, 0, 4, 4)
        found = store.fetch(order)
        assert found.layer(0).dtype == storage
        assert found.layer(1).rows.tolist() == [6, 0, 3, 7, 7]
        for place, number in enumerate(order.tolist()):
            if number < 0:
                assert found.layer(0).keys[place] == found.layer(0).values[place] == found.last()[0][place] == 0
                continue
            rows, last = fetched(found, place)
            assert torch.equal(rows, as_stored(added[number][1], storage, HEADS))
            assert torch.equal(last, added[number][2].to(last_as).float())
            assert store.index.tokens_of(number).tolist() == added[number][0].tolist()
        assert len(store) == len(store.index) == 5
        assert store.storage == (storage, last_as)

    def test_what_is_kept_is_a_copy(self) -> None:
        store = store_for(8)
        offers = offers_of(record(0), record(1))
        store.offer(offers)
        assert store.flush()
        for offer in offers:
            offer.body[:] = 0
        for seed in (0, 1):
            rows, last = fetched(store.fetch(numbers(seed)), 0)
            assert torch.equal(rows, record(seed)[1])
            assert torch.equal(last, record(seed)[2])

    def test_rows_that_were_fetched_outlive_their_record(self) -> None:
        store = store_for(1)
        keep(store, record(0))
        found = store.fetch(numbers(0))
        for seed in range(1, 3 * PER_SEGMENT):
            keep(store, record(seed))
        assert 0 not in store.index
        rows, last = fetched(found, 0)
        assert torch.equal(rows, record(0)[1])
        assert torch.equal(last, record(0)[2])

    def test_a_note_is_kept_with_its_record(self) -> None:
        store = store_for(8)
        keep(store, record(0), record(1), record(2), notes=b"abc")
        assert store.notes_of([2, 0, 1, 3, -1]) == [b"c", b"a", b"b", b"", b""]

    def test_a_closed_store_holds_nothing(self) -> None:
        store = store_for(3)
        keep(store, record(0))
        store.close()
        assert (len(store), store.nbytes) == (0, 0)
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(0))
        store.offer(offers_of(record(1)))
        assert store.flush()
        assert len(store) == 0
        assert sum(store.done.values()) == 2

    def test_records_that_a_pool_had_before_are_found(self) -> None:
        pool = Pool(1 << 20)
        first = GrowingRows(pool, layout())
        keep(first, record(0), record(1), notes=b"ab")
        pool.remove([0])
        pool.news = lambda: _all_of(pool)  # type: ignore[method-assign]
        store = GrowingRows(pool, layout())
        assert held(store, 3) == [1]
        assert torch.equal(fetched(store.fetch(find(store, record(1)[0])), 0)[0], record(1)[1])


def _all_of(pool: Pool) -> News:
    """The news of a pool that another process has filled."""
    return News(list(pool.records.values()))


class TestWhatIsKept:
    def test_what_is_stored_is_not_stored_again(self) -> None:
        store = store_for(8)
        keep(store, record(0), record(1), record(0))
        keep(store, record(1), record(2))
        assert held(store, 4) == [0, 1, 2]
        assert store.done == {"kept": 3, KNOWN: 2}
        assert agree(store)

    def test_what_was_dropped_may_come_again(self) -> None:
        store = store_for(1)
        for seed in (*range(PER_SEGMENT + 1), 0):
            keep(store, record(seed))
        assert held(store, 99) == [0, PER_SEGMENT]
        assert KNOWN not in store.done

    def test_much_alike_is_not_the_same(self) -> None:
        store = store_for(8)
        tokens, rows, last = record(0, 12)
        other = tokens.copy()
        other[7] += 1
        keep(store, (tokens, rows, last), (other, rows, last), (tokens[:-1], rows[:, :, :-1], last[:-1]))
        assert store.done == {"kept": 3}

    def test_all_that_an_error_costs_is_counted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store = store_for(8)
        offers = offers_of(record(0), record(1), record(2), record(3))
        bad, as_record = offers[2], Offer.as_record

        def fails(offer: Offer, own: RowLayout) -> npt.NDArray[np.uint8]:
            if offer is bad:
                raise MemoryError("no memory")
            return as_record(offer, own)

        monkeypatch.setattr(Offer, "as_record", fails)
        with store._filler._changed:  # the thread takes all of them at once
            store.offer(offers)
            assert store.flush()
        assert sum(store.done.values()) == len(offers)
        assert store.done["MemoryError"] == len(offers) - len(held(store, 4))
        keep(store, record(0))
        assert 0 in held(store, 4), "and it goes on"

    def test_nothing_is_stored_fast_while_something_has_to_go_for_a_new_record(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("attmemo.rows.throttle.Pace.look", lambda _: None)  # it counts as busy, whatever else runs
        store = store_for(8)
        pace = store._filler.pace
        pace.has_room = False
        keep(store, record(0))
        assert pace.has_room
        for seed in range(1, 12 * PER_SEGMENT):
            keep(store, record(seed))
        assert not store.pool.has_room
        store.pay_from(TimeAccount(always=True))
        assert pace.is_slow
        assert not pace.has_room

    def test_there_is_no_room_where_a_record_as_large_as_the_last_would_drop_another(self) -> None:
        pool = Pool(1 << 20)
        large = 5 * pool.usual
        while not pool.counts.get("evicted"):
            has_room, before = pool.has_room, len(pool)
            pool.add([Entry(np.arange(before + 1, dtype=np.int32), np.zeros(large, np.uint8))])
            assert has_room == (len(pool) == before + 1)

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    @pytest.mark.parametrize("part", ["last", "keys", "values"])
    def test_what_is_not_finite_is_left_out_and_others_are_kept(self, value: float, part: str) -> None:
        store = store_for(8)
        offers = offers_of(record(0), record(1), record(2))
        {"last": offers[1].last, "keys": offers[1].rows[-1, 0], "values": offers[1].rows[-1, 1]}[part][2, 3] = value
        store.offer(offers)
        assert store.flush()
        assert held(store, 3) == [0, 2]
        assert store.done == {"kept": 2, "not_finite": 1}

    @pytest.mark.parametrize("part", ["last", "rows"])
    def test_what_its_type_cannot_hold_is_left_out_and_the_largest_number_is_kept(self, part: str) -> None:
        most, storage = torch.finfo(torch.float16).max, (torch.float16, torch.float16)
        store = GrowingRows(Pool(8 * SMALLEST), layout(storage))
        offers = offers_of(record(0), record(1), record(2))
        for offer, value in ((offers[1], -most - 96), (offers[2], -most)):
            getattr(offer, part).view(-1)[3] = value
        store.offer(offers)
        assert store.flush()
        assert held(store, 3) == [0, 2]
        assert store.done == {"kept": 2, "not_finite": 1}
        for number in range(2):
            assert all(tensor.isfinite().all() for tensor in fetched(store.fetch(numbers(number)), 0))

    def test_a_store_that_is_only_read_keeps_nothing(self) -> None:
        store = store_for(8, fills=False)
        keep(store, record(0))
        assert (len(store), store.done) == (0, {})


class TestFailure:
    @pytest.mark.parametrize("error", [DatabaseError("full.", "nothing"), OSError(28, "full"), MemoryError("full")])
    def test_a_record_that_cannot_be_kept_leaves_no_trace_and_is_told_once(
        self, error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = store_for(8)
        keep(store, record(0))

        def fail(*_: Any) -> Any:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(store.pool, "add", fail)
            for seed in (1, 2):
                keep(store, record(seed))
        assert caplog.text.count("new records are not kept") == 1
        assert store.done == {"kept": 1, type(error).__name__: 2}
        assert agree(store)
        keep(store, record(1))
        assert held(store, 4) == [0, 1]
        assert torch.equal(fetched(store.fetch(find(store, record(1)[0])), 0)[0], record(1)[1])

    def test_a_sequence_that_cannot_be_packed_leaves_no_trace(self) -> None:
        store = store_for(8)
        offers = offers_of(record(0))
        offers[0].tokens = offers[0].tokens[:4]  # and five rows
        store.offer(offers)
        assert store.flush()
        keep(store, record(1))
        assert held(store, 3) == [1]
        assert store.done == {"kept": 1, "ValueError": 1}
        assert agree(store)

    def test_a_damaged_record_is_not_served_and_never_found_again(self, caplog: pytest.LogCaptureFixture) -> None:
        pool = Pool(1 << 20)
        bodies = [layout().body_of(Record.pack(*record(seed), FLOAT, HEADS)) for seed in range(2)]
        kept = pool.add([Entry(record(seed)[0], bodies[seed]) for seed in range(2)]).added
        pool.news = lambda: _all_of(pool)  # type: ignore[method-assign]
        store = GrowingRows(pool, layout())
        pool.news = Pool(0).news  # type: ignore[method-assign]
        kept[0].segment.write(kept[0].offset + 77, kept[0].body[77:78] ^ np.uint8(4))
        for _ in range(2):
            with pytest.raises(DatabaseError, match="does not match its checksum"):
                store.fetch(numbers(1, 0))
        assert held(store, 2) == [1]
        assert caplog.text.count("is damaged and is not used") == 1
        assert torch.equal(fetched(store.fetch(numbers(1)), 0)[0], record(1)[1])

    def test_a_record_of_another_shape_is_not_served(self) -> None:
        pool = Pool(1 << 20)
        pool.add([Entry(record(0)[0], np.zeros(layout().nbytes(5) - 1, np.uint8))])
        pool.news = lambda: _all_of(pool)  # type: ignore[method-assign]
        store = GrowingRows(pool, layout())
        with pytest.raises(DatabaseError, match="checksum"):
            store.fetch(numbers(0))
        assert held(store, 1) == []


class TestBound:
    def test_bytes_are_never_above_the_limit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        store, random, seen = store_for(8), np.random.default_rng(0), list[int]()
        own = store.pool._segment

        def segment(number: int, nbytes: int) -> Segment:
            seen.append(nbytes + sum(one.nbytes for one in store.pool._segments.values()))
            return own(number, nbytes)

        monkeypatch.setattr(store.pool, "_segment", segment)
        for seed in range(150):
            keep(store, record(seed, int(random.integers(1, 20))))
            assert store.nbytes <= 8 * SMALLEST
            assert agree(store)
            store.fetch(numbers(*random.choice(list(store.pool.records), 2)))
        assert len(seen) > 16
        assert max(seen) <= 8 * SMALLEST, "also while the new one is made"

    def test_a_record_larger_than_all_memory_is_left_out_and_drops_nothing(self) -> None:
        store = store_for(2)
        for seed in range(3):
            keep(store, record(seed))
        keep(store, record(7, 400))
        assert held(store, 8) == [0, 1, 2]
        assert agree(store)
        nothing = GrowingRows(Pool(0), layout())
        keep(nothing, record(0))
        assert len(nothing) == len(nothing.index) == 0

    def test_what_was_fetched_outlives_what_was_not(self) -> None:
        store = store_for(5)
        for seed in range(PER_SEGMENT):
            keep(store, record(seed))
        for seed in range(PER_SEGMENT, 15 * PER_SEGMENT):
            store.fetch(numbers(1))
            keep(store, record(seed))
        assert held(store, 2 * PER_SEGMENT) == [1]
        assert torch.equal(fetched(store.fetch(numbers(1)), 0)[0], record(1)[1])


class TestDropped:
    def test_a_dropped_record_is_an_error_and_never_another_record(self) -> None:
        store = store_for(1)
        for seed in range(PER_SEGMENT + 2):
            keep(store, record(seed))
        there = PER_SEGMENT + 1
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(there, 0))
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(99))
        assert torch.equal(fetched(store.fetch(numbers(there)), 0)[0], record(there)[1])

    def test_a_record_whose_changes_cannot_be_told_any_more_cannot_be_fetched(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Another thread found it before. Without gaps it would be served as an input that did not change."""
        store = store_for(1)
        for seed in range(PER_SEGMENT):
            keep(store, record(seed))
        tokens, starts = record(0)[0].copy(), numbers(0, 5)
        tokens[2] += 500
        near = store.index.candidates(tokens, starts)
        found = store.index.plan(tokens, starts, near, Rule(), NO_KINDS, Demand()).record
        assert found.tolist() == [0]
        own, seen = store.index.remove, list[str]()

        def remove(number: int) -> None:
            own(number)
            if number:
                return
            changes = store.index.plan(tokens, starts, near, Rule(), NO_KINDS, Demand()).changes
            try:
                store.fetch(found)
                seen.append(f"fetched, {len(changes)} changes")
            except DatabaseError:
                seen.append("dropped")

        monkeypatch.setattr(store.index, "remove", remove)
        keep(store, record(99))
        assert seen in (["dropped"], ["fetched, 1 changes"])


STORED = [9, 12, 7]


@pytest.fixture(scope="module", name="prepared", params=["float32", "int8"])
def _prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("growing")
    return rows_database(MODELS["BERT"](), [batch(STORED, 3)], folder / "db", request.param)


@pytest.fixture(name="base")
def _base(prepared: Path) -> StoredRows:
    return StoredRows(prepared)


def shape_of(database: StoredRows) -> dict[str, int]:
    """Layers and width of its rows."""
    return {"layers": database.layout.layers, "width": database.layout.hidden}


class TestBesideAPreparedBase:
    def check(self, database: StoredRows, found: Placed, place: int, number: int) -> None:
        """One place holds what the database holds."""
        rows, last = fetched(found, place, shape_of(database)["layers"])
        stored = database.record(number)
        expected = stored.rows.float()
        if stored.scales is not None:
            expected *= stored.scales.repeat_interleave(expected.shape[-1] // stored.scales.shape[-1], -1)
        assert torch.equal(rows, expected)
        assert torch.equal(last, stored.last.float())

    def store(self, base: StoredRows, max_bytes: int = 1 << 20) -> GrowingRows:
        return GrowingRows(Pool(max_bytes), base.layout, base.kept)

    def test_both_are_fetched_in_one_batch(self, base: StoredRows) -> None:
        shape, store = shape_of(base), self.store(base)
        own = [record(seed, 6, **shape) for seed in range(2)]
        keep(store, *own, notes=b"ab")
        assert len(store.index) == len(STORED) + 2
        assert len(store) == 2
        found = store.fetch(numbers(4, 1, -1, 3, 0))
        for place, number in ((1, 1), (4, 0)):
            self.check(base, found, place, number)
        for place, seed in ((0, 1), (3, 0)):
            rows, last = fetched(found, place, shape["layers"])
            assert torch.equal(rows, as_stored(own[seed][1], store.storage[0], 4))
            assert torch.equal(last, own[seed][2].to(store.storage[1]).float())
        assert found.layer(1).rows.tolist() == [6, STORED[1], 0, 6, STORED[0]]
        assert store.notes_of(range(6)) == [b"", b"", b"", b"a", b"b", b""]

    def test_what_is_prepared_is_not_kept_again(self, base: StoredRows) -> None:
        store, (_, rows, last) = self.store(base), record(0, STORED[1], **shape_of(base))
        keep(store, (base.kept[1].tokens, rows, last))
        assert (len(store), store.done) == (0, {KNOWN: 1})

    def test_prepared_records_are_never_dropped(self, base: StoredRows) -> None:
        shape, store = shape_of(base), self.store(base, 3 * SMALLEST)
        for seed in range(30):
            keep(store, record(seed, 20, **shape))
        assert 0 < len(store) < 30
        assert len(store.index) == len(STORED) + len(store)
        assert agree(store, len(STORED))
        for number in range(len(STORED)):
            self.check(base, store.fetch(numbers(number)), 0, number)
        with pytest.raises(DatabaseError, match="a record was dropped"):
            store.fetch(numbers(0, len(STORED)))


def test_index_and_store_agree_while_threads_offer_and_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is fetched for a record has the rows of its tokens, or is said to be dropped."""
    monkeypatch.setattr("attmemo.rows.throttle.Pace.share", 1.0)  # nothing is left out because the thread has to rest
    store, done = store_for(2), threading.Event()
    newest, served = [0], np.zeros(2, np.int64)

    def offer(first: int) -> None:
        for seed in range(first, first + 300):
            tokens, rows, last = record(seed)
            store.offer(offers_of((tokens, rows.fill_(float(tokens[0])), last)))
            assert seed % 4 or store.flush(), "it takes too long"
            newest.append(seed)
            assert store.nbytes <= 2 * SMALLEST

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
            assert bool((fetched(found, 0)[0] == float(tokens[0])).all()), "rows of another record"

    with ThreadPoolExecutor(5) as threads:
        readers = [threads.submit(fetch, reader) for reader in range(2)]
        try:
            list(threads.map(offer, (0, 300, 600)))
        finally:
            done.set()
        for one in readers:
            one.result()
    assert store.flush()
    assert store.done == {"kept": 900}
    assert PER_SEGMENT <= len(store) <= 2 * PER_SEGMENT
    assert agree(store)
    for number in store.index.numbers():
        rows, _ = fetched(store.fetch(numbers(number)), 0)
        assert bool((rows == float(store.index.tokens_of(number)[0])).all())


def test_a_forked_child_reads_what_was_there_and_keeps_its_own() -> None:
    store = store_for(8)
    keep(store, record(0))

    def child() -> None:
        keep(store, record(1))
        assert held(store, 3) == [0, 1]
        for seed in (0, 1):
            assert torch.equal(fetched(store.fetch(numbers(seed)), 0)[0], record(seed)[1])
        store.close()

    assert in_child(child) == 0
    keep(store, record(2))
    assert held(store, 3) == [0, 2]
    assert torch.equal(fetched(store.fetch(numbers(1)), 0)[0], record(2)[1])


def test_a_fork_does_not_wait_for_counters_that_another_thread_holds() -> None:
    store, lock = store_for(4), threading.Lock()

    def work() -> Work:
        with lock:
            return Work(1, 1, 1)

    store.watch(work)
    with lock:
        assert in_child(lambda: 0, seconds=30) == 0
    store.close()


def test_a_process_that_ends_while_the_graph_is_far_behind_ends_well(tmp_path: Path) -> None:
    """A thread inside of C++ while the interpreter ends would abort it."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\n"
        f"sys.path[:0] = {[str(Path(attmemo.__file__).parents[1])]!r}\n"
        "import numpy as np\n"
        "import torch\n"
        "from attmemo.db.pools.pool import Pool\n"
        "from attmemo.rows import filler, layout, live_store, throttle\n"
        "live_store._LINKED, filler.POLL, throttle.Pace.spend = 256, 0.001, lambda *_: 0.0  # it works all the time\n"
        "own, chance = layout.RowLayout(1, 8, 2, (torch.float32, torch.float32)), np.random.default_rng(0)\n"
        "store = live_store.GrowingRows(Pool(1 << 20), own)\n"
        "texts = [chance.integers(0, 30000, 60).astype(np.int32) for _ in range(6000)]\n"
        "store.index.extend(texts, range(6000))\n"
        "time.sleep(0.3)\n"
    )
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
