from mmap import mmap
from typing import Any

import numpy.typing as npt

Buffer = npt.NDArray[Any] | mmap | bytes

def multiply(
    maps: Buffer,
    offsets: Buffer,
    form: int,
    heads: int,
    length: int,
    width: int,
    values: Buffer,
    starts: Buffer,
    context: Buffer,
    rows: Buffer,
    padded: int,
    threads: int,
    triangle: bool = False,
    isa: str = "",
    bfloat16: bool = False,
) -> None: ...
def use_team(path: str, /) -> bool: ...
def instruction_sets(bfloat16: bool = False, /) -> list[str]: ...
