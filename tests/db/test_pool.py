"""A pool of records in memory: what was put in comes out, numbers are never used twice, bytes are bounded."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import hit

from attmemo.db.pools.pool import CARRIED, SEGMENTS, Entry, Kept, News, Pool, checksum_of
from attmemo.db.pools.segment import ALIGNED, Bytes, Segment, start_of
from attmemo.errors import StorageFullError

SMALLEST: Final = 1 << 14
"""Bytes of a segment of a small pool."""
ROOM: Final = SMALLEST - start_of(64)
"""Bytes of records in such a segment."""
EIGHTH: Final = ROOM // 8


def entry(name: int, nbytes: int) -> Entry:
    """One like no other; its note says which it is."""
    random = np.random.default_rng(name)
    tokens = random.integers(0, 1000, name % 7 + 1).astype(np.int32)
    return Entry(tokens, random.integers(0, 256, nbytes).astype(np.uint8), name.to_bytes(4, "little"))


def name_of(kept: Kept) -> int:
    return int.from_bytes(kept.note, "little")


def use(pool: Pool, *numbers: int) -> None:
    for number in numbers:
        hit(pool.records[number])


def fill(pool: Pool, count: int, nbytes: int = EIGHTH) -> list[News]:
    """Add so many records, one at a time. Their names are their numbers."""
    first = pool._next
    return [pool.add([entry(name, nbytes)]) for name in range(first, first + count)]


class Model:
    """What a pool must hold."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.entries: dict[int, Entry] = {}
        self.uses: Counter[int] = Counter()
        self.named = self.highest = -1
        self.told = News()
        self.held: list[tuple[Bytes, bytes]] = []

    def make(self, sizes: Iterable[int]) -> list[Entry]:
        found = []
        for nbytes in sizes:
            self.named += 1
            found.append(entry(self.named, nbytes))
        return found

    def changed(self, before: dict[int, Kept], news: News, given: list[Entry]) -> None:
        """News are the difference between what was there and what is there."""
        now = self.pool.records
        numbers = [kept.number for kept in news.added]
        assert numbers == sorted(set(numbers)), "numbers rise"
        assert set(numbers) == now.keys() - before.keys()
        assert len(news.removed) == len(set(news.removed))
        assert set(news.removed) == before.keys() - now.keys()
        assert bool(news) == (now.keys() != before.keys())
        assert all(number > self.highest for number in numbers), "no number is used twice"
        self.highest = max([self.highest, *numbers])
        by_name = {int.from_bytes(one.note, "little"): one for one in given}
        for kept in news.added:
            assert now[kept.number] is kept
            self.entries[kept.number] = by_name[name_of(kept)]
        for number in news.removed:
            del self.entries[number]
        self.told += News(list(news.added), list(news.removed))
        assert {kept.number for kept in self.told.added} == now.keys(), "the pool was empty at first"
        assert not self.told.removed

    def check(self) -> None:
        pool = self.pool
        assert pool.records.keys() == self.entries.keys()
        assert len(pool) == len(self.entries)
        assert pool.max_bytes is None or pool.nbytes <= pool.max_bytes
        ends: dict[int, list[tuple[int, int, int]]] = {}
        for number, kept in pool.records.items():
            expected = self.entries[number]
            assert kept.number == number
            assert np.array_equal(kept.body, expected.body)
            assert kept.is_sound
            assert kept.checksum == checksum_of(expected.body)
            assert np.array_equal(kept.tokens, expected.tokens)
            assert kept.note == expected.note
            assert kept.hits == self.uses[number]
            assert (kept.segment.address + kept.offset) % ALIGNED == 0
            assert kept.offset >= kept.segment.start
            ends.setdefault(id(kept.segment), []).append((kept.offset, kept.offset + kept.nbytes, kept.place))
        for found in ends.values():
            found.sort()
            assert all(one[1] <= other[0] for one, other in pairwise(found)), "none overlaps"
            assert len({place for _, _, place in found}) == len(found)
        for body, expected_bytes in self.held:
            assert body.tobytes() == expected_bytes, "a reader holds it"


CHOICES = st.lists(st.integers(0, 10**6), max_size=6)
SIZES = st.one_of(st.integers(0, 200), st.integers(0, 3000), st.integers(0, 60_000))
ADDS = st.tuples(st.just("add"), st.lists(SIZES, max_size=5) | st.lists(st.integers(0, 600), min_size=20, max_size=90))
USES = st.tuples(st.sampled_from(["use", "hold"]), CHOICES) | st.tuples(st.just("use"), st.none())
CHANGES = st.tuples(st.just("remove"), CHOICES) | st.tuples(st.just("rewrite"), st.none())
BOUNDS = st.sampled_from([0, SMALLEST - 1, SMALLEST, 50_000, 5 * SMALLEST, 200_000])


