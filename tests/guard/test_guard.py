"""The guard: what is served stays within the budget, whatever the stream; what is not verified is never served."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from guard_tools import gaps, number, word
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.guard import certificate as certificate_module
from attmemo.guard.certificate import Counts, highest_rate
from attmemo.guard.guard import ALIKE, HOPE, Guard
from attmemo.guard.margin import CLASSES, SEEN, VECTORS, Margin
from attmemo.guard.verdict import Verdict
from attmemo.kernels.plan import Evidence

STEPS, FIRST, SURE = CLASSES.steps, CLASSES.first, CLASSES.sure


@pytest.fixture(autouse=True, scope="module")
def _remembered() -> Iterator[None]:
    """Rates of the same counts are found once: thousands of streams pass the same counts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate_module, "highest_rate", cache(highest_rate))
        yield


def _ask(margin: Margin, requests: int) -> None:
    """As many requests whose answers, below the margin, were seen."""
    margin.request(requests, 0.0)


def _asked(requests: int) -> Margin:
    """A margin after so many requests."""
    margin = Margin(0.01)
    _ask(margin, requests)
    return margin


class TestMargin:
    def test_it_falls_only_after_enough_answers_were_seen(self) -> None:
        margin = _asked(100_000)
        first = margin.least
        assert first == STEPS[FIRST]
        for _ in range(SEEN - 1):
            margin.sample(0.4, False)
            assert margin.least == first
        margin.sample(0.4, False)
        assert margin.least < first

    def test_it_falls_only_once_the_budget_covers_what_was_not_seen_to_change(self) -> None:
        margin = _asked(400)
        for _ in range(SEEN):
            margin.sample(0.4, False)  # up to 2.3 of them may change; half the budget is 2.0
        assert margin.least == STEPS[FIRST]
        _ask(margin, 100)
        margin.sample(0.4, False)
        assert margin.least < STEPS[FIRST]

    def test_it_does_not_fall_if_too_many_answers_would_have_changed(self) -> None:
        margin = _asked(1000)
        for _ in range(10 * SEEN):
            margin.sample(0.4, True)
        assert margin.least == STEPS[FIRST]

    def test_it_falls_as_far_as_few_answers_would_have_changed(self) -> None:
        margin = _asked(10_000)
        for _ in range(10 * SEEN):
            for seen, changed in ((0.45, False), (0.25, False), (0.15, True)):
                margin.sample(seen, changed)
        assert margin.least == 0.2

    def test_it_rises_again_if_more_would_have_changed(self) -> None:
        margin = _asked(1000)
        for _ in range(SEEN):
            for seen in (0.45, 0.25, 0.15):
                margin.sample(seen, False)
        assert margin.least == 0.1
        for _ in range(SEEN):
            margin.sample(0.15, True)
        assert margin.least > 0.15

    def test_answers_once_allowed_count_by_their_rate_however_many_requests_follow(self) -> None:
        margin = _asked(2000)
        for _ in range(SEEN):
            margin.sample(0.45, False)
        for _ in range(6):
            margin.sample(0.45, True)  # .0053 a request at most, with a sureness of 90 %
        assert margin.least == STEPS[FIRST]
        _ask(margin, 200)
        margin.sample(0.45, False)
        assert margin.least == STEPS[FIRST - 1]
        _ask(margin, 100_000)  # answers between the two steps are given now, and change as often as before
        for answer in range(400):
            margin.sample(0.25, answer % 10 == 0)
        assert margin.least == STEPS[FIRST - 1]

    def test_answers_that_are_given_are_watched_in_the_samples_drawn_of_them(self) -> None:
        margin = _asked(1000)
        for _ in range(SEEN):
            margin.sample(0.45, False)
        assert margin.least == STEPS[FIRST - 1]
        for _ in range(1000):
            margin.request(1.0, 0.02)
        for _ in range(20):
            margin.sample(0.45, True)
        assert margin.least == STEPS[FIRST]

    def test_it_does_not_fall_past_a_step_where_nothing_was_seen(self) -> None:
        margin = _asked(100_000)
        for _ in range(10 * SEEN):
            margin.sample(0.15, False)
        assert margin.least == STEPS[FIRST]

    def test_it_rises_after_each_alarm_and_forgets(self) -> None:
        margin = _asked(100_000)
        for _ in range(2 * SEEN):
            margin.sample(0.15, False)
        for step in range(FIRST + 1, len(STEPS) + 3):
            margin.rise()
            _ask(margin, 100_000)
            assert margin.least == STEPS[min(step, len(STEPS) - 1)]
            for _ in range(SEEN - 1):
                margin.sample(0.4, False)
            assert margin.least == STEPS[min(step, len(STEPS) - 1)]

    @given(st.lists(st.tuples(st.floats(0.0, 1.0), st.booleans(), st.integers(0, 10**6)), max_size=80),
           st.integers(0, 3))  # fmt: skip
    @settings(max_examples=100, deadline=None)
    def test_it_is_always_a_step_and_goes_on_from_counts(
        self, seen: list[tuple[float, bool, int]], alarms: int
    ) -> None:
        margin = Margin(0.05)
        for _ in range(alarms):
            margin.rise()
        highest = margin.least
        for found, changed, requests in seen:
            margin.request(requests, requests / 50)
            margin.sample(found, changed)
            assert margin.least in STEPS
            assert STEPS[0] <= margin.least <= highest
            assert margin.least_freely == max(margin.least, SURE)
        other = Margin(0.05)
        other.adopt(margin.counts())
        assert other.counts() == margin.counts()
        assert other.least in STEPS
        assert STEPS[0] <= other.least <= highest
        if seen and seen[-1][0] < highest:  # else nothing was chosen after the last requests
            assert other.least == margin.least


