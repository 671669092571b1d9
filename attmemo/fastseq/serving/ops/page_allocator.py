"""Pages of a cache and how many sequences hold each."""

from __future__ import annotations

from collections.abc import Iterable

from attmemo.errors import OutOfPagesError


class PageAllocator:
    """Gives out page numbers, counts their holders, and takes a page back when the last one lets go.

    Parameters
    ----------
    pages : int
        How many there are, numbered from 0.
    """

    def __init__(self, pages: int) -> None:
        self._holders = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: the page let go last is given out first

    @property
    def pages(self) -> int:
        """All pages."""
        return len(self._holders)

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    @property
    def shared(self) -> int:
        """Pages with more than one holder."""
        return sum(count > 1 for count in self._holders)

    def holders(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._holders[page]

    def allocate(self, count: int) -> list[int]:
        """Pages that were free; all of them or none.

        Raises
        ------
        OutOfPagesError
            Fewer are free.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages are needed, but {len(self._free)} of {self.pages} are free",
                "free a sequence, or make the cache with more pages",
            )
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._holders[page] = 1
        return taken

    def find_run(self, count: int) -> int | None:
        """The first page of the lowest run of free neighbours that is long enough, or None."""
        length = 0
        for page, holders in enumerate(self._holders):
            if length == count:
                return page - count
            length = 0 if holders else length + 1
        return self.pages - count if length >= count else None

    def is_free(self, first: int, count: int) -> bool:
        """Whether these neighbours exist and are free."""
        return first + count <= self.pages and not any(self._holders[first : first + count])

    def claim(self, first: int, count: int) -> list[int]:
        """These neighbours, which are free (`is_free`)."""
        taken = list(range(first, first + count))
        if not self.is_free(first, count):
            raise OutOfPagesError(f"pages {first} to {first + count - 1} are not all free")
        for page in taken:
            self._holders[page] = 1
        self._free = [page for page in self._free if self._holders[page] == 0]
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One holder more for each of these pages; none of them is free."""
        for page in pages:
            self._holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of these pages."""
        for page in pages:
            self._holders[page] -= 1
            if self._holders[page] == 0:
                self._free.append(page)
