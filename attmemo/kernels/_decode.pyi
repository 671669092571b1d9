from typing import Any

import numpy as np
import numpy.typing as npt

from attmemo.kernels._linear import Norm, Weights

ROOM: int
FEWEST: int

Layer = tuple[int, int, int, bool, Weights, tuple[Norm, Norm, Norm]]
Block = tuple[Norm, Norm, bool, Layer, Layer, Layer | None, Layer | None, Layer, Layer]
Addresses = npt.NDArray[np.uint64]

def prepare(
    first: Norm, blocks: tuple[Block, ...], heads: tuple[int, int, int, float], flags: tuple[int, int, str, str], /
) -> object: ...
def run(
    decoder: object,
    rows: tuple[int, int, int],
    own: tuple[Addresses, npt.NDArray[np.int32], int, int, int],
    turns: tuple[npt.NDArray[np.int32], int, int, int, int],
    bias: tuple[int, int],
    shared: tuple[Addresses, Addresses, npt.NDArray[np.int64]],
    ways: tuple[int, int, int, int, int, int, int],
    attend: tuple[Any, ...] | None,
    threads: int,
    /,
) -> None: ...
def use_team(path: str, /) -> bool: ...
def instruction_sets() -> list[str]: ...
