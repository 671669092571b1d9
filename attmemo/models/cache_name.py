"""How transformers calls the argument with the key-value cache: the name changed in transformers 5.24."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, Final

NEW, OLD = "cache", "past_key_values"
_MAJOR, _MINOR = version("transformers").split(".")[:2]
# Asked of the version, for transformers itself takes seconds to import.
CACHE_NAME: Final = NEW if (int(_MAJOR), int(_MINOR)) >= (5, 24) else OLD


def cache_of(given: Mapping[str, Any]) -> Any:
    """The cache among the arguments of a model by name, under the new or the old name; None without one."""
    found = given.get(NEW)
    return given.get(OLD) if found is None else found
