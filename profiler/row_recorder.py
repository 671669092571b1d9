"""Records of rows: K and V of every layer, and the last hidden states, as packed blocks compute them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.db import KIND_LAST, KIND_ROWS, KIND_TOKENS, DatabaseWriter, ModelInfo, kinds_of_rows
from attmemo.db.encodings import ROW_STORAGE, TYPES
from attmemo.errors import AttmemoError, UnsupportedModelError
from attmemo.handle.stack import StackMemoization, blocks_of
from attmemo.kernels.align import Rule
from attmemo.memoization import memoize, unmemoize
from attmemo.models import Adapter
from attmemo.profiler.models import LoadedModel, Tokens, collate
from attmemo.profiler.recorder import Admission, Form, Place, Slots
from attmemo.rows.index import TokenIndex
from attmemo.rows.planner import packed_tokens
from attmemo.rows.store import records_of

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
        types = {kind.name: TYPES[kind.dtype] for kind in form.kinds}
        self._types = types[KIND_ROWS], types[KIND_LAST]
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

    def run(self, inputs: Mapping[str, Tensor]) -> list[Slots]:
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
        return [record.slots for record in records_of(lengths, rows, last, self._types, self._heads, parts)]

    def admission(self, admit: float | None, writer: DatabaseWriter) -> ByTokens:
        assert self._loaded is not None
        return ByTokens(self._loaded, admit, writer)


def row_form(info: ModelInfo, storage: str) -> Form:
    """How rows of a model are stored, of what was asked for."""
    if storage == "auto":
        storage = "int8"
    if storage not in ROW_STORAGE:
        raise AttmemoError(f"rows are not stored as {storage}.", f"--dtype {', '.join(ROW_STORAGE)}")
    return Form(storage, {}, kinds_of_rows(info, storage))


class ByTokens(Admission):
    """Leaves out texts that a record stands for: by its tokens, so the model need not be asked.

    A text with the tokens of a record is never stored again. A text of which a record supplies at least the share
    `admit` is left out too; a resumed build finds the same, so nothing is noted.
    """

    def __init__(self, loaded: LoadedModel, admit: float | None, writer: DatabaseWriter) -> None:
        self._loaded, self._admit = loaded, admit
        self._seen: set[bytes] = set()
        self._index = TokenIndex()
        for record in range(writer.records):
            self._remember(writer.slot(KIND_TOKENS, record).numpy())

    def before(self, place: Place, tokens: Tokens) -> bool:
        own = row_tokens(self._loaded, tokens)
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
