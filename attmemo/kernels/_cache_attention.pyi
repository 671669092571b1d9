from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]
Tensor = tuple[int, int, int, int, int]

def attend(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor],
    output: int,
    indices: tuple[Array, Array, Array, Array],
    sizes: tuple[int, int, int, int, int, int, int, int, int],
    flags: tuple[bool, int, int],
    slopes: Array,
    isa: str,
    /,
) -> None: ...
def is_sound(
    indices: tuple[Array, Array, Array, Array], sizes: tuple[int, int, int, int, int, int, int, int], /
) -> bool: ...
def use_team(path: str, /) -> bool: ...
def instruction_sets() -> list[str]: ...
