"""Every error that this library raises on purpose: what happened and where, what was seen and expected, what next."""

from __future__ import annotations


class AttmemoError(Exception):
    """Base class: an error that the user can act on. `hint` says what to do or run next."""

    def __init__(self, what: str, hint: str | None = None) -> None:
        self.what, self.hint = what, hint
        super().__init__(what if hint is None else f"{what}\n  Next: {hint}")


class DataError(AttmemoError):
    """The user's data cannot be read as text: missing, empty, a wrong column, not text."""


class UnsupportedModelError(AttmemoError):
    """No adapter knows this model's attention. Replacing unknown attention would give wrong numbers."""


class AdapterCheckError(AttmemoError):
    """The hit path did not reproduce the model's own output from the model's own map."""


class DatabaseError(AttmemoError):
    """Base class of all errors of a database."""


class DatabaseNotFoundError(DatabaseError):
    """There is no database at the path, or none in the cache directory for this model."""


class FormatVersionError(DatabaseError):
    """The database has a format that this version does not read."""


class DatabaseTruncatedError(DatabaseError):
    """A file is shorter than the manifest says. A read from its mapping could go past the end of the file."""


class DatabaseCorruptError(DatabaseError):
    """A file breaks a rule of the format, or does not match its checksum."""


class GenerationMismatchError(DatabaseCorruptError):
    """A file belongs to another generation, or to another database, than the manifest beside it."""


class ForkedHandleError(DatabaseError):
    """A process inherited a handle through fork. Parent and child would overwrite each other's data."""


class StaleDatabaseError(DatabaseError):
    """The database was built for another model, tokenizer, precision or embedder."""


class PageSizeError(DatabaseError):
    """The slots are not aligned to this machine's pages, so they cannot be mapped."""


class DatabaseLockedError(DatabaseError):
    """Another process is building this database. There is one writer at a time."""


class StorageFullError(DatabaseError):
    """There is no space for the next slot on the disk, or within the user's limit."""


class EmbedderMissingError(DatabaseError):
    """The database holds records but no trained embedder, so no lookup is possible."""


class WindowError(AttmemoError):
    """Pages could not be mapped into a window. The caller makes a copy instead."""


class WindowBusyError(WindowError):
    """The window is leased. Another mapping would change a tensor that is in use."""


class TuningError(AttmemoError):
    """No threshold can be chosen from this data."""


class ArgumentError(AttmemoError, ValueError):
    """An argument is none of the values that it may be, or does not go with another one. Nothing was changed."""


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has the wrong type. A boolean mask, for example, would be added as the numbers 0 and 1."""


class AnswerError(ArgumentError):
    """The guard finds no answer in what the model gives out, or none for each sequence."""


class CacheRangeError(ArgumentError):
    """A call would read or write a row of the cache that does not exist. A kernel would leave its memory."""


class CacheOverlapError(ArgumentError):
    """Two tokens would be written to one row of the cache, or a row is overwritten after another sequence read it."""


class ImplementationError(AttmemoError):
    """The implementation that was chosen by name cannot do this call on this machine."""


class CacheError(AttmemoError):
    """Base class of errors in the bookkeeping of a key-value cache. The contents of the cache are unchanged."""


class OutOfPagesError(CacheError):
    """No page is free for the next tokens. A server preempts a sequence, or waits until one finishes."""


class StaleStepError(CacheError):
    """Tokens of this step were removed from the cache, or moved, after the step was made."""


class UnknownSequenceError(CacheError):
    """The cache never gave out this sequence number."""


class DoubleFreeError(UnknownSequenceError):
    """The sequence was already freed. Its pages may hold the keys of another sequence now."""
