"""One arena file: slots of one shape, mapped read-only, once.

A tensor over a slot is a view of the file's pages. The arena does not copy, does not write and does not check what
the bytes mean; it checks that they are there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Literal, SupportsIndex

import numpy as np
import numpy.typing as npt
import torch

from attmemo.errors import DatabaseError, DatabaseNotFoundError, DatabaseTruncatedError, PageSizeError
from attmemo.mmap import hugepages, pages
from attmemo.mmap.layout import SlotLayout

LOOKED_AT = 8
"""Slots that are looked at to learn what pages a page cache has."""

Residency = Literal["page-cache", "hugepages"]
Slots = Sequence[int] | npt.NDArray[np.integer] | torch.Tensor


class _Descriptor:
    """A file descriptor, closed with its last user: a number closed earlier may be another file in another thread."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self, close=os.close) -> None:  # type: ignore[no-untyped-def]  # bound now: `os` may go first at exit
        close(self.fd)


class Mapping:
    """The file of an open arena: descriptor, mapping and table of slots. It never changes.

    A fetch takes the mapping once and works on it, so closing the arena in another thread cannot pull the file from
    under it. The pages stay mapped until the last tensor over them is gone. `copy_bytes` is the size of a sealed copy
    in huge pages: mapped whole, populated, never checked again.
    """

    def __init__(self, descriptor: _Descriptor, layout: SlotLayout, path: Path, copy_bytes: int | None = None) -> None:
        self.layout = layout
        self.path = path
        self.fd = descriptor.fd
        self.slots = layout.slots
        self._descriptor = descriptor  # closes with this object
        self.sealed = copy_bytes is not None
        self.check_whole()
        self.huge_bytes = 0
        self._page_bytes: int | None = pages.page_size()  # None: looked up when asked
        self._map: mmap.mmap | None = None
        with torch.inference_mode(False):  # a tensor born in inference mode could not be used outside it
            if layout.slots == 0:
                self._table = torch.empty((0, *layout.shape), dtype=layout.dtype)
                return
            nbytes = layout.file_bytes if copy_bytes is None else copy_bytes
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if self.sealed else 0)
            try:
                self._map = mmap.mmap(self.fd, nbytes, flags, mmap.PROT_READ)
            except (OSError, ValueError) as error:
                raise DatabaseError(
                    f"cannot map {path} ({nbytes} bytes): {error}", "check the limit on addresses: ulimit -v"
                ) from error
            self._table = _table(self._map, layout)
        # Only hugetlbfs and tmpfs mounted with huge= announce such blocks.
        if self.sealed or os.fstat(self.fd).st_blksize >= pages.HUGE_PAGE:
            self._map[layout.header]
            self._page_bytes, self.huge_bytes = pages.huge_mapping(self.address, nbytes)
        elif layout.stride % pages.HUGE_PAGE == layout.header % pages.HUGE_PAGE == 0:
            # The page cache of ext4, xfs and btrfs may have huge pages too, since Linux 6.x; it announces nothing.
            # What is not in memory yet is read in such pieces if asked, and slots are at least that large.
            with suppress(OSError):
                self._map.madvise(mmap.MADV_HUGEPAGE)
            self._page_bytes = None

    @property
    def page_bytes(self) -> int:
        """Bytes in the pages of the arena."""
        if self._page_bytes is None:
            self._page_bytes = self._look()
        return self._page_bytes

    @property
    def window_page_bytes(self) -> int:
        """Bytes in the pages that a window over these slots gets: small ones if slots begin inside a huge one."""
        page = self.page_bytes
        whole = self.layout.stride % page == 0 and self.layout.header % page == 0
        return page if whole else pages.page_size()

    @cached_property
    def window_facts(self) -> tuple[int, bool]:
        """`window_page_bytes`, and whether windows should ask for huge pages where the file is not in memory yet."""
        page = self.window_page_bytes
        there = self.huge_bytes >= hugepages.ENOUGH * self.layout.file_bytes  # and in huge pages already
        return page, page >= pages.HUGE_PAGE and not there

    def reload(self, progress: hugepages.Progress | None) -> int:
        """Have the file in huge pages of the page cache, if its file system has any. Bytes that are."""
        self.check_whole()
        self.huge_bytes = hugepages.reload(self.fd, self.memory, self.address, progress)
        if 2 * self.huge_bytes > len(self.memory):
            self._page_bytes = pages.HUGE_PAGE
        return self.huge_bytes

    @property
    def address(self) -> int:
        """Where the mapped file begins; valid as long as this object is held."""
        return np.frombuffer(self.memory, np.uint8).ctypes.data

    def _look(self) -> int:
        """Size of the pages in the page cache, from a few slots. Not asked at opening: slots are read for it."""
        self.check_whole()
        huge = 0
        looked_at = {number * self.slots // LOOKED_AT for number in range(LOOKED_AT)}
        for slot in looked_at:
            offset = self.layout.offset(slot)
            self.memory[offset]
            huge += pages.is_huge(self.address + offset)
        return pages.HUGE_PAGE if 2 * huge > len(looked_at) else pages.page_size()

    @property
    def memory(self) -> mmap.mmap:
        """The whole file as it is mapped, read-only: byte `offsets()` of it are slots. ValueError without slots."""
        if self._map is None:
            raise ValueError(f"{self.path} has no slots")
        return self._map

    def check_whole(self) -> None:
        """Ask the file system whether the file still reaches to its last slot (a microsecond).

        Reading a mapped page that the file no longer has ends the process with SIGBUS. The check narrows the gap to a
        moment and cannot close it: published arenas are never shortened. Raises `DatabaseTruncatedError`.
        """
        if self.sealed:
            return
        seen, expected = os.fstat(self.fd).st_size, self.layout.file_bytes
        if seen < expected:
            raise DatabaseTruncatedError(
                f"{self.path} is truncated: {seen} bytes seen, {expected} expected for {self.slots} slots "
                f"of {self.layout.stride} bytes after a header of {self.layout.header}",
                f"attmemo check {self.path.parent}",
            )

    def slot(self, index: SupportsIndex) -> torch.Tensor:
        """See `Arena.slot`."""
        if not 0 <= index < self.slots:  # type: ignore[operator]
            raise self._out_of_range(index)
        return self._table[index]

    def slot_bytes(self, index: int) -> memoryview:
        """See `Arena.slot_bytes`."""
        if not 0 <= index < self.slots or self._map is None:
            raise self._out_of_range(index)
        start = self.layout.offset(index)
        return memoryview(self._map)[start : start + self.layout.nbytes]

    def indices(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Checked slot numbers, int64 [count]. IndexError: no such slot; ValueError: no flat sequence of integers."""
        index = np.asarray(slots)
        if index.ndim == 1 and index.size == 0:
            return np.empty(0, np.int64)
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise ValueError(f"slots must be a flat sequence of integers, not {index.dtype} of shape {index.shape}")
        for extreme in (int(index.min()), int(index.max())):
            if not 0 <= extreme < self.slots:
                raise self._out_of_range(extreme)
        return index.astype(np.int64, copy=False)

    def offsets(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Byte offsets in the file of checked slot numbers; no overflow: the last slot lies inside the file."""
        return self.layout.header + indices * self.layout.stride

    def _out_of_range(self, index: object) -> IndexError:
        return IndexError(f"slot {index} does not exist: {self.path} has {self.slots} slots, from 0")


def _table(mapped: mmap.mmap, layout: SlotLayout) -> torch.Tensor:
    """All slots of a mapped file as a tensor [slots, *shape]; no copy, and no look at the memory.

    Numpy has no bfloat16, and torch warns about a read-only buffer, by default once in a process, which would use up
    the user's own warning. A ctypes array has an address and no opinion.
    """
    exported = np.frombuffer(mapped, np.uint8)  # keeps the mapping from being closed under a tensor
    memory = (ctypes.c_char * layout.file_bytes).from_address(exported.ctypes.data)
    memory.owner = exported  # type: ignore[attr-defined]
    flat = torch.frombuffer(memory, dtype=layout.dtype)
    return flat.as_strided((layout.slots, *layout.shape), layout.strides, layout.header // layout.dtype.itemsize)


class Arena:
    """An arena file opened for serving, read-only; `layout` is as the manifest says.

    `residency` says where the bytes are served from: the file's own pages, or a copy in 2 MiB pages made now, with
    `progress` called with (bytes done, bytes in total). If the machine gives no such copy the arena is read into the
    page cache, in huge pages where the file system has them, and `notice` says what was got and why.

    AttMEMO (arXiv 2301.09262), section 5.3, keeps each record as a file object of its own. One file and one mapping
    cost the same few kernel objects for a hundred thousand records as for one.

    **Slot tensors are read-only although PyTorch believes otherwise.** The pages are mapped PROT_READ: an in-place
    operation on a slot ends the process with SIGSEGV. They stay inside the library; clone a slot to write to it.

    Safe to use from several threads. After fork the child may go on reading. Raises DatabaseNotFoundError,
    DatabaseTruncatedError (shorter than the layout says), PageSizeError (stride or header is not a multiple of this
    machine's page), or DatabaseError (not opened or mapped for another reason).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        layout: SlotLayout,
        residency: Residency = "page-cache",
        progress: hugepages.Progress | None = None,
    ) -> None:
        if residency not in ("page-cache", "hugepages"):
            raise ValueError(f"residency must be 'page-cache' or 'hugepages', not {residency!r}")
        self.path = Path(path)
        self.notice: str | None = None
        self._mapping: Mapping | None = None
        page = pages.page_size()
        for what, value in (("stride", layout.stride), ("header", layout.header)):
            # Slots of bytes are read where they lie; `MapFetcher` copies those that begin inside a page.
            if value % page != 0 and (layout.dtype.itemsize > 1 or what == "header"):
                raise PageSizeError(
                    f"{self.path}: the {what} of its slots is {value} bytes, not a multiple of this machine's "
                    f"page of {page} bytes, so the slots cannot be mapped",
                    "build the database again on this machine with attmemo build-database",
                )
        try:
            source = _Descriptor(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError as error:
            raise DatabaseNotFoundError(f"{self.path} does not exist", f"attmemo check {self.path.parent}") from error
        except OSError as error:
            raise DatabaseError(
                f"cannot open {self.path}: {error.strerror}",
                "check who may read it, and the limit on open files: ulimit -n",
            ) from error
        self.layout = layout
        """How the slots lie in the file at `path`; those of the memory copy may lie further apart."""
        plain = Mapping(source, layout, self.path)
        served = residency == "hugepages" and layout.slots > 0
        self._mapping = self._in_huge_pages(plain, progress) if served else plain

    def _in_huge_pages(self, plain: Mapping, progress: hugepages.Progress | None) -> Mapping:
        """A mapping of a copy of the file in huge pages, if they are to be had; else `plain`, and a notice."""
        copy = hugepages.load(plain.fd, plain.layout, progress)
        if isinstance(copy, hugepages.Lack):
            reloaded = plain.reload(progress)
            self.notice = copy.notice(str(self.path), reloaded, plain.layout.file_bytes)
            return plain
        huge = Mapping(_Descriptor(copy.fd), copy.layout, self.path, copy.nbytes)
        if huge.huge_bytes >= copy.nbytes:
            return huge
        got = f"{huge.huge_bytes >> 20} of {copy.nbytes >> 20} MiB are in huge pages"
        keep = 2 * huge.huge_bytes >= copy.nbytes
        self.notice = (
            f"{self.path}: huge pages asked, {got}, {'copy kept' if keep else 'page cache used'}; "
            "more speed with: freeing or compacting memory (vm.compact_memory)"
        )
        return huge if keep else plain

    @property
    def mapping(self) -> Mapping:
        """The present state; hold it for the length of one fetch. Raises `DatabaseError` once closed."""
        if self._mapping is None:
            raise DatabaseError(
                f"{self.path} was closed", f"open it again: Database({str(self.path.parent.parent)!r})"
            )
        return self._mapping

    @property
    def residency(self) -> Residency:
        """Where the bytes are really served from."""
        return "hugepages" if self.mapping.sealed else "page-cache"

    @property
    def page_bytes(self) -> int:
        """Size of the pages that were really got, bytes: `page_size()` or 2 MiB."""
        return self.mapping.page_bytes

    @property
    def window_page_bytes(self) -> int:
        """Bytes of the pages that a window over the slots gets: `page_size()` if slots begin inside a huge page."""
        return self.mapping.window_page_bytes

    @property
    def fd(self) -> int:
        """Descriptor of the file that is mapped: the arena's, or that of its copy in memory."""
        return self.mapping.fd

    def __len__(self) -> int:
        return self.mapping.slots

    def slot(self, index: SupportsIndex) -> torch.Tensor:
        """A view [*shape] of one slot, contiguous, read-only (see the class), valid also after `close`.

        Negative numbers do not count from the end. Raises `IndexError` if there is no such slot.
        """
        return self.mapping.slot(index)

    def slot_bytes(self, index: int) -> memoryview:
        """The bytes of one slot without its padding, read-only. Raises `IndexError` if there is no such slot."""
        return self.mapping.slot_bytes(index)

    def close(self) -> None:
        """Let go of the file. Pages stay mapped until the last tensor over them is gone. Closing twice is fine."""
        self._mapping = None

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
