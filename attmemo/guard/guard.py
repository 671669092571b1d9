"""The guard: which answers may be served from a record, which are verified, and what was learned from it.

    a request with a record
      nothing changed ───────────────────────────────► served: its answer is the record's
      a change that is not verified ─────────────────► exact, and verified: the change may be learned    (paid)
      all changes verified (words in free slots: only with a great margin)
        answers after such changes are far away, or the
        record's own answer is below the margin ─────► more rows are computed. If that does not do: exact; a small
                                                       share is verified
        the budget does not afford it ───────────────► exact, and verified: a sample for the certificate (paid)
        drawn by chance, a small share;
        before there is a certificate all (paid) ────► served, and verified afterwards: a sample, too. Where too many
                                                       answers are owed already, drawn ones are exact, and verified
        else ────────────────────────────────────────► served. Below the margin it is computed again, with more rows
                                                       where that may do; below the margin of such answers, exactly
    a request without a record ──────────────────────► exact

What is paid for comes from an account: so many verifications at first, then a few for each request, and more for each
served answer. On an empty account a request is exact and is not verified: where nothing comes of it, verifying ends.

What is verified at once is answered exactly: that cannot change an answer, whatever the verification finds. What is
verified afterwards was afforded like every served answer.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from attmemo.errors import ArgumentError
from attmemo.guard.certificate import Certificate, Counts, certifies
from attmemo.guard.draw import Draw
from attmemo.guard.futile import Futile
from attmemo.guard.ledger import NO_SUMS, Learned, Ledger, beyond, joined
from attmemo.guard.margin import MOVED, VECTORS, WIDER, Margin
from attmemo.guard.state import State
from attmemo.guard.verdict import Verdict, served_name
from attmemo.guard.verified import Cover, Gaps, Verified
from attmemo.locking import ThreadLock

DRAWN: Final = 0.02
"""Share of the answers to be served that are verified, at most."""
SAVED: Final = 500.0
"""Verifications that are paid at first, and most that may be saved up: a certificate for 1 % takes 318."""
EARNED: Final = 0.1
"""Verifications that each request pays for."""
RETURNED: Final = 0.2
"""Verifications that each served answer pays for."""
AGAIN: Final = 0.1
"""Share of the served answers that are verified while a certificate has to be earned again: a changed answer asks for
326 samples more. To verify all of them would make these requests as slow as exact ones. A tenth is enough where .7 to
.95 of the requests are served: the certificate is back before what was saved up of the budget is spent."""


class Guard:
    """Keeps the share of changed answers within a budget.

    Parameters
    ----------
    budget : float
        Share of all answers that may change, in (0, 1).
    confidence : float
        In (0, 1).
    drawn : float
        Share of the answers to be served that are verified, at most (`draw`).
    free : bool
        Whether any value may stand in a slot that enough values were harmless in.
    seed : int, optional
        Of the draw of samples.

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
        self.budget, self.confidence, self.draw = float(budget), float(confidence), Draw(drawn)
        self.verified, self.futile, self.futile_wider = Verified(free), Futile(), Futile()
        self.margin, self.wider = Margin(float(budget)), Margin(float(budget), WIDER)
        self.compares_vectors = False  # answers are vectors, not classes
        self.certificate = Certificate(budget, confidence)
        self._alarmed, self._epoch = False, 0
        self._stands = False  # certified once, and nothing was refused for want of samples since
        self._synced: dict[str, float] | None = None  # counts of the last sync
        self._inherited: dict[str, float] = {}  # counts of the parent, in a forked child before its first sync
        self._dirty = False
        self._since = time.time()
        self._saved = self._patience = SAVED
        self._random = random.Random(seed)
        self._done: Counter[str] = Counter()
        self._lock = ThreadLock()

    @classmethod
    def of(cls, budget: float, confidence: float, learned: Learned, *, vectors: bool = False) -> Guard:
        """A guard that stands where one stood when it was stored; `vectors`: answers are vectors."""
        found = cls(budget, confidence)
        if vectors:
            found.compare_vectors()
        found.verified.merge(learned.hashes)
        found._epoch, found._since, found._alarmed = learned.epoch, learned.since, learned.epoch > 0
        found._adopt(learned.counts)
        return found

    def compare_vectors(self) -> None:
        """Answers are vectors; to be called before the first request."""
        self.margin, self.wider = Margin(self.budget, VECTORS), Margin(self.budget, MOVED)
        self.compares_vectors = True

    def ask(self, gaps: Gaps, own: float | None = None) -> Cover:
        """How well the changes of a request are verified; `own`: how sure the record's own answer is, if known."""
        with self._lock:
            cover = self.verified.ask(gaps)
            if not cover or not (self.futile.expects(gaps) or self.is_low(own, cover)):
                return cover
            # A vector with more rows is compared with the one with fewer: both are needed.
            return Cover.UNSURE if not self.compares_vectors and self.may_widen(gaps, own, cover) else Cover.FUTILE

    def may_widen(self, gaps: Gaps, own: float | None, cover: Cover) -> bool:
        """Whether an answer below the margin may be served with more rows computed."""
        if not self.widens:
            return False
        if not (cover is Cover.FULLY or self._is_like_fully(cover)) or self.futile_wider.expects(gaps):
            return False
        return own is None or not self.wider.is_hopeless(own, False)

    def serves(self, cover: Cover) -> bool:
        """Whether such a request would be served now, unless it is drawn as a sample."""
        return cover is Cover.SAME or (cover.may_serve and self.certificate.affords())

    def decide(
        self, covers: Sequence[Cover | None], room: int = 0, times: Sequence[int] | None = None
    ) -> list[Verdict | None]:
        """What becomes of the requests of a batch, by how well changes are verified; None: there is no record.

        Parameters
        ----------
        covers : sequence of Cover or None
        room : int
            So many answers may be verified afterwards.
        times : sequence of int, optional
            How often each request is in the batch; once by default. All of them get one answer: the budget must afford
            all, or none is served. One at most is verified, for more say nothing new.
        """
        with self._lock:
            found = list[Verdict | None]()
            for cover, count in zip(covers, [1] * len(covers) if times is None else times, strict=True):
                verdict = self._decide(cover, self.certificate.affords(count), room > 0)
                found.append(verdict)
                again = cover if verdict is not None and verdict.serves else None
                for _ in range(count - 1):
                    self._decide(again, True, False, draws=False)
                self._stands = self.certified or (self._stands and self.certificate.affords())
                room -= verdict is Verdict.OWE
            return found

    def _decide(self, cover: Cover | None, affords: bool, later: bool, draws: bool = True) -> Verdict | None:
        """One request; the account and the draw go on.

        `affords`: it may be served. `later`: its answer may be verified afterwards. `draws`: it may be a sample.
        """
        earned, verdict, share = EARNED, None, self.draw.share if draws else 0.0
        pays = draws and self._saved >= 1.0
        learns = later and pays and not self.certified
        owes = share  # how probably, if it is served
        if learns:
            owes = max(share, AGAIN) if self._stands else 1.0
        seen = 1.0 if affords or pays else share
        above = owes if affords else seen
        if cover is not Cover.FUTILE:  # such an answer is in none of the margins' counts
            if self.widens:
                self.wider.request(seen, above)
            if cover is not Cover.UNSURE:
                self.margin.request(seen, above)
        if cover is Cover.SAME:
            verdict = Verdict.SERVE
        elif cover is Cover.FUTILE:
            verdict = Verdict.LEARN if self._random.random() < self.draw.most else Verdict.LEAVE
        elif cover:
            drawn = self._random.random() < (owes if affords else share)
            if affords and not (drawn and not later):
                verdict, earned = Verdict.OWE if drawn else Verdict.SERVE, EARNED + RETURNED
                if learns and drawn:
                    self._pay()
            else:
                verdict = Verdict.SAMPLE if drawn else self._paid(Verdict.SAMPLE)
        elif cover is not None:
            verdict = self._paid(Verdict.LEARN)
        self._saved = min(self._saved + earned, SAVED)
        serves, same = verdict is not None and verdict.serves, cover is Cover.SAME
        self.certificate.request(serves and not same, same)
        self._done["whole" if verdict is None else served_name(same) if serves else verdict.value] += 1
        self._dirty = True
        return verdict

    def _paid(self, verdict: Verdict) -> Verdict:
        """This verification, or none if the account is empty."""
        if self._saved < 1.0:
            return Verdict.LEAVE
        self._pay()
        return verdict

    def _pay(self) -> None:
        self._saved -= 1.0
        self._patience -= 1.0

    def note_rows(self, rows: int, drawable: int, tokens: int) -> None:
        """What the rows of a batch say about the draw: `Draw.note`."""
        with self._lock:
            self.draw.note(rows, drawable, tokens)

    def is_low(self, margin: float | None, cover: Cover) -> bool:
        """Whether an answer is too near to another one to be served."""
        if margin is None or cover is Cover.SAME:
            return False
        return not margin >= self._margin_of(cover).least_for(cover is Cover.FREELY)

    def _is_like_fully(self, cover: Cover) -> bool:
        """Whether words stand in free slots, and no greater margin is asked for that: vectors have one for both."""
        return self.compares_vectors and cover is Cover.FREELY

    def _margin_of(self, cover: Cover) -> Margin:
        return self.wider if cover is Cover.UNSURE else self.margin

    def computed_again(self, margin: float | None, differs: bool, epoch: int) -> None:
        """An answer below the margin was computed again with more rows, or exactly; whether that differs."""
        with self._lock:
            if margin is not None and epoch == self._epoch:
                self._dirty = True
                self.margin.sample(margin, differs)

    def compared(
        self, verdict: Verdict, gaps: Gaps, cover: Cover, margin: float | None, changed: bool, epoch: int | None = None
    ) -> bool:
        """An answer from a record and the exact one were compared. True: an alarm began.

        `epoch`: in which it was decided. If an alarm came since, the answer is no sample, and nothing is given back.
        """
        with self._lock:
            if verdict is Verdict.SERVE:
                self._rename(False, "below the margin")
            if epoch is not None and epoch != self._epoch:
                return False
            self._dirty = True
            # What is served is compared if it is low, and what is owed if it is not, whatever the margin is by now.
            low = verdict is Verdict.SERVE or (verdict is not Verdict.OWE and self.is_low(margin, cover))
            if margin is not None and (cover in (Cover.FULLY, Cover.UNSURE) or self._is_like_fully(cover)):
                self._margin_of(cover).sample(margin, changed)
            if cover and not verdict.serves:
                self._note_kind(gaps, cover, margin)
            if low:
                if verdict is Verdict.SERVE:
                    self._saved -= RETURNED  # it saved nothing
                    self.certificate.give_back()
            elif verdict in (Verdict.SAMPLE, Verdict.OWE) and self.certificate.sample(changed, verdict.serves):
                self.verified.changed(gaps)
                self._alarm()
                return True
            if not changed:
                self.verified.stayed(gaps)
            elif not low:  # below the margin, the margin has done its work
                self.verified.changed(gaps)
            return False

    def served(self, gaps: Gaps, cover: Cover, margin: float | None) -> None:
        """An answer from a record is known, and may be below the margin."""
        with self._lock:
            if cover is not Cover.SAME:
                self._note_kind(gaps, cover, margin)

    def take_back(self, cover: Cover, epoch: int) -> None:
        """An answer that was to be served was computed exactly after all, and is compared with nothing."""
        with self._lock:
            same = cover is Cover.SAME
            self._rename(same, "whole after all")
            if epoch != self._epoch:
                return
            if same:
                self.certificate.counts.repeated = max(self.certificate.counts.repeated - 1, 0)
            else:
                self._saved -= RETURNED
                self.certificate.give_back()

    def _rename(self, same: bool, name: str) -> None:
        """Count a request that was to be served under another name."""
        self._done[served_name(same)] -= 1
        self._done[name] += 1

    def give_back(self) -> None:
        """An answer that was to be verified afterwards will not be: what was paid for that comes back."""
        with self._lock:
            if not self.certified:
                self._saved, self._patience = min(self._saved + 1.0, SAVED), self._patience + 1.0

    def _note_kind(self, gaps: Gaps, cover: Cover, margin: float | None) -> None:
        if margin is not None:
            kinds = self.futile_wider if cover is Cover.UNSURE else self.futile
            kinds.note(gaps, self._margin_of(cover).is_hopeless(margin, cover is Cover.FREELY))

    def sync(self, ledger: Ledger) -> None:
        """Share what was learned with a file. OSError: it cannot be written; nothing is lost but the sharing."""
        with ledger.lock(), self._lock:
            stored, own = ledger.read(), self._counts()
            known = self._synced
            if self._inherited and (stored is None or stored.epoch < self._epoch):
                # What the parent counted it will write itself.
                own = beyond(own, self._inherited)
                self._adopt(own)
                self._synced = known = None
            self._inherited = {}
            if stored is not None:
                self.verified.merge(stored.hashes)
                if stored.epoch > self._epoch:  # another process raised the alarm: what was counted here is void
                    self._epoch, self._since, own = stored.epoch, stored.since, dict(stored.counts)
                    self._alarmed, self._stands = True, False
                    self._saved = self._price() if known is None else max(self._saved, self._price())
                    self._patience = max(self._patience, self._price())
                    self.certificate.restart()
                elif stored.epoch == self._epoch:
                    own = joined(beyond(own, known or {}), stored.counts)
                    self._since = min(self._since, stored.since)
                self._adopt(own)
                # Until the file has the sum: what is known beyond the file's counts is not shared yet.
                self._synced = dict(stored.counts) if stored.epoch == self._epoch else None
            ledger.write(Learned(self._epoch, self._since, own, self.verified.state()))
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
        own = {name: float(getattr(counts, name)) for name in Counts.__slots__}
        return own | self.margin.counts() | self.wider.counts()

    def _adopt(self, counts: Mapping[str, float]) -> None:
        types = {name: type(getattr(Counts(), name)) for name in Counts.__slots__}
        known = {name: kind(counts.get(name, NO_SUMS.get(name, (0, 0))[1])) for name, kind in types.items()}
        self.certificate.adopt(Counts(**known))
        self.margin.adopt(counts)
        self.wider.adopt(counts)

    def _price(self) -> float:
        """What is paid for a certificate of this epoch: after every alarm less, for it may never come."""
        return SAVED * 0.5 ** min(self._epoch, 64)

    def _alarm(self) -> None:
        self._alarmed, self._since, self._epoch, self._synced = True, time.time(), self._epoch + 1, None
        self._stands = False
        self.margin.rise()
        self.wider.rise()
        self.certificate.restart()
        self._saved = max(self._saved, self._price())
        self._patience = max(self._patience, self._price())

    @property
    def epoch(self) -> int:
        """How many alarms there were."""
        return self._epoch

    @property
    def learns(self) -> bool:
        """Whether it still learns what a certificate needs: verifications are an investment, and reuse is slow.

        Not once it is certified, and not for ever: after as many verifications as are paid at first.
        """
        return not self.certified and self._patience >= 1.0

    @property
    def widens(self) -> bool:
        """Whether more rows are computed for any answer. Not for vectors before there is a certificate.

        Until then all are computed whole anyway, as far as the account pays: more rows for some would save nothing,
        and exact answers say more of the margin.
        """
        return not self.compares_vectors or self.stands

    @property
    def stands(self) -> bool:
        """Whether there is a certificate. Where more is served than before, more samples are needed; meanwhile the
        account may afford all the same."""
        return self.certified or self._stands

    @property
    def certified(self) -> bool:
        """Whether every answer whose changes are verified may be served."""
        c = self.certificate.counts
        could = c.served + c.same + c.changed - c.owed
        return certifies(self.certificate.highest, could, c.requests, self.budget)

    def state(self) -> State:
        """Where the guard stands now."""
        with self._lock:
            c = self.certificate.counts
            name = "certified" if self.stands else "alarm" if self._alarmed else "learning"
            highest = self.certificate.cost / c.requests if c.requests else 0.0
            return State(
                name, highest, c.copy(), self.margin.least, len(self.verified),
                self._since, dict(self._done),
            )  # fmt: skip

    def stats(self) -> dict[str, Any]:
        """The state, JSON-able."""
        state = self.state()
        counts = state.counts
        return {
            "state": state.name,
            "says": state.sentence(self.confidence),
            "budget": self.budget,
            "confidence": self.confidence,
            "highest_share_changed": state.highest,
            "highest_rate_of_served": self.certificate.highest,
            "verified": counts.same + counts.changed,
            "verified_afterwards": counts.owed,
            "changed": counts.changed,
            "requests": counts.requests,
            "reused": counts.served,
            "repeated": counts.repeated,
            "margin": state.margin,
            "margin_with_more_rows": self.wider.least,
            "changes_known": state.verified,
            "since": state.since,
            "done": state.done,
        }
