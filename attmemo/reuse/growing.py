"""Records that come while the model serves, in front of those of a prepared database if there is one.

    a request ──► offers (references to what was computed) ──► the filler's thread: kept, if they are not yet
    the pool's news (own, and those of other processes) ──► the index, where the next request finds them
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db.history import Work
from attmemo.db.pool import Entry, Kept, Late, News, Pool
from attmemo.embed.tokens import TokenIndex
from attmemo.errors import DatabaseError
from attmemo.kernels.row_attention import Stored
from attmemo.reuse.filler import Filler
from attmemo.reuse.row_layout import Placed, RowLayout
from attmemo.reuse.row_store import DatabaseRows, Fetched, Ints, RowStore

_LOG = logging.getLogger("attmemo")

DAMAGED: Final = "damaged"
KNOWN: Final = "stored before"
LARGE: Final = "larger than the database may be"
SPARE: Final = "another serves, and there is no room"

_AT_EXIT = 5.0  # seconds
_NOTED = 10.0  # seconds between two notes of what requests cost
_LINKED = 64  # records that go to the index's graph with each look for news, while it is behind


@dataclass(slots=True)
class Offer:
    """A sequence that was computed whole, as its request hands it over.

    Parameters
    ----------
    tokens : int32 [n]
    part : slice
        Its rows in the tensors of the batch.
    layers : list of (keys, values)
        Of the whole batch, ``[N, H]`` each.
    last : Tensor [N, H]
        Last hidden states of the whole batch.
    note : bytes
        Kept with the record.
    spare : bool
        A record could have served the sequence: keep it only if nothing has to go for it.
    """

    tokens: npt.NDArray[np.int32]
    part: slice
    layers: list[tuple[Tensor, Tensor]]
    last: Tensor
    note: bytes = b""
    spare: bool = False

    def written(self, layout: RowLayout, into: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The bytes of the record in the types of a layout, at the beginning of `into`."""
        return layout.write(into, self.part, self.layers, self.last)

    @property
    def is_finite(self) -> bool:
        """Whether it can be kept: one number that is not finite has no finite sum."""
        parts = (self.last, *self.layers[-1])
        return all(math.isfinite(float(part[self.part].sum(dtype=torch.float32))) for part in parts)


