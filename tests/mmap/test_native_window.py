"""The window in C: what must never happen to pages. Each test is named after the wound."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import re
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import in_child
from torch.utils.dlpack import from_dlpack
from window_tools import PAGE, Pages, numbers, readable

from attmemo.mmap import _window

SLOTS = 64
MAX_MAP_COUNT = int(Path("/proc/sys/vm/max_map_count").read_text())

fillable = pytest.mark.skipif(MAX_MAP_COUNT > 300_000, reason="vm.max_map_count is too large to be filled in a test")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file whose page i is full of the byte i + 1."""
    path = tmp_path / "pages"
    path.write_bytes(b"".join(bytes([i + 1]) * PAGE for i in range(SLOTS)))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def mappings() -> list[tuple[int, int, str]]:
    """(first address, end, permissions) of every mapping of this process."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    parsed = [re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line) for line in lines]
    return [(int(m[1], 16), int(m[2], 16), m[3]) for m in parsed if m]


def reserved() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def inside(window: Pages) -> list[tuple[int, int, str]]:
    """The mappings that begin in the window."""
    return [m for m in mappings() if window.address <= m[0] < window.address + window.capacity]


def test_slots_appear_side_by_side_in_the_order_asked(fd: int) -> None:
    window = Pages(_window, 8 * PAGE)
    window.map(fd, numbers(5, 2, 2, 3, 63, 0))
    assert window.seen() == [5, 2, 2, 3, 63, 0]
    window.map(fd, numbers(1, 10), 2 * PAGE, populate=False)
    assert window.seen() == [2, 3, 20, 21]


def test_slot_numbers_of_any_64_bit_kind_are_understood(fd: int) -> None:
    np = pytest.importorskip("numpy")
    window = Pages(_window, 2 * PAGE)
    for buffer in (
        np.array([1, 0]),
        np.array([1, 7, 0, 7])[::2].copy(),
        memoryview(bytes(numbers(1, 0))).cast("q"),
    ):
        window.map(fd, buffer)
        assert window.seen() == [1, 0]


def test_neighbours_in_the_file_cost_one_mapping_and_strangers_one_each(fd: int) -> None:
    window = Pages(_window, SLOTS * PAGE)
    window.map(fd, numbers(*range(SLOTS)))
    assert len(inside(window)) == 1
    window.map(fd, numbers(*reversed(range(SLOTS))))
    assert len(inside(window)) == SLOTS


@pytest.mark.parametrize(
    ("slots", "size", "header", "limit", "rule"),
    [
        ([0], PAGE, 0, SLOTS + 1, "shorter"),
        ([0], 2 * PAGE, PAGE, SLOTS // 2, "shorter"),
        ([0], 1 << 50, 0, 1, "shorter"),
        ([0] * 9, PAGE, 0, SLOTS, "capacity"),
        ([0] * 5, 2 * PAGE, 0, SLOTS // 2, "capacity"),
        ([0], 9 * PAGE, 0, 1, "capacity"),
        ([0], 0, 0, 1, "multiple"),
        ([0], PAGE - 1, 0, 1, "multiple"),
        ([0], PAGE // 2, 0, 1, "multiple"),
        ([0], PAGE, 1, 1, "offset is not a multiple"),
        ([0], PAGE, PAGE + 512, 1, "offset is not a multiple"),
        ([0], -PAGE, 0, 1, "negative"),
        ([0], PAGE, -PAGE, 1, "negative"),
        ([0], PAGE, 0, -1, "negative"),
        ([0], 1 << 62, 0, 4, "do not fit"),  # 4 * 2**62 wraps to 0
        ([0], 2**63 - PAGE, 2 * PAGE, 1, "do not fit"),
        ([0], 1 << 64, 0, 1, "cannot fit"),
    ],
)
def test_arguments_that_would_leave_window_or_file_change_nothing(
    fd: int, slots: list[int], size: int, header: int, limit: int, rule: str
) -> None:
    window = Pages(_window, 8 * PAGE)
    window.map(fd, numbers(7, 9))
    before = inside(window)
    with pytest.raises(ValueError, match=rule):
        window.map(fd, numbers(*slots), size, header=header, limit=limit)
    assert inside(window) == before
    assert window.seen() == [7, 9]


@pytest.mark.parametrize("bad", [array("d", [0.0]), array("i", [0]), array("Q", [0]), b"\0" * 8])
def test_slot_numbers_of_another_type_are_not_reinterpreted(fd: int, bad: object) -> None:
    with pytest.raises(ValueError, match="64-bit signed"):
        Pages(_window, PAGE).map(fd, bad)


def test_slot_numbers_that_are_no_buffer_are_refused(fd: int) -> None:
    with pytest.raises(TypeError):
        Pages(_window, PAGE).map(fd, [0])


@pytest.mark.parametrize("bad", [-1, 1 << 31, 1 << 70])
def test_numbers_that_are_no_descriptor_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        _window.Window(PAGE, PAGE).map_slots(bad, numbers(0), 0, PAGE, 1)


def test_a_closed_descriptor_and_a_pipe_are_refused_by_name() -> None:
    window = Pages(_window, PAGE)
    reader, writer = os.pipe()
    with pytest.raises(ValueError, match="not a regular file"):
        window.map(reader, numbers(0), limit=1)
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError, match="fstat") as caught:
        window.map(reader, numbers(0), limit=1)
    assert caught.value.errno == errno.EBADF


@pytest.mark.parametrize(
    ("capacity", "alignment"),
    [
        (0, PAGE),
        (-1, PAGE),
        (PAGE, 0),
        (PAGE, PAGE // 2),
        (PAGE, 3 * PAGE),
        (PAGE, -PAGE),
        (1 << 64, PAGE),
        (2**63 - 1, PAGE),
        (2**63 - PAGE, 1 << 62),
        (1, 1 << 63),
    ],
)
def test_a_window_of_impossible_size_is_refused(capacity: int, alignment: int) -> None:
    before = reserved()
    with pytest.raises(ValueError, match=r"."):
        _window.Window(capacity, alignment)
    assert reserved() < before + (64 << 20)


def test_a_window_larger_than_the_address_space_names_the_call() -> None:
    with pytest.raises(OSError, match="mmap") as caught:
        Pages(_window, 1 << 60)
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize("alignment", [PAGE, 1 << 16, 2 << 20, 1 << 30])
def test_the_base_is_aligned_and_the_capacity_never_less_than_asked(alignment: int) -> None:
    for capacity in (1, PAGE, PAGE + 1, 5 << 20):
        window = Pages(_window, capacity, alignment)
        assert window.address % alignment == 0
        assert window.capacity >= capacity
        assert window.capacity % alignment == 0


def test_a_smaller_batch_leaves_nothing_of_the_larger_one_behind_it(fd: int) -> None:
    window = Pages(_window, 8 * PAGE)
    window.map(fd, numbers(1, 3, 5, 7, 9, 11, 13, 15))
    window.map(fd, numbers(2, 4))
    assert window.seen() == [2, 4]
    assert [readable(window.address + i * PAGE) for i in range(8)] == [True] * 2 + [False] * 6


def test_an_empty_batch_is_a_dark_window(fd: int) -> None:
    window = Pages(_window, 2 * PAGE)
    window.map(fd, numbers(1, 3))
    window.map(fd, numbers())
    assert window.dark()


def test_a_dark_window_keeps_its_addresses(fd: int) -> None:
    window = Pages(_window, 8 * PAGE)
    window.map(fd, numbers(1, 3, 5))
    window.darken()
    assert window.dark()
    start, last = window.address, window.address + window.capacity
    taken = sum(max(0, min(end, last) - max(first, start)) for first, end, _ in mappings())
    assert taken == window.capacity


def test_a_darkened_window_is_dark_and_the_next_batch_replaces_what_it_left(fd: int) -> None:
    window = Pages(_window, 8 * PAGE)
    window.map(fd, numbers(1, 3, 5))
    window.darken()
    assert window.dark()
    window.darken()
    window.map(fd, numbers(2, 9))
    assert window.seen() == [2, 9]
    assert [readable(window.address + i * PAGE) for i in range(8)] == [True] * 2 + [False] * 6
    window.darken()
    assert window.dark()
    window.map(fd, numbers())
    assert window.dark()
    assert len(inside(window)) <= 1


def test_slots_by_number_are_those_of_the_layout(fd: int) -> None:
    window = Pages(_window, 8 * PAGE)
    window.map(fd, numbers(3, 0, 29), 2 * PAGE, header=4 * PAGE, limit=30)
    assert window.seen() == [10, 11, 4, 5, 62, 63]
    window.map(fd, numbers(), 2 * PAGE, header=4 * PAGE, limit=30)
    assert window.dark()


@pytest.mark.parametrize("slot", [30, -1, 2**63 - 1, -(2**63), 2**52])
def test_a_slot_that_the_layout_does_not_have_moves_nothing(fd: int, slot: int) -> None:
    """2^52 slots of a page come round to offset 0."""
    window = Pages(_window, 8 * PAGE)
    window.map(fd, numbers(7), 2 * PAGE, header=4 * PAGE, limit=30)
    with pytest.raises(IndexError, match=f"slot {slot} does not exist"):
        window.map(fd, numbers(1, slot), 2 * PAGE, header=4 * PAGE, limit=30)
    assert window.seen() == [18, 19]


@pytest.mark.parametrize(
    ("header", "stride", "limit"), [(5, 2, 30), (4, 2, 31), (0, 1, 1 << 62), (2**50, 1, 2**50), (0, 2**51, 2**11)]
)
def test_a_file_shorter_than_its_slots_is_refused_whatever_is_asked_of_it(
    fd: int, header: int, stride: int, limit: int
) -> None:
    window = Pages(_window, 8 * PAGE)
    with pytest.raises(ValueError, match=r"shorter|do not fit|cannot fit"):
        window.map(fd, numbers(0), stride * PAGE, header=header * PAGE, limit=limit)
    assert window.dark()


def test_a_tensor_shown_is_a_lease_until_its_last_view_is_gone(fd: int) -> None:
    window = Pages(_window, 4 * PAGE)
    window.map(fd, numbers(4, 6))
    tensor = from_dlpack(window.native.show((2, 3), PAGE, 1, 8))
    assert (tensor.shape, tensor.stride()) == ((2, 2, 3), (PAGE, 3, 1))
    assert tensor.tolist() == [[[5] * 3] * 2, [[7] * 3] * 2]
    part = tensor[1, 1]
    del tensor
    for change in (lambda: window.map(fd, numbers(1)), window.darken, window.close):
        with pytest.raises(BufferError, match="leased"):
            change()
    assert part.tolist() == [7, 7, 7]
    del part
    window.native.show((1,), PAGE, 1, 8)  # and not taken
    window.darken()
    window.close()


def test_a_tensor_keeps_the_pages_when_the_window_object_is_gone(fd: int) -> None:
    window = Pages(_window, PAGE)
    window.map(fd, numbers(4))
    tensor = from_dlpack(window.native.show((PAGE,), PAGE, 1, 8))
    count = sys.getrefcount(window.native)
    others = threading.Thread(target=lambda kept: None, args=(tensor,))  # let go by another thread
    del window, tensor
    assert count > 2
    others.start()
    others.join()
    gc.collect()


@pytest.mark.parametrize(
    ("shape", "slot", "code", "bits"),
    [
        ((PAGE + 1,), PAGE, 1, 8), ((PAGE,), PAGE, 1, 16), ((2**32, 2**32), PAGE, 1, 8), ((0,), PAGE, 1, 8),
        ((-1,), PAGE, 1, 8), ((1,) * 9, PAGE, 1, 8), ((1,), PAGE, 1, 7), ((1,), PAGE, 1, 0), ((1,), PAGE, 256, 8),
        ((1,), 0, 1, 8), ((1,), PAGE + 1, 1, 16), ((1,), 3 * PAGE, 1, 8), (("1",), PAGE, 1, 8),
    ],
)  # fmt: skip
def test_a_tensor_larger_than_what_is_mapped_is_refused(
    fd: int, shape: tuple[int, ...], slot: int, code: int, bits: int
) -> None:
    window = Pages(_window, 2 * PAGE)
    window.map(fd, numbers(4, 6))
    with pytest.raises((ValueError, TypeError, OverflowError)):
        window.native.show(shape, slot, code, bits)
    assert window.seen() == [4, 6]
    window.darken()  # no lease was left behind


def test_the_pages_cannot_be_written(fd: int) -> None:
    window = Pages(_window, PAGE)
    window.map(fd, numbers(4))
    assert [p for first, _, p in mappings() if first == window.address] == ["r--s"]
    with pytest.raises((BufferError, TypeError)):
        (ctypes.c_char * PAGE).from_buffer(window.native)


def test_a_closed_window_answers_with_an_error(fd: int) -> None:
    window = Pages(_window, PAGE)
    window.map(fd, numbers(4))
    address = window.address
    window.close()
    window.close()
    assert window.native.capacity == 0
    assert not readable(address)
    for use in (lambda: window.map(fd, numbers(1)), window.darken, window.look):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_refused_system_call_leaves_the_window_dark_not_half_new(tmp_path: Path, fd: int) -> None:
    """A descriptor without the right to read: mmap says EACCES after the old batch was there."""
    path = tmp_path / "written"
    path.write_bytes(bytes(2 * PAGE))
    write_only = os.open(path, os.O_WRONLY)
    window = Pages(_window, 4 * PAGE)
    window.map(fd, numbers(1, 3, 5, 7))
    with pytest.raises(PermissionError, match=r"slot 0: mmap"):
        window.map(write_only, numbers(0, 0))
    assert window.dark()
    os.close(write_only)
    window.map(fd, numbers(8))
    assert window.seen() == [8]


def fill_mappings(filler: Pages, fd: int, room: int) -> None:
    """Use up the mappings of this process but `room`, or as near to that as the kernel allows."""
    filler.map(fd, numbers())  # first: at the limit not even malloc gets a large block
    count = MAX_MAP_COUNT - len(mappings()) - room
    pattern = numbers(0, 2) * (count // 2 + 1)  # never neighbours: one mapping a slot
    while count:
        try:
            filler.map(fd, pattern[:count], populate=False)
            return
        except OSError:  # ENOMEM: the last one or two were too many
            count -= 1


@fillable
def test_running_out_of_mappings_half_way_leaves_no_mixed_window(fd: int) -> None:
    """At vm.max_map_count the kernel refuses a slot and leaves the old page readable: for every i, all or nothing."""

    def body() -> None:
        gc.disable()
        filler = Pages(_window, MAX_MAP_COUNT * PAGE)
        window = Pages(_window, SLOTS * PAGE)
        old, new = list(range(SLOTS)), list(reversed(range(SLOTS)))  # one mapping; one for each slot
        blamed = set()
        for room in [*range(-1, 8), 20, 40, SLOTS - 2, SLOTS - 1, SLOTS, SLOTS + 5]:
            window.map(fd, numbers(*old), populate=False)
            fill_mappings(filler, fd, room)
            try:
                window.map(fd, numbers(*new), populate=False)
                blame = SLOTS
            except OSError as error:
                blame = int(re.search(r"slot (\d+): mmap: Cannot allocate memory", str(error))[1])
            if blame == SLOTS:
                assert window.seen() == new, room
            else:
                assert window.dark(), room
            blamed.add(blame)
            filler.map(fd, numbers())
            window.darken()
            assert window.dark(), room
        # The scene is real only if it failed near the start, in the middle and near the end, and once did not fail.
        assert min(blamed) < 4, blamed
        assert max(blamed) == SLOTS, blamed
        assert len(blamed) > 8, blamed

    assert in_child(body) == 0


@fillable
def test_at_the_limit_a_window_can_still_go_dark_and_recover(fd: int) -> None:
    def body() -> None:
        gc.disable()
        filler = Pages(_window, MAX_MAP_COUNT * PAGE)
        window = Pages(_window, 8 * PAGE)
        for room in range(-1, 4):
            window.map(fd, numbers(1, 3, 5, 7))
            fill_mappings(filler, fd, room)
            window.darken()
            assert window.dark()
            filler.map(fd, numbers())
            window.map(fd, numbers(9))
            assert window.seen() == [9]

    assert in_child(body) == 0


def test_a_huge_page_file_cannot_spill_over_the_end_of_the_window(fd: int) -> None:
    """For hugetlbfs the kernel rounds lengths up: a 4 KiB slot would map 2 MiB over whatever follows the window."""
    try:
        huge = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        pytest.skip(f"no hugetlb memory files here: {error}")
    os.ftruncate(huge, 4 << 20)
    small, wide = Pages(_window, PAGE), Pages(_window, 2 << 20, 2 << 20)
    before = [inside(small), inside(wide)]
    with pytest.raises(ValueError, match="alignment of the window"):
        small.map(huge, numbers(0))
    with pytest.raises(ValueError, match="multiple of the page size"):
        wide.map(huge, numbers(0))
    with pytest.raises(ValueError, match="multiple of the page size"):
        wide.map(huge, numbers(0), 2 << 20, header=PAGE, limit=1)
    assert [inside(small), inside(wide)] == before
    wide.map(fd, numbers(1, 3))
    if int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()) == 0:
        with pytest.raises(OSError, match="mmap") as caught:
            wide.map(huge, array("q", [0]), 2 << 20)
        assert caught.value.errno == errno.ENOMEM
        assert wide.dark()
    os.close(huge)


def test_memory_around_the_window_survives_many_cycles(fd: int) -> None:
    rng = random.Random(5)
    windows = [Pages(_window, SLOTS * PAGE) for _ in range(3)]
    around = [mmap.mmap(-1, PAGE) for _ in range(8)]  # the kernel places them next to the reservations
    for i, page in enumerate(around):
        page.write(bytes([200 + i]) * PAGE)
    code = {m for m in mappings() if m[2] == "r-xp"}  # libraries lie around reservations too
    for _ in range(5000):
        window = rng.choice(windows)
        if rng.random() < 0.2:
            window.darken()
        else:
            slot = rng.choice([1, 2, 4])
            pages = [rng.randrange(SLOTS // slot) for _ in range(rng.randrange(SLOTS // slot + 1))]
            window.map(fd, numbers(*pages), slot * PAGE, populate=False)
    assert [page[:] for page in around] == [bytes([200 + i]) * PAGE for i in range(8)]
    assert code <= set(mappings())


def test_mappings_and_descriptors_end_where_they_began(fd: int) -> None:
    rng = random.Random(6)
    count = lambda: (len(mappings()), len(os.listdir("/proc/self/fd")))  # noqa: E731
    window = Pages(_window, SLOTS * PAGE)
    del window
    gc.collect()
    before = count()
    window = Pages(_window, SLOTS * PAGE)
    for _ in range(2000):
        window.map(fd, numbers(*(rng.randrange(SLOTS) for _ in range(SLOTS))), populate=False)
    window.close()
    for _ in range(200):
        Pages(_window, rng.randrange(1 << 20, 1 << 30), 2 << 20).map(fd, numbers(3, 1))
    # Two to spare: the interpreter's own allocator may have grown meanwhile. A leak would be hundreds.
    after = count()
    assert after[0] <= before[0] + 2
    assert after[1] == before[1]


def test_a_forked_child_gets_an_error_and_does_the_parent_no_harm(fd: int) -> None:
    window = Pages(_window, 4 * PAGE)
    window.map(fd, numbers(1, 3))
    held = [window]
    del window

    def body() -> None:
        uses = (
            lambda: held[0].map(fd, numbers(9, 9)),
            lambda: held[0].darken(),
            lambda: held[0].close(),
            lambda: held[0].look(),
        )
        for use in uses:
            with pytest.raises(ValueError, match="fork"):
                use()
        held.clear()  # the child's object dies here
        gc.collect()
        own = Pages(_window, PAGE)
        own.map(fd, numbers(7))
        assert own.seen() == [7]

    assert in_child(body) == 0
    assert held[0].seen() == [1, 3]
    held[0].map(fd, numbers(5))
    assert held[0].seen() == [5]


def test_two_threads_on_one_window_see_whole_batches_or_busy(fd: int) -> None:
    window = Pages(_window, SLOTS * PAGE)
    batches = [list(range(0, SLOTS, 2)), list(range(1, SLOTS, 2))]
    wrong: list[object] = []
    outcomes = {"whole": 0, "busy": 0}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            try:
                window.map(fd, numbers(*rng.choice(batches)))
                pages = window.seen()
                if pages not in batches:
                    wrong.append(pages)
                outcomes["whole"] += 1
            except BufferError:
                outcomes["busy"] += 1

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert outcomes["whole"] > 0


def test_the_window_cannot_be_subclassed_and_types_are_not_leaked() -> None:
    with pytest.raises(TypeError):
        type("Sub", (_window.Window,), {})
    before = sys.getrefcount(_window.Window)
    for _ in range(100):
        Pages(_window, PAGE)
        with pytest.raises(ValueError, match="capacity"):
            Pages(_window, 0)
    assert abs(sys.getrefcount(_window.Window) - before) < 5