def steps(*kinds: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.one_of(*kinds), max_size=25)


def take(pool: Pool, model: Model, step: str, given: Any) -> None:
    before, nbytes = dict(pool.records), pool.nbytes
    numbers = sorted(before)
    some = [] if step == "bound" else given or []
    chosen = [numbers[choice % len(numbers)] for choice in some if numbers]
    if step == "use":
        chosen = chosen if given is not None else numbers
        use(pool, *chosen)
        model.uses.update(chosen)
    elif step == "hold":
        model.held += [(before[number].body, before[number].body.tobytes()) for number in chosen]
    elif step == "remove":
        news, left = pool.remove([*chosen, 10**9]), {before[number].segment for number in chosen}
        assert set(news.removed) == set(chosen)
        assert not any(kept.segment in left for kept in pool.records.values()), "their bytes are gone too"
        assert pool.nbytes <= nbytes, "never larger"
        model.changed(before, news, [])
    elif step == "rewrite":
        news, left = pool.rewrite(), {kept.segment for kept in before.values()}
        assert not news, "records only move"
        assert pool.nbytes < nbytes or pool.records == before, "what gains nothing is left as it is"
        assert pool.nbytes == nbytes or not any(kept.segment in left for kept in pool.records.values())
        model.changed(before, news, [])
    elif step == "bound":
        pool.max_bytes = given
        pool.trim()
        model.changed(before, pool.news(), [])
        assert pool.nbytes <= nbytes
    else:
        entries = model.make(given)
        model.changed(before, pool.add(entries), entries)
    model.check()


class TestAnyOrder:
    def check(self, pool: Pool, steps: list[tuple[str, Any]]) -> None:
        model = Model(pool)
        for step, argument in steps:
            take(pool, model, step, argument)

    @settings(max_examples=300, deadline=None, derandomize=True)
    @given(BOUNDS, steps(ADDS, USES, CHANGES))
    def test_a_pool_holds_what_was_put_in_and_is_bounded(self, max_bytes: int, steps: list[tuple[str, Any]]) -> None:
        """A small record and a large one that share a segment take two when they are written anew."""
        self.check(Pool(max_bytes), steps)

    @settings(max_examples=120, deadline=None, derandomize=True)
    @given(steps(ADDS, USES, CHANGES, st.tuples(st.just("bound"), BOUNDS)))
    def test_a_pool_without_a_bound_keeps_all_and_one_that_gets_a_bound_holds_it(
        self, steps: list[tuple[str, Any]]
    ) -> None:
        self.check(Pool(None), steps)

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(st.integers(SMALLEST, 300_000), st.lists(st.integers(0, 5000), min_size=1, max_size=150))
    def test_the_oldest_go_first_if_none_is_used(self, max_bytes: int, sizes: list[int]) -> None:
        pool = Pool(max_bytes)
        for name, nbytes in enumerate(sizes):
            pool.add([entry(name, nbytes)])
            assert list(pool.records) == list(range(name + 1 - len(pool), name + 1))
            assert len(pool) > 0


class TestUse:
    def test_what_was_used_since_it_was_written_outlives_what_was_not(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8 * 15)
        used = set(range(3, 8 * 15, 8))
        use(pool, *used)
        fill(pool, 7 * 15)
        assert set(range(8 * 15)) & pool.records.keys() == used, "after every segment was replaced"

    def test_one_use_is_good_for_one_replacement(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8)
        use(pool, 5)
        fill(pool, 8 * 16)
        assert 5 in pool.records
        fill(pool, 8 * 16)
        assert 5 not in pool.records

    def test_what_is_used_again_and_again_stays(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8)
        for turn in range(200):
            use(pool, 5)
            fill(pool, 4)
            assert pool.records[5].hits == turn + 1

    def test_if_too_many_were_used_those_used_most_stay(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8 * 15)
        fits = int(CARRIED * ROOM / EIGHTH)
        assert 0 < fits < 8, "else there is nothing to choose"
        for number, times in enumerate([1, 5, 2, 7, 3, 8, 4, 6]):
            use(pool, *[number] * times)
        news = pool.add([entry(500, EIGHTH)])
        assert sorted(news.removed) == [0, 2, 4, 6]
        assert set(range(8)) & pool.records.keys() == {1, 3, 5, 7}

    def test_of_many_small_ones_that_were_used_as_many_stay_as_there_are_places_for(self) -> None:
        """A segment has 64 places, whatever its records take."""
        pool = Pool(5 * SMALLEST)
        fill(pool, 64 * 4, 1)
        use(pool, *pool.records, *[number for number in range(64) if number % 2])
        pool.add([entry(900, 1)])
        assert [number for number in range(64) if number in pool.records] == [n for n in range(64) if n % 2]
        assert pool.nbytes <= pool.max_bytes

    def test_if_all_were_used_new_records_are_kept_nevertheless(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8 * 15)
        for _ in range(20):
            use(pool, *pool.records)
            (news,) = fill(pool, 1)
            assert len(news.added) == 1

    def test_a_pool_of_few_segments_drops_used_records_too(self) -> None:
        pool = Pool(2 * SMALLEST)
        fill(pool, 16)
        use(pool, *range(16))
        fill(pool, 1)
        assert list(pool.records) == list(range(8, 17))


