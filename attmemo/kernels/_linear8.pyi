from typing import Any

import numpy.typing as npt

Buffer = npt.NDArray[Any] | bytes

def multiply(
    x: tuple[int, int],
    add: tuple[int, int],
    out: int,
    sizes: tuple[int, int, int, int, int],
    weights: tuple[Buffer, Buffer, Buffer, Buffer],
    flags: tuple[int, str],
    /,
) -> None: ...
def use_team(path: str, /) -> bool: ...
def instruction_sets() -> list[str]: ...
