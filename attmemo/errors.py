"""Every error this library raises on purpose.

One class for each broken rule; its docstring is the reason the rule exists. A message says what happened,
where, what was seen against what was expected, and what to run next. `AttmemoError` is the common base, so
a caller (the command line, a server) catches one class and shows the message without a traceback.
"""

from __future__ import annotations


class AttmemoError(Exception):
    """Base class: something the user can act on.

    Parameters
    ----------
    what : str
        What happened and where, with what was seen against what was expected.
    hint : str, optional
        What to do or run next.
    """

    def __init__(self, what: str, hint: str | None = None) -> None:
        self.what = what
        self.hint = hint
        super().__init__(what if hint is None else f"{what}\n  Next: {hint}")


class DataError(AttmemoError):
    """The user's data cannot be read as text: missing, empty, a wrong column, not text."""


class UnsupportedModelError(AttmemoError):
    """No adapter knows this model's attention; replacing it blindly would give wrong numbers."""


class AdapterCheckError(AttmemoError):
    """The hit path, given the model's own map, did not reproduce the model's own output."""


class DatabaseError(AttmemoError):
    """Base class of everything that is wrong with a database."""


class DatabaseNotFoundError(DatabaseError):
    """There is no database at the path, or none in the cache directory for this model."""


class FormatVersionError(DatabaseError):
    """The database was written in a format that this version does not read."""


class DatabaseTruncatedError(DatabaseError):
    """A file is shorter than the manifest says; mapping it would read past its end."""


class DatabaseCorruptError(DatabaseError):
    """A file does not hold what its checksum says it should hold."""


class GenerationMismatchError(DatabaseCorruptError):
    """A file belongs to another generation or another database than the manifest beside it."""


class ForkedHandleError(DatabaseError):
    """A handle was inherited through fork; parent and child would write over each other."""


class StaleDatabaseError(DatabaseError):
    """The database was built for another model, tokenizer, precision or embedder."""


class PageSizeError(DatabaseError):
    """Slots are not aligned to this machine's pages, so they cannot be mapped."""


class DatabaseLockedError(DatabaseError):
    """Another process is building this database; there is one writer at a time."""


class StorageFullError(DatabaseError):
    """There is no room for the next slot on the disk, or under the limit the user set."""


class EmbedderMissingError(DatabaseError):
    """The database holds records but no trained embedder, so nothing can be looked up."""


class WindowError(AttmemoError):
    """Pages could not be mapped into a window; the caller falls back to a copy."""


class WindowBusyError(WindowError):
    """The window is leased; remapping it would change a tensor that is in use."""


class TuningError(AttmemoError):
    """No threshold can be chosen from this data."""


class ArgumentError(AttmemoError, ValueError):
    """An argument of an operator breaks a rule of its specification; nothing was written."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument is of the wrong type; a boolean mask, say, would be added as numbers 0 and 1."""


class CacheRangeError(ArgumentError):
    """A row of the cache that would be read or written does not exist; a kernel would leave its memory."""


class CacheOverlapError(ArgumentError):
    """Two tokens would be written to one row of the cache, or a row is rewritten after another sequence read it."""


class ImplementationError(AttmemoError):
    """The implementation that was asked for by name cannot do this, here; another one would have to be taken."""


class CacheError(AttmemoError):
    """Base class of what goes wrong in the bookkeeping of a key-value cache; its contents are as before."""


class OutOfPagesError(CacheError):
    """No page is free for the next tokens; a server preempts a sequence or lets one finish first."""


class StaleStepError(CacheError):
    """Tokens of this step were taken from the cache again, or moved, since the step was made."""


class UnknownSequenceError(CacheError):
    """The cache never gave out this sequence number."""


class DoubleFreeError(UnknownSequenceError):
    """The sequence was freed before; its pages may hold another's keys by now."""
