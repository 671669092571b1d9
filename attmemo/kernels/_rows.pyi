"""Rows that lie anywhere, copied to places of a tensor. See native/rows.c."""

import numpy as np
import numpy.typing as npt

def copy(
    addresses: npt.NDArray[np.uint64], places: npt.NDArray[np.int64], out: tuple[int, int, int, int, int],
    steps: npt.NDArray[np.float32], which: npt.NDArray[np.int64], /,
) -> None: ...
