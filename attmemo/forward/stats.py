"""Counters of an engine, safe under threads."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from attmemo.forward.plan import Plan
from attmemo.system.locking import thread_lock

Skip = Literal[
    "asked_without_reuse", "positions_given", "positions_with_gaps", "no_token_ids", "no_records",
    "lookup_does_not_pay", "records_do_not_pay", "not_through_the_model",
]  # fmt: skip
"""Why sequences were not looked up; docs/python.md has a sentence for each."""
_MOST_FAILURES = 20  # texts of different errors that are kept


@dataclass(slots=True)
class LayerStats:
    """One layer since the counters were last reset."""

    sequences: int = 0
    queries: int = 0
    hits: int = 0
    declined: int = 0  # near enough, but too few in their batch to pay
    predicted: float = 0.0  # sum over hits
    lookup_seconds: float = 0.0
    serve_seconds: float = 0.0
    exact_seconds: float = 0.0  # of the misses in mixed batches
    saved_ms: float = 0.0  # by the profile's cost model, for the sequences served


@dataclass(slots=True)
class Work:
    """What a stack of blocks did since the counters were last reset."""

    sequences: int = 0
    reused: int = 0  # of these, answers that came from a record of another input
    repeated: int = 0  # of these, answers that the input's own record gave again as they were
    tokens: int = 0
    rows: int = 0  # that were computed
    shared: int = 0  # rows of prefixes that another sequence of the batch computed
    stored: int = 0  # rows of stored prefixes
    firsts: int = 0  # calls that gave first rows alone
    lookup_seconds: float = 0.0
    plan_seconds: float = 0.0
    fetch_seconds: float = 0.0
    blocks_seconds: float = 0.0

    @property
    def seconds_per_row(self) -> float | None:
        """Seconds that blocks took for a computed row; None: none was computed."""
        return self.blocks_seconds / self.rows if self.rows else None


class Counters:
    """Everything that `stats()` reports."""

    def __init__(self, layers: int) -> None:
        self._lock = thread_lock()
        self.layers = [LayerStats() for _ in range(layers)]
        self.done = Work()
        self.skipped: Counter[Skip] = Counter()  # sequences that were not looked up
        # Sequences by reason, and by the error's text; for maps times layers.
        self.ineligible: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def call(
        self, layer: int, plan: Plan, sequences: int, serve: float = 0.0, exact: float = 0.0, saved: float = 0.0
    ) -> None:
        """One call of one layer: seconds of serving and of the misses, and milliseconds saved by the cost model."""
        with self._lock:
            if not plan.eligible:
                self.ineligible[plan.reason or ""] += sequences
                return
            stats, share = self.layers[layer], plan.layers.get(layer)
            stats.sequences += sequences
            stats.queries += sequences if plan.found is not None else 0
            stats.declined += plan.declined.get(layer, 0)
            if share is not None:
                stats.hits += len(share.sequences)
                stats.predicted += share.predicted
                stats.serve_seconds += serve
                stats.exact_seconds += exact
                stats.saved_ms += saved

    def work(
        self, sequences: int, tokens: int, rows: int, *, fetch: float = 0.0, blocks: float = 0.0, first: bool = False
    ) -> None:
        """Work of one call of a stack: its sequences, their tokens, rows computed, and seconds by part.

        A call that repeats a part of another one adds rows and seconds, no sequence.
        """
        with self._lock:
            self.done.sequences += sequences
            self.done.tokens += tokens
            self.done.rows += rows
            self.done.firsts += first
            self.done.fetch_seconds += fetch
            self.done.blocks_seconds += blocks

    def whole(
        self, sequences: int, tokens: int, rows: int, seconds: float, first: bool, why: Skip | bool = False
    ) -> None:
        """One forward of a stack that looked nothing up; `why`, if that counts."""
        with self._lock:
            if isinstance(why, str):
                self.skipped[why] += sequences
            self.layers[0].sequences += sequences
            self.layers[0].serve_seconds += seconds
            self.done.sequences += sequences
            self.done.tokens += tokens
            self.done.rows += rows
            self.done.firsts += first
            self.done.blocks_seconds += seconds

    def prefixes(self, shared: int, stored: int) -> None:
        """Rows that were not computed: another sequence of the batch has them, and they were stored."""
        with self._lock:
            self.done.shared += shared
            self.done.stored += stored

    def answered(self, reused: int, repeated: int) -> None:
        """So many answers came from records, and stay: of other inputs, and of the inputs' own."""
        with self._lock:
            self.done.reused += reused
            self.done.repeated += repeated

    def planned(self, lookup: float, plan: float) -> None:
        """Seconds of one lookup of rows, and of the plan behind it."""
        with self._lock:
            self.done.lookup_seconds += lookup
            self.done.plan_seconds += plan

    def skip(self, reason: Skip, sequences: int) -> None:
        """Sequences that were computed whole without a lookup."""
        with self._lock:
            self.skipped[reason] += sequences

    def copy(self) -> Counters:
        """The counters as they are now, while other threads go on."""
        found = Counters(0)
        with self._lock:
            found.layers = [replace(layer) for layer in self.layers]
            found.done, found.skipped = replace(self.done), self.skipped.copy()
            found.ineligible, found.failures = self.ineligible.copy(), self.failures.copy()
        return found

    def looked_up(self, layer: int, seconds: float) -> None:
        """Time of one lookup."""
        with self._lock:
            self.layers[layer].lookup_seconds += seconds

    @property
    def failed(self) -> int:
        """All that `failures` counts."""
        return sum(self.failures.values())

    def reason(self, otherwise: str = "no reason was counted") -> str:
        """Why something was not served, for messages: the first reason that was counted."""
        return next(iter([*self.failures, *self.ineligible]), otherwise)

    def failure(self, what: str, error: Exception, sequences: int) -> int:
        """Count an error that leaves sequences exact.

        Returns
        -------
        int
            Sequences that met the error, where a warning is due: at first, and when they have a digit more; else 0.
        """
        text = str(error).splitlines()
        reason = f"{what} ({type(error).__name__}: {text[0] if text else ''})"
        with self._lock:
            if reason not in self.failures and len(self.failures) >= _MOST_FAILURES:
                reason = f"{what} ({type(error).__name__})"
            before = self.failures[reason]
            self.failures[reason] = now = before + sequences
        return now if not before or len(str(now)) > len(str(before)) else 0
