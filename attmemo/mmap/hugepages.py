"""An arena in 2 MiB pages: a window over a batch of 200 MB costs 0.3 ms instead of 17 ms over 4 KiB pages.

Three ways, in this order: a copy in a hugetlb pool (``vm.nr_hugepages``; certain or refused at once); a copy in
shared memory (``shmem_enabled``; a wish, read back); the page cache of a file system with large folios (ext4 since
Linux 6.16, xfs, btrfs; no copy, and the pages may be evicted). Otherwise the arena is served from the page cache as it
is, with one line that says so. That is never an error: the results are the same bytes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from attmemo.errors import DatabaseTruncatedError
from attmemo.mmap.layout import SlotLayout
from attmemo.mmap.pages import HUGE_PAGE, huge_mapping, round_up
from attmemo.system.memory import available_memory

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total)."""

THP = Path("/sys/kernel/mm/transparent_hugepage")
HUGETLB = Path("/sys/kernel/mm/hugepages/hugepages-2048kB")
CHUNK = 64 << 20
WORTH_ROUNDING = 1 << 20
"""Slots of at least this many bytes get whole huge pages, so that windows keep them; at most half is wasted."""

F_SEAL_FUTURE_WRITE = 0x0010  # in fcntl only since Python 3.13
MADV_POPULATE_READ = 22  # Linux 5.14; not in mmap
ENOUGH = 0.95
"""Share of a file in huge pages from which on it is not worth reading again."""


class _NotHugeError(Exception):
    """The kernel gave small pages; the text says what it was asked."""


@dataclass(frozen=True)
class HugeCopy:
    """A copy of an arena in huge pages: a descriptor (read-only, owned by the receiver), its layout and its size."""

    fd: int
    layout: SlotLayout
    nbytes: int


@dataclass(frozen=True)
class Lack:
    """Why there is no copy in huge pages, and what would give one; sentences without a subject."""

    reasons: list[str]
    remedies: list[str]

    def notice(self, name: str, huge: int, total: int) -> str:
        """One line: what was asked, what was got (`huge` of `total` bytes), which setting would give more."""
        got = f"{huge >> 20} of {total >> 20} MiB of it in huge pages" if huge else "in small pages"
        return (
            f"{name}: huge pages asked, page cache used, {got} ({'; '.join(self.reasons)}); "
            f"more speed with: {' or '.join(self.remedies)}"
        )


def load(source: int, layout: SlotLayout, progress: Progress | None = None) -> HugeCopy | Lack:
    """Copy the slots of the file with descriptor `source` into huge pages, if this machine gives any.

    The copy has no header and, for slots of 1 MiB and more, a stride rounded up to 2 MiB. Raises
    `DatabaseTruncatedError` if the file ends before its last slot.
    """
    stride = round_up(layout.nbytes, HUGE_PAGE) if layout.nbytes >= WORTH_ROUNDING else layout.stride
    copied = replace(layout, stride=stride, header=0)
    nbytes = round_up(copied.file_bytes, HUGE_PAGE)
    reasons: list[str] = []
    remedies: list[str] = []
    pages = nbytes // HUGE_PAGE
    if stride % HUGE_PAGE == 0:  # hugetlbfs maps whole pages only, so every slot must begin one
        try:
            return _copy(source, layout, copied, nbytes, progress, pool=True)
        except (OSError, _NotHugeError):
            free = _setting(HUGETLB / "free_hugepages") or "0"
            reasons.append(f"the hugetlb pool has {free} free pages, {pages} needed")
            remedies.append(f"sysctl vm.nr_hugepages={pages}")
    room = available_memory()
    if not shared_memory_allowed():
        reasons.append(f"shmem_enabled={_setting(THP / 'shmem_enabled') or 'missing'}")
        remedies.append(f"echo advise > {THP / 'shmem_enabled'}")
    elif room is not None and nbytes > room:
        reasons.append(f"the copy needs {nbytes >> 20} MiB and {room >> 20} MiB are available")
        remedies.append("a machine or memory limit with more room")
    else:
        try:
            return _copy(source, layout, copied, nbytes, progress, pool=False)
        except (OSError, _NotHugeError) as error:
            reasons.append(f"shared memory: {error}")
            remedies.append("freeing or compacting memory (vm.compact_memory)")
    return Lack(reasons, remedies)


