"""Where rows of a packed batch are copied to: K and V of each block, while they are in the caches, and the result.

Without copies K and V of all blocks of a batch would have to stay where they were computed: six or twelve times the
memory, touched for the first time in each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Copy:
    """Some rows and where they go.

    Parameters
    ----------
    first, stop : int
        The rows of the batch.
    rows : Tensor [blocks, 2, n, H]
        Gets K and V, of the type of the computed rows. Without gaps in a plane; planes may lie apart, all alike.
    last : Tensor [n, H] or None
        Gets the last hidden states. Without gaps.

    Raises
    ------
    ValueError
        A tensor has gaps, or is of another number of rows.
    """

    first: int
    stop: int
    rows: Tensor
    last: Tensor | None = None

    def __post_init__(self) -> None:
        count, last = self.stop - self.first, self.last
        to = self.rows
        planes = to.stride(0) == 2 * to.stride(1) and to.stride(1) % to.shape[3] == 0
        if not (planes and to[0, 0].is_contiguous()) or to.shape[2] != count:
            raise ValueError(f"{count} rows do not fit {tuple(self.rows.shape)}, or it has gaps")
        if last is not None and not (last.is_contiguous() and last.shape[0] == count):
            raise ValueError(f"{count} last hidden states do not fit {tuple(last.shape)}, or it has gaps")


class Copies:
    """All that is copied of one batch."""

    def __init__(self, parts: Sequence[Copy]) -> None:
        self._parts = tuple(parts)

    def __call__(self, block: int, keys: Tensor, values: Tensor) -> None:
        """Copy K and V of a block, ``[N, H]`` each."""
        for part in self._parts:
            rows = slice(part.first, part.stop)
            part.rows[block, 0], part.rows[block, 1] = keys[rows], values[rows]

    def end(self, last: Tensor, asked: Ints | None = None) -> None:
        """Copy the last hidden states ``[N, H]``, or ``[W, H]`` of the rows asked for. ValueError: some are not."""
        for part in self._parts:
            if part.last is not None:
                place = _place_of(part, asked)
                part.last.copy_(last[place : place + len(part.last)])

    def asked(self, rows: Ints) -> Ints:
        """These rows and those whose result is copied; they rise."""
        copied = [np.arange(part.first, part.stop) for part in self._parts if part.last is not None]
        return np.unique(np.concatenate([rows, *copied])) if copied else rows

    def addresses(
        self, blocks: int, size: int, last: Tensor, asked: Ints | None = None
    ) -> tuple[tuple[int, int, int, int, int, int], ...]:
        """Of each part its first row, how many there are, how many from a plane to the next, where K and V go, where
        the result goes (0: nowhere), and which row of the result is the first of these.

        `asked`: int64 ``[W]``, the rows that the result has; None: all. ValueError: a part is not of so many blocks
        and numbers a row of K, cannot hold rows of `last`, the result, or wants some that are not asked for.
        """
        found = []
        for part in self._parts:
            rows, end = part.rows, part.last
            if rows.shape[:2] != (blocks, 2) or rows.shape[3] != size or rows.dtype != last.dtype:
                raise ValueError(
                    f"copies are {tuple(rows.shape)} of {rows.dtype}, rows of {blocks} blocks are "
                    f"[{blocks}, 2, n, {size}] of {last.dtype}"
                )
            if end is not None and (end.shape[1] != last.shape[1] or end.dtype != last.dtype):
                raise ValueError(f"copies are {tuple(end.shape)} of {end.dtype}, rows are {tuple(last.shape)}")
            place = 0 if end is None else _place_of(part, asked)
            to = 0 if end is None else end.data_ptr()
            pitch = rows.stride(1) // size
            found.append((part.first, part.stop - part.first, pitch, rows.data_ptr(), to, place))
        return tuple(found)


def _place_of(part: Copy, asked: Ints | None) -> int:
    """Which row of the result is the first of a part."""
    if asked is None or part.first == part.stop:
        return part.first if asked is None else 0
    place = int(np.searchsorted(asked, part.first))
    end = place + part.stop - part.first
    if end > len(asked) or asked[place] != part.first or asked[end - 1] != part.stop - 1:
        raise ValueError(f"the result has not all of the rows {part.first} to {part.stop - 1}")
    return place
