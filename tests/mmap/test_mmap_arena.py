"""Arena files: what is promised about them when they are short, odd, written to, or put into huge pages."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import faulthandler
import fcntl
import gc
import mmap
import os
import re
import signal
import sys
import warnings
from pathlib import Path

import pytest
import torch
from children import in_child
from mmap_tools import pretend_huge, smaps

from attmemo.errors import DatabaseError, DatabaseNotFoundError, DatabaseTruncatedError, PageSizeError
from attmemo.mmap import (
    HUGE_PAGE,
    Arena,
    CopyFetcher,
    MapFetcher,
    SlotLayout,
    ViewFetcher,
    choose_fetcher,
    hugepages,
    page_size,
    pages,
)

PAGE = page_size()


def write_arena(path: Path, layout: SlotLayout, first: int = 0) -> torch.Tensor:
    """Append slots `first`.. to a file and return all of them [slots, *shape]; padding and header are 0xFF (NaN)."""
    generator = torch.Generator().manual_seed(17)
    slots = torch.rand((layout.slots, *layout.shape), generator=generator)
    slots = (slots * 100).to(layout.dtype)
    with path.open("ab") as file:
        if first == 0:
            file.write(b"\xff" * layout.header)
        for slot in slots[first:]:
            file.write(slot.view(torch.uint8).numpy().tobytes())
            file.write(b"\xff" * (layout.stride - layout.nbytes))
    return slots


@pytest.fixture
def layout() -> SlotLayout:
    return SlotLayout.paged((3, 20, 20), torch.float32, slots=5, header=100)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "arena.bin"


def test_slots_that_are_not_whole_pages_are_padded_to_the_next_page() -> None:
    layout = SlotLayout.paged((12, 100, 100), torch.float32, slots=7, header=1, page=4096)
    assert (layout.nbytes, layout.stride, layout.header, layout.dense) == (480_000, 483_328, 4096, False)
    assert layout.file_bytes == 4096 + 7 * 483_328
    assert layout.offset(3) == 4096 + 3 * 483_328
    assert SlotLayout.paged((12, 128, 128), torch.bfloat16, page=4096).dense
    assert SlotLayout.paged((12, 128, 128), torch.bfloat16, page=1 << 16).dense
    assert SlotLayout.paged((12, 128, 128), torch.bfloat16).strides == (12 * 128 * 128, 128 * 128, 128, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": ()},
        {"shape": (0, 4)},
        {"shape": (-1, 4)},
        {"stride": 63},
        {"stride": 66},
        {"header": -4096},
        {"header": 2},
        {"slots": -1},
        {"dtype": torch.float64},
    ],
)
def test_a_layout_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    good = SlotLayout((4, 4), torch.float32, 64, 0, 1)
    with pytest.raises(ValueError):
        dataclasses.replace(good, **wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8])
def test_a_slot_is_the_bytes_that_were_written_and_no_padding(path: Path, dtype: torch.dtype) -> None:
    layout = SlotLayout.paged((3, 21, 21), dtype, slots=4, header=1)
    slots = write_arena(path, layout)
    with Arena(path, layout) as arena:
        assert len(arena) == 4
        for i in range(4):
            assert arena.slot(i).dtype == dtype
            assert arena.slot(i).is_contiguous()
            assert torch.equal(arena.slot(i), slots[i])
            raw = arena.slot_bytes(i)
            assert raw.readonly
            assert bytes(raw) == slots[i].view(torch.uint8).numpy().tobytes()
        assert arena.slot(2).data_ptr() - arena.slot(0).data_ptr() == 2 * layout.stride


@pytest.mark.parametrize("index", [-1, 5, 6, 1 << 62, 1 << 70, -(1 << 70)])
def test_an_index_outside_the_arena_is_an_index_error(path: Path, layout: SlotLayout, index: int) -> None:
    write_arena(path, layout)
    arena = Arena(path, layout)
    for use in (arena.slot, arena.slot_bytes):
        with pytest.raises(IndexError):
            use(index)
    with pytest.raises((IndexError, ValueError)):
        arena.mapping.indices([0, index])


def test_offsets_name_the_right_bytes(path: Path, layout: SlotLayout) -> None:
    write_arena(path, layout)
    arena = Arena(path, layout)
    indices = arena.mapping.indices([4, 0, 4])
    assert arena.mapping.offsets(indices).tolist() == [layout.offset(4), layout.offset(0), layout.offset(4)]
    assert os.pread(arena.fd, 4, layout.offset(2)) == bytes(arena.slot_bytes(2)[:4])


def test_a_file_cut_anywhere_is_a_named_error_and_never_a_signal(path: Path, layout: SlotLayout) -> None:
    write_arena(path, layout)
    whole = layout.file_bytes
    borders = {0, layout.header, *(layout.offset(i) for i in range(5)), layout.offset(4) + layout.nbytes, whole}
    cuts = sorted({border + d for border in borders for d in (-1, 0, 1)} & set(range(whole)))

    def body() -> None:
        for cut in reversed(cuts):
            os.truncate(path, cut)
            with pytest.raises(DatabaseTruncatedError) as caught:
                Arena(path, layout)
            for part in (str(path), str(cut), str(whole), f"attmemo check {path.parent}"):
                assert part in str(caught.value)

    assert in_child(body) == 0


@pytest.mark.parametrize("fetcher", [CopyFetcher, ViewFetcher, MapFetcher])
def test_a_file_cut_while_it_is_open_is_a_named_error_and_never_a_signal(
    path: Path, layout: SlotLayout, fetcher: type
) -> None:
    write_arena(path, layout)

    def body() -> None:
        arena, twin = Arena(path, layout), fetcher()
        with twin.fetch(arena, [4, 1]):
            pass
        os.truncate(path, layout.offset(2))
        with pytest.raises(DatabaseTruncatedError, match="truncated"):
            twin.fetch(arena, [4, 1])

    assert in_child(body) == 0


def test_a_file_replaced_by_rename_goes_on_being_served(path: Path, layout: SlotLayout) -> None:
    slots = write_arena(path, layout)
    arena = Arena(path, layout)
    other = path.with_name("other")
    other.write_bytes(b"\0" * 10)
    other.rename(path)
    with MapFetcher().fetch(arena, [3]) as batch:
        assert torch.equal(batch[0], slots[3])
    assert torch.equal(arena.slot(0), slots[0])


def test_slots_that_do_not_begin_on_a_page_are_refused_with_the_remedy(path: Path) -> None:
    for layout in (SlotLayout((4, 4), torch.float32, 64, 0, 1), SlotLayout((4, 4), torch.float32, PAGE, 64, 1)):
        path.write_bytes(bytes(2 * PAGE))
        with pytest.raises(PageSizeError, match="build-database"):
            Arena(path, layout)


def test_a_database_built_for_smaller_pages_is_refused_by_name(
    path: Path, layout: SlotLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_arena(path, layout)
    monkeypatch.setattr(pages, "page_size", lambda: 1 << 16)
    with pytest.raises(PageSizeError, match="65536"):
        Arena(path, layout)


def test_a_file_that_is_not_there_or_not_a_file_is_a_named_error(path: Path, layout: SlotLayout) -> None:
    with pytest.raises(DatabaseNotFoundError, match="does not exist"):
        Arena(path, layout)
    with pytest.raises(DatabaseError):
        Arena(path.parent, layout.with_slots(1))
    with pytest.raises(ValueError, match="residency"):
        Arena(path, layout, residency="ram")  # type: ignore[arg-type]


def test_serving_maps_cannot_be_written_not_even_after_mprotect(path: Path, layout: SlotLayout) -> None:
    write_arena(path, layout)
    arena = Arena(path, layout)
    fetcher = MapFetcher()
    with fetcher.fetch(arena, [1, 3]) as batch:
        for tensor in (arena.slot(0), batch[0], batch[1]):
            entry = smaps(tensor.data_ptr())
            assert entry.split()[1] == "r--s"
            flags = re.search(r"^VmFlags: (.*)$", entry, re.M)
            assert flags is not None
            assert "mw" not in flags[1].split()  # "may write": what mprotect could turn into a right
    assert os.get_inheritable(arena.fd) is False


def test_an_in_place_operation_faults_instead_of_changing_the_database(path: Path, layout: SlotLayout) -> None:
    write_arena(path, layout)
    before = path.read_bytes()
    arena = Arena(path, layout)

    def body() -> None:
        faulthandler.disable()  # the signal is expected; its traceback would only look like a failure
        arena.slot(1).zero_()

    assert in_child(body) == -signal.SIGSEGV
    arena.slot(1).clone().zero_()
    assert path.read_bytes() == before


def test_opening_and_reading_give_no_warnings(path: Path, layout: SlotLayout) -> None:
    write_arena(path, layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena = Arena(path, layout)
        arena.slot(1)
        with MapFetcher().fetch(arena, [1, 2]) as batch:
            assert batch.stacked is not None


def test_a_large_arena_costs_one_mapping_and_few_descriptors(path: Path) -> None:
    layout = SlotLayout.paged((1, 8, 8), torch.float32, slots=100_000)
    with path.open("wb") as file:
        file.truncate(layout.file_bytes)
    gc.collect()
    count = lambda: (pages.map_count(), len(os.listdir("/proc/self/fd")))  # noqa: E731
    before = count()
    arena = Arena(path, layout)
    held = [arena.slot(i) for i in range(0, 100_000, 1000)]
    assert not held[-1].any()
    assert count()[0] <= before[0] + 2
    assert count()[1] <= before[1] + 2  # ours, and the one that Python's mmap keeps
    del held
    arena.close()
    del arena
    gc.collect()
    assert count()[1] == before[1]
    assert count()[0] <= before[0] + 1


def test_tensors_outlive_the_arena_that_made_them(path: Path, layout: SlotLayout) -> None:
    slots = write_arena(path, layout)
    arena = Arena(path, layout)
    held = arena.slot(2)
    arena.close()
    arena.close()
    uses = (
        lambda arena: arena.slot(2),
        lambda arena: len(arena),
        lambda arena: CopyFetcher().fetch(arena, [0]),
    )
    for use in uses:
        with pytest.raises(DatabaseError, match="closed"):
            use(arena)
    del arena
    gc.collect()
    assert torch.equal(held, slots[2])


def test_an_arena_without_slots_can_be_opened(path: Path, layout: SlotLayout) -> None:
    empty = layout.with_slots(0)
    path.write_bytes(b"")
    with pytest.raises(DatabaseTruncatedError):
        Arena(path, empty)  # not even the header
    path.write_bytes(b"\xff" * layout.header)
    arena = Arena(path, empty)
    with pytest.raises(IndexError):
        arena.slot(0)
    with MapFetcher().fetch(arena, []) as batch:
        assert batch.stacked is not None
        assert batch.stacked.shape == (0, *layout.shape)
    path.unlink()


def test_without_huge_pages_the_same_bytes_come_with_a_notice(path: Path, layout: SlotLayout) -> None:
    slots = write_arena(path, layout)
    arena = Arena(path, layout, residency="hugepages")
    if arena.residency == "hugepages":
        pytest.skip("this machine gives huge pages to memory files")
    assert arena.notice is not None
    assert "\n" not in arena.notice
    assert "shmem_enabled" in arena.notice
    assert arena.page_bytes == arena.window_page_bytes == PAGE
    assert all(torch.equal(arena.slot(i), slots[i]) for i in range(5))
    assert Arena(path, layout).notice is None


def test_pages_that_a_page_cache_gives_are_found_out_and_the_bytes_are_the_same(path: Path) -> None:
    """Small or huge, as the file system has them; what is reported is what the kernel says of each slot."""
    layout = SlotLayout((1, 600, 700), torch.float32, HUGE_PAGE, HUGE_PAGE, 12)
    slots = write_arena(path, layout)
    plain = Arena(path, layout)
    address = plain.slot(0).data_ptr()
    looked = [number * 12 // 8 for number in range(8)]
    assert all(torch.equal(plain.slot(i), slots[i]) for i in range(12))
    huge = sum(pages.is_huge(address + i * HUGE_PAGE) for i in looked)
    assert plain.page_bytes == plain.window_page_bytes == (HUGE_PAGE if huge > 4 else PAGE)
    assert pages.is_huge(address) == (pages.huge_mapping(address, 1)[1] > 0 and huge > 0)
    plain.close()
    told: list[tuple[int, int]] = []
    asked = Arena(path, layout, "hugepages", lambda done, total: told.append((done, total)))
    assert all(torch.equal(asked.slot(i), slots[i]) for i in range(12))
    assert told[-1] == (layout.file_bytes, layout.file_bytes)
    if asked.residency == "page-cache":
        assert asked.notice is not None
        got = asked.mapping.huge_bytes
        assert asked.page_bytes == (HUGE_PAGE if 2 * got > layout.file_bytes else PAGE)
        assert (f"{got >> 20} of {layout.file_bytes >> 20} MiB" if got else "in small pages") in asked.notice
    with MapFetcher(strict=True).fetch(asked, [11, 0, 11]) as batch:
        assert batch.stacked is not None
        assert torch.equal(batch.stacked, slots[[11, 0, 11]])


@pytest.mark.parametrize(("huge", "expected"), [(8, HUGE_PAGE), (5, HUGE_PAGE), (4, PAGE), (0, PAGE)])
def test_most_of_the_slots_that_are_looked_at_decide(
    path: Path, monkeypatch: pytest.MonkeyPatch, huge: int, expected: int
) -> None:
    layout = SlotLayout((1, 600, 700), torch.float32, HUGE_PAGE, HUGE_PAGE, 8)
    slots = write_arena(path, layout)
    answers = iter([True] * huge + [False] * (8 - huge))
    monkeypatch.setattr(pages, "is_huge", lambda address: next(answers))
    arena = Arena(path, layout)
    assert (arena.page_bytes, arena.window_page_bytes) == (expected, expected)
    assert next(answers, None) is None
    with choose_fetcher("auto", arena.window_page_bytes).fetch(arena, [2, 7]) as batch:
        assert (batch.stacked is None) == (expected == PAGE)
        assert torch.equal(batch[1], slots[7])


def test_a_kernel_that_knows_no_question_about_one_page_is_asked_about_all(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOTTY, "inappropriate ioctl for device")

    monkeypatch.setattr(fcntl, "ioctl", refuse)
    monkeypatch.setattr(pages, "huge_mapping", lambda address, nbytes: (HUGE_PAGE, HUGE_PAGE))
    assert pages.is_huge(0)


def test_large_slots_name_the_pool_too(path: Path) -> None:
    layout = SlotLayout.paged((2, 400, 400), torch.float32, slots=2)
    slots = write_arena(path, layout)
    arena = Arena(path, layout, residency="hugepages")
    if arena.residency == "hugepages":
        pytest.skip("this machine gives huge pages to memory files")
    assert arena.notice is not None
    assert "vm.nr_hugepages=2" in arena.notice
    assert torch.equal(arena.slot(1), slots[1])


@pytest.mark.parametrize("shape", [(3, 20, 20), (2, 400, 400)])
def test_the_copy_in_memory_is_the_same_bytes_at_a_wider_stride(
    path: Path, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_huge(monkeypatch)
    layout = SlotLayout.paged(shape, torch.float32, slots=5, header=1)
    slots = write_arena(path, layout)
    calls: list[tuple[int, int]] = []
    arena = Arena(path, layout, "hugepages", progress=lambda done, total: calls.append((done, total)))
    assert (arena.residency, arena.notice, arena.page_bytes) == ("hugepages", None, HUGE_PAGE)
    wide = layout.nbytes >= 1 << 20
    assert arena.window_page_bytes == (HUGE_PAGE if wide else PAGE)
    assert arena.layout == layout  # what the file says, not the copy
    assert calls
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] >= 5 * layout.nbytes
    path.unlink()
    order = [4, 0, 0, 2]
    for twin in (CopyFetcher(), ViewFetcher(), MapFetcher(strict=True)):
        with twin.fetch(arena, order) as batch:
            assert all(torch.equal(batch[i], slots[j]) for i, j in enumerate(order)), twin.name
        assert getattr(twin, "fallbacks", 0) == 0
    if wide:
        assert arena.slot(0).data_ptr() % PAGE == 0
        assert arena.mapping.layout.offset(1) == HUGE_PAGE


def test_the_copy_in_memory_cannot_be_changed(
    path: Path, layout: SlotLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F_SEAL_SHRINK alone lets a punched hole turn data to zeros; all four ways are tried."""
    pretend_huge(monkeypatch)
    slots = write_arena(path, layout)
    arena = Arena(path, layout, "hugepages")
    with pytest.raises(OSError):
        os.pwrite(arena.fd, b"x", 0)
    intruder = os.open(f"/proc/self/fd/{arena.fd}", os.O_RDWR)
    punch = ctypes.CDLL(None, use_errno=True).fallocate
    punch.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    for attack in (
        lambda: os.ftruncate(intruder, 0),
        lambda: os.ftruncate(intruder, 1 << 30),
        lambda: os.pwrite(intruder, b"x", 0),
        lambda: mmap.mmap(intruder, PAGE),
    ):
        with pytest.raises(PermissionError):
            attack()
    assert punch(intruder, 3, 0, PAGE) == -1  # PUNCH_HOLE | KEEP_SIZE
    os.close(intruder)
    assert torch.equal(arena.slot(0), slots[0])


