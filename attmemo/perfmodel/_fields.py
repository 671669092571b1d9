"""Reading fields out of parsed JSON, where a wrong one is named in the error.

A profile lies beside the database and travels between machines, so nothing in it is taken on trust: a NaN
coefficient would not crash the gate, it would make every comparison false and switch memoization off silently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attmemo.errors import DatabaseCorruptError

_HINT = "measure the profile again; the records of the database are not affected"
_SHOWN = 60  # characters of an unexpected value that an error message shows


def corrupt(where: str, expected: str, seen: object) -> DatabaseCorruptError:
    """The error for the field `where`; `seen` is shortened, since a file may hold anything there."""
    shown = repr(seen)
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "..."
    return DatabaseCorruptError(f"profile field {where!r}: expected {expected}, found {shown}", _HINT)


def join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def mapping(data: object, where: str) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise corrupt(where or "(the whole profile)", "an object", data)
    return data


def member(data: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in data:
        raise corrupt(join(where, key), "a value", "nothing: the field is missing")
    return data[key]


def items(data: object, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise corrupt(where, "a list", data)
    return data


def number(value: object, where: str, *, minimum: float | None = None) -> float:
    # bool is an int in Python; a JSON `true` is not a number of milliseconds.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise corrupt(where, "a finite number", value)
    try:
        result = float(value)
    except OverflowError:  # JSON integers have no upper limit
        result = math.inf
    if not math.isfinite(result):
        raise corrupt(where, "a finite number", value)
    if minimum is not None and result < minimum:
        raise corrupt(where, f"a number >= {minimum:g}", value)
    return result


def integer(value: object, where: str, *, minimum: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise corrupt(where, f"an integer >= {minimum}", value)
    return value


def integer_key(key: object, where: str, *, minimum: int) -> int:
    """JSON has only text for keys; "07" and " 7" are refused, or two keys could name one layer."""
    try:
        value = int(str(key))
    except ValueError:
        raise corrupt(where, "an integer as key", key) from None
    if str(value) != key or value < minimum:
        raise corrupt(where, f"an integer >= {minimum} as key", key)
    return value
