"""Where rows of a packed batch are copied to: K and V of each block, while they are in the caches, and the result.

Without copies K and V of all blocks of a batch would have to stay where they were computed: six or twelve times the
memory, touched for the first time in each request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Copy:
    """Some rows and where they go.

    Parameters
    ----------
    first, stop : int
        The rows of the batch.
    rows : Tensor [blocks, 2, n, H]
        Gets K and V. Without gaps, of the type of the computed rows.
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
        if not self.rows.is_contiguous() or self.rows.shape[2] != count:
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

    def end(self, last: Tensor) -> None:
        """Copy the last hidden states ``[N, H]``."""
        for part in self._parts:
            if part.last is not None:
                part.last.copy_(last[part.first : part.stop])

    def addresses(self, blocks: int, size: int, last: Tensor) -> tuple[tuple[int, int, int, int], ...]:
        """Of each part its first row, how many there are, where K and V go, and where the result goes (0: nowhere).

        ValueError: a part is not of so many blocks and numbers a row of K, or cannot hold rows of `last`, the result.
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
            found.append((part.first, part.stop - part.first, rows.data_ptr(), 0 if end is None else end.data_ptr()))
        return tuple(found)
