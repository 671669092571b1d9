"""Whether modules of torch hold what they held: `native/members.c`, and its oracle in Python.

Every forward asks for all modules of a model.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from attmemo.kernels import _members as native

hold, are_empty, have, lie = native.hold, native.are_empty, native.have, native.lie


def hold_plain(dicts: tuple[dict[str, Any], ...], values: tuple[Any, ...]) -> bool:
    """Whether dictionaries have the very values, one dictionary behind the other, in their order."""
    found = [value for one in dicts for value in one.values()]
    return len(found) == len(values) and all(a is b for a, b in zip(found, values, strict=True))


def are_empty_plain(dicts: tuple[dict[Any, Any], ...]) -> bool:
    """Whether no dictionary has a member."""
    return not any(dicts)


def have_plain(dicts: tuple[dict[str, Any], ...], name: str, values: tuple[Any, ...]) -> bool:
    """Whether each dictionary has this very value under the name; None: nothing."""
    return all(one.get(name) is value for one, value in zip(dicts, values, strict=True))


def lie_plain(addresses: npt.NDArray[np.uint64], size: int, numbers: bytes) -> bool:
    """Whether these bytes lie at the addresses, `size` at each."""
    return b"".join(ctypes.string_at(int(address), size) for address in addresses) == numbers
