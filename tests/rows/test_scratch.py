"""Memory that is used again: no two parts share bytes, and what comes back is found again."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.rows.scratch import ALIGNED, Scratch

SIZE = 1 << 14


def begin(part: npt.NDArray[np.uint8]) -> int:
    return int(part.ctypes.data)


def within(scratch: Scratch, part: npt.NDArray[np.uint8]) -> bool:
    return scratch._address <= begin(part) < scratch._address + SIZE


def test_a_part_comes_back_once_nothing_refers_to_it() -> None:
    scratch = Scratch(SIZE)
    part = scratch.take(SIZE)
    view = torch.from_numpy(part[100:200]).view(torch.int16)
    place = begin(part)
    assert within(scratch, part)
    del part
    assert not within(scratch, scratch.take(1)), "a view is there"
    del view
    assert begin(scratch.take(SIZE)) == place


def test_what_does_not_fit_is_memory_of_its_own() -> None:
    scratch = Scratch(SIZE)
    large = scratch.take(SIZE + 1)
    assert len(large) == SIZE + 1
    assert not within(scratch, large)
    large[:] = 3
    assert within(scratch, scratch.take(SIZE))


def test_a_part_has_the_bytes_that_were_asked_for_and_is_aligned() -> None:
    scratch = Scratch(SIZE)
    parts = [scratch.take(n) for n in (0, 1, 63, 64, 65, 1000)]
    assert [len(part) for part in parts] == [0, 1, 63, 64, 65, 1000]
    assert all(begin(part) % ALIGNED == 0 for part in parts)


def test_while_another_thread_takes_a_part_memory_is_of_its_own() -> None:
    """A forked child may find the lock taken by a thread that it does not have."""
    scratch = Scratch(SIZE)
    with scratch._lock:
        part = scratch.take(10)
    assert not within(scratch, part)
    assert within(scratch, scratch.take(10))


def test_parts_outlive_what_they_came_from() -> None:
    scratch = Scratch(SIZE)
    part = scratch.take(1000)
    part[:] = 5
    del scratch
    gc.collect()
    assert (part == 5).all()


@given(st.lists(st.one_of(st.integers(1, SIZE), st.none()), max_size=60), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_no_two_parts_share_bytes_and_all_comes_back(asked: list[int | None], random: object) -> None:
    """None: a part, any of those that are there, is given back."""
    scratch, held = Scratch(SIZE), dict[int, npt.NDArray[np.uint8]]()
    for number, nbytes in enumerate(asked):
        if nbytes is None:
            if held:
                del held[random.choice(sorted(held))]  # type: ignore[attr-defined]
            continue
        held[number] = scratch.take(nbytes)
        held[number][:] = number
    assert all((part == number).all() for number, part in held.items())
    held.clear()
    assert within(scratch, scratch.take(SIZE))


def test_threads_take_and_give_back_without_sharing() -> None:
    scratch = Scratch(SIZE)

    def work(own: int) -> None:
        random = np.random.default_rng(own)
        for _ in range(2000):
            part = scratch.take(int(random.integers(1, SIZE // 3)))
            part[:] = own
            assert (part == own).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert within(scratch, scratch.take(SIZE))
