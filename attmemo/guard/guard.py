"""The guard: which answers may be served from a record, which are verified, and what was learned from it.

    a request with a record
      nothing changed ───────────────────────────────► repeated: its answer is the record's
      a change that is not known ────────────────────► exact, and verified: the change may be learned
      all changes known (words that were never exchanged: only with a great margin)
        the record's own answer is below the margin ─► exact; a small share is verified
        the budget does not afford it ───────────────► exact, and verified: a sample for the certificate
        drawn by chance, a small share;
        before there is a certificate all ───────────► reused, and verified while no request runs: a sample, too.
                                                       Where too many wait for that, drawn ones are exact, and verified
        else ────────────────────────────────────────► reused. Below the margin it is computed again, exactly
    a request without a record ──────────────────────► exact

What verifying may cost is not the guard's matter: a caller says how many it may verify at once
(`attmemo.guard.time_account`). Beyond, only the small share is verified that is drawn anyway. While no request runs
records of inputs that were answered exactly are tried (`attmemo.guard.deferred`).

What is verified at once is answered exactly: that cannot change an answer, whatever the verification finds. What is
verified afterwards was afforded like every reused answer.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attmemo.errors import ArgumentError
from attmemo.guard.certificate import Certificate, Counts, certifies, samples_needed
from attmemo.guard.file import NO_SUMS, Learned, Ledger, beyond, joined
from attmemo.guard.known_changes import Gaps, Verified
from attmemo.guard.margin import VECTORS, Margin
from attmemo.guard.state import State
from attmemo.guard.verdict import Verdict, served_name
from attmemo.kernels.plan import Demand, Evidence
from attmemo.system.locking import thread_lock

DRAWN: Final = 0.0075
"""Share of the answers to be reused that are verified, whatever was verified before."""
ALIKE: Final = 8
"""Sequences of a forward, about, whose unknown changes are tried at once: many of them change the same."""
ALL: Final = 1 << 30
HOPE: Final = 4096
"""Inputs without a certificate after which records are seldom tried while no request runs."""
RARELY: Final = 1 / 16
"""Share of the forwards that are learned from then."""
TRIED: Final = 4
"""Records of a sequence that are looked at, the one with the fewest rows to compute first, until all that changed is
known. Of the log lines of docs/guard.md 4 serve as many as 16 do, and 1 serves 0.02 of the lines less."""

# Of enumerations: a member takes longer to find than a number to be compared, and a batch compares many.
_NONE, _UNKNOWN, _UNSURE, _FREELY, _SAME = map(
    int, (Evidence.NONE, Evidence.UNKNOWN, Evidence.UNSURE, Evidence.FREELY, Evidence.SAME)
)
_SERVE, _OWE, _SAMPLE, _LEARN, _LEAVE = Verdict.SERVE, Verdict.OWE, Verdict.SAMPLE, Verdict.LEARN, Verdict.LEAVE

EQUAL_ONLY: Final = "; labels are about attacks: only equal inputs are reused, similar ones with reuse='rows' alone"


class Guard:
    """Keeps the share of changed answers within a budget.

    Parameters
    ----------
    budget : float
        Share of all answers that may change, in (0, 1).
    confidence : float
        In (0, 1).
    drawn : float
        Share of the answers to be reused that are verified in any case.
    free : bool
        Whether any value may stand in a slot that enough values were harmless in.
    seed : int, optional
        Of the draw of samples.

    Attributes
    ----------
    epoch : int
        How many alarms there were.

    Raises
    ------
    ArgumentError
        A number is out of its range.
    """

    def __init__(
        self, budget: float, confidence: float, *, drawn: float = DRAWN, free: bool = True, seed: int | None = None
    ) -> None:  # fmt: skip
        for name, value in (("budget", budget), ("confidence", confidence)):
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < 1.0:
                what = f"{name} must be a number between 0 and 1; got {value!r}."
                raise ArgumentError(what, "budget=0.01 lets 1 % of answers change; confidence=0.95: how sure that is")
        if not 0.0 <= drawn <= 1.0:
            raise ValueError(f"the share drawn for verification must be in [0, 1]; got {drawn!r}")
        self.budget, self.confidence, self.drawn = float(budget), float(confidence), drawn
        self.equal_only = False  # whether answers are reused for equal inputs alone
        self.verified, self.margin = Verified(free), Margin(float(budget))
        self.certificate = Certificate(budget, confidence)
        self._alarmed, self.epoch = False, 0
        self._stands = False  # certified once, and nothing was refused for want of samples since
        self._synced: dict[str, float] | None = None  # counts of the last sync
        self._inherited: dict[str, float] = {}  # counts of the parent, in a forked child before its first sync
        self._tried = 0  # inputs, while no request ran, since there was a certificate
        self._dirty = False
        self._since = time.time()
        self._random = random.Random(seed)
        self._done: Counter[str] = Counter()
        self._lock = thread_lock()

    @classmethod
    def of(cls, budget: float, confidence: float, learned: Learned, *, vectors: bool = False) -> Guard:
        """Return a guard that stands where one stood when it was stored; `vectors`: answers are vectors."""
        found = cls(budget, confidence)
        if vectors:
            found.compare_vectors()
        found.verified.merge(learned.hashes)
        found.epoch, found._since, found._alarmed = learned.epoch, learned.since, learned.epoch > 0
        found._adopt(learned.counts)
        return found

    def compare_vectors(self) -> None:
        """Take answers for vectors; to be called before the first request."""
        self.margin = Margin(self.budget, VECTORS)

    def demand(self, share: float, rounds: bool = False) -> Demand:
        """Return what a plan of rows asks of records now: this share of the tokens, and what the guard knows."""
        margin = self.margin
        return Demand(share, margin.least, margin.least_freely, TRIED, *self.verified.needs, rounds)

    def decide(
        self, evidence: Sequence[int], firsts: Sequence[int] | None = None, room: int = 0, most: int = ALL
    ) -> list[Verdict | None]:
        """Decide what becomes of the requests of a batch, and count them; None: there is no record.

        Parameters
        ----------
        evidence : sequence of int
            `Evidence`: how well the changes of each request are known.
        firsts : sequence of int, optional
            For each request the first one that is the same: often itself. All of these get one answer, and one of them
            at most is verified, for more say nothing new.
        room : int
            So many answers may be verified afterwards.
        most : int
            So many answers, chosen by chance, may be verified at once beside those that are drawn, of those with
            unknown changes about `ALIKE`; by default all.
        """
        with self._lock:
            times = Counter(range(len(evidence)) if firsts is None else firsts)
            kinds, wanted, repeated = list(map(evidence.__getitem__, times)), list[bool](), list[bool]()
            for number, kind in enumerate(kinds):
                if self.equal_only and kind != _SAME:
                    kind = kinds[number] = _NONE
                wanted.append(_FREELY <= kind < _SAME)
                repeated.append(kind == _SAME)
            affords = self.certificate.spend(list(times.values()), wanted, repeated)
            certified = self.certified
            if max(kinds, default=_NONE) < _UNKNOWN:
                self._done["whole"] += len(evidence)
                self._note_decided(certified)
                return [None] * len(evidence)
            decided: dict[int, Verdict | None] = {}
            drawn, below, above, asking, unknown = self.drawn, 0.0, 0.0, 0, 0
            for kind, affordable in zip(kinds, affords, strict=True):
                if not affordable and _UNKNOWN <= kind < _SAME:
                    asking, unknown = asking + 1, unknown + (kind == _UNKNOWN)
            seen = max(drawn, min(1.0, most / asking)) if asking else drawn
            few = unknown and most < ALL
            tries = max(drawn, min(seen, ALIKE / unknown)) if few else seen
            for (place, count), kind, affordable in zip(times.items(), kinds, affords, strict=True):
                chance, verdict = self._random.random(), None
                if kind == _SAME:
                    verdict = _SERVE
                elif affordable:
                    owes = drawn if certified or room <= 0 else 1.0
                    below, above = below + 1.0, above + owes
                    verdict = _SERVE if chance >= owes else _OWE if room > 0 else _SAMPLE
                    room -= verdict is _OWE
                    for _ in range(count if verdict is _SAMPLE else 0):
                        self.certificate.give_back()
                elif kind >= _UNKNOWN:
                    learns = drawn if kind == _UNSURE else tries if kind == _UNKNOWN else seen
                    now = _LEARN if kind < _FREELY else _SAMPLE
                    if now is _SAMPLE:
                        below, above = below + seen, above + seen
                    verdict = now if chance < learns else _LEAVE
                serves = verdict is _SERVE or verdict is _OWE
                if serves:
                    name = "repeated" if kind == _SAME else "reused"
                else:
                    name = "whole" if verdict is None else verdict.value
                self._done[name] += count if serves else 1
                if count > 1 and not serves:
                    self._done["whole"] += count - 1
                decided[place] = verdict
            self.margin.request(below, above)
            self._note_decided(certified)
            if firsts is None or len(times) == len(evidence):
                return list(decided.values())
            later = {_SERVE: _SERVE, _OWE: _SERVE}
            return [
                decided[first] if first == place else later.get(decided[first])  # type: ignore[arg-type]
                for place, first in enumerate(firsts)
            ]

    def try_all(self, evidence: Sequence[int]) -> list[Verdict | None]:
        """Return what is verified of inputs that were answered exactly; None: there is no record to try."""
        with self._lock:
            known = 0 if self.equal_only else sum(Evidence.FREELY <= kind < Evidence.SAME for kind in evidence)
            self.margin.request(known, known)
            self._tried += len(evidence)
        if self.equal_only:
            return [None] * len(evidence)
        kinds = {Evidence.UNKNOWN: Verdict.LEARN, Evidence.FREELY: Verdict.SAMPLE, Evidence.FULLY: Verdict.SAMPLE}
        return [kinds.get(Evidence(kind)) for kind in evidence]

    def _note_decided(self, certified: bool) -> None:
        self._stands = certified or (self._stands and self.certificate.affords())
        self._tried = 0 if self._stands else self._tried
        self._dirty = True

    def low(self, margins: npt.NDArray[Any], evidence: npt.NDArray[Any]) -> set[int]:
        """Return which answers of a batch are too near to another one to be reused: places in these arrays."""
        least = np.where(evidence == Evidence.FREELY, self.margin.least_freely, self.margin.least)
        return set(np.flatnonzero((margins < least) & (evidence != Evidence.SAME)).tolist())

    def is_low(self, margin: float | None, evidence: int) -> bool:
        """Return whether an answer is too near to another one to be reused."""
        if margin is None or evidence == Evidence.SAME:
            return False
        return not margin >= (self.margin.least_freely if evidence == Evidence.FREELY else self.margin.least)

    def compared(
        self, verdict: Verdict, gaps: Gaps, evidence: int, margin: float | None, changed: bool,
        epoch: int | None = None,
    ) -> bool:  # fmt: skip
        """Learn from an answer of a record and the exact one. True: an alarm began.

        `epoch`: in which it was decided. If an alarm came since, the answer is no sample, and nothing is given back.
        """
        with self._lock:
            if verdict is Verdict.SERVE:
                self._rename(False, "below the margin")
            if epoch is not None and epoch != self.epoch:
                return False
            self._dirty = True
            # What is served is compared if it is low, and what is owed if it is not, whatever the margin is by now.
            low = verdict is Verdict.SERVE or (verdict is not Verdict.OWE and self.is_low(margin, evidence))
            counts = evidence == Evidence.FULLY or (evidence == Evidence.FREELY and self._one_scale)
            if margin is not None and counts:
                self.margin.sample(margin, changed)
            if low:
                if verdict is Verdict.SERVE:
                    self.certificate.give_back()
            elif verdict in (Verdict.SAMPLE, Verdict.OWE) and self.certificate.sample(
                changed, verdict is Verdict.OWE
            ):
                self.verified.changed(gaps)
                self._alarm()
                return True
            if not changed:
                self.verified.stayed(gaps)
            elif not low:  # below the margin, the margin has done its work
                self.verified.changed(gaps)
            return False

    @property
    def _one_scale(self) -> bool:
        """Whether words that were never exchanged ask for no greater margin: those of vectors do not."""
        return self.margin.scale is VECTORS

    def take_back(self, evidence: int, epoch: int) -> None:
        """Note that an answer that was to be reused was computed exactly after all, and is compared with nothing."""
        with self._lock:
            same = evidence == Evidence.SAME
            self._rename(same, "whole after all")
            if epoch != self.epoch:
                return
            if same:
                self.certificate.counts.repeated = max(self.certificate.counts.repeated - 1, 0)
            else:
                self.certificate.give_back()

    def _rename(self, same: bool, name: str) -> None:
        """Count a request that was to be reused under another name."""
        self._done[served_name(same)] -= 1
        self._done[name] += 1

    def sync(self, ledger: Ledger) -> None:
        """Share what was learned with a file. OSError: it cannot be written; nothing is lost but the sharing."""
        with ledger.lock(), self._lock:
            stored, own = ledger.read(), self._counts()
            known = self._synced
            if self._inherited and (stored is None or stored.epoch < self.epoch):
                # What the parent counted it will write itself.
                own = beyond(own, self._inherited)
                self._adopt(own)
                self._synced = known = None
            self._inherited = {}
            if stored is not None:
                self.verified.merge(stored.hashes)
                if stored.epoch > self.epoch:  # another process raised the alarm: what was counted here is void
                    self.epoch, self._since, own = stored.epoch, stored.since, dict(stored.counts)
                    self._alarmed, self._stands, self._tried = True, False, 0
                    self.certificate.restart()
                elif stored.epoch == self.epoch:
                    own = joined(beyond(own, known or {}), stored.counts)
                    self._since = min(self._since, stored.since)
                self._adopt(own)
                # Until the file has the sum: what is known beyond the file's counts is not shared yet.
                self._synced = dict(stored.counts) if stored.epoch == self.epoch else None
            ledger.write(Learned(self.epoch, self._since, own, self.verified.state()))
            self._synced, self._dirty = dict(own), False

    def leave_to_parent(self) -> None:
        """In a forked child: what is not shared yet, the parent will share."""
        self._inherited = self._counts()
        self._synced, self._dirty = dict(self._inherited), False

    @property
    def dirty(self) -> bool:
        """Whether something was learned since the last sync."""
        return self._dirty

    def _counts(self) -> dict[str, float]:
        counts = self.certificate.counts
        counts.lowest = min(counts.lowest, self.certificate.highest)
        own = {name: float(getattr(counts, name)) for name in Counts.__slots__}
        return own | self.margin.counts()

    def _adopt(self, counts: Mapping[str, float]) -> None:
        types = {name: type(getattr(Counts(), name)) for name in Counts.__slots__}
        known = {name: kind(counts.get(name, NO_SUMS.get(name, (0, 0))[1])) for name, kind in types.items()}
        self.certificate.adopt(Counts(**known))
        self.margin.adopt(counts)

    def alarm(self) -> None:
        """Begin anew: nothing that was counted holds any more."""
        with self._lock:
            self._dirty = True
            self._alarm()

    def _alarm(self) -> None:
        self._alarmed, self._since, self.epoch, self._synced = True, time.time(), self.epoch + 1, None
        self._stands, self._tried = False, 0
        self.margin.rise()
        self.certificate.restart()

    def learns(self, forwards: int = 1) -> bool:
        """Return whether records are to be tried, and made, while no request runs, behind so many forwards.

        Seldom where there was no certificate for long, or none will come, unless equal inputs are asked: those are
        answered by their records without one.
        """
        c = self.certificate.counts
        hopes = not self.certificate.is_hopeless or c.repeated > RARELY * c.requests
        return (self._tried < HOPE and hopes) or self._random.random() < 1.0 - (1.0 - RARELY) ** forwards

    @property
    def stands(self) -> bool:
        """Whether there is a certificate. Where more is served than before, more samples are needed; meanwhile the
        account may afford all the same."""
        return self.certified or self._stands

    def rate(self) -> float:
        """Return the highest rate of changed answers that the samples do not rule out."""
        with self._lock:
            return self.certificate.highest

    def affords(self) -> bool:
        """Return whether an answer of a record of another input may be served now."""
        with self._lock:
            return self.certificate.affords()

    @property
    def certified(self) -> bool:
        """Whether every answer whose changes are verified may be served."""
        c = self.certificate.counts
        return certifies(self.certificate.highest, c.could, c.requests, self.budget)

    def state(self) -> State:
        """Where the guard stands now."""
        with self._lock:
            c = self.certificate.counts
            name = "certified" if self.stands else "alarm" if self._alarmed else "learning"
            highest = self.certificate.cost / c.requests if c.requests else 0.0
            needed = None  # asked for where there is a use: it takes a while, and the lock is held
            if name != "certified":
                needed = samples_needed(c.changed, c.could, c.requests, self.budget, self.confidence)
            return State(
                name, needed, highest, c.copy(), self.margin.least, len(self.verified),
                self._since, dict(self._done),
            )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """The state, JSON-able."""
        state = self.state()
        counts = state.counts
        return {
            "state": state.name,
            "says": state.sentence(self.confidence) + (EQUAL_ONLY if self.equal_only else ""),
            "budget": self.budget,
            "confidence": self.confidence,
            "highest_share_changed": state.highest,
            "highest_rate_of_served": self.certificate.highest,
            "verified": counts.same + counts.changed,
            "verified_needed": state.needed,
            "verified_afterwards": counts.owed,
            "changed": counts.changed,
            "requests": counts.requests,
            "reused": counts.served,
            "repeated": counts.repeated,
            "margin": state.margin,
            "changes_known": state.verified,
            "since": state.since,
            "done": state.done,
        }
