"""The window in C: what must never happen to pages. Each test is named after the wound."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import random
import re
import signal
import sys
import threading
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.utils.dlpack import from_dlpack

from attmemo.mmap import _window

PAGE = _window.page_size()
SLOTS = 64
MAX_MAP_COUNT = int(Path("/proc/sys/vm/max_map_count").read_text())

PIPE = os.pipe()

fillable = pytest.mark.skipif(MAX_MAP_COUNT > 300_000, reason="vm.max_map_count is too large to be filled in a test")


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A file whose page i is full of the byte i + 1."""
    path = tmp_path / "pages"
    path.write_bytes(b"".join(bytes([i + 1]) * PAGE for i in range(SLOTS)))
    descriptor = os.open(path, os.O_RDONLY)
    yield descriptor
    os.close(descriptor)


def offsets(*pages: int) -> array[int]:
    return array("q", [page * PAGE for page in pages])


def seen(window: _window.Window) -> list[int]:
    """The first byte of every mapped page, less one: which page of the file is there."""
    with memoryview(window) as view:
        return [view[i] - 1 for i in range(0, len(view), PAGE)]


def mappings() -> list[tuple[int, int, str]]:
    """(first address, end, permissions) of every mapping of this process."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    parsed = [re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+)", line) for line in lines]
    return [(int(m[1], 16), int(m[2], 16), m[3]) for m in parsed if m]


def reserved() -> int:
    """Bytes of address space in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE


def inside(window: _window.Window) -> list[tuple[int, int, str]]:
    """The mappings that begin in the window."""
    return [m for m in mappings() if window.address <= m[0] < window.address + window.capacity]


def readable(address: int) -> bool:
    """Ask the kernel whether a byte can be read; a system call fails where a load would be a signal."""
    try:
        os.write(PIPE[1], (ctypes.c_char * 1).from_address(address))
    except OSError as error:
        return error.errno != errno.EFAULT
    os.read(PIPE[0], 1)
    return True


def dark(window: _window.Window) -> bool:
    """Whether no page of the window can be read."""
    inside = range(window.address, window.address + window.capacity, PAGE)
    return window.mapped_bytes == 0 and not any(readable(address) for address in inside)