def sampled(guard: Guard, count: int, changed: bool = False, margin: float | None = None) -> list[bool]:
    """Verify so many answers that would have been served."""
    known = Evidence.FULLY
    return [guard.compared(Verdict.SAMPLE, gaps(number(1, 2, 3)), known, margin, changed) for _ in range(count)]


def certified(drawn: float = 0.0) -> Guard:
    """A guard with a certificate, and enough saved up for a few answers."""
    guard = Guard(0.01, 0.95, drawn=drawn, seed=0)
    guard.certificate.adopt(Counts(same=2000))
    guard.decide([Evidence.NONE] * 20)
    assert guard.state().name == "certified"
    return guard


class TestGuard:
    @pytest.mark.parametrize("value", [0, 1, 0.0, 1.0, -0.1, 2, float("nan"), float("inf"), True, "0.1", None])
    @pytest.mark.parametrize("name", ["budget", "confidence"])
    def test_numbers_out_of_range_are_refused_by_name(self, name: str, value: Any) -> None:
        with pytest.raises(ValueError, match=f"^{name} must be a number between 0 and 1"):
            Guard(**{"budget": 0.01, "confidence": 0.95} | {name: value})

    @pytest.mark.parametrize("drawn", [-0.1, 1.1, float("nan")])
    def test_a_share_that_is_none_is_refused(self, drawn: float) -> None:
        with pytest.raises(ValueError, match="share drawn"):
            Guard(0.01, 0.95, drawn=drawn)

    def test_before_any_sample_nothing_that_changed_is_served(self) -> None:
        guard = Guard(0.01, 0.95)
        verdicts = guard.decide([Evidence.FULLY, Evidence.FREELY, Evidence.UNKNOWN, Evidence.NONE] * 20)
        assert verdicts == [Verdict.SAMPLE, Verdict.SAMPLE, Verdict.LEARN, None] * 20
        assert guard.state().name == "learning"

    def test_the_same_input_is_served_at_once(self) -> None:
        guard = Guard(0.01, 0.95)
        assert guard.decide([Evidence.SAME] * 5) == [Verdict.SERVE] * 5
        assert guard.state().counts.served == 0  # an answer that cannot change costs nothing
        assert not guard.is_low(0.0, Evidence.SAME)

    @given(
        st.lists(st.sampled_from([one for one in Evidence if one < Evidence.FREELY]), min_size=1, max_size=100),
        st.booleans(),
    )
    @settings(max_examples=40, deadline=None)
    def test_what_is_not_verified_is_never_served(self, covers: list[Evidence], with_certificate: bool) -> None:
        guard = certified() if with_certificate else Guard(0.01, 0.95)
        for cover, verdict in zip(covers, guard.decide(covers), strict=True):
            assert verdict is None if cover < Evidence.UNKNOWN else verdict in (Verdict.LEARN, Verdict.LEAVE)

    def test_a_certified_guard_serves_what_is_verified(self) -> None:
        guard = certified()
        assert guard.decide([Evidence.FULLY, Evidence.FREELY]) == [Verdict.SERVE] * 2
        assert guard.state().counts.served == 2
        assert sum(verdict is Verdict.SERVE for verdict in guard.decide([Evidence.FULLY] * 100)) == 100

    def test_some_of_what_would_be_served_is_drawn(self) -> None:
        verdicts = certified(drawn=0.2).decide([Evidence.FULLY] * 1000)
        assert set(verdicts) == {Verdict.SERVE, Verdict.SAMPLE}
        assert 140 < verdicts.count(Verdict.SAMPLE) < 260
        assert set(certified(drawn=1.0).decide([Evidence.FULLY] * 50)) == {Verdict.SAMPLE}

    @pytest.mark.parametrize("cover", [Evidence.UNKNOWN, Evidence.FULLY])
    def test_about_so_many_are_verified_as_may_be_chosen_by_chance(self, cover: Evidence) -> None:
        guard = Guard(1e-9, 0.95, drawn=0.0, seed=0)  # nothing is affordable
        assert set(guard.decide([cover] * 100, most=0)) == {Verdict.LEAVE}
        verified = [place for _ in range(100) for place, verdict in enumerate(guard.decide([cover] * 100, most=10))
                    if verdict is not Verdict.LEAVE]  # fmt: skip
        each = 10 if cover is Evidence.FULLY else ALIKE  # many unknown changes are the same
        assert len(verified) == pytest.approx(100 * each, rel=0.15)
        assert set(verified) == set(range(100)), "the first of a batch are no better samples"
        assert Verdict.LEAVE not in guard.decide([cover] * each, most=10)

    def test_what_is_drawn_is_verified_whatever_else_may_be(self) -> None:
        guard = Guard(1e-9, 0.95, drawn=1.0)
        assert Verdict.LEAVE not in guard.decide([Evidence.FULLY] * 200, most=0)

    def test_a_record_whose_own_answer_is_unsure_is_left_and_sometimes_tried(self) -> None:
        guard = certified(drawn=0.5)
        verdicts = guard.decide([Evidence.UNSURE] * 50)
        assert set(verdicts) == {Verdict.LEAVE, Verdict.LEARN}
        counts = guard.margin.counts()
        guard.compared(Verdict.LEARN, gaps(number(1, 2, 3)), Evidence.UNSURE, STEPS[0], False)
        assert guard.margin.counts() == counts, "the margin was not asked"

    def test_requests_that_are_the_same_get_one_answer_and_are_verified_once_at_most(self) -> None:
        guard = certified(drawn=1.0)
        assert guard.decide([Evidence.FULLY] * 4, [0, 0, 2, 0], 9) == [
            Verdict.OWE, Verdict.SERVE, Verdict.OWE, Verdict.SERVE
        ]  # fmt: skip
        assert guard.certificate.counts.served == 4
        assert guard.decide([Evidence.UNKNOWN] * 2, [0, 0]) == [Verdict.LEARN, None]
        assert guard.certificate.counts.requests == 26

    def test_where_a_proof_is_hopeless_records_are_seldom_tried_until_it_is_not(self) -> None:
        guard = Guard(0.01, 0.95, seed=0)
        guard.certificate.adopt(Counts(same=300, changed=40, requests=800))
        assert 20 < sum(guard.learns() for _ in range(1000)) < 120
        assert 200 < sum(guard.learns(16) for _ in range(320)) < 240, "as often, where others were not looked at"
        guard.certificate.adopt(Counts(same=300, changed=40, requests=800, repeated=100))
        assert all(guard.learns() for _ in range(100)), "equal inputs need no proof, but records"
        guard.certificate.adopt(Counts(same=4000, changed=40, requests=8000))
        assert all(guard.learns() for _ in range(100))

    def test_after_an_alarm_records_are_tried_as_at_first(self) -> None:
        guard = Guard(0.01, 0.95, seed=0)
        guard.try_all([Evidence.NONE] * HOPE)
        assert not all(guard.learns() for _ in range(100))
        guard.alarm()
        assert all(guard.learns() for _ in range(100))

    def test_a_margin_rises_with_an_alarm(self) -> None:
        guard = certified()
        before = guard.margin.least
        while not sampled(guard, 1, changed=True)[0]:
            pass
        assert guard.margin.least > before

    def test_a_certificate_that_stood_stands_while_the_account_affords_all(self) -> None:
        guard = certified()
        guard.certificate.adopt(Counts(same=400, requests=4000, served=3600))
        guard.decide([Evidence.NONE])
        assert guard.certified
        guard.certificate.sample(True)
        assert not guard.certified
        assert guard.state().name == "certified"
        assert guard.decide([Evidence.FULLY] * 8, room=8) == [Verdict.OWE] * 8, "each is verified if there is time"
        assert guard.decide([Evidence.FULLY] * 8, room=0) == [Verdict.SERVE] * 8, "else as many as are drawn"

    def test_alarms_without_end_are_no_error(self) -> None:
        guard = Guard(0.01, 0.95, drawn=0.0)
        guard.epoch = 5000
        guard.verified.stayed(gaps(word(1, 2, 3)))
        while not guard.compared(Verdict.SAMPLE, gaps(word(1, 2, 3)), Evidence.FULLY, None, True):
            pass
        assert guard.state().name == "alarm"
        assert guard.verified.ask(gaps(word(1, 2, 3))) is Evidence.UNKNOWN

    def test_a_change_that_stayed_is_covered_and_one_that_changed_an_answer_is_not(self) -> None:
        guard, these = Guard(0.01, 0.95), gaps(word(1, 2, 3))
        assert guard.verified.ask(these) is Evidence.UNKNOWN
        guard.compared(Verdict.LEARN, these, Evidence.UNKNOWN, None, False)
        assert guard.verified.ask(these) is Evidence.FULLY
        guard.compared(Verdict.LEARN, these, Evidence.FULLY, None, True)
        assert guard.verified.ask(these) is Evidence.UNKNOWN

    def test_only_samples_count_for_the_certificate(self) -> None:
        guard = Guard(0.01, 0.95)
        for verdict in (Verdict.LEARN, Verdict.LEAVE, Verdict.SERVE):
            guard.compared(verdict, gaps(), Evidence.FULLY, None, False)
        sampled(guard, 3, margin=0.3)  # below the margin: computed again, not served
        assert (guard.state().counts.same, guard.state().counts.changed) == (0, 0)
        sampled(guard, 3, margin=0.6)
        assert guard.state().counts.same == 3

    def test_an_answer_below_the_margin_is_low_and_one_that_is_no_number_too(self) -> None:
        guard = Guard(0.01, 0.95)
        assert guard.is_low(0.49, Evidence.FULLY)
        assert not guard.is_low(0.5, Evidence.FULLY)
        assert guard.is_low(0.5, Evidence.FREELY)
        assert not guard.is_low(SURE, Evidence.FREELY)
        assert guard.is_low(float("nan"), Evidence.FULLY)
        assert not guard.is_low(None, Evidence.FREELY)

    def test_a_served_answer_below_the_margin_is_counted_as_such(self) -> None:
        guard = certified()
        guard.verified.stayed(gaps(number(1, 2, 3)))
        assert guard.decide([Evidence.FULLY] * 2) == [Verdict.SERVE] * 2
        guard.compared(Verdict.SERVE, gaps(number(1, 2, 3)), Evidence.FULLY, 0.1, True)
        done = guard.state().done
        assert (done["reused"], done["below the margin"]) == (1, 1)
        assert guard.verified.ask(gaps(number(1, 2, 3))) is Evidence.FULLY  # the margin has done its work

    def test_a_certificate_stands_while_more_is_served_and_the_account_affords_it(self) -> None:
        guard = Guard(0.01, 0.95, drawn=0.0)
        guard.certificate.adopt(Counts(same=200, requests=400, served=0))
        guard.decide([Evidence.NONE])
        assert guard.state().name == "certified", "a half could be served"
        for _ in range(20):
            guard.decide([Evidence.FULLY] * 20)
        assert not guard.certified, "all could be served: that takes more samples"
        assert guard.certificate.affords()
        assert guard.state().name == "certified"
        while guard.certificate.affords():
            guard.decide([Evidence.FULLY])
        guard.decide([Evidence.FULLY])
        assert guard.state().name == "learning"

    @pytest.mark.parametrize("cover", [Evidence.FULLY, Evidence.FREELY])
    def test_every_vector_that_is_compared_counts_for_the_margin(self, cover: Evidence) -> None:
        """Also where words stand in free slots: such vectors lower the margin, so those that changed keep it up."""
        guard, own = certified(), gaps(number(1, 2, 3))
        guard.compare_vectors()
        guard.compared(Verdict.OWE, own, cover, VECTORS.steps[1], True)
        assert sum(count for name, count in guard.margin.counts().items() if "_changed_" in name) == 1

    @pytest.mark.parametrize("margin", [0.1, 0.99])
    def test_a_served_answer_that_was_computed_again_was_low_whatever_the_margin_is_now(self, margin: float) -> None:
        guard, own = certified(), gaps(number(1, 2, 3))
        guard.verified.stayed(own)
        assert guard.decide([Evidence.FULLY]) == [Verdict.SERVE]
        guard.compared(Verdict.SERVE, own, Evidence.FULLY, margin, True)
        assert guard.state().done["below the margin"] == 1
        assert guard.verified.ask(own) is Evidence.FULLY, "its slot is not blamed"

    def test_too_many_changed_answers_raise_an_alarm_that_begins_again(self) -> None:
        guard = certified()
        before = guard.margin.least
        alarms = [sampled(guard, 1, changed=True)[0] for _ in itertools.takewhile(
            lambda _: guard.state().name != "alarm", range(200))]  # fmt: skip
        assert alarms == [False] * (len(alarms) - 1) + [True]
        state = guard.state()
        assert state.counts == Counts()
        assert state.margin > before
        assert guard.decide([Evidence.FULLY]) == [Verdict.SAMPLE]
        sampled(guard, 500, margin=0.99)
        assert guard.state().name == "certified"

    @pytest.mark.parametrize("rate", [0.0, 0.01, 0.05])
    def test_the_expected_number_of_changed_answers_stays_within_the_budget(self, rate: float) -> None:
        """In all streams but a share of them, at any time; the stakes are those of chance only."""
        streams, budget, over = 15, 0.02, 0
        for seed in range(streams):
            guard, random = Guard(budget, 0.9, seed=seed), np.random.default_rng(seed)
            served, worst = 0, -np.inf
            for request in range(1, 501):
                verdict = guard.decide([Evidence.FULLY])[0]
                served += verdict is Verdict.SERVE
                worst = max(worst, rate * served - budget * request)
                if verdict is Verdict.SAMPLE:
                    guard.compared(verdict, gaps(), Evidence.FULLY, None, bool(random.random() < rate))
            over += worst > 1e-9
            assert rate or served > 250
        assert over / streams <= 0.1 + 3 * np.sqrt(0.1 * 0.9 / streams)

    def test_a_sentence_says_all_that_matters(self) -> None:
        guard = certified()
        guard.decide([Evidence.FULLY] * 30 + [Evidence.SAME] * 9 + [Evidence.NONE] * 50)
        said = guard.state().sentence(0.95)
        pattern = (
            r"certified: (\d+) reused answers verified, (\d+) changed; "
            r"of (\d+) requests (\d+) \((\d+) %\) reused and "
            r"(\d+) \((\d+) %\) repeated; at most ([\d.e-]+) % of all answers changed, 95 %, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC"
        )
        found = re.fullmatch(pattern, said)
        assert found is not None, said
        assert found.groups()[:7] == ("2000", "0", "109", "30", "28", "9", "8")
        assert 0 < float(found[8]) <= 1.0
        assert Guard(0.01, 0.95).state().sentence(0.95).startswith(
            "evidence collected: 0 of 158 reused answers verified, 0 changed; of 0 requests 0 reused and 0 repeated;"
        )

    def test_stats_are_plain_numbers(self) -> None:
        stats = certified().stats()
        assert json.loads(json.dumps(stats)) == stats
        assert (stats["state"], stats["verified"], stats["changed"]) == ("certified", 2000, 0)
        assert stats["highest_rate_of_served"] <= 0.01

    def test_counts_of_many_threads_add_up(self) -> None:
        guard, threads, rounds = Guard(0.01, 0.95, seed=1), 8, 60
        covers = [Evidence.FULLY, Evidence.NONE, Evidence.SAME, Evidence.UNKNOWN]
        verdicts: list[Verdict | None] = []

        def work(thread: int) -> None:
            for turn in range(rounds):
                found = guard.decide(covers)
                verdicts.extend(found)
                these = gaps(number(thread, turn, turn + 1))
                guard.verified.ask(these)
                for verdict, cover in zip(found, covers, strict=True):
                    if verdict in (Verdict.SAMPLE, Verdict.LEARN):
                        guard.compared(verdict, these, cover, None, False)

        workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        state = guard.state()
        total = threads * rounds * len(covers)
        assert state.counts.requests == len(verdicts) == sum(state.done.values()) == total
        assert state.counts.same == verdicts.count(Verdict.SAMPLE) > 0
        assert state.counts.served == verdicts.count(Verdict.SERVE) - threads * rounds
        assert state.verified == threads * (rounds + 1)
