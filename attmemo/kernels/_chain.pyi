from typing import Any

from attmemo.kernels._linear import Norm, Weights

Layer = tuple[int, int, int, Weights, Norm]

def prepare(layers: tuple[Layer, ...], flags: tuple[int, int, str], /) -> object: ...
def run(
    chain: object,
    hidden: tuple[int, int, int],
    projected: int,
    calls: tuple[Any, ...],
    copies: tuple[tuple[int, int, int, int], ...],
    ways: tuple[int, int, int, int],
    threads: int,
    /,
) -> None: ...
