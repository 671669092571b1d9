"""Arguments of `memoize` and of a service: what each may be, and which of them make no sense together.

Nothing here loads torch: a service asks before it loads a model.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from attmemo.errors import ArgumentError, ArgumentTypeError

MEMORY: Final = ":memory:"
"""The database that starts with nothing and is kept in memory."""


def check_choices(**choices: tuple[object, tuple[object, ...]]) -> None:
    """Check that each value is one of those that are allowed, or raise ArgumentError."""
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            what = f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}."
            raise ArgumentError(what, f"give one of these, or leave out {name}")


def is_auto(threshold: object) -> bool:
    """Whether a threshold is ``"auto"``; it may be an array, which no text can be compared with."""
    return isinstance(threshold, str) and threshold == "auto"


def check_places(database: object, fill: object) -> None:
    """Check that both name a place if they name anything, or raise ArgumentError."""
    for name, value, others in (("database", database, "None"), ("fill", fill, "True, False")):
        if (value is None and name == "database") or (isinstance(value, bool) and name == "fill"):
            continue
        if not isinstance(value, str | os.PathLike):
            what = f"{name} is {value!r}, of type {type(value).__name__}; expected a path, or {others}."
            raise ArgumentTypeError(what, f"give the path as a text, or leave out {name}")
        if not os.fspath(value):
            what = f"{name} is an empty text, which would be the working directory."
            raise ArgumentError(what, f"name a directory, or leave out {name}")
        try:
            os.stat(value)
        except (OSError, ValueError) as error:  # ValueError: a null byte
            if not isinstance(error, OSError) or error.errno == errno.ENAMETOOLONG:
                what = f"{name} is {str(value)!r:.80}, which can be no path: {getattr(error, 'strerror', error)}."
                raise ArgumentError(what, f"name a directory, or leave out {name}") from error


def check_tokenizer(tokenizer: object) -> None:
    """Check that this is a tokenizer of transformers, or None."""
    if tokenizer is None or (hasattr(tokenizer, "convert_ids_to_tokens") and hasattr(tokenizer, "__len__")):
        return
    name = tokenizer if isinstance(tokenizer, str) and tokenizer else "…"
    what = f"tokenizer is {tokenizer!r:.80}, of type {type(tokenizer).__name__}; expected a tokenizer of transformers."
    raise ArgumentTypeError(what, f"tokenizer=AutoTokenizer.from_pretrained({name!r})")


def check_together(
    *, reuse: str, database: object = None, fill: object = True, budget: object = 0.01, linear: str = "exact",
    threshold: object = "auto", lookup: object = None, fetch: str = "auto", near: object = None,
    most_moved: object = None,
) -> None:  # fmt: skip
    """Refuse arguments that make no sense together; the values are those of `memoize`.

    Raises
    ------
    ArgumentError
        Names the first two that do not go together.
    """
    memory = database == MEMORY
    reuse = "rows" if memory and reuse == "auto" else reuse
    folder = None if isinstance(fill, bool) else os.fspath(fill)  # type: ignore[call-overload]
    own = f"reuse={reuse!r}"
    for nonsense, what, hint in (
        (linear != "exact" and reuse == "maps", f"linear={linear!r} is a setting of packed blocks; {own} has none",
         "leave out linear"),
        (folder == MEMORY, "fill=':memory:' is no directory", "database=':memory:' keeps records in memory"),
        (memory and reuse in ("maps", "none"), f"database=':memory:' keeps rows; {own} serves none", "reuse='rows'"),
        (memory and folder is not None, f"database=':memory:' and fill={folder!r} are two places for new records",
         "leave out one of them"),
        (memory and fill is False, "database=':memory:' begins with nothing, and fill=False keeps nothing",
         "leave out fill, or give a database"),
        (folder is not None and reuse in ("maps", "none"),
         f"fill={folder!r}: a folder is filled with rows; {own} keeps none there", "reuse='rows', or leave out fill"),
        (budget is None and (memory or folder is not None),
         "new records are what the guard verifies, and budget=None is without a guard",
         "give a budget; or only read a database, with fill=False"),
        (reuse == "none" and database is not None, f"{own} takes no database: it reuses nothing",
         "leave out one of them"),
        (reuse == "none" and not is_auto(threshold), f"{own} takes no threshold: it reuses nothing",
         "leave out one of them"),
        (reuse in ("none", "maps") and (near not in (None, 1) or most_moved is not None),
         f"near and most_moved are settings of rows; {own} has none", "leave them out, or reuse='rows'"),
        (reuse in ("none", "rows") and (lookup == "layer" or fetch != "auto"),
         f"lookup='layer' and fetch are settings of maps; {own} has none", "leave them out, or reuse='maps'"),
    ):  # fmt: skip
        if nonsense:
            raise ArgumentError(f"{what}.", hint)
