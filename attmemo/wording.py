"""Words of messages that depend on a number."""

from __future__ import annotations


def counted(count: int, one: str, more: str = "") -> str:
    """Return a number and its noun: ``1 text``, ``1,000 texts``. By default `more` is `one` with an s."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def percent(share: float, digits: int = 0) -> str:
    """Return a share of 1 in hundredths: ``67 %``."""
    return f"{100 * share:.{digits}f} %"