def reload(source: int, mapped: mmap.mmap, address: int, progress: Progress | None = None) -> int:
    """Have a file, `mapped` whole at `address`, in huge pages of the page cache, as far as its file system has any.

    What is in memory in small pages, as a builder's writes often leave it, is dropped and read again. Returns how many
    bytes are in huge pages now; 0 before Linux 5.14, or if there is less memory than the file has bytes.
    """
    room = available_memory()
    if room is not None and len(mapped) > room:
        return 0
    huge = 0
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        for again in (False, True):
            if again:  # what is in memory in small pages stays so until it leaves
                mapped.madvise(mmap.MADV_DONTNEED)
                os.posix_fadvise(source, 0, 0, os.POSIX_FADV_DONTNEED)
            for start in range(0, len(mapped), CHUNK):
                count = min(CHUNK, len(mapped) - start)
                mapped.madvise(MADV_POPULATE_READ, start, count)
                if progress is not None:
                    progress(start + count, len(mapped))
            huge = huge_mapping(address, len(mapped))[1]
            if huge >= ENOUGH * len(mapped):
                break
    except OSError:
        return 0
    return huge


def shared_memory_allowed() -> bool:
    """Whether the kernel may give huge pages to a memory file: one setting for all sizes, one since 6.11 for 2 MiB."""
    if _setting(THP / "hpage_pmd_size") not in (None, str(HUGE_PAGE)):
        return False  # arm64 with 64 KiB pages: one huge page is 512 MiB
    general = _setting(THP / "shmem_enabled")
    own = _setting(THP / "hugepages-2048kB" / "shmem_enabled") or "inherit"
    if general in ("deny", None):
        return False
    return (general if own == "inherit" or general == "force" else own) in ("always", "within_size", "advise", "force")


def _setting(path: Path) -> str | None:
    """The value of a kernel setting; for a list of choices, the one in brackets."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen[1] if chosen else text


def _copy(
    source: int, layout: SlotLayout, copied: SlotLayout, nbytes: int, progress: Progress | None, pool: bool
) -> HugeCopy:
    """Fill a memory file; raises OSError or _NotHugeError, leaving nothing, if it cannot be had in huge pages."""
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | (os.MFD_HUGETLB | os.MFD_HUGE_2MB if pool else 0)
    target = os.memfd_create("attmemo-arena", flags)
    try:
        os.ftruncate(target, nbytes)
        # fallocate() first would be the usual care, but it knows of no madvise() and so takes small pages.
        with mmap.mmap(target, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as pages:
            if not pool:
                pages.madvise(mmap.MADV_HUGEPAGE)
            _fill(pages, source, layout, copied, progress)
        # The writable mapping is gone before the seals: one made earlier would still write.
        with suppress(OSError):  # an extra; the descriptor kept is read-only, and no other process knows this file
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | F_SEAL_FUTURE_WRITE
            fcntl.fcntl(target, fcntl.F_ADD_SEALS, seals)
        reader = os.open(f"/proc/self/fd/{target}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(target)
    return HugeCopy(reader, copied, nbytes)


def _fill(pages: mmap.mmap, source: int, layout: SlotLayout, copied: SlotLayout, progress: Progress | None) -> None:
    """Read every slot into its place; give up after the first piece if it did not land in huge pages."""
    total = layout.slots * (layout.stride if layout.stride == copied.stride else layout.nbytes)
    done = 0
    if layout.stride == copied.stride:
        pieces = ((layout.header + start, start, min(CHUNK, total - start)) for start in range(0, total, CHUNK))
    else:
        pieces = ((layout.offset(slot), copied.offset(slot), layout.nbytes) for slot in range(layout.slots))
    for offset, place, count in pieces:  # bytes in the file, in the copy, and of the piece
        # Read into the mapping by the kernel: where memory runs out this is an error, a store would be a signal.
        with memoryview(pages) as whole, whole[place : place + count] as piece:
            _read(source, piece, offset)
        if done == 0 and huge_mapping(np.frombuffer(pages, np.uint8).ctypes.data, len(pages))[1] == 0:
            raise _NotHugeError("the kernel gave small pages although it was asked for huge ones")
        done += count
        if progress is not None:
            progress(done, total)


def _read(source: int, piece: memoryview, offset: int) -> None:
    done = 0
    while done < len(piece):  # one call reads at most 2 GiB
        with piece[done:] as rest:
            count = os.preadv(source, [rest], offset + done)
        if count == 0:
            raise DatabaseTruncatedError(
                f"an arena file ended at byte {offset + done} while it was read; byte {offset + len(piece)} expected",
                "attmemo check on its database",
            )
        done += count