def in_child(body: Callable[[], None]) -> None:
    """Run in a forked child; an exception there, or a signal, fails the test here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of fork in a process with threads; this child starts none
        pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(60)
            body()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0, "the child failed or was killed (negative: by that signal)"


def test_slots_appear_side_by_side_in_the_order_asked(fd: int) -> None:
    window = _window.Window(8 * PAGE, PAGE)
    window.map(fd, offsets(5, 2, 2, 3, 63, 0), PAGE)
    assert seen(window) == [5, 2, 2, 3, 63, 0]
    window.map(fd, offsets(1, 10), 2 * PAGE, populate=False)
    assert seen(window) == [1, 2, 10, 11]


def test_an_offset_buffer_of_any_64_bit_kind_is_understood(fd: int) -> None:
    np = pytest.importorskip("numpy")
    window = _window.Window(2 * PAGE, PAGE)
    for buffer in (
        np.array([PAGE, 0]),
        np.array([PAGE, 7, 0, 7])[::2].copy(),
        memoryview(bytes(offsets(1, 0))).cast("q"),
    ):
        window.map(fd, buffer, PAGE)
        assert seen(window) == [1, 0]


def test_neighbours_in_the_file_cost_one_mapping_and_strangers_one_each(fd: int) -> None:
    window = _window.Window(SLOTS * PAGE, PAGE)
    window.map(fd, offsets(*range(SLOTS)), PAGE)
    assert len(inside(window)) == 1
    window.map(fd, offsets(*reversed(range(SLOTS))), PAGE)
    assert len(inside(window)) == SLOTS


@pytest.mark.parametrize(
    ("pages", "slot", "rule"),
    [
        ([-1], PAGE, "negative"),
        ([0, -(1 << 40)], PAGE, "negative"),
        ([SLOTS], PAGE, "end of the file"),
        ([0, SLOTS - 1], 2 * PAGE, "end of the file"),
        ([1 << 50], PAGE, "end of the file"),
        ([0] * 9, PAGE, "capacity"),
        ([0] * 5, 2 * PAGE, "capacity"),
        ([0], 0, "multiple"),
        ([0], PAGE - 1, "multiple"),
        ([0], PAGE // 2, "multiple"),
        ([0], -PAGE, "negative"),
        ([0], 1 << 62, "capacity"),
        ([0] * 4, 1 << 62, "capacity"),  # 4 * 2**62 wraps to 0
        ([0], 1 << 64, "index-sized"),
    ],
)
def test_arguments_that_would_leave_window_or_file_change_nothing(
    fd: int, pages: list[int], slot: int, rule: str
) -> None:
    window = _window.Window(8 * PAGE, PAGE)
    window.map(fd, offsets(7, 9), PAGE)
    before = inside(window)
    with pytest.raises(ValueError, match=rule):
        window.map(fd, offsets(*pages), slot)
    assert inside(window) == before
    assert seen(window) == [7, 9]


@pytest.mark.parametrize("offset", [1, 4095, PAGE + 512, 2**63 - 1, -(2**63)])
def test_odd_and_extreme_byte_offsets_are_refused(fd: int, offset: int) -> None:
    window = _window.Window(PAGE, PAGE)
    with pytest.raises(ValueError, match="slot 0"):
        window.map(fd, array("q", [offset]), PAGE)


@pytest.mark.parametrize("bad", [array("d", [0.0]), array("i", [0]), array("Q", [0]), b"\0" * 8])
def test_offsets_of_another_type_are_not_reinterpreted(fd: int, bad: object) -> None:
    with pytest.raises(ValueError, match="64-bit signed"):
        _window.Window(PAGE, PAGE).map(fd, bad, PAGE)


def test_offsets_that_are_no_buffer_are_refused(fd: int) -> None:
    with pytest.raises(TypeError):
        _window.Window(PAGE, PAGE).map(fd, [0], PAGE)


@pytest.mark.parametrize("bad", [-1, 1 << 31, 1 << 70])
def test_numbers_that_are_no_descriptor_are_refused(bad: int) -> None:
    with pytest.raises(ValueError, match=r"."):
        _window.Window(PAGE, PAGE).map(bad, offsets(0), PAGE)


def test_a_closed_descriptor_and_a_pipe_are_refused_by_name() -> None:
    window = _window.Window(PAGE, PAGE)
    reader, writer = os.pipe()
    with pytest.raises(ValueError, match="not a regular file"):
        window.map(reader, offsets(0), PAGE)
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError, match="fstat") as caught:
        window.map(reader, offsets(0), PAGE)
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
        _window.Window(1 << 60, PAGE)
    assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize("alignment", [PAGE, 1 << 16, 2 << 20, 1 << 30])
def test_the_base_is_aligned_and_the_capacity_never_less_than_asked(alignment: int) -> None:
    for capacity in (1, PAGE, PAGE + 1, 5 << 20):
        window = _window.Window(capacity, alignment)
        assert window.address % alignment == 0
        assert window.capacity >= capacity
        assert window.capacity % window.alignment == 0


def test_a_smaller_batch_leaves_nothing_of_the_larger_one_behind_it(fd: int) -> None:
    window = _window.Window(8 * PAGE, PAGE)
    window.map(fd, offsets(1, 3, 5, 7, 9, 11, 13, 15), PAGE)
    window.map(fd, offsets(2, 4), PAGE)
    assert seen(window) == [2, 4]
    assert [readable(window.address + i * PAGE) for i in range(8)] == [True] * 2 + [False] * 6


def test_an_empty_batch_is_a_dark_window(fd: int) -> None:
    window = _window.Window(2 * PAGE, PAGE)
    window.map(fd, offsets(1, 3), PAGE)
    window.map(fd, offsets(), PAGE)
    assert dark(window)


def test_collapse_takes_every_page_and_keeps_the_addresses(fd: int) -> None:
    window = _window.Window(8 * PAGE, PAGE)
    window.map(fd, offsets(1, 3, 5), PAGE)
    address = window.address
    window.collapse()
    assert dark(window)
    assert window.address == address
    assert any(first <= address and address + window.capacity <= end for first, end, _ in mappings())


def test_a_darkened_window_is_dark_and_the_next_batch_replaces_what_it_left(fd: int) -> None:
    window = _window.Window(8 * PAGE, PAGE)
    window.map(fd, offsets(1, 3, 5), PAGE)
    window.darken()
    assert dark(window)
    window.darken()
    window.map(fd, offsets(2, 9), PAGE)
    assert seen(window) == [2, 9]
    assert [readable(window.address + i * PAGE) for i in range(8)] == [True] * 2 + [False] * 6
    window.darken()
    with memoryview(window) as view:
        assert len(view) == 0
    window.collapse()
    assert len(inside(window)) <= 1


def test_slots_by_number_are_those_of_the_layout(fd: int) -> None:
    window = _window.Window(8 * PAGE, PAGE)
    window.map_slots(fd, array("q", [3, 0, 29]), 4 * PAGE, 2 * PAGE, 30)
    assert seen(window) == [10, 11, 4, 5, 62, 63]
    window.map_slots(fd, array("q", []), 4 * PAGE, 2 * PAGE, 30)
    assert dark(window)


@pytest.mark.parametrize("slot", [30, -1, 2**63 - 1, -(2**63), 2**52])
def test_a_slot_that_the_layout_does_not_have_moves_nothing(fd: int, slot: int) -> None:
    """2^52 slots of a page come round to offset 0."""
    window = _window.Window(8 * PAGE, PAGE)
    window.map_slots(fd, array("q", [7]), 4 * PAGE, 2 * PAGE, 30)
    with pytest.raises(IndexError, match=f"slot {slot} does not exist"):
        window.map_slots(fd, array("q", [1, slot]), 4 * PAGE, 2 * PAGE, 30)
    assert seen(window) == [18, 19]


@pytest.mark.parametrize(
    ("header", "stride", "limit"), [(5, 2, 30), (4, 2, 31), (0, 1, 1 << 62), (2**50, 1, 2**50), (0, 2**51, 2**11)]
)
def test_a_file_shorter_than_its_slots_is_refused_whatever_is_asked_of_it(
    fd: int, header: int, stride: int, limit: int
) -> None:
    window = _window.Window(8 * PAGE, PAGE)
    with pytest.raises(ValueError, match=r"shorter|do not fit|cannot fit"):
        window.map_slots(fd, array("q", [0]), header * PAGE, stride * PAGE, limit)
    assert dark(window)


def test_a_tensor_shown_is_a_lease_until_its_last_view_is_gone(fd: int) -> None:
    window = _window.Window(4 * PAGE, PAGE)
    window.map(fd, offsets(4, 6), PAGE)
    tensor = from_dlpack(window.show((2, 3), PAGE, 1, 8))
    assert (tensor.shape, tensor.stride()) == ((2, 2, 3), (PAGE, 3, 1))
    assert tensor.tolist() == [[[5] * 3] * 2, [[7] * 3] * 2]
    part = tensor[1, 1]
    del tensor
    for change in (lambda: window.map(fd, offsets(1), PAGE), window.collapse, window.darken, window.close):
        with pytest.raises(BufferError, match="leased"):
            change()
    assert part.tolist() == [7, 7, 7]
    del part
    assert window.leases == 0
    window.show((1,), PAGE, 1, 8)  # taken by nobody
    assert window.leases == 0
    window.close()


def test_a_tensor_keeps_the_pages_when_the_window_object_is_gone(fd: int) -> None:
    window = _window.Window(PAGE, PAGE)
    window.map(fd, offsets(4), PAGE)
    tensor = from_dlpack(window.show((PAGE,), PAGE, 1, 8))
    count = sys.getrefcount(window)
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
    window = _window.Window(2 * PAGE, PAGE)
    window.map(fd, offsets(4, 6), PAGE)
    with pytest.raises((ValueError, TypeError, OverflowError)):
        window.show(shape, slot, code, bits)
    assert window.leases == 0
    assert seen(window) == [4, 6]


def test_a_leased_window_is_not_remapped_collapsed_or_closed(fd: int) -> None:
    window = _window.Window(2 * PAGE, PAGE)
    window.map(fd, offsets(4, 6), PAGE)
    window.lease()
    window.lease()
    window.release()
    for change in (lambda: window.map(fd, offsets(1), PAGE), window.collapse, window.close):
        with pytest.raises(BufferError, match="leased"):
            change()
    assert seen(window) == [4, 6]
    window.release()
    window.map(fd, offsets(1), PAGE)
    assert seen(window) == [1]
    with pytest.raises(ValueError, match="without a lease"):
        window.release()


def test_a_buffer_is_a_lease_until_its_last_slice_is_gone(fd: int) -> None:
    window = _window.Window(2 * PAGE, PAGE)
    window.map(fd, offsets(4, 6), PAGE)
    view = memoryview(window)
    part = view[PAGE : PAGE + 4]
    view.release()
    assert window.leases == 1
    with pytest.raises(BufferError):
        window.map(fd, offsets(1), PAGE)
    assert bytes(part) == b"\x07" * 4
    part.release()
    window.close()


def test_the_buffer_cannot_be_written(fd: int) -> None:
    window = _window.Window(PAGE, PAGE)
    window.map(fd, offsets(4), PAGE)
    with memoryview(window) as view:
        assert view.readonly
        with pytest.raises(TypeError):
            view[0] = 1
    with pytest.raises((BufferError, TypeError)):
        (ctypes.c_char * PAGE).from_buffer(window)
    permissions = [p for first, _, p in mappings() if first == window.address]
    assert permissions == ["r--s"]


def test_a_buffer_keeps_the_pages_when_the_window_object_is_gone(fd: int) -> None:
    window = _window.Window(PAGE, PAGE)
    window.map(fd, offsets(4), PAGE)
    view = memoryview(window)
    del window
    gc.collect()
    assert view[0] == 5


def test_a_lease_that_outlives_the_object_keeps_the_pages_from_malloc(fd: int) -> None:
    window = _window.Window(PAGE, PAGE)
    window.map(fd, offsets(4), PAGE)
    window.lease()
    address = window.address
    del window
    gc.collect()
    assert (ctypes.c_ubyte * 1).from_address(address)[0] == 5
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(PAGE))


def test_a_closed_window_answers_with_an_error(fd: int) -> None:
    window = _window.Window(PAGE, PAGE)
    window.map(fd, offsets(4), PAGE)
    address = window.address
    window.close()
    window.close()
    assert (window.address, window.capacity, window.mapped_bytes) == (0, 0, 0)
    assert not readable(address)
    uses = [lambda: window.map(fd, offsets(1), PAGE), window.collapse, window.lease, window.release]
    for use in (*uses, lambda: memoryview(window)):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_refused_system_call_leaves_the_window_dark_not_half_new(tmp_path: Path, fd: int) -> None:
    """A descriptor without the right to read: mmap says EACCES after the old batch was there."""
    path = tmp_path / "written"
    path.write_bytes(bytes(2 * PAGE))
    write_only = os.open(path, os.O_WRONLY)
    window = _window.Window(4 * PAGE, PAGE)
    window.map(fd, offsets(1, 3, 5, 7), PAGE)
    with pytest.raises(PermissionError, match=r"slot 0: mmap"):
        window.map(write_only, offsets(0, 0), PAGE)
    assert dark(window)
    os.close(write_only)
    window.map(fd, offsets(8), PAGE)
    assert seen(window) == [8]


def fill_mappings(filler: _window.Window, fd: int, room: int) -> None:
    """Use up the mappings of this process but `room`, or as near to that as the kernel allows."""
    filler.collapse()  # first: at the limit not even malloc gets a large block
    count = MAX_MAP_COUNT - len(mappings()) - room
    pattern = offsets(0, 2) * (count // 2 + 1)  # never neighbours: one mapping a slot
    while count:
        try:
            filler.map(fd, pattern[:count], PAGE, populate=False)
            return
        except OSError:  # ENOMEM: the last one or two were too many
            count -= 1


@fillable
def test_running_out_of_mappings_half_way_leaves_no_mixed_window(fd: int) -> None:
    """At vm.max_map_count the kernel refuses a slot and leaves the old page readable: for every i, all or nothing."""

    def body() -> None:
        gc.disable()
        filler = _window.Window(MAX_MAP_COUNT * PAGE, PAGE)
        window = _window.Window(SLOTS * PAGE, PAGE)
        old, new = list(range(SLOTS)), list(reversed(range(SLOTS)))  # one mapping; one for each slot
        blamed = set()
        for room in [*range(-1, 8), 20, 40, SLOTS - 2, SLOTS - 1, SLOTS, SLOTS + 5]:
            window.map(fd, offsets(*old), PAGE, populate=False)
            fill_mappings(filler, fd, room)
            try:
                window.map(fd, offsets(*new), PAGE, populate=False)
                blame = SLOTS
            except OSError as error:
                blame = int(re.search(r"slot (\d+): mmap: Cannot allocate memory", str(error))[1])
            if blame == SLOTS:
                assert seen(window) == new, room
            else:
                assert dark(window), room
            blamed.add(blame)
            filler.collapse()
            window.collapse()
            assert dark(window), room
        # The scene is real only if it failed near the start, in the middle and near the end, and once did not fail.
        assert min(blamed) < 4, blamed
        assert max(blamed) == SLOTS, blamed
        assert len(blamed) > 8, blamed

    in_child(body)


@fillable
def test_at_the_limit_a_window_can_still_go_dark_and_recover(fd: int) -> None:
    def body() -> None:
        gc.disable()
        filler = _window.Window(MAX_MAP_COUNT * PAGE, PAGE)
        window = _window.Window(8 * PAGE, PAGE)
        for room in range(-1, 4):
            window.map(fd, offsets(1, 3, 5, 7), PAGE)
            fill_mappings(filler, fd, room)
            window.collapse()
            assert dark(window)
            filler.collapse()
            window.map(fd, offsets(9), PAGE)
            assert seen(window) == [9]

    in_child(body)


def test_a_huge_page_file_cannot_spill_over_the_end_of_the_window(fd: int) -> None:
    """For hugetlbfs the kernel rounds lengths up: a 4 KiB slot would map 2 MiB over whatever follows the window."""
    try:
        huge = os.memfd_create("huge", os.MFD_HUGETLB | os.MFD_HUGE_2MB)
    except OSError as error:
        pytest.skip(f"no hugetlb memory files here: {error}")
    os.ftruncate(huge, 4 << 20)
    small, wide = _window.Window(PAGE, PAGE), _window.Window(2 << 20, 2 << 20)
    before = [inside(small), inside(wide)]
    with pytest.raises(ValueError, match="alignment of the window"):
        small.map(huge, offsets(0), PAGE)
    with pytest.raises(ValueError, match="multiple of the page size"):
        wide.map(huge, offsets(0), PAGE)
    with pytest.raises(ValueError, match="multiple of the page size"):
        wide.map(huge, offsets(1), 2 << 20)
    assert [inside(small), inside(wide)] == before
    wide.map(fd, offsets(1, 3), PAGE)
    if int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text()) == 0:
        with pytest.raises(OSError, match="mmap") as caught:
            wide.map(huge, array("q", [0]), 2 << 20)
        assert caught.value.errno == errno.ENOMEM
        assert dark(wide)
    os.close(huge)


def test_memory_around_the_window_survives_many_cycles(fd: int) -> None:
    rng = random.Random(5)
    windows = [_window.Window(SLOTS * PAGE, PAGE) for _ in range(3)]
    around = [mmap.mmap(-1, PAGE) for _ in range(8)]  # the kernel places them next to the reservations
    for i, page in enumerate(around):
        page.write(bytes([200 + i]) * PAGE)
    code = {m for m in mappings() if m[2] == "r-xp"}  # libraries lie around reservations too
    for _ in range(5000):
        window = rng.choice(windows)
        if rng.random() < 0.2:
            window.collapse()
        else:
            slot = rng.choice([1, 2, 4])
            pages = [rng.randrange(SLOTS - slot + 1) for _ in range(rng.randrange(SLOTS // slot + 1))]
            window.map(fd, offsets(*pages), slot * PAGE, populate=False)
    assert [page[:] for page in around] == [bytes([200 + i]) * PAGE for i in range(8)]
    assert code <= set(mappings())


def test_mappings_and_descriptors_end_where_they_began(fd: int) -> None:
    rng = random.Random(6)
    count = lambda: (len(mappings()), len(os.listdir("/proc/self/fd")))  # noqa: E731
    window = _window.Window(SLOTS * PAGE, PAGE)
    del window
    gc.collect()
    before = count()
    window = _window.Window(SLOTS * PAGE, PAGE)
    for _ in range(2000):
        window.map(fd, offsets(*(rng.randrange(SLOTS) for _ in range(SLOTS))), PAGE, populate=False)
    window.close()
    for _ in range(200):
        _window.Window(rng.randrange(1, 1 << 30), 2 << 20).map(fd, offsets(3, 1), PAGE)
    # Two to spare: the interpreter's own allocator may have grown meanwhile. A leak would be hundreds.
    after = count()
    assert after[0] <= before[0] + 2
    assert after[1] == before[1]


def test_a_forked_child_gets_an_error_and_does_the_parent_no_harm(fd: int) -> None:
    window = _window.Window(4 * PAGE, PAGE)
    window.map(fd, offsets(1, 3), PAGE)
    held = [window]
    del window

    def body() -> None:
        uses = (
            lambda: held[0].map(fd, offsets(9, 9), PAGE),
            lambda: held[0].collapse(),
            lambda: held[0].lease(),
            lambda: held[0].release(),
            lambda: held[0].close(),
            lambda: memoryview(held[0]),
        )
        for use in uses:
            with pytest.raises(ValueError, match="fork"):
                use()
        held.clear()  # the child's object dies here
        gc.collect()
        own = _window.Window(PAGE, PAGE)
        own.map(fd, offsets(7), PAGE)
        assert seen(own) == [7]

    in_child(body)
    assert seen(held[0]) == [1, 3]
    held[0].map(fd, offsets(5), PAGE)
    assert seen(held[0]) == [5]


def test_two_threads_on_one_window_see_whole_batches_or_busy(fd: int) -> None:
    window = _window.Window(SLOTS * PAGE, PAGE)
    batches = [list(range(0, SLOTS, 2)), list(range(1, SLOTS, 2))]
    wrong: list[object] = []
    outcomes = {"whole": 0, "busy": 0}

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(300):
            try:
                window.map(fd, offsets(*rng.choice(batches)), PAGE)
                pages = seen(window)
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
        _window.Window(PAGE, PAGE)
        with pytest.raises(ValueError, match="capacity"):
            _window.Window(0, PAGE)
    assert abs(sys.getrefcount(_window.Window) - before) < 5
