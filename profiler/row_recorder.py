"""Records of rows: K and V of every layer, and the last hidden states, as packed blocks compute them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.db import ModelInfo, Provenance
from attmemo.db.encodings import ROW_STORAGE, row_types
from attmemo.db.pools.filling import Filling, is_sealed
from attmemo.db.pools.pool import usual_for
from attmemo.db.pools.prepared import building, in_order, open_to_build
from attmemo.db.pools.segment import bytes_of, rounded
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.db.records import Entry
from attmemo.errors import AttmemoError, DatabaseCorruptError, UnsupportedModelError
from attmemo.handle.stack import StackMemoization, blocks_of
from attmemo.kernels.align import Rule
from attmemo.memoization import memoize, unmemoize
from attmemo.models import Adapter
from attmemo.profiler.models import LoadedModel, Tokens, collate
from attmemo.profiler.recorder import Admission, Form, Place
from attmemo.rows.index import TokenIndex
from attmemo.rows.layout import RowLayout
from attmemo.rows.planner import packed_tokens
from attmemo.rows.store import Record, records_of

_MAPS = "attmemo build-database --reuse maps …"


class RowRecorder:
    """Records of rows. Inside of its context the model runs over packed rows, exactly, and reuses nothing.

    `row_form` gives `form`; `loaded` makes inputs of texts, and only `admission` needs it. UnsupportedModelError: the
    family has no blocks that can be packed. AttmemoError, when the context is entered: the model is memoized.
    """

    def __init__(self, model: nn.Module, adapter: Adapter, form: Form, loaded: LoadedModel | None = None) -> None:
        self.form = form
        self._model, self._loaded = model, loaded
        self._heads = blocks_of(model, adapter, "rows").heads
        self._types = row_types(form.storage)
        self._kept: list[tuple[list[int], Tensor, Tensor]] = []
        self._handle: StackMemoization | None = None

    def __enter__(self) -> RowRecorder:
        if getattr(self._model, "attmemo", None) is not None:
            raise AttmemoError("the model is memoized, and recording would undo that.", "attmemo.unmemoize(model)")
        memoize(self._model, reuse="none")
        handle: Any = self._model.attmemo
        handle.engine.reuse.keep = lambda lengths, rows, last: self._kept.append((lengths, rows, last))
        self._handle = handle
        return self

    def __exit__(self, *_: object) -> None:
        self._handle = None
        unmemoize(self._model)

    def run(self, inputs: Mapping[str, Tensor]) -> list[Record]:
        """As `Recorder.run`. UnsupportedModelError if the call stays exact for a reason that is then named."""
        handle = self._handle
        assert handle is not None
        self._kept.clear()
        with torch.inference_mode():
            handle.host(**inputs)
        if len(self._kept) != 1:
            reason = handle.engine.counters.reason("the blocks were not called once")
            raise UnsupportedModelError(f"rows cannot be captured: {reason}.", _MAPS)
        lengths, rows, last = self._kept.pop()
        tokens = packed_tokens(inputs.get("input_ids"), inputs.get("token_type_ids"), lengths)
        if tokens is None:
            raise UnsupportedModelError(
                "rows cannot be captured: the inputs have no token ids.", f"{_MAPS}: maps are kept of any input"
            )
        parts = np.split(tokens, np.cumsum(lengths)[:-1])
        return records_of(lengths, rows, last, self._types, self._heads, parts)

    def admission(self, admit: float | None, writer: RowWriter) -> ByTokens:
        assert self._loaded is not None
        return ByTokens(self._loaded, admit, writer)


class RowWriter:
    """Writes a prepared database of rows as `DatabaseWriter` writes one of maps; it begins with the first publication.

    Records are published a segment at a time: a killed process loses no more. `expected`: bytes that there will be, at
    most. DatabaseLockedError, DatabaseError, StaleDatabaseError: as `building`.
    """

    def __init__(self, path: Path, info: ModelInfo, form: Form, expected: int = 0) -> None:
        self.path, self._expected = path, expected
        self._filling = Filling.of(info, form.storage, sealed=True)
        self._layout = RowLayout.of(info, form.storage)
        self.pool: SharedPool | None = None  # what is published
        self._waiting: list[Entry] = []
        self._bytes = 0  # of what waits
        self._sources: dict[str, int] = {}
        with ExitStack() as held:
            held.enter_context(building(path, self._filling))
            if is_sealed(path):
                self._open()
            self._held = held.pop_all()

    def _open(self) -> SharedPool:
        self.pool = open_to_build(self.path, self._filling, self._expected)
        return self.pool

    @property
    def records(self) -> int:
        """Records stored, published or not."""
        return len(self._waiting) + (0 if self.pool is None else len(self.pool))

    @property
    def stored_bytes(self) -> int:
        """Bytes of all segments, that of what is not published too."""
        return self._next() + (0 if self.pool is None else self.pool.nbytes)

    def cost(self, length: int) -> int:
        """Bytes that one more record of this length will take."""
        return self._next(rounded(self._layout.nbytes(length))) - self._next()

    def _next(self, *more: int) -> int:
        """Bytes of the segment for what is not published, and for records of so many bytes."""
        count = len(self._waiting) + len(more)
        return bytes_of(count, self._bytes + sum(more)) if count else 0

    def stored_rows(self) -> dict[int, set[int]]:
        """None: what is stored is known by its tokens."""
        return {}

    def add_source(self, name: str, digest: str) -> int:
        """Number of a data file, the same one for the same content."""
        return self._sources.setdefault(digest, len(self._sources))

    def add(self, record: Record, length: int, provenance: Provenance) -> int:
        """Store a record. DatabaseCorruptError: a number is not finite in the storage type; nothing was stored."""
        parts = [part for part in (record.rows, record.scales, record.last) if part is not None]
        if not all(bool(part.isfinite().all()) for part in parts if part.is_floating_point()):
            raise DatabaseCorruptError(
                f"row {provenance.row} of the data: the rows are not finite in their type; nothing was stored.",
                "store in a type of wider range: --dtype bfloat16 or float32",
            )
        nbytes = rounded(self._layout.nbytes(length))
        if self._waiting and self._next(nbytes) > usual_for(self._expected):
            self.publish()
        self._waiting.append(Entry(record.tokens.copy(), self._layout.body_of(record)))
        self._bytes += nbytes
        return self.records - 1

    def publish(self) -> None:
        """Make everything stored so far visible. StorageFullError: what was published before stays."""
        waiting, self._waiting, self._bytes = self._waiting, [], 0  # before: after Ctrl-C nothing is published twice
        (self._open() if self.pool is None else self.pool).add(waiting)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.close()
        self._held.close()


def row_form(storage: str) -> Form:
    """How rows are stored, of what was asked for."""
    if storage == "auto":
        storage = "int8"
    if storage not in ROW_STORAGE:
        raise AttmemoError(f"rows are not stored as {storage}.", f"--dtype {', '.join(ROW_STORAGE)}")
    return Form(storage)


class ByTokens(Admission):
    """Leaves out texts that a record stands for: by its tokens, so the model need not be asked.

    A text with the tokens of a record is never stored again. A text of which a record supplies at least the share
    `admit` is left out too; a resumed build finds the same, so nothing is noted.
    """

    def __init__(self, loaded: LoadedModel, admit: float | None, writer: RowWriter) -> None:
        self._loaded, self._admit = loaded, admit
        self._seen: set[bytes] = set()
        self._index = TokenIndex()
        for kept in [] if writer.pool is None else in_order(writer.pool):
            self._remember(kept.tokens)
        self._earlier = set(self._seen)

    def before(self, place: Place, tokens: Tokens) -> bool:
        own = row_tokens(self._loaded, tokens)
        if own.tobytes() in self._earlier:
            self._earlier.remove(own.tobytes())  # the same text once more is another one that is left out
            self.there += 1
            return False
        if own.tobytes() in self._seen or self._is_supplied(own):
            return False
        self._remember(own)  # not when it is stored: a batch later the next text of this chunk may be the same
        return True

    def _remember(self, tokens: npt.NDArray[np.int32]) -> None:
        self._seen.add(tokens.tobytes())
        if self._admit is not None:
            self._index.add(tokens)

    def _is_supplied(self, tokens: npt.NDArray[np.int32]) -> bool:
        if self._admit is None or not len(self._index):
            return False
        found = self._index.best(tokens, np.array([0, len(tokens)], np.int64), Rule())
        return bool(found.record[0] >= 0 and len(tokens) - found.computed[0] >= self._admit * len(tokens))


def row_tokens(loaded: LoadedModel, item: Tokens) -> npt.NDArray[np.int32]:
    """Ids and types of a text as a record of rows keeps them, int32 ``[n]``."""
    inputs = collate(loaded, [item])
    found = packed_tokens(inputs["input_ids"], inputs.get("token_type_ids"), [len(item)])
    assert found is not None
    return found
