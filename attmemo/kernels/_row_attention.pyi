from typing import Any

import numpy.typing as npt

Buffer = npt.NDArray[Any] | bytes
Lines = tuple[int, int]

face: object

def attend(
    tensors: tuple[Lines, Lines, Lines, Lines],
    sizes: tuple[int, int, int, int, int, int, int],
    layout: tuple[Buffer, Buffer, Buffer, Buffer, Buffer],
    stored: tuple[Buffer, Buffer, Buffer, Buffer, Buffer, int, int, int, int],
    turn: tuple[int, int, int, int],
    table: tuple[int, int, int, int],
    distances: tuple[int, int, int, int, int, Buffer, int],
    flags: tuple[float, int, str, bool, int],
    /,
) -> None: ...
def use_team(path: str, /) -> bool: ...
def instruction_sets() -> list[str]: ...