def test_a_copy_that_would_not_fit_in_memory_is_not_begun(
    path: Path, layout: SlotLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_huge(monkeypatch)
    monkeypatch.setattr(hugepages, "available_memory", lambda: HUGE_PAGE - 1)
    slots = write_arena(path, layout)
    arena = Arena(path, layout, "hugepages")
    assert arena.residency == "page-cache"
    assert arena.notice is not None
    assert "available" in arena.notice
    assert torch.equal(arena.slot(4), slots[4])


def test_pages_that_turn_out_small_are_given_back(
    path: Path, layout: SlotLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_huge(monkeypatch)
    monkeypatch.setattr(hugepages, "huge_mapping", lambda address, nbytes: (PAGE, 0))
    write_arena(path, layout)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(path, layout, "hugepages")
    assert arena.residency == "page-cache"
    assert arena.notice is not None
    assert "small pages" in arena.notice
    arena.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("general", "own", "allowed"),
    [
        ("never", None, False),
        ("advise", None, True),
        ("always", "inherit", True),
        ("never", "inherit", False),
        ("never", "advise", True),
        ("always", "never", False),
        ("deny", "always", False),
        ("force", "never", True),
        (None, None, False),
    ],
)
def test_the_two_settings_of_the_kernel_are_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, general: str | None, own: str | None, allowed: bool
) -> None:
    choices = ["always", "inherit", "within_size", "advise", "never", "deny", "force"]
    show = lambda chosen: " ".join(f"[{c}]" if c == chosen else c for c in choices) + "\n"  # noqa: E731
    (tmp_path / "hugepages-2048kB").mkdir()
    if general is not None:
        (tmp_path / "shmem_enabled").write_text(show(general))
    if own is not None:
        (tmp_path / "hugepages-2048kB" / "shmem_enabled").write_text(show(own))
    monkeypatch.setattr(hugepages, "THP", tmp_path)
    assert hugepages.shared_memory_allowed() is allowed


