"""Rows of records, put where a batch wants them. See native/rows.c."""

import numpy as np
import numpy.typing as npt

def supply(
    source: npt.NDArray[np.int32], starts: npt.NDArray[np.int64], firsts: npt.NDArray[np.int64],
    places: npt.NDArray[np.int64], begins: npt.NDArray[np.uint64], fresh: tuple[int, int],
    out: tuple[int, int, int, int, int, int], share: float, threads: int, isa: str, /,
) -> None: ...
def use_team(path: str, /) -> bool: ...
def instruction_sets() -> list[str]: ...
