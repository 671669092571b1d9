"""Which record serves each input of a batch: `native/plan.c` in one call, and its oracle in plain Python.

Each candidate is aligned with the input (`attmemo.kernels.align`). The one with the fewest rows to compute comes
first. What changed between both (`attmemo.kernels.changes`) is looked up in a table of known changes. If the changes
are not known well enough to serve, the next candidate is tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attmemo.kernels import _plan
from attmemo.kernels.align import Alignment, Ints, Rule, Tokens, aligned
from attmemo.kernels.changes import Changes, changes
from attmemo.kernels.kinds import Kinds
from attmemo.kernels.omp_team import join_torch

Floats = npt.NDArray[np.float32]

_MANY: Final = 1 << 12  # tokens times candidates: less is faster done than another thread is told of

join_torch(_plan.use_team)


class Evidence(IntEnum):
    """How well the changes between an input and its record are known. From `FREELY` on the record may serve."""

    NONE = 0  # no record supplies enough
    ROUNDED = 1  # there is a record of the very input, in fewer bits than the model computes with: it serves nothing
    UNKNOWN = 2  # a change is not known
    UNSURE = 3  # all are known, but the record's own answer is too near to another one
    FREELY = 4  # all are known, some of them as words that were never exchanged: like others, or in free slots
    FULLY = 5
    SAME = 6  # nothing changed: the answer is the record's own


class Mark(IntEnum):
    """What a key of the table stands for."""

    FREE = 0
    SLOT = 1  # data: harmless values; in the upper half changed answers that the slot is blamed for
    VALUE = 2  # a harmless value; data: its group
    CHANGE = 3  # a harmless change
    HARMFUL = 4  # a value or a change that changed an answer


class Table(NamedTuple):
    """Known changes by hash: open addressing in a power of two of places, at least one of them free."""

    keys: npt.NDArray[np.uint64]
    marks: npt.NDArray[np.uint8]
    data: npt.NDArray[np.uint64]


def table_of(
    keys: npt.NDArray[np.uint64], marks: npt.NDArray[np.uint8], data: npt.NDArray[np.uint64], places: int
) -> Table:
    """Return a table of these entries, whose keys differ, in a power of two of places, more than there are entries."""
    found = Table(np.zeros(places, np.uint64), np.zeros(places, np.uint8), np.zeros(places, np.uint64))
    left = np.arange(len(keys))
    at = (keys & np.uint64(places - 1)).astype(np.int64)
    while len(left):
        free = found.marks[at] == Mark.FREE
        # One entry for each free place.
        _, firsts = np.unique(np.where(free, at, -1 - np.arange(len(at))), return_index=True)
        mine = np.zeros(len(at), np.bool_)
        mine[firsts] = free[firsts]
        put, where = left[mine], at[mine]
        found.keys[where], found.data[where], found.marks[where] = keys[put], data[put], marks[put]
        left, at = left[~mine], (at[~mine] + 1) & (places - 1)
    return found


NOTHING_KNOWN: Final = Table(np.zeros(1, np.uint64), np.zeros(1, np.uint8), np.zeros(1, np.uint64))


class Demand(NamedTuple):
    """What a record must supply, and what must be known of its changes.

    Attributes
    ----------
    share : float
        Share of its tokens that a record must supply to an input; below 0: any record will do.
    least, least_freely : float
        The least sureness of a record's own answer; the same where words were never exchanged.
    tried : int
        Records of an input that are looked at, the one with the fewest rows to compute first.
    numbers, words : int
        Harmless values that make a slot of numbers, or of words, free; 0: it is never free.
    penalty : int
        Times as many values more are needed for each changed answer that the slot is blamed for.
    rounds : bool
        Last hidden states of records are stored in fewer bits than the model computes with: no record is
        `Evidence.SAME`.
    """

    share: float = -1.0
    least: float = 0.0
    least_freely: float = 0.0
    tried: int = 1
    numbers: int = 0
    words: int = 0
    penalty: int = 0
    rounds: bool = False


@dataclass(frozen=True, slots=True)
class RowPlan(Alignment):
    """Records of B inputs with n tokens, and what they supply. `record` is -1 where none supplies enough.

    Attributes
    ----------
    evidence : uint8 [B]
        `Evidence`.
    changes : Changes
        The gaps between inputs and their records.
    """

    evidence: npt.NDArray[np.uint8]
    changes: Changes


def plan(
    tokens: Tokens,
    starts: Ints,
    candidates: Ints,
    record_tokens: Tokens,
    record_starts: Ints,
    own: Floats,
    kinds: Kinds,
    rule: Rule,
    demand: Demand,
    table: Table = NOTHING_KNOWN,
) -> RowPlan:
    """Choose a record for each input.

    Parameters
    ----------
    tokens : int32 [n]
        Token ids of B inputs, one behind the other.
    starts : int64 [B + 1]
        Where each input starts, and n.
    candidates : int64 [B, k]
        Numbers of records to try, -1: none.
    record_tokens : int32 [t]
        Token ids of the records.
    record_starts : int64 [R + 1]
        Record r is ``record_tokens[record_starts[r] : record_starts[r + 1]]``. Only those of candidates are read.
    own : float32 [R]
        How sure the own answer of each record is; NaN: not known.
    kinds : uint8 [V]
        `NUMBER` or `WORD` for each token id; ids from V on are words.
    rule : Rule
        Which rows are computed.
    demand : Demand
    table : Table
        Known changes. Another thread may add to it meanwhile.

    Raises
    ------
    ValueError
        Arrays of other types or shapes, starts that do not rise to n, a candidate that is no record.
    """
    batch, most = len(candidates), len(tokens) + len(candidates)
    slot, value, former, change = np.empty((4, most), np.uint64)
    gaps = Changes(np.empty(most, np.int64), slot, value, former, change, np.empty(most, np.uint8))
    found = RowPlan(
        np.empty(batch, np.int64), np.empty(len(tokens), np.int32), np.empty(batch, np.int64),
        np.empty(batch, np.uint8), gaps,
    )  # fmt: skip
    arrays = (
        tokens, starts, candidates, record_tokens, record_starts, kinds, own, *table,
        found.record, found.source, found.computed, found.evidence, *gaps.columns,
    )  # fmt: skip
    moved = -1 if rule.most_moved is None else rule.most_moved
    settings = (rule.near, rule.near_where(words=False), moved, rule.edges, rule.ends)
    threads = torch.get_num_threads() if len(tokens) * candidates.shape[1] > _MANY else 1
    count = _plan.plan(arrays, settings, demand, threads)
    return RowPlan(found.record, found.source, found.computed, found.evidence, gaps.first(count))


def plan_in_python(
    tokens: Tokens,
    starts: Ints,
    candidates: Ints,
    record_tokens: Tokens,
    record_starts: Ints,
    own: Floats,
    kinds: Kinds,
    rule: Rule,
    demand: Demand,
    table: Table = NOTHING_KNOWN,
) -> RowPlan:
    """What `plan` returns, one input and one candidate at a time."""
    batch = len(candidates)
    record, computed = np.full(batch, -1, np.int64), np.diff(starts)
    source, evidence = np.full(len(tokens), -1, np.int32), np.zeros(batch, np.uint8)
    gaps: list[Changes] = []
    for b, (start, stop) in enumerate(pairwise(starts.tolist())):
        input_, rows = (tokens[start:stop], np.array([0, stop - start])), (record_tokens, record_starts)
        same = [
            number for number in candidates[b].tolist() if number >= 0 and stop > start
            and np.array_equal(tokens[start:stop], record_tokens[record_starts[number] : record_starts[number + 1]])
        ]  # fmt: skip
        if same and demand.rounds:
            evidence[b] = Evidence.ROUNDED
        elif same:
            record[b], computed[b], evidence[b] = min(same), 0, Evidence.SAME
            source[start:stop] = np.arange(stop - start)
        if same:
            continue
        alone = []
        for number in candidates[b].tolist():
            if number >= 0:
                stored = record_tokens[record_starts[number] : record_starts[number + 1]]
                found = np.array(aligned(tokens[start:stop].tolist(), stored.tolist(), rule, kinds), np.int32)
                alone.append((number, found, int(np.count_nonzero(found < 0))))
        alone.sort(key=lambda one: one[2])  # the first of equals stays first
        kept: Changes | None = None
        for number, found, fewest in alone[: demand.tried]:
            enough = fewest < stop - start and stop - start - fewest >= demand.share * (stop - start)
            if not (demand.share < 0 or enough):
                break
            partner = np.where(found < -1, -2 - found, found).astype(np.int32)
            own_gaps = changes(*input_, np.array([number]), *rows, partner, kinds)
            sure = evidence_in_python(own_gaps, float(own[number]), demand, table)
            if kept is None or sure > Evidence.UNSURE:
                kept, record[b], computed[b], evidence[b] = own_gaps, number, fewest, sure
                source[start:stop] = found
            if sure > Evidence.UNSURE:
                break
        if kept is not None:
            gaps.append(Changes(kept.sequence + b, *kept.columns[1:]))
    columns = [np.concatenate(parts) for parts in zip(*(one.columns for one in gaps), strict=True)]
    types: tuple[Any, ...] = (np.int64, np.uint64, np.uint64, np.uint64, np.uint64, np.uint8)
    every: list[Any] = columns if gaps else [np.empty(0, kind) for kind in types]
    return RowPlan(record, source, computed, evidence, Changes(*every))


def evidence_in_python(gaps: Changes, own: float, demand: Demand, table: Table) -> Evidence:
    """How well all these gaps are known; `own`: how sure the record's own answer is."""
    known = {
        int(key): (Mark(mark), int(data)) for key, mark, data in zip(*table, strict=True) if mark != Mark.FREE
    }  # fmt: skip
    found, nothing = Evidence.FULLY, (Mark.FREE, 0)
    for _, *hashes, word in zip(*(column.tolist() for column in gaps.columns), strict=True):
        (slot, counts), value, former, (change, _) = (known.get(one, nothing) for one in hashes)
        if slot != Mark.SLOT or change == Mark.HARMFUL:
            return Evidence.UNKNOWN
        if change == Mark.CHANGE:
            continue
        harmless = value[0] == former[0] == Mark.VALUE
        if harmless and (not word or value[1] == former[1]):
            found = Evidence.FREELY if word else found
            continue
        needed = (demand.words if word else demand.numbers) * (1 + demand.penalty * (counts >> 32))
        if Mark.HARMFUL in (value[0], former[0]) or not needed or counts & 0xFFFFFFFF < needed:
            return Evidence.UNKNOWN
        if word:
            found = Evidence.FREELY
    return Evidence.UNSURE if own < (demand.least_freely if found is Evidence.FREELY else demand.least) else found
