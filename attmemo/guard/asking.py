"""One guarded forward: what was asked, what records there are, and what was decided."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence, Set

import numpy as np

from attmemo.forward.plan import Reused
from attmemo.guard.verdict import Verdict
from attmemo.kernels.align import Tokens
from attmemo.kernels.changes import Changes
from attmemo.kernels.plan import Evidence, RowPlan
from attmemo.rows.planner import Flags, Ints


class Asking:
    """One guarded forward: what was decided in it.

    Parameters
    ----------
    room : int
        Answers of it that may be verified afterwards.
    spare : int
        Sequences of it that may be learned from afterwards.
    tries : bool
        In a replay of what was answered exactly: all records are tried, and sequences without one become records.
    decides : bool
        In such a replay the guard decides as it would have in the request.
    worth : bool [B], optional
        Sequences that are worth a record; by default all.
    keeps : mapping of int to int32 [n], optional
        In a replay that computes all exactly: sequences that become records, and their tokens.
    pays : bool
        Whether to look up is known to pay; else that is asked.

    Attributes
    ----------
    tokens_asked : int32 [sum n]
        Tokens of its sequences, one behind the other.
    plan : RowPlan or None
        Records of its sequences; None: none was looked up.
    starts : int64 [B + 1]
        Where the tokens of its sequences begin.
    verdicts : list of Verdict or None
        What becomes of each sequence; None: it has no record.
    served, owed, tried : list of int
        Sequences with answers from records; of these those that are verified afterwards; and sequences that are
        computed, and verified at once.
    epoch : int
        Of the guard, when it decided.
    exact, low, changed : set of int
        Sequences that were to be served, and whose answers were computed exactly after all; of these those below the
        margin; and sequences whose answer a record changed.
    grown : dict of int to int32 [n]
        Sequences that are so much longer than their records that they become records in a pause, and their tokens.
    """

    def __init__(
        self, room: int = 0, spare: int = 0, tries: bool = False, decides: bool = False, worth: Flags | None = None,
        keeps: Mapping[int, Tokens] | None = None, pays: bool = False,
    ) -> None:  # fmt: skip
        self.room, self.spare, self.tries, self.decides, self.worth = room, spare, tries, decides, worth
        self.keeps, self.pays = keeps or {}, pays
        self.tokens_asked: Tokens = np.zeros(0, np.int32)
        self.planned, self.batch = False, 0
        self.tokens = self.sequences = 0  # of the forward
        self.twice = False  # the model called its blocks twice: it has no one answer for a sequence of the first call
        self.plan: RowPlan | None = None
        self.starts: Ints = np.zeros(1, np.int64)
        self.verdicts: list[Verdict | None] = []
        self.served: list[int] = []
        self.owed: list[int] = []
        self.tried: list[int] = []
        self.epoch = 0
        self.exact: set[int] = set()
        self.low: set[int] = set()
        self.grown: dict[int, Tokens] = {}
        self.changed: set[int] = set()

    def note(self, verdicts: list[Verdict | None]) -> None:
        """Note what becomes of each sequence."""
        self.verdicts, self.served, self.owed, self.tried = verdicts, [], [], []
        serve, owe, sample, learn = Verdict.SERVE, Verdict.OWE, Verdict.SAMPLE, Verdict.LEARN
        for sequence, verdict in enumerate(verdicts):
            if verdict is serve or verdict is owe:
                self.served.append(sequence)
            if verdict is owe:
                self.owed.append(sequence)
            elif verdict is sample or verdict is learn:
                self.tried.append(sequence)

    def left(self, offered: Container[int]) -> list[int]:
        """Return the sequences that were answered exactly, and are worth a record; not those that were offered."""
        return [
            place for place in worth_of(self.worth, len(self.verdicts))
            if (verdict := self.verdicts[place]) is Verdict.LEAVE or (verdict is None and place not in offered)
        ]  # fmt: skip

    def serve_only(self, sequences: Set[int]) -> None:
        """Note that of the sequences that were to be served only these were; the others were computed exactly."""
        for sequence in [*self.served]:
            if sequence not in sequences:
                self.exact.add(sequence)
                self.served.remove(sequence)
                self.verdicts[sequence] = None
        self.owed = [sequence for sequence in self.owed if sequence in sequences] if self.owed else []

    def evidence(self, sequence: int) -> Evidence:
        """Return how well the changes of a sequence are known."""
        return Evidence.NONE if self.plan is None else Evidence(self.plan.evidence[sequence])

    def is_spare(self, sequence: int) -> bool:
        """Return whether a record could have answered a sequence, or was not sure enough."""
        verdict = self.verdicts[sequence] if self.verdicts else None
        known = verdict in (Verdict.SERVE, Verdict.OWE, Verdict.SAMPLE)
        return known or self.evidence(sequence) is Evidence.UNSURE

    def changes(self, sequence: int) -> Changes:
        """Return what changed between a sequence and its record."""
        assert self.plan is not None
        return self.plan.changes.of(sequence)

    def tokens_of(self, sequence: int) -> Tokens:
        """Return the tokens of a sequence."""
        return self.tokens_asked[self.starts[sequence] : self.starts[sequence + 1]]

    def reused(self, sequence: int) -> Reused:
        """Return how its record would serve a sequence."""
        assert self.plan is not None
        begin, end = self.starts[sequence], self.starts[sequence + 1]
        return Reused(int(self.plan.record[sequence]), self.plan.source[begin:end])


def worth_of(worth: Flags | None, count: int) -> Sequence[int]:
    """Return which sequences of a batch, of so many, are worth a record; None: all."""
    return range(count) if worth is None else np.flatnonzero(worth[:count]).tolist()
