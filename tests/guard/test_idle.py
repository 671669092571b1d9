"""Work for idle times: when it runs, and that its thread ends."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Sequence

import pytest
import torch
from children import in_child
from guarded import until

from attmemo.guard import idle
from attmemo.guard.idle import GAPS, LONG, NICE, OVERDUE, Idle


class Worker:
    """So many parts of work."""

    def __init__(self, parts: int = 1) -> None:
        self.parts, self.threads = parts, list[int]()
        self.takes = 0.0
        self.idle = Idle(self)

    def part_takes(self) -> float:
        return self.takes

    def do_part(self, seconds: float) -> bool:
        self.threads.append(threading.get_ident())
        self.parts -= 1
        return self.parts > 0


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.01)


def thread_of(worker: Worker) -> threading.Thread:
    thread = worker.idle._thread
    assert thread is not None
    return thread


def test_all_work_is_done_in_a_thread_of_its_own_once_no_request_runs() -> None:
    worker = Worker(parts=3)
    worker.idle.began()
    worker.idle.ended()
    worker.idle.wake()
    assert until(lambda: worker.parts == 0)
    assert len(set(worker.threads)) == 1
    assert threading.get_ident() not in worker.threads
    worker.idle.close()


class Clock:
    """Time as a test has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(idle, "monotonic", lambda: self.now)


def after_requests(clock: Clock, gaps: Sequence[float], part: float) -> Worker:
    """A worker that saw requests with these pauses before them, and whose parts take so long."""
    worker = Worker()
    worker.takes = part
    worker.idle.part()
    worker.idle.ended()
    for gap in gaps:
        clock.now += gap
        worker.idle.began()
        clock.now += 0.03
        worker.idle.ended()
    return worker


def test_work_begins_early_only_if_it_will_end_before_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    clock = Clock(monkeypatch)
    worker = after_requests(clock, [0.04] * GAPS, 0.02)
    assert worker.idle.wait() == pytest.approx(0.002)
    clock.now += 0.01
    assert worker.idle.wait() == 0.0
    clock.now += 0.02
    assert worker.idle.wait() == pytest.approx(LONG - 0.03), "too late for this pause"
    clock.now += LONG
    assert worker.idle.wait() == 0.0, "requests have ended, or come at other times"
    for gaps in ([0.04] * (GAPS - 2) + [0.01] * 2, [0.04] * (GAPS - 1), [0.01] * GAPS):
        worker = after_requests(clock, gaps, 0.02)
        clock.now += 0.003
        assert worker.idle.wait() == pytest.approx(LONG - 0.003), "pauses are not known, or often shorter"


def test_no_work_begins_just_as_the_next_request_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    clock = Clock(monkeypatch)
    worker = after_requests(clock, [0.25] * GAPS, 0.02)
    clock.now += 0.24
    assert worker.idle.wait() == pytest.approx(OVERDUE * 0.25 - 0.24), "a request is due"
    clock.now += 0.3
    assert worker.idle.wait() == 0.0, "requests have ended"


def test_work_that_fits_no_pause_begins_after_a_while_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    clock = Clock(monkeypatch)
    worker = after_requests(clock, [0.25, 0.5] * (GAPS // 2), 0.4)
    clock.now += LONG + 0.01
    assert worker.idle.wait() == 0.0


def test_who_has_pauses_for_work_is_not_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    clock = Clock(monkeypatch)
    assert after_requests(clock, [0.04], 0.02).idle.is_busy, "one pause says nothing"
    assert not after_requests(clock, [0.04] * 2, 0.02).idle.is_busy
    assert after_requests(clock, [0.001] * GAPS, 0.0005).idle.is_busy, "requests follow each other"
    assert after_requests(clock, [0.04] * GAPS, 0.06).idle.is_busy, "no part fits"


def test_where_work_was_done_a_few_requests_ago_there_are_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    clock = Clock(monkeypatch)
    worker = after_requests(clock, [0.04] * GAPS, 0.06)
    assert worker.idle.is_busy, "no part fits"
    worker.idle.part()
    for _ in range(GAPS - 1):
        worker.idle.began()
        worker.idle.ended()
        assert not worker.idle.is_busy
    worker.idle.began()
    assert worker.idle.is_busy


def test_requests_that_overlap_are_no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    worker = after_requests(Clock(monkeypatch), [0.04] * GAPS, 0.02)
    assert not worker.idle.is_busy
    worker.idle.began()
    for _ in range(3 * GAPS):
        worker.idle.began()
        worker.idle.ended()
    assert worker.idle.is_busy
    worker.idle.ended()
    worker.idle.began()
    assert not worker.idle.is_busy


def test_work_counts_as_done_lately_for_a_few_requests_each_of_which_counts_once() -> None:
    worker = Worker()
    assert not worker.idle.works
    worker.idle.part()
    for _ in range(GAPS - 1):
        for _ in range(2):  # one guard around the other
            worker.idle.began()
        for _ in range(2):
            worker.idle.ended()
    assert worker.idle.works
    worker.idle.began()
    assert not worker.idle.works


def test_a_part_is_over_once_a_request_came_or_the_thread_is_to_end() -> None:
    worker = Worker()
    for ends in (lambda: (worker.idle.began(), worker.idle.ended()), worker.idle.close):
        worker.idle.part()
        assert not worker.idle.is_over
        ends()
        assert worker.idle.is_over


def test_pauses_say_nothing_once_no_thread_works_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    worker = after_requests(Clock(monkeypatch), [0.04] * GAPS, 0.02)
    assert not worker.idle.is_busy
    worker.idle.close()
    worker.idle.began()
    assert worker.idle.is_busy


def test_a_part_that_took_longer_than_all_pauses_is_not_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 0.002)
    clock = Clock(monkeypatch)
    worker = after_requests(clock, [0.04] * GAPS, 0.2)
    clock.now += 0.003
    assert worker.idle.wait() > 0.0
    worker = after_requests(clock, [0.04] * 50 * GAPS, 0.2)
    clock.now += 0.003
    assert worker.idle.wait() == 0.0
    worker.idle.part()
    assert worker.idle.wait() > 0.0, "once"


def test_work_is_done_on_one_core_and_others_go_first() -> None:
    seen = list[tuple[int, int]]()

    class Looking(Worker):
        def do_part(self, seconds: float) -> bool:
            seen.append((torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))
            return False

    worker = Looking()
    before = torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)
    worker.idle.wake()
    assert until(lambda: bool(seen))
    worker.idle.close()
    assert seen == [(1, min(before[1] + NICE, 19))]
    assert (torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)) == before


