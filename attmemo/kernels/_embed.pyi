"""The embedded rows of a batch of token ids, without padding. See native/embed.c."""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = np.ndarray[Any, np.dtype[np.int64]]
Given = tuple[Ints, Ints | None, Ints | None]

def read(
    given: Given, tables: tuple[int, int, int], padding: int, starts: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64], /,
) -> tuple[int, int, int] | None: ...
def add(
    given: Given, rows: tuple[int, int, int], padding: int, starts: npt.NDArray[np.int64], places: Ints | None,
    tables: tuple[int, int, int, int, int], out: tuple[int, int], threads: int, /,
) -> None: ...
def spread(
    rows: tuple[int, int], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64],
    firsts: npt.NDArray[np.int64], out: tuple[int, int], /,
) -> None: ...
def use_team(path: str, /) -> bool: ...
