from typing import Any

import numpy.typing as npt

Buffer = npt.NDArray[Any] | bytes
Weights = tuple[Buffer, Buffer, Buffer, Buffer]
Norm = tuple[int, int, float, int, bool]

face: object

def multiply(
    x: tuple[int, int],
    add: tuple[int, int],
    out: int,
    sizes: tuple[int, int, int, int, int, bool],
    weights: Weights,
    norm: Norm,
    flags: tuple[int, int, str],
    /,
) -> None: ...
def use_team(path: str, /) -> bool: ...
def instruction_sets(arithmetic: int, /) -> list[str]: ...
