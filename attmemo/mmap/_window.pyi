from typing import Any

import numpy.typing as npt

class Window:
    def __new__(cls, capacity: int, alignment: int) -> Window: ...
    @property
    def capacity(self) -> int: ...
    def map_slots(
        self,
        fd: int,
        slots: npt.NDArray[Any],
        header: int,
        slot_bytes: int,
        limit: int,
        populate: bool = True,
        huge: bool = False,
    ) -> None: ...
    def show(self, shape: tuple[int, ...], slot_bytes: int, code: int, bits: int, /) -> object: ...
    def darken(self) -> None: ...
    def close(self) -> None: ...
