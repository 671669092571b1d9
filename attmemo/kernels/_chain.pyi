from typing import Any

import numpy as np
import numpy.typing as npt

from attmemo.kernels._linear import Norm, Weights

Heads = tuple[int, int, int, Norm, Norm, int]
Layer = tuple[int, int, int, bool, Weights, tuple[Norm, Norm, Norm]]
Block = tuple[Heads, Layer, Layer, Layer, Layer]
Angles = tuple[int, int, int, int]

def prepare(first: Norm, blocks: tuple[Block, ...], flags: tuple[int, int, str], /) -> object: ...
def run(
    chain: object,
    hidden: tuple[int, int, int],
    projected: int,
    turns: tuple[npt.NDArray[np.int32], tuple[Angles, ...]],
    calls: tuple[Any, ...],
    asked: tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], int, int, int, bool, Any] | None,
    copies: tuple[tuple[int, int, int, int, int, int], ...],
    ways: tuple[int, int, int, int, int],
    threads: int,
    /,
) -> None: ...
