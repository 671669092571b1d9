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
AUTO: Final = "auto"
"""The database of the model in the user's cache directory."""
LONGEST_NAME: Final = 128
"""Characters of the name of a namespace, at most."""
NAMESPACES: Final = 64
"""Namespaces of a model, at most, by default."""


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


def check_namespace(name: object) -> None:
    """Check that a text can name a namespace, or raise ArgumentError."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        what = f"a namespace is named by 1 to {LONGEST_NAME} printable characters; got {name!r:.80}."
        raise ArgumentError(what, "namespace('tenant-a')")


def check_namespaces(most: object) -> None:
    """Check that this is how many namespaces there may be, or raise ArgumentError."""
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise ArgumentError(f"namespaces must be a whole number from 0 on; got {most!r}.", f"namespaces={NAMESPACES}")


def check_budget(budget: object) -> None:
    """Check that a budget is None or a share from 0 on and below 1, or raise ArgumentError."""
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0.0 <= budget < 1.0:
        what = f"budget must be a number from 0 on and below 1; got {budget!r}."
        raise ArgumentError(what, "budget=0.01 is 1 % of the answers, budget=0 computes all of them exactly")


def check_tokenizer(tokenizer: object) -> None:
    """Check that this is a tokenizer of transformers, or None."""
    if tokenizer is None or (hasattr(tokenizer, "convert_ids_to_tokens") and hasattr(tokenizer, "__len__")):
        return
    name = tokenizer if isinstance(tokenizer, str) and tokenizer else "…"
    what = f"tokenizer is {tokenizer!r:.80}, of type {type(tokenizer).__name__}; expected a tokenizer of transformers."
    raise ArgumentTypeError(what, f"tokenizer=AutoTokenizer.from_pretrained({name!r})")


def check_together(
    *, reuse: str, database: object = None, fill: object = True, budget: object = 0, linear: str = "exact",
    threshold: object = "auto", lookup: object = None, fetch: str = "auto", near: object = None,
    most_moved: object = None, shadow: object = False, log_changes: object = None,
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
    own, equal = f"reuse={reuse!r}", {"prefix": "prefixes", "local": "local rows"}.get(reuse)
    if reuse == "auto" and budget == 0 and database is None and folder is None and is_auto(threshold):
        reuse, own = "none", "budget=0 without a database"
    asks = "database=':memory:'" if memory else own if folder is None else f"fill={folder!r}"  # for rows
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
        (budget is None and reuse == "auto" and database is None and is_auto(threshold),
         "budget=None reuses records of a prepared database, and there is none", "give the database, or a budget"),
        (equal and database is not None and not memory,
         f"{own} keeps {equal} in memory, and reads no database", "leave out database, or database=':memory:'"),
        (equal and (folder is not None or fill is False), f"{own} keeps {equal} in memory; fill={fill!r} does not",
         "leave out fill"),
        (equal and budget != 0, f"{own} changes no answer: there is nothing that a budget could guard",
         "leave out budget; linear='int8' rounds linear layers"),
        (equal and (not is_auto(threshold) or near not in (None, 1) or most_moved is not None),
         f"threshold, near and most_moved are settings of similar inputs; {own} reuses equal {equal} alone",
         "leave them out"),
        (budget == 0 and not equal and (reuse == "rows" or memory or folder is not None),
         f"{asks} reuses rows of similar inputs, which can change answers; "
         "budget=0 allows no change", "budget=0.01 allows at most 1 % of the answers to change"),
        (bool(budget) and reuse == "maps", "a budget guards reuse of rows; maps have a threshold",
         "leave out budget; attmemo tune DB --budget 0.01 chooses a threshold by a budget"),
        (database is None and fill is False and bool(budget) and reuse in ("auto", "rows"),
         "reuse with nothing to read: fill=False keeps nothing, and there is no database",
         "leave out fill, or give a database"),
        (reuse == "none" and database is not None, f"{own} takes no database: it reuses nothing",
         "leave out one of them"),
        (reuse == "none" and not is_auto(threshold), f"{own} takes no threshold: it reuses nothing",
         "leave out one of them"),
        (reuse in ("none", "maps") and (near not in (None, 1) or most_moved is not None),
         f"near and most_moved are settings of rows; {own} has none", "leave them out, or reuse='rows'"),
        (shadow and (reuse not in ("auto", "rows") or not budget),
         "shadow mode says what a budget would reuse of rows, and there is " + ("no budget" if not budget else own),
         "give a budget, or leave out shadow"),
        (log_changes is not None and (reuse not in ("auto", "rows") or not budget),
         "log_changes is about answers that a guard verifies, and there is " + ("no budget" if not budget else own),
         "give a budget, or leave out log_changes"),
        ((equal or reuse in ("none", "rows")) and (lookup == "layer" or fetch != "auto"),
         f"lookup='layer' and fetch are settings of maps; {own} has none", "leave them out, or reuse='maps'"),
    ):  # fmt: skip
        if nonsense:
            raise ArgumentError(f"{what}.", hint)