class GrowingRows(RowStore):
    """A store that keeps what was computed exactly.

    Parameters
    ----------
    pool : Pool
        Where records are kept.
    layout : RowLayout
    base : DatabaseRows, optional
        Records that are there already. Their numbers come first.
    fills : bool
        Whether what is offered is kept.

    Attributes
    ----------
    index : TokenIndex
        Finds records by tokens.
    """

    def __init__(
        self, pool: Pool, layout: RowLayout, base: DatabaseRows | None = None, *, fills: bool = True
    ) -> None:
        self.pool, self.layout, self.fills = pool, layout, fills
        self.index = TokenIndex() if base is None else base.index
        self.kept: Counter[str] = Counter()  # what became of offers
        self._base = base
        self._first = self.index.next
        self._sound: dict[int, int] = {}  # records that were compared with their checksum, and in which segment
        self._told: set[str] = set()
        self._anew = False
        self._work: Callable[[], Work] | None = None
        self._worked: Work | None = None  # what was noted; None: the parent of a forked child notes what it did
        self._noted = time.monotonic()
        self._earned: tuple[Work, float] | None = None  # what was done, and processor time, at the last look
        self._learn(pool.news())
        self._filler: Filler[Offer] = Filler(self._fill, pool.close)
        own = weakref.ref(self)  # neither a fork nor the exit keeps a store alive
        os.register_at_fork(after_in_child=partial(_in_child, own))
        self._leave = partial(_flush, own)
        atexit.register(self._leave)

    @property
    def storage(self) -> tuple[torch.dtype, torch.dtype]:
        """Types of K and V, and of the last hidden states."""
        return self.layout.storage

    @property
    def nbytes(self) -> int:
        """Bytes that the records take."""
        return self.pool.nbytes

    def __len__(self) -> int:
        return len(self.pool)

    def offer(self, offers: Sequence[Offer]) -> None:
        """Have these sequences of one batch kept; returns at once."""
        self._filler.wake()
        if self.fills and offers:
            held = [offers[0].last, *(keys for keys, _ in offers[0].layers)]  # values lie beside their keys
            self._filler.offer(offers, sum(part.untyped_storage().nbytes() for part in held))

    def admit(self, sequences: int) -> bool:
        """Whether so many sequences of a batch may be offered now; if not, they are counted."""
        return self.fills and self._filler.admit(sequences)

    def flush(self, seconds: float = 60.0) -> bool:
        """Wait until all that was offered is kept or left out; False: it takes longer."""
        return self._filler.flush(seconds)

    def note_of(self, record: int) -> bytes:
        """What was kept with a record; nothing if there is no such record."""
        kept = self.pool.records.get(record - self._first)
        return b"" if kept is None else kept.note

    @property
    def done(self) -> dict[str, int]:
        """What became of offers: kept, or why not."""
        return dict(self.kept + self._filler.skipped)

    # ---- the filler's thread ----

    def _fill(self, offers: Sequence[Offer]) -> None:
        """Keep what no record serves; and learn what others have kept."""
        chosen = list(offers)
        try:
            self._learn(self._news())
            self._earn()
            if not offers:
                self.index.link(_LINKED)
            chosen = self._chosen(offers)
            if chosen:
                try:
                    self._learn(self.pool.add(self._entries(chosen)))
                except DatabaseError:
                    self._learn(self.pool.news())  # some of them may have been kept
                    raise
                self.kept["kept"] += len(chosen)
        except Exception as error:  # the thread must live: whatever it is, it costs records, no requests
            self.kept[type(error).__name__] += len(chosen)
            self._tell(type(error).__name__, f"new records are not kept: {error}")
        self.note(_NOTED)

    def _entries(self, offers: Sequence[Offer]) -> list[Entry]:
        """What becomes records. All are written in the same memory: to ask for new pages takes as long as the rest."""
        sizes = [self.layout.nbytes(len(one.tokens)) for one in offers]
        memory = np.empty(max(sizes), np.uint8)
        return [
            Entry(one.tokens.copy(), Late(size, partial(one.written, self.layout, memory)), one.note)
            for one, size in zip(offers, sizes, strict=True)
        ]  # a copy: the tokens of the whole batch would be held

    def watch(self, work: Callable[[], Work]) -> None:
        """Note from now on what requests do; `work` says how much they have done so far."""
        self._work, self._worked = work, work()

    def _earn(self) -> None:
        """Let what records saved pay for more of them: seconds of the process for a computed row, times rows saved."""
        if self._work is None:
            return
        seen, used = self._work(), time.process_time()
        before, self._earned = self._earned, (seen, used)
        if before is not None:
            new = seen.since(before[0])
            saved = max(0, new.tokens - new.rows)  # below 0: verifications
            self._filler.pace.earn((used - before[1]) * saved / max(new.rows, 1))

    def note(self, seconds: float = 0.0) -> None:
        """Keep what requests did since the last time, if that is so long ago. It raises nothing."""
        now = time.monotonic()
        if self._work is None or not self.fills or now - self._noted < seconds:
            return
        with suppress(Exception):  # the next note has it; the filler's thread, a close and an exit must go on
            done, self._noted = self._work(), now
            new = Work() if self._worked is None else done.since(self._worked)
            if new.requests:
                self.pool.note(new)
            self._worked = done

    def _news(self) -> News:
        """The pool's news; in a forked child, all that the index does not have."""
        news, anew, self._anew = self.pool.news(), self._anew, False
        if not anew:
            return news
        known = {number - self._first for number in self.index.numbers() if number >= self._first}
        records = dict(self.pool.records)
        return News([records[number] for number in sorted(records.keys() - known)], sorted(known - records.keys()))

    def _chosen(self, offers: Sequence[Offer]) -> list[Offer]:
        """Those that are not stored yet, each once.

        Sequences that are much alike are all kept: of log lines, neighbours of a batch serve .05 more than one of
        them alone (docs/filling.md).
        """
        found: dict[bytes, Offer] = {}
        for one, stored in zip(offers, self._are_stored([one.tokens for one in offers]), strict=True):
            if not one.is_finite:
                self.kept["not finite"] += 1
            elif stored or one.tokens.tobytes() in found:
                self.kept[KNOWN] += 1
            elif not self.pool.fits(self.layout.nbytes(len(one.tokens))):
                self.kept[LARGE] += 1
            elif one.spare and not self.pool.has_room:
                self.kept[SPARE] += 1
            else:
                found[one.tokens.tobytes()] = one
        return list(found.values())

    def _are_stored(self, tokens: Sequence[npt.NDArray[np.int32]]) -> list[bool]:
        """Whether there is a record of just these tokens, for each sequence."""
        if not tokens:
            return []
        starts = np.concatenate([[0], np.cumsum([len(one) for one in tokens])]).astype(np.int64)
        near = self.index.candidates(np.concatenate(tokens), starts, 4)
        return [
            any(np.array_equal(near.shelf.tokens_of(row), one) for row in rows if row >= 0)
            for one, rows in zip(tokens, near.rows.tolist(), strict=True)
        ]

    def _learn(self, news: News) -> None:
        """Let what came be found, and what went no more."""
        numbers = [self._first + kept.number for kept in news.added]
        self.index.extend([kept.tokens for kept in news.added], numbers)
        for number in news.removed:
            self._sound.pop(number, None)
            if self._first + number in self.index:
                self.index.remove(self._first + number)

    def _tell(self, kind: str, text: str) -> None:
        """Warn once of each kind of trouble."""
        if kind not in self._told:
            self._told.add(kind)
            _LOG.warning("attmemo: %s", text)

    # ---- requests ----

    def fetch(self, records: Ints) -> Fetched:
        """Rows of these records. DatabaseError: a record was dropped since it was found, or is damaged."""
        own = records >= self._first
        held: list[Kept | None] = [None] * len(records)
        for place in np.flatnonzero(own).tolist():
            held[place] = self._get(int(records[place]))
        if self._base is None or (own | (records < 0)).all():
            return Placed(self.layout, held)
        prepared = self._base.fetch(np.where(own, -1, records))
        return prepared if not own.any() else _Both(prepared, Placed(self.layout, held), own)

    def _get(self, record: int) -> Kept:
        number = record - self._first
        kept = self.pool.records.get(number)
        if kept is None:
            raise DatabaseError("a record was dropped since it was found.", "a larger max_bytes, if it is often")
        if self._sound.get(number) != kept.segment.number:
            if not kept.is_sound or kept.nbytes != self.layout.nbytes(len(kept.tokens)):
                if record in self.index:
                    self.index.remove(record)  # it is never found again; the file is left to `attmemo check`
                self._tell(DAMAGED, f"record {number} is damaged and is not served; attmemo check lists all that are")
                raise DatabaseError(f"record {number} does not match its checksum.", "attmemo check")
            self._sound[number] = kept.segment.number
        kept.segment.hit(kept.place)
        return kept

    def close(self) -> None:
        atexit.unregister(self._leave)
        self._filler.close()
        self.note()
        self.pool.close()
        self._sound = {}

    def leave_to_parent(self) -> None:
        """In a forked child: threads are gone, and locks may be held by them."""
        self._anew = True
        self._earned = None
        self._worked = None  # no lock may be taken here: a thread of the parent may hold it
        self.index.leave_to_parent()
        self.pool.leave_to_parent()
        self._filler.leave_to_parent()


