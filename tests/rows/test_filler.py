"""The thread that stores what requests hand over: a request never waits, and nothing that was taken is lost."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from children import in_child, run_child

from attmemo.rows import filler as module
from attmemo.rows.filler import Filler

LONG = 60.0
"""Seconds after which a test fails. None waits so long if the promise holds."""
TOO_MANY = "queue_full"


class Store:
    """What the thread works for."""

    def __init__(self) -> None:
        self.stored: list[int] = []
        self.calls: list[list[int]] = []
        self.hurried = 0
        self.workers: set[threading.Thread] = set()
        self.begun, self.may_go, self.polled, self.ended = (threading.Event() for _ in range(4))
        self.may_go.set()
        before = set(threading.enumerate())
        self.filler: Filler[int] = Filler(self.work, self.ended.set)
        (self.thread,) = set(threading.enumerate()) - before

    def work(self, items: Sequence[int], hurry: bool) -> None:
        self.hurried += hurry
        if not items:
            self.polled.set()
            return
        self.workers.add(threading.current_thread())
        self.begun.set()
        assert self.may_go.wait(LONG)
        self.calls.append(list(items))
        self.stored += items

    def block(self, item: int = 0) -> None:
        """Let the thread work on this one, and on nothing else until `may_go`."""
        self.may_go.clear()
        self.begun.clear()
        assert self.filler.offer([item], [1])
        assert self.begun.wait(LONG)


@pytest.fixture(name="store")
def _store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The thread may take a whole core: what it took for an item, and what else runs here, decides nothing."""
    monkeypatch.setattr(module.Pace, "share", 1.0)
    found = Store()
    yield found
    found.may_go.set()
    found.filler.close()
    found.thread.join(LONG)


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until this holds, or for so long that it never will: then an assertion behind it says what is wrong."""
    until = time.monotonic() + LONG
    while not holds() and time.monotonic() < until:
        time.sleep(0.001)


class TestStoring:
    def test_what_was_handed_over_is_stored_once_and_in_order(self, store: Store) -> None:
        for number in range(0, 200, 2):
            assert store.filler.offer([number, number + 1], [10] * 2)
        assert store.filler.flush(LONG)
        assert store.stored == list(range(200))
        assert not store.filler.skipped

    def test_work_is_done_in_a_thread_of_its_own(self, store: Store) -> None:
        store.filler.offer([1], [1])
        assert store.filler.flush(LONG)
        assert store.workers == {store.thread}
        assert store.thread is not threading.current_thread()
        assert store.thread.daemon, "a process can end while it works"

    def test_nothing_is_lost_or_stored_twice_with_many_threads(self, store: Store) -> None:
        def offer(own: int) -> None:
            for n in range(300):
                store.filler.offer([1000 * own + n], [1])

        with ThreadPoolExecutor(6) as threads:
            list(threads.map(offer, range(6)))
        assert store.filler.flush(LONG)
        assert sorted(store.stored) == [1000 * own + n for own in range(6) for n in range(300)]
        for own in range(6):
            mine = [item for item in store.stored if item // 1000 == own]
            assert mine == sorted(mine), "those of one request stay in order"

    def test_what_came_while_it_worked_is_stored_at_once(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.Pace, "rest", lambda *_: 1e6)  # else it may go on before the flush
        store.block(0)
        for number in range(1, 30):
            store.filler.offer([number], [1])
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.calls == [[0], list(range(1, 30))]

    def test_it_also_works_without_requests(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "POLL", 0.001)
        for _ in range(3):
            store.polled.clear()
            assert store.polled.wait(LONG)
        assert store.stored == []


class TestFull:
    def test_a_request_never_waits_and_what_is_left_out_is_counted(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Were it to wait, this test would not end: only its last lines let the thread go on."""
        monkeypatch.setattr(module, "MOST_WAITING", 100)
        store.block()
        assert store.filler.offer([1], [60])
        assert store.filler.offer([2], [40]), "just as much as may wait"
        assert not store.filler.offer([3, 4, 5], [1] * 3)
        assert not store.filler.offer([6], [1000])
        assert store.filler.skipped == {TOO_MANY: 4}
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.stored == [0, 1, 2]

    def test_while_the_thread_takes_little_only_what_is_stored_soon_waits(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "SOON", 1.0)
        monkeypatch.setattr(module, "DUE", 1.0)
        store.filler._cost = 0.01  # 100 bytes are stored in a second
        store.block()
        assert store.filler.admit([50] * 3) == 2
        assert store.filler.offer([1, 2, 3], [50] * 3) == 2
        assert not store.filler.offer([4], [1])
        assert not store.filler.admit([1])
        assert store.filler.skipped == {TOO_MANY: 4}
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.stored == [0, 1, 2]
        store.filler._cost = 0.01  # what the first items took changed that
        store.block(5)
        store.filler._cost = 0.01
        assert store.filler.offer([6, 7], [500] * 2) == 1, "one at least"
        assert not store.filler.admit([1])
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.stored == [0, 1, 2, 5, 6]
        store.block(8)
        store.filler._cost = 1e-9
        assert store.filler.offer([9, 10, 11], [50] * 3) == 3

    def test_what_would_be_stored_too_late_is_not_taken(self, store: Store) -> None:
        store.filler.pace.owed = 1000.0
        assert not store.filler.admit([1] * 3)
        assert not store.filler.offer([1, 2], [1] * 2)
        assert store.filler.skipped == {TOO_MANY: 5}
        store.filler.pace.owed = 0.0
        assert store.filler.admit([1])
        assert store.filler.offer([3], [1])
        assert store.filler.flush(LONG)
        assert store.stored == [3]

    def test_what_was_taken_is_stored_soon_however_little_the_thread_may_take(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With its share alone the thread would work on this for a day."""
        monkeypatch.setattr(module.Pace, "share", 1e-8)

        def work(items: Sequence[int], hurry: bool) -> None:
            for _ in range(10 if items else 0):
                sum(range(10_000))  # some processor time
                store.filler.breathe()
            Store.work(store, items, hurry)

        monkeypatch.setattr(store.filler, "_work", lambda: work)
        assert store.filler.offer([1, 2], [1 << 19] * 2) == 1
        wait_until(lambda: bool(store.stored) and store.filler._rest() > LONG)
        assert store.stored == [1], "one of them may wait"
        assert store.filler._rest() > LONG, "what it could not rest meanwhile it rests now"
        assert not store.filler.admit([1])

    def test_what_is_offered_during_a_rest_is_taken_when_the_rest_ends(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "POLL", 1e6)
        store.block()
        store.may_go.set()
        assert store.filler.flush(LONG)
        with store.filler._changed:
            store.filler._rests_until = time.monotonic() + 0.1
            store.filler._changed.notify_all()  # the thread itself sets this, and looks at it before it sleeps
        assert store.filler.offer([1], [1])
        wait_until(lambda: len(store.stored) >= 2)
        assert store.stored == [0, 1]

    def test_what_is_not_admitted_is_counted_and_need_not_be_made(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MOST_WAITING", 100)
        store.block()
        assert store.filler.admit([20] * 5) == 5
        store.filler.offer([1], [100])
        assert not store.filler.admit([1] * 5)
        assert store.filler.skipped == {TOO_MANY: 5}
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.filler.admit([20] * 5) == 5
        store.filler.close()
        assert not store.filler.admit([1] * 2)
        assert store.filler.skipped == {TOO_MANY: 5, "closed": 2}

    def test_of_a_batch_as_many_are_admitted_as_there_is_room_for(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MOST_WAITING", 100)
        store.block()
        assert store.filler.offer([1], [30])
        assert store.filler.admit([30, 30, 30, 30]) == 2
        assert store.filler.offer([2, 3, 4, 5], [30] * 4) == 2
        assert store.filler.skipped == {TOO_MANY: 4}
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.stored == [0, 1, 2, 3]

    def test_what_waits_is_told_in_seconds_of_work(self, store: Store) -> None:
        assert store.filler.waits == 0.0
        store.block()
        one = store.filler.waits
        assert one == pytest.approx(module.COST)
        assert store.filler.offer([1], [9])
        assert store.filler.waits == pytest.approx(10 * one)
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.filler.waits == 0.0

    def test_in_idle_times_all_is_stored_at_once_and_nobody_pays(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "MOST_WAITING", 100)
        spent = list[float]()
        monkeypatch.setattr(store.filler.pace, "spend", lambda worked: spent.append(worked) or 0.0)
        store.filler.pace.owed = 1000.0
        assert not store.filler.offer([1], [1])
        assert store.filler.store([2, 3, 4], [1000] * 3, LONG)
        assert store.stored == [2, 3, 4]
        assert not any(spent)  # a look for news tells that it took nothing


class TestRest:
    """The thread rests after each item. Here a rest has no end, unless a caller waits."""

    @pytest.fixture(autouse=True)
    def endless(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.Pace, "rest", lambda _, worked, __=0.0: 1e6 if worked else 0.0)

    def test_it_rests_after_an_item(self, store: Store) -> None:
        store.block()
        store.filler.offer([1, 2, 3], [4] * 3)
        store.begun.clear()
        store.may_go.set()
        assert not store.begun.wait(0.05)
        assert store.filler.flush(LONG)
        assert store.calls == [[0], [1, 2, 3]], "a flush waits for no rest"

    def test_it_works_on_one_item_at_a_time(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.Pace, "rest", lambda *_: 0.0)
        store.block()
        store.filler.offer([1, 2], [10] * 2)
        store.filler.offer([3], [200])
        store.may_go.set()
        wait_until(lambda: len(store.stored) >= 4)
        assert store.calls == [[0], [1], [2], [3]]

    def test_it_rests_within_an_item_until_a_caller_waits(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "PIECE", 0.0)
        pieces = list[int]()

        def work(items: Sequence[int], hurry: bool) -> None:
            if items:
                sum(range(1000))  # some processor time
                pieces.append(1)
                store.begun.set()
                store.filler.breathe()
                pieces.append(2)
            Store.work(store, items, hurry)

        monkeypatch.setattr(store.filler, "_work", lambda: work)
        store.filler.offer([1], [1])
        assert store.begun.wait(LONG)
        wait_until(lambda: store.filler._rest() > LONG)
        time.sleep(0.05)
        assert pieces == [1]
        assert not store.filler.offer([2], [1]), "a request waits for no rest, and nothing waits for a long one"
        assert store.filler.flush(LONG)
        assert pieces == [1, 2]
        assert store.filler.offer([3], [1]), "what a caller waited for needs no rest"
        assert store.filler.flush(LONG)
        assert pieces == [1, 2, 1, 2]
        assert store.stored == [1, 3]

    def test_little_work_within_an_item_needs_no_rest(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "PIECE", LONG)
        breathed = threading.Event()

        def work(items: Sequence[int], hurry: bool) -> None:
            if items:
                assert not hurry
                store.filler.breathe()
                breathed.set()

        monkeypatch.setattr(store.filler, "_work", lambda: work)
        store.filler.offer([1], [1])
        assert breathed.wait(LONG)

    def test_closing_ends_a_rest_within_an_item(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "PIECE", 0.0)

        def work(items: Sequence[int], hurry: bool) -> None:
            if items:
                store.begun.set()
                store.filler.breathe()
            Store.work(store, items, hurry)

        monkeypatch.setattr(store.filler, "_work", lambda: work)
        store.filler.offer([1], [1])
        assert store.begun.wait(LONG)
        store.filler.close()
        assert store.stored == [1]

    def test_items_get_a_turn_though_looks_for_news_need_long_rests(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "POLL", 0.001)
        monkeypatch.setattr(module, "_LOOK", 0.0)
        monkeypatch.setattr(module.Pace, "rest", lambda *_: 0.01)
        monkeypatch.setattr(module.Pace, "spend", lambda *_: 1e6)
        assert store.polled.wait(LONG)
        store.filler.offer(range(5), [1] * 5)
        wait_until(lambda: len(store.stored) >= 5)
        assert store.stored == list(range(5))

    def test_closing_stores_what_waits_without_a_rest(self, store: Store) -> None:
        store.block()
        store.filler.offer([1, 2, 3], [4] * 3)
        store.may_go.set()
        store.filler.close()
        assert store.stored == [0, 1, 2, 3]


class TestFlush:
    def test_it_tells_whether_all_is_stored(self, store: Store) -> None:
        assert store.filler.flush(LONG), "nothing was handed over"
        store.block()
        assert not store.filler.flush(0), "it works"
        store.filler.offer([1], [1])
        assert not store.filler.flush(0.01)
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.stored == [0, 1]

    def test_it_can_be_called_from_many_threads(self, store: Store) -> None:
        store.block()
        with ThreadPoolExecutor(4) as threads:
            found = [threads.submit(store.filler.flush, LONG) for _ in range(4)]
            store.may_go.set()
            assert all(one.result(LONG) for one in found)


class TestEnd:
    def test_closing_stores_what_waits_and_ends_the_thread(self, store: Store) -> None:
        store.block()
        store.filler.offer([1, 2], [1] * 2)
        closing = threading.Thread(target=store.filler.close)
        closing.start()
        store.may_go.set()
        closing.join(LONG)
        assert store.stored == [0, 1, 2]
        store.thread.join(LONG)
        assert not store.thread.is_alive()

    def test_what_comes_after_closing_is_left_out_and_counted(self, store: Store) -> None:
        store.filler.close()
        store.filler.close()
        assert not store.filler.offer([1, 2], [1] * 2)
        assert sum(store.filler.skipped.values()) == 2
        assert store.filler.flush(LONG)
        assert store.stored == []

    def test_a_store_that_nothing_holds_ends_its_thread(self) -> None:
        store = Store()
        thread, gone, ended = store.thread, weakref.ref(store), store.ended
        store.filler.offer([1], [1])
        assert store.filler.flush(LONG)
        del store
        gc.collect()
        thread.join(LONG)
        assert not thread.is_alive()
        gc.collect()
        assert gone() is None
        assert ended.is_set()

    def test_a_store_that_was_let_go_while_it_works_ends_its_thread(self) -> None:
        store = Store()
        store.block()
        thread, gone, may_go = store.thread, weakref.ref(store), store.may_go
        del store
        may_go.set()
        thread.join(LONG)
        assert not thread.is_alive()
        gc.collect()
        assert gone() is None


class TestFork:
    def test_a_child_stores_its_own_and_leaves_the_rest_to_its_parent(self, store: Store) -> None:
        store.block(0)
        store.filler.offer([1], [1])

        def child() -> None:
            store.filler.leave_to_parent()
            store.may_go.set()
            assert store.filler.flush(LONG), "nothing waits here"
            assert store.filler.offer([2], [1])
            assert store.filler.flush(LONG)
            assert store.stored == [2]
            store.filler.close()

        assert in_child(child) == 0
        store.may_go.set()
        assert store.filler.flush(LONG)
        assert store.stored == [0, 1]

    def test_a_child_owes_no_rest_of_its_parent(self, store: Store) -> None:
        store.filler.pace.owed = 1e6

        def child() -> None:
            store.filler.leave_to_parent()
            assert store.filler.offer([2], [1])
            assert store.filler.flush(LONG)
            store.filler.close()

        assert in_child(child) == 0
        store.filler.pace.owed = 0.0

    def test_a_lock_that_another_thread_held_does_not_stop_a_child(self, store: Store) -> None:
        held, release = threading.Event(), threading.Event()

        def hold() -> None:
            with store.filler._changed:
                held.set()
                release.wait(LONG)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(LONG)

        def child() -> None:
            store.filler.leave_to_parent()
            assert store.filler.offer([5], [1])
            assert store.filler.flush(LONG)
            assert store.stored == [5]

        try:
            assert in_child(child) == 0
        finally:
            release.set()
            holder.join(LONG)

    def test_a_closed_one_stays_closed_in_a_child(self, store: Store) -> None:
        store.filler.close()
        store.thread.join(LONG)

        def child() -> None:
            before = threading.active_count()
            store.filler.leave_to_parent()
            assert threading.active_count() == before
            assert not store.filler.offer([1], [1])

        assert in_child(child) == 0


ALONE = r"""
import os, threading
import torch
from attmemo.rows.filler import Filler

def multiply():
    torch.mm(torch.ones(900, 900), torch.ones(900, 900)).add_(1)

def threads():
    return len(os.listdir("/proc/self/task"))

class Work:
    seen = []
    def do(self, items, hurry):
        if items:
            multiply()
            self.seen.append([torch.get_num_threads(), threads()])

multiply()
before, work = threads(), Work()
filler = Filler(work.do, lambda: None)
filler.offer([1], [1])
filler.flush(60)
other = []
thread = threading.Thread(target=lambda: other.append(torch.get_num_threads()))
thread.start()
thread.join()
result = [torch.get_num_threads(), *other, work.seen[0][0], work.seen[0][1] - before]
"""


def test_the_thread_computes_without_a_team_and_others_keep_theirs() -> None:
    """A second team would have that of the requests sleep between two operations."""
    assert run_child(ALONE, environment={"OMP_NUM_THREADS": "2"}).result == [2, 2, 1, 1]