def test_no_work_begins_while_a_request_runs() -> None:
    worker = Worker()
    worker.idle.began()
    worker.idle.began()
    worker.idle.ended()
    worker.idle.wake()
    assert not until(lambda: worker.parts == 0, 0.2)
    worker.idle.ended()
    assert until(lambda: worker.parts == 0)
    worker.idle.close()


def test_the_time_until_work_counts_from_the_last_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 100.0)
    clock, worker = Clock(monkeypatch), Worker()
    worker.idle.began()
    worker.idle.ended()
    clock.now += 30.0
    assert worker.idle.wait() == pytest.approx(70.0)
    worker.idle.began()
    assert worker.idle.wait() == 100.0
    worker.idle.close()


def test_no_thread_runs_before_there_is_work_nor_after_it_was_closed() -> None:
    worker = Worker()
    assert worker.idle._thread is None
    worker.idle.wake()
    assert until(lambda: worker.parts == 0)
    thread = thread_of(worker)
    worker.idle.close()
    assert not thread.is_alive()
    worker.idle.wake()
    assert worker.idle._thread is thread


def test_a_worker_that_nothing_holds_ends_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle, "QUIET", 100.0)
    worker = Worker()
    worker.idle.began()
    worker.idle.wake()
    thread, gone = thread_of(worker), weakref.ref(worker)
    assert thread.is_alive()
    del worker
    gc.collect()
    assert until(lambda: gone() is None), "the thread holds it for a moment while it looks"
    assert until(lambda: not thread.is_alive())


def test_a_forked_child_works_in_a_thread_of_its_own() -> None:
    worker = Worker(parts=2)
    worker.idle.began()  # of the parent: the child must not wait for its end

    def work() -> None:
        worker.idle.began()
        worker.idle.ended()
        worker.idle.wake()
        assert until(lambda: worker.parts == 0)

    assert in_child(work) == 0
    assert worker.parts == 2
    worker.idle.close()


def test_work_that_fails_does_not_end_the_thread() -> None:
    worker, done = Worker(parts=2), list[int]()

    def fail_once() -> bool:
        done.append(1)
        if len(done) == 1:
            raise ValueError("no such thing")
        return False

    worker.idle.part = fail_once  # type: ignore[method-assign]
    worker.idle.wake()
    assert until(lambda: len(done) == 1)
    worker.idle.wake()
    assert until(lambda: len(done) == 2)
    worker.idle.close()


def test_where_no_thread_can_be_had_work_stays_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        worker.idle.wake()
        worker.idle.close()
    assert worker.parts == 1


def test_a_fork_waits_for_the_part_that_is_done() -> None:
    inside, go = threading.Event(), threading.Event()

    class Slow(Worker):
        def do_part(self, seconds: float) -> bool:
            inside.set()
            go.wait(10)
            self.threads.append(1)
            return False

    worker = Slow()
    worker.idle.wake()
    assert inside.wait(10)
    threading.Timer(0.2, go.set).start()

    def look() -> None:
        assert worker.threads == [1]
        assert worker.idle._thread is None

    assert in_child(look) == 0
    worker.idle.close()


def test_where_pauses_are_too_short_the_thread_looks_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look two hundred times a second takes 2 % of a core, and finds nothing."""
    clock, worker = Clock(monkeypatch), Worker()
    assert worker.idle.look == idle._SELDOM
    for pause in [0.001] * GAPS:
        worker.idle.ended()
        clock.now += pause
        worker.idle.began()
    assert worker.idle.look == idle._SELDOM
    for pause in [1.0] * GAPS:
        worker.idle.ended()
        clock.now += pause
        worker.idle.began()
    assert worker.idle.look == idle._LOOK
    worker.idle.close()
