"""What waits: oldest first, up to a budget, never mixed up."""

from __future__ import annotations

import threading

import services  # noqa: F401  # skips where the service is not installed
from hypothesis import given
from hypothesis import strategies as st

from attmemo.serve.model import Answer
from attmemo.serve.queue import PADDING, Queue, Request, Waiting


def waiting(request: Request, place: int, rows: int, length: int | None = None) -> Waiting:
    ids = [0] * (length or rows)
    return Waiting(request, place, ids, ids, rows)


def emptied(queue: Queue) -> list[list[Waiting]]:
    found = []
    while len(queue):
        taken = queue.take()
        assert taken is not None
        found.append(taken[0])
    return found


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 60), st.booleans()), min_size=1), st.integers(20, 100))
def test_every_sequence_is_taken_once_in_order_and_within_the_budget(
    sizes: list[tuple[int, int, bool]], most: int
) -> None:
    queue = Queue(most)
    both = {reuse: Request(len(sizes), each=False, reuse=reuse) for reuse in (False, True)}
    given_ = [waiting(both[reuse], n, rows, rows + more) for n, (rows, more, reuse) in enumerate(sizes)]
    queue.put(given_)
    batches = emptied(queue)
    assert sorted(one.place for batch in batches for one in batch) == list(range(len(sizes)))
    for reuse in (False, True):
        places = [one.place for batch in batches for one in batch if one.request.reuse == reuse]
        assert places == sorted(places)
    left = list(range(len(sizes)))
    for batch in batches:
        assert batch[0].place == left[0], "a batch begins with the oldest"
        assert len({one.request.reuse for one in batch}) == 1
        if len(batch) > 1:
            assert sum(one.rows for one in batch) <= most
            assert max(len(one.ids) for one in batch) * len(batch) <= PADDING * most
        left = [place for place in left if place not in {one.place for one in batch}]


def test_what_a_record_supplies_makes_room_for_more() -> None:
    queue = Queue(100)
    request = Request(40, each=False, reuse=True)
    queue.put([waiting(request, place, 5, 20) for place in range(40)])
    assert [len(batch) for batch in emptied(queue)] == [20, 20]


def test_clients_that_ask_again_once_answered_never_leave_the_model_without_work() -> None:
    """Answers travel while the next batch runs: what was taken comes back only when another batch was taken."""
    request = Request(64, each=False, reuse=True)
    queue, sizes, away = Queue(1000, worth=100), list[int](), list[Waiting]()
    queue.put([waiting(request, place, 10) for place in range(64)])
    for _ in range(12):
        assert len(queue), "there is something to do as soon as a batch is done"
        taken = queue.take()
        assert taken is not None
        queue.put(away)
        away = taken[0]
        sizes.append(len(away))
    assert max(sizes[-4:]) <= 33
    assert min(sizes[-4:]) >= 31


def test_little_that_waits_is_taken_at_once() -> None:
    queue, request = Queue(1000, worth=100), Request(16, each=False, reuse=True)
    queue.put([waiting(request, place, 10) for place in range(10)])
    assert [len(batch) for batch in emptied(queue)] == [10]
    queue.put([waiting(request, place, 10) for place in range(10, 16)])
    assert [len(batch) for batch in emptied(queue)] == [6]


def test_rows_are_not_asked_where_a_part_of_what_waits_fits_whole() -> None:
    queue, request = Queue(300, worth=100), Request(50, each=False, reuse=True)
    queue.put([waiting(request, place, 10) for place in range(50)])
    taken = queue.take(lambda sequences: [1] * len(sequences))
    assert taken is not None
    assert len(taken[0]) == 25
    assert not any(one.asked for one in taken[0])


def test_rows_are_asked_once_and_only_if_more_waits_than_a_batch_computes_whole() -> None:
    queue, asked = Queue(100), []

    def needs(sequences: list[Waiting]) -> list[int]:
        asked.append([one.place for one in sequences])
        return [5] * len(sequences)

    few, many, whole = (Request(40, each=False, reuse=reuse) for reuse in (True, True, False))
    queue.put([waiting(few, place, 20) for place in range(5)])
    taken = queue.take(needs)
    assert taken is not None
    assert (len(taken[0]), asked) == (5, []), "all of them fit"
    queue.put([waiting(whole, 39, 20)] + [waiting(many, place, 20) for place in range(30)])
    sizes = []
    while len(queue):
        taken = queue.take(needs)
        assert taken is not None
        sizes.append(len(taken[0]))
    assert sizes == [1, 20, 10]
    assert asked == [[*range(19)], [19], [*range(20, 30)]], "as many as ever fit into a batch, and no sequence twice"


def test_clients_that_went_away_are_dropped() -> None:
    queue = Queue(100)
    here, away = Request(2, each=False, reuse=True), Request(3, each=False, reuse=True)
    queue.put([waiting(away, place, 10) for place in range(3)] + [waiting(here, place, 10) for place in range(2)])
    away.gone = True
    taken = queue.take()
    assert taken is not None
    batch, gone = taken
    assert [one.request for one in batch] == [here, here]
    assert [one.request for one in gone] == [away] * 3


def test_a_closed_queue_is_emptied_first() -> None:
    queue = Queue(10)
    queue.put([waiting(Request(1, each=False, reuse=True), 0, 5)])
    queue.close()
    assert queue.take() is not None
    assert queue.take() is None


def test_a_thread_that_waits_is_woken() -> None:
    queue, found = Queue(10), []
    thread = threading.Thread(target=lambda: found.append(queue.take()))
    thread.start()
    queue.put([waiting(Request(1, each=False, reuse=True), 0, 5)])
    thread.join(60)
    assert len(found) == 1


def test_the_last_answer_completes_a_request() -> None:
    request = Request(2, each=False, reuse=True)
    answer = Answer(None, None, 3, 3)  # type: ignore[arg-type]
    assert not request.settle(1, answer, 0.1)
    assert request.settle(0, answer, 0.2)
    assert request.answers == [answer, answer]
