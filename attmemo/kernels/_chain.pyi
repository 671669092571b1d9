from typing import Any

import numpy as np
import numpy.typing as npt

from attmemo.kernels._linear import Norm, Weights

Layer = tuple[int, int, int, Weights, Norm]

def prepare(layers: tuple[Layer, ...], flags: tuple[int, int, str], /) -> object: ...
def run(
    chain: object,
    hidden: tuple[int, int, int],
    projected: int,
    calls: tuple[Any, ...],
    asked: tuple[npt.NDArray[np.int64], int, int, int, bool, Any] | None,
    copies: tuple[tuple[int, int, int, int, int], ...],
    ways: tuple[int, int, int, int],
    threads: int,
    /,
) -> None: ...