def enter_a_mount_of_huge_pages(where: Path) -> bool:
    """In this (forked) process only: a tmpfs of huge pages, in name spaces of its own. False where not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(0x10000000 | 0x00020000) != 0:  # CLONE_NEWUSER | CLONE_NEWNS
        return False
    try:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    except OSError:
        return False
    return bool(libc.mount(b"none", str(where).encode(), b"tmpfs", 0, b"size=64m,huge=always") == 0)


def shared_bytes_in_huge_pages(path: Path) -> int:
    """What the kernel itself gave the file of a tmpfs: every page is touched, then ``smaps`` is read."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        for offset in range(0, len(mapped), HUGE_PAGE):
            mapped[offset]
        of_the_file = Path("/proc/self/smaps").read_text().split(str(path), 1)[1]
    return int(of_the_file.split("ShmemPmdMapped:", 1)[1].split()[0]) * 1024


SKIP = 77


def test_huge_pages_that_are_there_are_used_by_arena_and_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real 2 MiB pages, without touching the machine's settings: a private tmpfs lends the memory file."""
    layout = SlotLayout.paged((2, 400, 400), torch.float32, slots=5, header=1)
    slots = write_arena(tmp_path / "arena.bin", layout)
    mount = tmp_path / "huge"
    mount.mkdir()

    def body() -> None:
        if not enter_a_mount_of_huge_pages(mount):
            os._exit(SKIP)
        monkeypatch.setattr(hugepages, "shared_memory_allowed", lambda: True)

        def lend(name: str, flags: int) -> int:
            if flags & os.MFD_HUGETLB:
                raise OSError("the pool is another test's matter")
            return os.open(mount, os.O_TMPFILE | os.O_RDWR, 0o600)

        monkeypatch.setattr(os, "memfd_create", lend)
        arena = Arena(tmp_path / "arena.bin", layout, "hugepages")
        if arena.residency != "hugepages" or arena.notice is not None:
            print(arena.notice, file=sys.stderr)
            os._exit(SKIP)  # memory too fragmented for huge pages, or for all of them
        assert (arena.page_bytes, arena.window_page_bytes) == (HUGE_PAGE, HUGE_PAGE)
        fetcher = MapFetcher(strict=True)
        with fetcher.fetch(arena, [4, 1, 1]) as batch:
            stacked = batch.stacked
            assert stacked is not None
            assert stacked.data_ptr() % HUGE_PAGE == 0
            assert torch.equal(stacked, slots[[4, 1, 1]])
            assert pages.huge_mapping(stacked.data_ptr(), 3 * HUGE_PAGE)[1] >= 3 * HUGE_PAGE
            assert pages.is_huge(stacked.data_ptr() + HUGE_PAGE + 12345)
            del stacked
        assert fetcher.fallbacks == 0
        # And a database that lies on such a file system is recognized without a copy.
        header = SlotLayout((2, 400, 400), torch.float32, HUGE_PAGE, 0, 3)
        write_arena(mount / "arena.bin", header)
        if shared_bytes_in_huge_pages(mount / "arena.bin") < header.file_bytes:
            os._exit(SKIP)  # the file system gave small pages: memory is too fragmented by now
        plain = Arena(mount / "arena.bin", header)
        assert (plain.residency, plain.page_bytes, plain.window_page_bytes) == ("page-cache", HUGE_PAGE, HUGE_PAGE)

    code = in_child(body)
    if code == SKIP:
        pytest.skip("no user name spaces with tmpfs, or no huge page to be had")
    assert code == 0
