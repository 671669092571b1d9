"""The certificate: a rate above the budget is seldom certified, what is served was earned, alarms come when due."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.guard.certificate import BETWEEN_ALARMS, EARNINGS, JUDGED, Certificate, Counts, highest_rate, stake


def request(certificate: Certificate, wanted: bool) -> bool:
    """Count one request; whether it is served."""
    return certificate.spend([1], [wanted], [False])[0]


class TestCertificate:
    @pytest.mark.parametrize(("budget", "confidence"), [(0.01, 0.95), (0.05, 0.8), (0.002, 0.99)])
    def test_answers_that_stay_certify_the_budget_nearly_as_soon_as_can_be(
        self, budget: float, confidence: float
    ) -> None:
        """No test that may be looked at any time can do it before the likelihood of so many zeros is low enough."""
        first = int(np.ceil(np.log(1.0 - confidence) / np.log1p(-budget)))
        needed = next(n for n in range(first) if highest_rate(0, n + first, confidence) <= budget)
        assert highest_rate(0, first - 1, confidence) > budget
        assert needed <= 0.25 * first

    def test_nothing_is_known_without_samples(self) -> None:
        assert highest_rate(0, 0, 0.95) == 1.0
        assert highest_rate(7, 0, 0.95) == 1.0
        assert Certificate(0.01, 0.95).highest == 1.0

    @given(st.integers(0, 60), st.integers(1, 3000), st.sampled_from([0.5, 0.9, 0.99]))
    @settings(max_examples=60, deadline=None)
    def test_the_rate_falls_with_what_stayed_and_rises_with_what_changed(
        self, changed: int, same: int, confidence: float
    ) -> None:
        rate = highest_rate(changed, same, confidence)
        assert changed / (changed + same) < rate <= 1.0
        assert highest_rate(changed, same + 1, confidence) <= rate
        assert highest_rate(changed + 1, same, confidence) >= rate
        assert highest_rate(changed, same, confidence + 0.009) >= rate

    @pytest.mark.parametrize("changed", [0, 3, 5000])
    def test_rates_are_numbers_after_very_many_samples(self, changed: int) -> None:
        rate = highest_rate(changed, 10**7, 0.95)
        assert changed / (changed + 10**7) < rate < 1.1 * changed / 10**7 + 1e-5

    @pytest.mark.parametrize(("budget", "confidence"), [(0.01, 0.95), (0.05, 0.8), (0.1, 0.95)])
    def test_a_rate_above_the_budget_is_seldom_certified_at_any_time(self, budget: float, confidence: float) -> None:
        streams, samples = 400, int(30 / budget)
        needed = _needed(budget, confidence, 90)
        changes = np.random.default_rng(0).random((streams, samples)) < 1.02 * budget
        changed = np.minimum(changes.cumsum(1), len(needed) - 1)
        certified = (np.arange(1, samples + 1) - changes.cumsum(1) >= needed[changed]).any(1)
        allowed = 1.0 - confidence
        assert certified.mean() <= allowed + 3 * np.sqrt(allowed * confidence / streams)

    def test_a_rate_far_below_the_budget_is_certified_by_and_by(self) -> None:
        needed = _needed(0.05, 0.95, 90)
        changes = np.random.default_rng(1).random((200, 1000)) < 0.01
        changed = np.minimum(changes.cumsum(1), len(needed) - 1)
        assert (np.arange(1, 1001) - changes.cumsum(1) >= needed[changed]).any(1).mean() > 0.95

    @given(st.lists(st.sampled_from(["ask", "ask", "other", "same", "changed"]), max_size=120), st.integers(1, 120))
    @settings(max_examples=25, deadline=None)
    def test_served_answers_never_cost_more_than_was_earned_and_never_less_than_the_lowest_bound(
        self, events: list[str], repeated: int
    ) -> None:
        certificate, lowest, served = Certificate(0.03, 0.9), 1.0, 0
        for event in itertools.chain(["same"] * repeated, events, ["other"] * repeated, events):
            if event in ("same", "changed"):
                certificate.sample(event == "changed")
                lowest = min(lowest, certificate.highest)
                assert certificate.counts.lowest == lowest
                continue
            affords = certificate.affords()
            asked = request(certificate, event == "ask")
            assert asked == (event == "ask" and affords)
            served += asked
            earned = 0.03 * certificate.counts.requests
            assert certificate.cost == pytest.approx(min(certificate.counts.charged, served * lowest))
            assert certificate.cost <= earned + 1e-9
        assert certificate.counts.served == served

    def test_a_sample_that_changed_makes_no_answer_dearer_that_was_served_before(self) -> None:
        certificate = Certificate(0.01, 0.95)
        for _ in range(400):
            certificate.sample(False)
            request(certificate, True)
        before = certificate.cost
        certificate.sample(True)
        assert certificate.cost == before
        assert certificate.highest > 0.01

    def test_an_answer_before_any_sample_costs_a_whole_one(self) -> None:
        certificate, budget = Certificate(1 / 64, 0.95), 1 / 64
        served = []
        for _ in range(64 * 5 + 1):
            served.append(request(certificate, True))
        assert np.flatnonzero(served).tolist() == [round(k / budget) - 1 for k in range(1, 6)]

    def test_an_answer_that_was_not_served_after_all_costs_nothing(self) -> None:
        certificate = Certificate(0.01, 0.95)
        for _ in range(400):
            certificate.sample(False)
            request(certificate, False)
        before = certificate.counts.copy()
        assert request(certificate, True)
        certificate.give_back()
        assert certificate.counts.served == before.served
        assert certificate.counts.charged == pytest.approx(before.charged)
        assert certificate.counts.requests == before.requests + 1
        certificate.restart()
        certificate.give_back()  # decided before an alarm
        assert certificate.counts == Counts()

    def test_what_is_saved_up_is_bounded(self) -> None:
        certificate = Certificate(1 / 64, 0.95)
        for _ in range(5 * EARNINGS):
            request(certificate, False)
        served = 0
        while request(certificate, True):
            served += 1
        assert EARNINGS / 64 - 1 <= served <= EARNINGS / 64 + 1

    def test_requests_that_are_the_same_are_served_all_or_none(self) -> None:
        certificate = Certificate(0.01, 0.95)
        for _ in range(100):
            certificate.sample(False)
            request(certificate, False)
        many = round(2 * certificate.counts.requests * certificate.budget / (certificate.highest - certificate.budget))
        before = certificate.counts.requests
        assert certificate.spend([many, 2], [True, True], [False, False]) == [False, True]
        assert certificate.counts.served == 2
        assert certificate.counts.requests == before + many + 2
        assert certificate.spend([3], [False], [True]) == [False]
        assert certificate.counts.repeated == 3

    @pytest.mark.parametrize(
        ("samples", "changed", "hopeless"), [(JUDGED, 0, False), (JUDGED, 2, False), (JUDGED - 1, 20, False),
                                             (JUDGED, 20, True), (20 * JUDGED, 20, False), (20 * JUDGED, 200, True)]
    )  # fmt: skip
    def test_where_many_times_the_budget_changes_a_proof_is_hopeless(
        self, samples: int, changed: int, hopeless: bool
    ) -> None:
        certificate = Certificate(0.01, 0.95)
        for number in range(samples):
            certificate.sample(number < changed)
            request(certificate, False)
        assert certificate.is_hopeless == hopeless
        certificate.restart()
        assert not certificate.is_hopeless

    @pytest.mark.parametrize("budget", [0.002, 0.01, 0.3, 0.9])
    def test_answers_that_change_as_seldom_as_the_budget_allows_are_seldom_hopeless(self, budget: float) -> None:
        random, wrong = np.random.default_rng(0), 0
        for _ in range(50):
            certificate, found = Certificate(budget, 0.95), False
            for changed in random.random(600) < budget:
                certificate.sample(bool(changed))
                request(certificate, False)
                found |= certificate.is_hopeless
            wrong += found
        assert wrong <= 5

    def test_counts_are_copied(self) -> None:
        counts = Counts(1, 2, 3, 4, 5, 6.5, 7.5, 0.5)
        other = counts.copy()
        assert other == counts
        other.same += 1
        assert counts.same == 1

    def test_a_certificate_goes_on_from_counts_and_begins_again(self) -> None:
        one, other = Certificate(0.01, 0.95), Certificate(0.01, 0.95)
        for _ in range(500):
            one.sample(False)
            request(one, True)
        other.adopt(one.counts.copy())
        assert other.counts == one.counts
        assert other.highest == one.highest < 0.01
        assert other.share_served == one.share_served > 0
        assert other.affords() == one.affords()
        one.restart()
        assert one.counts == Counts()
        assert one.highest == 1.0
        assert not one.affords()
        assert one.share_served == 0.0


def _needed(rate: float, confidence: float, most: int) -> npt.NDArray[np.int64]:
    """For each number of changed answers, of how many that stayed the rate is ruled out."""
    found, low = [], 0
    for changed in range(most):
        high = low + 1
        while stake(rate, changed, high) < 1.0 / (1.0 - confidence):
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if stake(rate, changed, middle) >= 1.0 / (1.0 - confidence) else (middle, high)
        found.append(high)
    for changed in (0, 1, most - 1):  # this is what `highest_rate` says
        assert highest_rate(changed, found[changed], confidence) <= rate * (1 + 1e-9)
        assert highest_rate(changed, found[changed] - 1, confidence) > rate * (1 - 1e-9)
    found[-1] = np.iinfo(np.int64).max
    return np.array(found)


def alarms_after(rate: float, budget: float, most: int, seed: int) -> int:
    """Samples until the alarm, in a stream that is all served; at most this many."""
    certificate = Certificate(budget, 0.95)
    certificate.counts.requests = certificate.counts.served = 1
    for place, changed in enumerate((np.random.default_rng(seed).random(most) < rate).tolist()):
        if certificate.alarms(changed):
            return place + 1
    return most


class TestAlarm:
    def test_false_alarms_are_rare(self) -> None:
        assert np.mean([alarms_after(0.02, 0.02, 3000, seed) for seed in range(40)]) >= BETWEEN_ALARMS
        assert np.mean([alarms_after(0.004, 0.02, 1000, seed) for seed in range(30)]) > 950

    def test_a_rate_far_above_the_budget_raises_it_soon(self) -> None:
        five = [alarms_after(0.1, 0.02, 1000, seed) for seed in range(40)]
        ten = [alarms_after(0.2, 0.02, 1000, seed) for seed in range(40)]
        assert max(five) < 1000
        assert np.mean(ten) < np.mean(five) < BETWEEN_ALARMS
        assert np.mean(ten) < BETWEEN_ALARMS / 4

    def test_it_comes_also_after_a_long_time_without_changes(self) -> None:
        certificate = Certificate(0.02, 0.95)
        certificate.counts.requests = certificate.counts.served = 1
        assert not any(certificate.alarms(False) for _ in range(2000))
        assert any(certificate.alarms(True) for _ in range(10))

    def test_a_new_epoch_forgets_the_bets(self) -> None:
        certificate = Certificate(0.02, 0.95)
        fresh = [certificate.sample(True) for _ in range(40)]
        assert any(fresh)
        certificate.restart()
        assert [certificate.sample(True) for _ in range(40)] == fresh