class TestBound:
    def test_the_memory_itself_is_bounded_while_records_are_replaced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Old segments that records are carried from are still there when the new one is made."""
        pool, alive, most = Pool(16 * SMALLEST), weakref.WeakSet[Segment](), [0]
        own = pool._segment

        def segment(number: int, nbytes: int) -> Segment:
            made = own(number, nbytes)
            alive.add(made)
            most.append(sum(one.nbytes for one in alive))
            return made

        monkeypatch.setattr(pool, "_segment", segment)
        gc.collect()
        for _ in range(60):
            use(pool, *list(pool.records)[::3])
            fill(pool, 4)
        assert pool.counts["evicted"] > 100
        assert pool.counts["carried"] > 20
        assert max(most) == pool.max_bytes, "just the room of one more segment than is held"

    @pytest.mark.parametrize("max_bytes", [0, SMALLEST, 10 * SMALLEST])
    def test_an_entry_larger_than_the_pool_is_left_out_and_drops_nothing(self, max_bytes: int) -> None:
        pool = Pool(max_bytes)
        fill(pool, 8 * (max_bytes // SMALLEST - 1))
        before = dict(pool.records)
        assert not pool.add([entry(0, max_bytes)])
        assert pool.records == before
        news = pool.add([entry(7, max_bytes), entry(8, 10)])
        assert [name_of(kept) for kept in news.added] == ([8] if max_bytes else [])

    @pytest.mark.parametrize("segments", [1, 3, 8])
    def test_the_largest_entry_that_fits_is_kept(self, segments: int) -> None:
        pool, large = Pool(segments * SMALLEST), None
        fill(pool, 8)
        for nbytes in range(segments * SMALLEST, 0, -ALIGNED):
            large = entry(99, nbytes)
            if pool.add([large]):
                break
        assert large is not None
        assert pool.nbytes <= pool.max_bytes
        (kept,) = [kept for kept in pool.records.values() if name_of(kept) == 99]
        assert np.array_equal(kept.body, large.body)
        assert kept.nbytes > pool.max_bytes - start_of(64) - 4096

    def test_a_large_record_takes_the_place_of_many(self) -> None:
        pool = Pool(10 * SMALLEST)
        fill(pool, 8 * 9)
        news = pool.add([entry(99, 5 * SMALLEST)])
        assert [name_of(kept) for kept in news.added] == [99]
        assert news.removed == list(range(len(news.removed)))
        assert len(news.removed) >= 8 * 4
        assert pool.nbytes <= pool.max_bytes

    @pytest.mark.parametrize("share", [1, 2, 64])
    def test_a_pool_is_cut_into_segments_of_which_one_goes_at_a_time(self, share: int) -> None:
        pool = Pool(share * SEGMENTS * SMALLEST)
        assert pool.usual == share * SMALLEST
        fill(pool, 1)
        assert pool.nbytes == pool.usual


class TestWithoutBound:
    def test_segments_are_as_large_as_what_they_hold(self) -> None:
        pool = Pool(None)
        pool._usual = SMALLEST
        pool.add([entry(name, EIGHTH) for name in range(20)])
        sizes = [segment.nbytes for segment in pool._segments.values()]
        assert sizes == [SMALLEST, SMALLEST, start_of(64) + SMALLEST // 4]
        assert len(pool) == 20

    def test_what_is_written_anew_has_no_gaps(self) -> None:
        """Records of which only one fits into a usual segment: nearly a half of the bytes is gaps."""
        pool = Pool(8 * SMALLEST)
        for name in range(6):
            pool.add([entry(name, ROOM // 2 + 64)])
        assert pool.nbytes == 6 * SMALLEST
        pool.rewrite()
        assert pool.nbytes <= 6 * (start_of(64) + ROOM // 2 + 4096)
        assert len(pool) == 6
        again = dict(pool.records)
        pool.rewrite()
        assert pool.records == again, "there is nothing to gain any more"


class TestTrim:
    def test_a_segment_that_is_mostly_empty_is_cut_and_nothing_goes(self) -> None:
        """A folder that was written with a larger bound: its records fit, its segments do not."""
        pool = Pool(SEGMENTS * 4 * SMALLEST)
        fill(pool, 20)
        assert pool.nbytes == 4 * SMALLEST
        pool.max_bytes = 3 * SMALLEST
        pool.trim()
        assert not pool.news()
        assert pool.nbytes <= 3 * SMALLEST
        assert len(pool) == 20

    def test_if_records_do_not_fit_the_oldest_go_and_used_ones_stay(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8 * 15)
        use(pool, 2, 3)
        pool.max_bytes = 8 * SMALLEST
        pool.trim()
        gone = pool.news().removed
        assert pool.nbytes <= 8 * SMALLEST
        assert {2, 3} <= pool.records.keys()
        assert sorted([*gone, 2, 3]) == list(range(len(gone) + 2)), "the oldest"
        assert pool.counts["carried"] == 2

    def test_where_there_is_no_room_for_a_new_segment_the_oldest_go(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8 * 15)
        use(pool, 2, 3)
        pool.max_bytes = 8 * SMALLEST

        def full(number: int, size: int) -> Segment:
            raise StorageFullError("no room", "free space")

        monkeypatch.setattr(pool, "_segment", full)
        pool.trim()
        assert pool.nbytes <= 8 * SMALLEST
        assert min(pool.records) > 3
        assert max(pool.records) == 8 * 15 - 1

    def test_a_pool_within_its_bound_is_left_as_it_is(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 3)
        before = dict(pool.records)
        pool.trim()
        assert pool.records == before


class TestRemoval:
    def test_no_byte_of_a_removed_record_is_left(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 20)
        secrets = [pool.records[number].body.tobytes() for number in (3, 11)]
        pool.remove([3, 11])
        memory = b"".join(bytes(segment._memory) for segment in pool._segments.values())
        assert not any(secret in memory for secret in secrets)
        assert all(kept.body.tobytes() in memory for kept in pool.records.values())

    def test_removing_gives_room_back(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8 * 10)
        assert pool.nbytes == 10 * SMALLEST
        pool.remove([number for number in pool.records if number % 8])
        assert (pool.segments, len(pool)) == (2, 10)
        assert pool.nbytes < 2 * SMALLEST, "the last one is as large as what it holds"
        pool.remove(list(pool.records))
        assert (pool.nbytes, pool.segments, len(pool)) == (0, 0, 0)

    def test_what_became_of_records_is_counted(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 8 * 15)
        use(pool, 2, 3)
        fill(pool, 1)
        pool.remove([4, 50, 51])
        assert pool.counts == {"added": 121, "carried": 2, "evicted": 6, "forgotten": 2}
        assert len(pool) == 121 - 6 - 2

    def test_a_closed_pool_holds_nothing_and_readers_keep_what_they_read(self) -> None:
        pool = Pool(16 * SMALLEST)
        fill(pool, 3)
        held = pool.records[1]
        pool.close()
        assert (len(pool), pool.nbytes) == (0, 0)
        assert held.is_sound
        assert np.array_equal(held.body, entry(1, EIGHTH).body)


class TestFailure:
    def test_a_change_that_fails_changes_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = Pool(8 * SMALLEST)
        model = Model(pool)
        for _ in range(12):
            take(pool, model, "add", [500] * 10)
        before, nbytes = dict(pool.records), pool.nbytes

        def full(number: int, size: int) -> Segment:
            raise MemoryError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(pool, "_segment", full)
            with pytest.raises(MemoryError):
                pool.add([entry(name, 1000) for name in range(900, 1000)])
            with pytest.raises(MemoryError):
                pool.rewrite()
        assert pool.records == before
        assert pool.nbytes == nbytes
        model.check()
        take(pool, model, "add", [500] * 60)

    def test_bytes_that_changed_are_told(self) -> None:
        pool = Pool(SMALLEST)
        fill(pool, 2)
        pool.records[0].segment.write(pool.records[0].offset + 5, pool.records[0].body[5:6] ^ np.uint8(1))
        assert [pool.records[number].is_sound for number in (0, 1)] == [False, True]


def news(added: Iterable[int], removed: Iterable[int]) -> News:
    kept = [Kept(number, np.zeros(1, np.int32), _NOWHERE, 0, 0, 0, 0, 0.0, 0, b"") for number in added]
    return News(kept, list(removed))


_NOWHERE = Segment.in_memory(0, SMALLEST)


class TestNews:
    @settings(max_examples=100, deadline=None, derandomize=True)
    @given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 12))), max_size=12), st.integers(0, 6))
    def test_both_together_are_the_difference_between_first_and_last(
        self, changes: list[tuple[int, set[int]]], first: int
    ) -> None:
        before = set(range(first))
        now, fresh, total = set(before), first, News()
        for count, chosen in changes:
            came, gone = range(fresh, fresh + count), chosen & now
            fresh += count
            now = (now - gone) | set(came)
            both = total
            total += news(came, gone)
            assert total is both
        assert [kept.number for kept in total.added] == sorted(now - before)
        assert sorted(total.removed) == sorted(before - now)
        assert bool(total) == (now != before)
