"""Sizes in bytes as people write them: ``8GiB``, ``500 MB``, ``1.5g``."""

from __future__ import annotations

import re
from typing import Any, Final

from attmemo.errors import ArgumentError

HINT: Final = "write 8GiB, 500MB or a number of bytes"

_UNITS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes in ``8GiB``, ``500 MB``, ``1.5g`` or a plain number; KiB and K are 1024 bytes, KB is 1000.

    Raises
    ------
    ArgumentError
        The text is no size, or none above 0.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]?)(i?)(b?)\s*", text, re.IGNORECASE)
    if found is None or (found[3] and not found[2]):
        raise ArgumentError(f"{text!r} is not a size.", HINT)
    base = 1000 if found[4] and not found[3] else 1024
    size = int(float(found[1]) * base ** _UNITS[found[2].lower()])
    if size < 1:
        raise ArgumentError(f"{text!r} is no bytes at all.", HINT)
    return size


def bytes_of(size: Any, name: str = "max_bytes") -> int | None:
    """Bytes of an argument that is a whole number, a text as `parse_size` reads it, or None."""
    if isinstance(size, str):
        try:
            return parse_size(size)
        except ArgumentError as error:
            raise ArgumentError(f"{name}: {error.what}", HINT) from None
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0):
        return size
    raise ArgumentError(f"{name} must be a whole number of bytes and must not be negative; got {size!r}.", HINT)
