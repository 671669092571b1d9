"""Reuse of rows: a record supplies K and V of every layer, and the last hidden states, of the tokens it shares.

Only the other tokens are computed, in every layer, and attend to all keys: fresh ones and those of the record, read
where they lie. Sequences without a record are computed whole in the same packed batch.

A reused row is the row of another input: it has not seen the tokens that changed. So its output is an approximation;
`attmemo.kernels.rows` moves it with the rows that were computed.
Rows that are computed are exact arithmetic over approximate keys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from itertools import pairwise
from time import perf_counter
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.errors import AttmemoError
from attmemo.forward.context import NOTHING, Forward, Outcome
from attmemo.forward.plan import RowShare, Share
from attmemo.forward.stats import Counters
from attmemo.kernels.row_attention import Layout
from attmemo.kernels.row_sinks import Copies, Copy
from attmemo.kernels.rows import Supply, supply_rows
from attmemo.models import Call, Site, Spans
from attmemo.models.blocks import Blocks
from attmemo.packed.duplicates import Twins
from attmemo.packed.runner import Packed
from attmemo.packed.stack import ON_THE_RIGHT, Stack, put_first
from attmemo.rows.candidate import Offer
from attmemo.rows.filler import MOST_WAITING
from attmemo.rows.layout import Placed, RowLayout
from attmemo.rows.scratch import Scratch
from attmemo.rows.store import Ints, RowStore

_LOG = logging.getLogger("attmemo")

DRIFT: Final = 1.0
"""How far reused rows follow the computed ones: the share of `attmemo.kernels.rows.supply_rows`."""

# A file that went away, a closed database: they cost time, not requests.
_UNREADABLE = (AttmemoError, OSError, ValueError, IndexError)

_SCRATCH: Final = MOST_WAITING + (8 << 20)  # bytes: what waits to be stored, is stored, and is computed

_Read = tuple[Placed, npt.NDArray[np.uint64], torch.dtype]  # with what `Placed.last` gives


class Rows(Stack):
    """Serves a stack of blocks from the rows of records.

    Parameters
    ----------
    blocks : Blocks
    packed : Packed
    store : RowStore
        The records.
    guarded : bool
        Whether a guard looks at the answers: then the guard counts those that came from records.
    scratch : Scratch, optional
        Where rows wait to be stored.
    """

    name: ClassVar[str] = "rows"

    def __init__(
        self, blocks: Blocks, packed: Packed, store: RowStore, *, guarded: bool = False, scratch: Scratch | None = None
    ) -> None:
        super().__init__(blocks, packed)
        self.store, self._guarded = store, guarded
        size, dtype = blocks.heads * blocks.width, packed.dtype
        self.layout = RowLayout(len(blocks.blocks), size, blocks.heads, (dtype, dtype))
        self.scratch = scratch or Scratch(_SCRATCH)

    def spans(self, module: nn.Module, call: Call, given: Mapping[str, Any] | None) -> Spans | str:
        found = super().spans(module, call, given)
        return ON_THE_RIGHT if isinstance(found, Spans) and found.left else found

    def serve(self, site: Site, call: Call, spans: Spans, share: Share, forward: Forward) -> Tensor:
        forward.outcome = NOTHING
        if isinstance(share, RowShare) and share.last is not None:
            return self._computed(share.last, call, forward)
        if not isinstance(share, RowShare) or not (len(share.sequences) or share.admitted or share.beside):
            return super().serve(site, call, spans, share, forward)
        if not (len(share.sequences) or share.beside):
            return self._kept(call, spans, forward, share.admitted)
        start = perf_counter()
        batch, padded, _ = call.shape
        every = np.asarray(spans.lengths, np.int64)
        twins, sources = _twins(call, spans.lengths, share)
        own = np.flatnonzero(twins.own)
        # What is computed: one sequence of all twins, and behind them those that a record serves beside.
        sequence, slot, asked, beside = own, own, share.record[own].astype(np.int64), share.beside
        if beside:
            sequence = np.concatenate([own, np.fromiter(beside, np.int64, len(beside))])
            slot = np.concatenate([own, batch + np.arange(len(beside))])
            asked = np.concatenate([asked, np.array([one.record for one in beside.values()], np.int64)])
            sources = [*sources, *[one.source for one in beside.values()]]
        lengths, source = every[sequence], sources[0] if len(sources) == 1 else np.concatenate(sources)
        read, records = self._fetch(asked, forward.counters)
        if records is not asked:
            source = np.where(np.repeat(records < 0, lengths), np.int32(-1), source)
        layout = layout_of(lengths, source)
        planned = perf_counter()
        # A record may be longer than every input: keys of its end move farther than an input is long.
        longest = max(max(spans.lengths), int(source.max()) + 1)
        offers, copies = dict[int, Offer](), Copies([])
        if share.admitted:
            computed_at = dict(zip(own.tolist(), pairwise(layout.starts.tolist()), strict=False))
            offers, copies = self._offers(share.admitted, computed_at)
        opened = source[layout.key_starts[:-1]] < 0  # sequences whose first row is computed
        # A first row of a record is given as it is if no row of its sequence is computed. Else it moves with those.
        apart = (opened | (np.diff(layout.starts) == 0)).all()
        wanted = self._asked(forward, layout.starts[:-1][opened], copies) if apart else None
        if layout.starts[-1]:
            assert layout.positions is not None
            places = np.repeat(sequence * padded, lengths)[source < 0] + layout.positions
            found = self.compute(
                call, torch.from_numpy(places), layout, longest, fetch=None if read is None else read[0].layer,
                keep=copies, asked=wanted, packed=forward.packed,
            )  # fmt: skip
        else:  # records supply all
            found = torch.empty(0, call.shape[2], dtype=(forward.packed or self.packed).dtype)
        done = perf_counter()
        every_slot = batch + len(beside), padded
        if wanted is not None:
            forward.firsts += 1
            output = put_first(found, wanted, layout.starts[:-1][opened], slot[opened], every_slot)
            if read is not None and not opened.all():
                self._put_stored_firsts(output, read, source[layout.key_starts[:-1]], slot * padded)
        else:
            output = found.new_empty(every_slot[0] * padded, found.shape[1])
            begins, dtype = (np.zeros(len(slot), np.uint64), found.dtype) if read is None else read[1:]
            supply = Supply(source, layout.key_starts, layout.starts, slot * padded, begins, dtype)
            supply_rows(output, found, supply, padded, DRIFT)
        output = output.view(*every_slot, output.shape[1])
        if len(own) < batch:
            twins.spread(output)
        fetching = planned - start + perf_counter() - done
        computed, reused = np.diff(layout.starts), records >= 0
        rows, served = np.zeros(batch, np.int64), np.zeros(batch, np.bool_)
        rows[own], served[own] = computed[: len(own)], reused[: len(own)]
        from_records = served[twins.firsts]
        forward.outcome = Outcome(
            served=frozenset(np.flatnonzero(from_records).tolist()), offers=offers,
            beside={} if not beside else {int(sequence[number]): output[slot[number]]
                                          for number in range(len(own), len(sequence)) if reused[number]},
            last=output[:batch] if beside else None,
        )  # fmt: skip
        self._count(
            spans.lengths, rows, twins, forward, fetch=fetching, blocks=done - planned,
            beside=int(computed[len(own) :].sum()), first=wanted is not None,
        )  # fmt: skip
        if not self._guarded and not forward.repeats:
            repeated = int((from_records & (rows[twins.firsts] == 0)).sum())
            forward.counters.answered(len(forward.outcome.served) - repeated, repeated)
        return output[:batch]

    @staticmethod
    def _put_stored_firsts(output: Tensor, read: _Read, source: npt.NDArray[np.int32], places: Ints) -> None:
        """Put first rows that records supply to these places of ``[R, H]``; `source` below 0: it does not."""
        stored, ends = np.flatnonzero(source >= 0), np.zeros(np.count_nonzero(source >= 0) + 1, np.int64)
        supply = Supply(source[stored], np.arange(len(ends)), ends, places[stored], read[1][stored], read[2])
        supply_rows(output, output[:0], supply, 1)

    def _kept(
        self, call: Call, spans: Spans, forward: Forward, admitted: Mapping[int, npt.NDArray[np.int32]]
    ) -> Tensor:
        """All sequences computed whole; those of `admitted` may become records."""
        offers: dict[int, Offer] = {}

        def copied(starts: Ints) -> Copies:
            rows = enumerate(pairwise(starts.tolist()))
            made, copies = self._offers(admitted, {place: span for place, span in rows if span[0] < span[1]})
            offers.update(made)
            return copies

        output = self._whole(call, spans, forward, copied)
        forward.outcome = Outcome(offers=offers)
        return output

    def _offers(
        self, admitted: Mapping[int, npt.NDArray[np.int32]], computed: Mapping[int, tuple[int, int]]
    ) -> tuple[dict[int, Offer], Copies]:
        """What is offered once it is computed, and what has to be copied for that: by place in the batch.

        `computed`: first row and the one behind the last, of the sequences that are computed. Others offer nothing.
        """
        own, take, generation = self.layout, self.scratch.take, self.store.generation
        offers = {place: Offer.of(tokens, own, take(own.nbytes(len(tokens))), generation)
                  for place, tokens in admitted.items() if place in computed}  # fmt: skip
        return offers, Copies([Copy(*computed[place], offer.rows, offer.last) for place, offer in offers.items()])

    @staticmethod
    def _computed(last: Tensor, call: Call, forward: Forward) -> Tensor:
        """Last hidden states that an earlier forward computed for this call."""
        if last.shape != call.shape:
            raise ValueError(f"blocks are called with {call.shape} after {tuple(last.shape)}")
        forward.outcome = Outcome(served=frozenset(range(len(last))))
        return last

    def _fetch(self, records: Ints, counters: Counters) -> tuple[_Read | None, Ints]:
        """Rows of these records, and the records: the same array, or another one without those that cannot be read.

        None: there is no record.
        """
        if (records < 0).all():
            return None, records
        try:
            return self._read(records), records
        except _UNREADABLE:
            found = records.copy()
        for place in np.flatnonzero(found >= 0).tolist():
            try:
                self._read(found[place : place + 1])
            except _UNREADABLE as error:
                if counters.failure("a record could not be read", error, 1):
                    _LOG.warning("attmemo: a record could not be read, its sequence is computed whole: %s", error)
                found[place] = -1
        try:
            return (None, found) if (found < 0).all() else (self._read(found), found)
        except _UNREADABLE:  # one more went meanwhile
            return None, np.full_like(records, -1)

    def _read(self, records: Ints) -> _Read:
        found = self.store.fetch(records)
        return found, *found.last()

    def close(self) -> None:
        self.store.close()


def _twins(call: Call, lengths: list[int], share: RowShare) -> tuple[Twins, list[npt.NDArray[np.int32]]]:
    """Which sequences are computed for which, and the sources of those that are computed, one behind the other.

    Twins have the same rows, the same record, and take the same rows of it.
    """
    firsts, batch = call.firsts, len(lengths)
    if firsts is not None and (firsts == np.arange(batch)).all():
        return Twins.none(batch), [share.source]
    ends = np.cumsum(lengths).tolist()
    parts = [share.source[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    kinds = list(zip(share.record.tolist(), map(np.ndarray.tobytes, parts), strict=True))
    if firsts is None:
        twins = Twins.of(call.hidden, lengths, kinds)
    else:
        twins = Twins.alike(list(zip(firsts.tolist(), kinds, strict=True)))
    return twins, [parts[place] for place in np.flatnonzero(twins.own).tolist()]


def layout_of(lengths: npt.NDArray[np.int64], source: npt.NDArray[np.int32]) -> Layout:
    """Where the computed rows and all keys of a batch lie.

    `source` ``[sum n]`` is as in `RowShare`.
    """
    key_starts = np.concatenate([[0], np.cumsum(lengths)])
    fresh = source < 0
    numbers = np.cumsum(fresh)  # of fresh rows up to here
    starts = np.concatenate([[0], numbers])[key_starts]
    positions = np.arange(len(source)) - np.repeat(key_starts[:-1], lengths)
    sources = np.where(fresh, numbers - 1, -1 - source)
    return Layout(starts, key_starts, positions[fresh].astype(np.int32), sources.astype(np.int32))