def _flush(store: weakref.ref[GrowingRows]) -> None:
    """At exit: what was handed over is stored."""
    found = store()
    if found is not None:
        found.flush(_AT_EXIT)
        found.note()


def _in_child(store: weakref.ref[GrowingRows]) -> None:
    found = store()
    if found is not None:
        found.leave_to_parent()


class _Both:
    """Rows of a batch of which some records are prepared and some are not."""

    def __init__(self, prepared: Fetched, placed: Fetched, own: npt.NDArray[np.bool_]) -> None:
        self._prepared, self._placed, self._own = prepared, placed, own

    def layer(self, number: int) -> Stored:
        a, b, own = self._prepared.layer(number), self._placed.layer(number), self._own
        scales: list[npt.NDArray[np.uint64] | None] = [None, None]
        if a.key_scales is not None and b.key_scales is not None:
            assert a.value_scales is not None
            assert b.value_scales is not None
            scales = [np.where(own, b.key_scales, a.key_scales), np.where(own, b.value_scales, a.value_scales)]
        return Stored(
            np.where(own, b.keys, a.keys), np.where(own, b.values, a.values), np.where(own, b.rows, a.rows), a.dtype,
            a.row_bytes, scales[0], scales[1], a.scale_row_bytes,
        )  # fmt: skip

    def last(self) -> tuple[npt.NDArray[np.uint64], torch.dtype]:
        prepared, dtype = self._prepared.last()
        return np.where(self._own, self._placed.last()[0], prepared), dtype
