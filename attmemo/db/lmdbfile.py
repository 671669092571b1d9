"""Is a file a sound LMDB environment? Its content is another question: `Manifest.records_digest` answers that one.

LMDB trusts its file: behind a wrong offset or a missing page there is SIGBUS or an assertion, and the process is gone
(measured: 6 % of random flips and nearly every truncation). So every page that LMDB could follow is looked at first.
The layout is that of LMDB 0.9 (data version 1, little-endian): two meta pages, then the pages of two B-trees, one of
free pages and one of entries.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from pathlib import Path

_PAGE = struct.Struct("<QHHHH")  # number, pad, flags, lower, upper
_META = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_TREE = struct.Struct("<IHHQQQQQ")  # pad (page size), flags, depth, branch, leaf and overflow pages, entries, root
_TAIL = struct.Struct("<QQ")  # last page, transaction
_NODE = struct.Struct("<HHHH")  # low and high half of the size or child, flags or top of the child, size of the key
_MAGIC, _VERSION, _NONE = 0xBEEFC0DE, 1, 0xFFFFFFFFFFFFFFFF
_BRANCH, _LEAF, _OVERFLOW, _IS_META = 1, 2, 4, 8
_BIG_DATA, _INTEGER_KEY = 1, 8
_FREE_KEY, _MAIN_KEY = (8, 8), (1, 511)  # least and most bytes of a key, in the trees of free pages and of entries
_DEEPEST = 32  # LMDB's cursors have no room for more
_TRIES = 50


def check_environment(file: Path) -> None:
    """Check every page that LMDB can reach; ValueError says what is wrong.

    A builder may commit meanwhile: a fault counts only if the meta pages are still the same afterwards.
    """
    for attempt in range(_TRIES):
        data = file.read_bytes()
        try:
            _Environment(data).check()
            return
        except (ValueError, struct.error) as error:
            with file.open("rb") as stream:
                if attempt == _TRIES - 1 or stream.read(2 << 15) == data[: 2 << 15]:
                    raise ValueError(str(error)) from error


def unread(file: Path) -> list[tuple[int, int]]:
    """Bytes that no reader of the last transaction looks at, from where to where; ValueError, as above.

    They are free pages, what lies behind the last page, and what pages in use have beside their entries. No one may
    commit meanwhile.
    """
    return _Environment(file.read_bytes()).unread()


class _Environment:
    def __init__(self, data: bytes) -> None:
        self.data = data
        if len(data) < 1024:
            raise ValueError(f"{len(data)} bytes long, shorter than two meta pages")
        (self.size,) = struct.unpack_from("<I", data, _PAGE.size + _META.size)
        if self.size not in (1 << n for n in range(9, 17)):
            raise ValueError(f"pages of {self.size} bytes")
        self.last, _, self.trees = max(self.meta(0), self.meta(1), key=lambda meta: meta[1])
        self.seen: set[int] = set()
        self.rests: list[tuple[int, int]] = []  # bytes of pages in use that hold nothing

    def unread(self) -> list[tuple[int, int]]:
        free, size = self.check(), self.size
        pages = [(number * size, (number + 1) * size) for number in sorted(free)]
        return [*pages, *self.rests, ((self.last + 1) * size, len(self.data))]

    def check(self) -> set[int]:
        """The free pages."""
        free, main = self.trees
        if free[1] != _INTEGER_KEY or main[1] != 0:
            raise ValueError(f"trees of kinds {free[1]} and {main[1]}")
        deque(self.entries(main, *_MAIN_KEY), maxlen=0)
        unused: set[int] = set()
        for value in self.entries(free, *_FREE_KEY):
            # An entry of the tree of free pages: how many, then their numbers.
            pages = struct.unpack_from(f"<{len(value) // 8}Q", value)
            if not pages or len(value) % 8 or pages[0] != len(pages) - 1:
                raise ValueError("malformed list of free pages")
            if not unused.isdisjoint(pages[1:]) or len(set(pages[1:])) < pages[0]:
                raise ValueError("a page is free twice")
            unused.update(pages[1:])
        if unused and not 2 <= min(unused) <= max(unused) <= self.last:
            raise ValueError(f"a free page beyond page {self.last}")
        if not unused.isdisjoint(self.seen):
            raise ValueError("a page is free and in use")
        return unused

    def meta(self, number: int) -> tuple[int, int, list[tuple[int, ...]]]:
        """Last page, transaction, and both trees."""
        at = number * self.size
        if self.page(number)[2] != _IS_META:
            raise ValueError(f"page {number} is no meta page")
        magic, version, _, room = _META.unpack_from(self.data, at + _PAGE.size)
        if magic != _MAGIC or version != _VERSION or room > 1 << 44:
            raise ValueError(f"magic {magic:#x}, version {version}, room for {room} bytes")
        at += _PAGE.size + _META.size
        trees = [_TREE.unpack_from(self.data, at + n * _TREE.size) for n in (0, 1)]
        if trees[0][0] != self.size:
            raise ValueError(f"pages of {self.size} and of {trees[0][0]} bytes")
        last, transaction = _TAIL.unpack_from(self.data, at + 2 * _TREE.size)
        if last * self.size > 1 << 40:  # LMDB would reserve that much
            raise ValueError(f"{last} pages")
        return last, transaction, trees

    def page(self, number: int) -> tuple[int, int, int, int, int]:
        if (number + 1) * self.size > len(self.data):
            raise ValueError(f"page {number} lies behind the end of the file ({len(self.data)} bytes)")
        head = _PAGE.unpack_from(self.data, number * self.size)
        if head[0] != number:
            raise ValueError(f"page {number} says it is page {head[0]}")
        return head

    def take(self, number: int) -> None:
        if not 2 <= number <= self.last or number in self.seen:
            raise ValueError(f"page {number} is out of range, or in use twice")
        self.seen.add(number)

    def entries(self, tree: tuple[int, ...], least: int, most: int) -> Iterator[bytes]:
        """The values of a tree, every page on the way checked."""
        depth, root = tree[2], tree[7]
        if root == _NONE:
            return
        if not 1 <= depth <= _DEEPEST:
            raise ValueError(f"a tree of depth {depth}")
        below = [(root, 1)]
        while below:
            number, level = below.pop()
            self.take(number)
            _, _, flags, lower, upper = self.page(number)
            if flags != (_LEAF if level == depth else _BRANCH):
                raise ValueError(f"page {number} has flags {flags} at level {level} of {depth}")
            if not _PAGE.size < lower <= upper <= self.size or lower % 2:
                raise ValueError(f"page {number} has bounds {lower} and {upper}")
            start = number * self.size
            self.rests.append((start + lower, start + upper))
            nodes = struct.unpack_from(f"<{(lower - _PAGE.size) // 2}H", self.data, start + _PAGE.size)
            if flags == _BRANCH and len(nodes) < 2:
                raise ValueError(f"page {number} branches once")
            ends = {}
            for place, node in enumerate(nodes):
                if node < upper or node + _NODE.size > self.size:
                    raise ValueError(f"page {number} has a node at {node}")
                low, high, flag, key = _NODE.unpack_from(self.data, start + node)
                end = node + _NODE.size + key
                if flags == _BRANCH:
                    if not least <= key <= most and (place or key):  # the first key of a branch may be left out
                        raise ValueError(f"page {number} has a key of {key} bytes")
                    below.append((low | high << 16 | flag << 32, level + 1))
                elif not least <= key <= most or flag not in (0, _BIG_DATA):
                    raise ValueError(f"page {number} has a key of {key} bytes, or flags {flag}")
                else:
                    nbytes = low | high << 16
                    end += 8 if flag == _BIG_DATA else nbytes
                    if end > self.size:
                        raise ValueError(f"page {number} has a node beyond its end")
                    if flag == _BIG_DATA:
                        (first,) = struct.unpack_from("<Q", self.data, start + end - 8)
                        yield self.overflow(first, nbytes)
                    else:
                        yield self.data[start + end - nbytes : start + end]
                ends[node] = end + end % 2
            # The nodes fill the page from `upper` to its end, without gap or overlap.
            at = upper
            while at in ends:
                at = ends.pop(at)
            if at != self.size or ends:
                raise ValueError(f"page {number} has overlapping nodes, or gaps")

    def overflow(self, first: int, nbytes: int) -> bytes:
        """A value that has pages of its own."""
        _, _, flags, low, high = self.page(first) if 2 <= first <= self.last else (0, 0, 0, 0, 0)
        pages = low | high << 16
        if flags != _OVERFLOW or not 0 < pages <= self.last or _PAGE.size + nbytes > pages * self.size:
            raise ValueError(f"page {first} does not hold a value of {nbytes} bytes")
        if (first + pages) * self.size > len(self.data):
            raise ValueError(f"page {first + pages - 1} lies behind the end of the file ({len(self.data)} bytes)")
        for number in range(first, first + pages):
            self.take(number)
        start = first * self.size + _PAGE.size
        self.rests.append((start + nbytes, (first + pages) * self.size))
        return self.data[start : start + nbytes]
