"""attmemo: faster transformer encoders on CPU servers.

from attmemo import memoize
model = memoize(model)                  # exact; with budget=0.01 it reuses what similar inputs have computed
print(model.attmemo.stats())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attmemo.db import Database
    from attmemo.embed.similarity import similarity_score
    from attmemo.errors import (
        AdapterCheckError,
        AttmemoError,
        DatabaseError,
        DataError,
        StaleDatabaseError,
        UnsupportedModelError,
    )
    from attmemo.forward.handle import Memoization
    from attmemo.memoization import memoize, unmemoize
    from attmemo.system.precision import best_dtype

_HOMES = {
    "Database": "db",
    "best_dtype": "system.precision",
    "Memoization": "forward.handle",
    "memoize": "memoization",
    "unmemoize": "memoization",
    "similarity_score": "embed.similarity",
}

__version__ = "0.1.0"

__all__ = [
    "AdapterCheckError",
    "AttmemoError",
    "DataError",
    "Database",
    "DatabaseError",
    "Memoization",
    "StaleDatabaseError",
    "UnsupportedModelError",
    "best_dtype",
    "memoize",
    "similarity_score",
    "unmemoize",
]


def __getattr__(name: str) -> Any:
    # Loaded at the first use: importing torch takes a second, and `attmemo --help` does not need it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES.get(name, 'errors')}"), name)
    return value
