"""JSON: fields that nothing has checked yet, an error names the first wrong one; and what JSON cannot write.

Anyone can write a manifest: a cost that is not a number would not crash a comparison, the comparison would be false.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

from attmemo.errors import DatabaseCorruptError


@dataclass(frozen=True)
class Field:
    """One value of parsed JSON, with its place. A value that is missing or not as asked is a DatabaseCorruptError."""

    value: object
    source: str  # the file, for messages
    hint: str  # what to run if a field is wrong
    place: str = ""  # name of the field, as in costs[3].exact.a; empty for the whole JSON

    @classmethod
    def parse(cls, text: str, source: str, hint: str) -> Field:
        """JSON text as a field; NaN and infinity are no JSON."""
        try:
            return cls(json.loads(text, parse_constant=_not_a_number), source, hint)
        except (ValueError, RecursionError) as error:
            raise DatabaseCorruptError(f"{source}: not JSON: {error}.", hint) from error

    def refuse(self, expected: str) -> NoReturn:
        """Raise the error for this field."""
        shown = repr(self.value)
        shown = shown[:60] + "..." if len(shown) > 60 else shown
        name = f"the field '{self.place}'" if self.place else "the content"
        raise DatabaseCorruptError(f"{self.source}: {name} is {shown}, expected {expected}.", self.hint)

    def __getitem__(self, key: str) -> Field:
        found = self.get(key)
        if found is None:
            raise DatabaseCorruptError(f"{self.source}: the field '{self._at(key)}' is missing.", self.hint)
        return found

    def get(self, key: str) -> Field | None:
        """The member of this name; None if it is missing or null."""
        value = self.object().get(key)
        return None if value is None else Field(value, self.source, self.hint, self._at(key))

    def members(self) -> dict[str, Field]:
        return {key: Field(value, self.source, self.hint, self._at(key)) for key, value in self.object().items()}

    def items(self) -> list[Field]:
        if not isinstance(self.value, list):
            self.refuse("a list")
        return [Field(value, self.source, self.hint, f"{self.place}[{n}]") for n, value in enumerate(self.value)]

    def _at(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def object(self) -> dict[str, Any]:
        """An object, its members unchecked."""
        if not isinstance(self.value, dict):
            self.refuse("an object")
        return self.value

    def text(self, pattern: str | None = None, among: Collection[str] | None = None) -> str:
        """Text; all of it matches the pattern, or it is one of a few words."""
        if not isinstance(self.value, str):
            self.refuse("text")
        try:
            self.value.encode()
        except UnicodeEncodeError:  # half a surrogate pair: JSON can escape it, no file name or terminal can show it
            self.refuse("text in Unicode")
        if among is not None and self.value not in among:
            self.refuse(f"one of {', '.join(among)}")
        if pattern is not None and not re.fullmatch(pattern, self.value):
            self.refuse(f"text like {pattern}")
        return self.value

    def integer(self, low: int = 0, high: int = 1 << 48) -> int:
        """A whole number between two limits, both included."""
        # A JSON `true` is an int in Python, and no number of anything.
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not low <= self.value <= high:
            self.refuse(f"an integer from {low} to {high}")
        return self.value

    def number(self, low: float = -math.inf, high: float = math.inf) -> float:
        """A finite number between two limits, both included."""
        value = self.value
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.refuse("a finite number")
        # Also for integers: those of JSON have no upper limit.
        if not (abs(value) <= sys.float_info.max and low <= value <= high):
            limits = f" from {low:g} to {high:g}" if (low, high) != (-math.inf, math.inf) else ""
            self.refuse(f"a finite number{limits}")
        return float(value)

    def numbers(self, low: float = -math.inf, high: float = math.inf) -> list[float]:
        return [item.number(low, high) for item in self.items()]

    def key(self, low: int = 0, high: int = 1 << 48) -> int:
        """The name of this member as a number. JSON has only text for names; "07" and " 7" are refused."""
        outer, _, name = self.place.rpartition(".")
        if not re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", name) or not low <= int(name) <= high:
            Field(name, self.source, self.hint, outer).refuse(f"names from {low} to {high}")
        return int(name)


def finite(value: Any) -> Any:
    """Return a value as JSON can write it: null for numbers that are not finite, the text of a path."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def _not_a_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")
