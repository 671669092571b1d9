"""What reuse may cost, by the times of forwards with and without it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from attmemo.guard.time_account import (
    FULL,
    GIVEN,
    LAST,
    OFTEN,
    OVERHEAD,
    PAYS_BACK,
    SAVED,
    SEED,
    SELDOM,
    SHARE,
    WORTH,
    TimeAccount,
)  # fmt: skip

TOKENS = 700
SEQUENCES = 4


class Stream:
    """Forwards of one size, and how long they take with records and without."""

    def __init__(self, account: TimeAccount, tokens: int = TOKENS, whole: float = 1.0) -> None:
        self.account, self.tokens, self.whole = account, tokens, whole
        self.asked = self.verified = self.forwards = 0
        self.seconds = 0.0

    def run(self, forwards: int, pure: float, verifying: float = 0.0) -> Stream:
        """So many more; looked up they take `pure` seconds, and where answers may be verified `verifying` more."""
        for _ in range(forwards):
            asked, learns = self.account.ask(self.tokens), self.account.learns and verifying > 0.0
            seconds = self.whole if not asked else pure + verifying * learns
            verified = SEQUENCES if asked and learns else 0
            self.account.record(self.tokens, SEQUENCES, seconds, asked, verified)
            self.asked += asked
            self.verified += verified
            self.seconds += seconds
        self.forwards += forwards
        return self

    @property
    def over_exact(self) -> float:
        """Their time over that without reuse."""
        return self.seconds / (self.forwards * self.whole)


def test_of_the_first_forwards_every_third_runs_without_records_and_none_verifies() -> None:
    account = TimeAccount()
    asked = []
    for _ in range(6):
        asked.append(account.ask(TOKENS))
        assert not account.learns
        account.record(TOKENS, SEQUENCES, 1.0, asked[-1])
    assert asked == [True, True, False] * 2
    assert account.learns


def test_lookups_that_save_nothing_cost_a_hundredth_of_the_time() -> None:
    stream = Stream(TimeAccount()).run(4000, 1.05)
    assert stream.over_exact <= 1.0 + SHARE + GIVEN / (SEQUENCES * stream.forwards) + 0.002
    assert 0 < stream.asked < 0.35 * stream.forwards, "now and then it is tried"
    assert stream.account.pays is False


def test_verifications_that_lead_to_nothing_cost_a_hundredth_of_the_time() -> None:
    stream = Stream(TimeAccount()).run(4000, 1.0, verifying=0.5)
    assert stream.over_exact <= 1.0 + SHARE + GIVEN / (SEQUENCES * stream.forwards) + 0.002
    assert stream.verified > SEQUENCES * 4000 * SHARE


def test_reuse_that_pays_goes_on_and_so_does_learning() -> None:
    stream = Stream(TimeAccount()).run(2000, 0.6, verifying=0.05)
    rare = stream.forwards - stream.asked
    assert 2000 / SELDOM <= rare <= 2000 / SELDOM + LAST + OFTEN * LAST / 4
    assert stream.verified > 0.9 * SEQUENCES * stream.asked
    assert stream.over_exact < 0.7


def test_reuse_that_pays_goes_on_where_nothing_may_be_verified() -> None:
    account = TimeAccount()
    stream = Stream(account).run(64, 0.6)
    account.spend(1e6)
    assert not account.learns
    before = stream.asked
    stream.run(100, 0.6)
    assert stream.asked - before > 90
    assert account.pays is True
    assert not account.rests


def test_once_a_stream_changes_no_more_is_lost_than_the_account_holds() -> None:
    account = TimeAccount()
    Stream(account).run(2000, 0.5)
    after = Stream(account).run(1000, 1.3)
    # What reuse had saved counts by half, so that losses do, too, until they are as large.
    assert after.over_exact <= 1.0 + SHARE + (GIVEN / SAVED / SEQUENCES + LAST) * 1.3 / 1000


def test_times_that_go_up_and_down_cost_nothing() -> None:
    """A slow forward takes no more from the account than a fast one brings."""
    account = TimeAccount()
    Stream(account).run(100, 1.0)
    noise = np.random.default_rng(0).normal(0.0, 0.2, 4000)
    for one in noise.tolist():
        account.record(TOKENS, SEQUENCES, 0.9 + one, True)
    assert account.afford() == pytest.approx(GIVEN, abs=1.0)


def test_rows_that_were_computed_to_verify_do_not_count_against_records() -> None:
    account = TimeAccount()
    Stream(account).run(100, 0.95)
    for _ in range(20):
        account.record(TOKENS, 4 * SEQUENCES, 1.05, True, 1, again=TOKENS // 10)
    assert account.pays is True


def test_the_account_is_saved_up_and_spent_on_few_forwards() -> None:
    account = TimeAccount()
    stream = Stream(account).run(50, 1.5)
    learning = []
    for _ in range(3000):
        stream.run(1, 1.5)
        learning.append(account.learns)
    begun = sum(later and not before for before, later in pairwise(learning))
    assert 0 < begun < 3000 * SHARE * SEQUENCES / (FULL * GIVEN) + 2


def poor() -> TimeAccount:
    """An account of which nothing is left."""
    account = TimeAccount()
    Stream(account).run(10, 1.0)
    account.spend(GIVEN / SEQUENCES)
    assert not account.learns
    account.lends = True
    return account


@pytest.mark.parametrize(("share", "lent"), [(OVERHEAD + WORTH - 0.01, 0.0), (OVERHEAD + WORTH + 0.01, SEED)])
def test_where_records_could_supply_most_something_is_lent_and_no_more(share: float, lent: float) -> None:
    account = poor()
    account.hope(share)
    assert account.learns == (lent > 0.0)
    assert not account.has_own
    assert account.afford() == pytest.approx(lent)
    account.spend(lent / SEQUENCES)
    assert not account.learns
    assert account.afford() == 0.0


def test_what_known_changes_pay_back_is_lent_beside() -> None:
    account = poor()
    account.hope(0.9)
    for _ in range(1000):
        account.expect(0.9, 0.5, SEQUENCES)
    assert account.afford() == pytest.approx(SEED + PAYS_BACK * (0.5 - OVERHEAD), rel=0.01)
    account.hope(0.0)
    for _ in range(1000):
        account.expect(0.0, 0.0, SEQUENCES)
    assert account.afford() == 0.0


def test_a_single_request_whose_changes_are_known_lends_nothing_and_a_batch_does() -> None:
    for sequences, lends in ((1, False), (32, True)):
        account = poor()
        account.hope(0.9)
        account.expect(0.9, 0.9, sequences)
        account.spend(SEED / SEQUENCES)
        assert account.learns == lends


@pytest.mark.parametrize(("taken", "lends"), [(1.3, False), (0.5, True)])
def test_what_is_known_and_saves_no_time_lends_nothing_more(taken: float, lends: bool) -> None:
    account = poor()
    account.hope(0.9)
    for _ in range(1000):
        account.expect(0.9, 0.6, SEQUENCES)
    for _ in range(8):
        account.record(TOKENS, SEQUENCES, taken, reused=True)
    account.spend(2 * SEED / SEQUENCES)
    assert account.learns == lends


def test_what_was_known_is_not_forgotten_at_once_where_new_kinds_of_inputs_come() -> None:
    account = poor()
    account.hope(0.9)
    for _ in range(8):
        account.expect(0.9, 0.5, 32)
    lent = account.afford()
    for _ in range(4):
        account.expect(0.9, 0.0, 32)
    assert SEED < 0.7 * lent < account.afford() < lent


def test_where_records_could_supply_next_to_nothing_nothing_is_learned() -> None:
    account = TimeAccount()
    Stream(account).run(10, 1.0)
    assert account.learns
    account.hope(OVERHEAD)
    assert not account.learns
    account.hope(OVERHEAD + 0.01)
    assert account.learns


def test_what_cannot_be_expected_to_pay_is_tried_from_time_to_time() -> None:
    account = TimeAccount()
    Stream(account).run(10, 1.0)
    account.hope(0.0)
    assert not account.learns
    assert account.has_own, "8 bits may be proven"
    assert Stream(account).run(1000, 1.3).over_exact < 1.0 + SHARE + 0.01
    assert Stream(account).run(2000, 0.5).over_exact < 0.8, "records came, or what is asked changed"


def test_nothing_is_lent_where_learning_has_idle_times() -> None:
    account = poor()
    account.lends = False
    account.hope(1.0)
    assert not account.learns
    assert account.afford() == 0.0
    account.lends = True
    account.hope(1.0)
    assert account.learns


def test_slow_first_forwards_make_reuse_no_faster() -> None:
    account = TimeAccount()
    for seconds in (10.0, 3.0, *[1.0] * (LAST - 2)):
        account.record(TOKENS, SEQUENCES, seconds, False)
    Stream(account).run(8 * LAST, 1.0)
    assert account.pays is False


def test_reuse_begins_again_once_it_pays() -> None:
    account = TimeAccount()
    Stream(account).run(1000, 1.5)
    assert account.rests
    assert Stream(account).run(1000, 0.5).over_exact < 0.8


def test_one_forward_that_took_very_long_changes_little() -> None:
    account = TimeAccount()
    stream = Stream(account).run(200, 0.8)
    account.record(TOKENS, SEQUENCES, 1000.0, True)
    before = stream.asked
    stream.run(50, 0.8)
    assert stream.asked - before > 45


def test_sizes_are_timed_apart() -> None:
    account = TimeAccount()
    Stream(account).run(500, 0.5)
    short = Stream(account, tokens=20, whole=0.01)
    assert [account.ask(20), short.run(2, 0.02).asked, account.ask(20)] == [True, 2, False]
    assert short.run(1500, 0.012).over_exact < 1.1


@pytest.mark.parametrize("tokens", [31, 32, 1000, 2047, 2048])
def test_batches_of_a_stream_are_of_one_size_wherever_their_tokens_lie(tokens: int) -> None:
    """A few tokens more or fewer make no other size, of which all would have to be learned again."""
    account, whole = TimeAccount(), 0
    for turn in range(200):
        some = tokens + (turn % 3 - 1) * tokens // 10
        asked = account.ask(some)
        account.record(some, SEQUENCES, some * (0.5 if asked else 1.0), asked)
        whole += not asked
    assert whole <= LAST + 200 // SELDOM
    assert account.pays is True


def test_without_a_gate_every_forward_reuses_and_verifies() -> None:
    account = TimeAccount(always=True)
    assert Stream(account).run(1000, 2.0).asked == 1000
    assert account.learns


def test_asking_changes_nothing() -> None:
    account = TimeAccount()
    Stream(account).run(100, 1.1)
    assert len({account.ask(TOKENS) for _ in range(1000)}) == 1


def test_what_something_else_cost_is_paid_too() -> None:
    account = TimeAccount()
    Stream(account).run(10, 1.0)
    assert account.learns
    held = account.afford()
    assert 0.9 * GIVEN < held <= GIVEN
    account.spend(1.0 / SEQUENCES)
    assert account.afford() == pytest.approx(held - 1.0)
    assert account.afford(owed=1.0 / SEQUENCES) == pytest.approx(held - 2.0), "what was begun is paid first"
    account.spend(GIVEN / SEQUENCES)
    assert not account.learns
    assert account.afford() == 0.0


def test_once_more_may_serve_it_is_tried_at_once_whether_records_pay() -> None:
    account = TimeAccount()
    stream = Stream(account).run(200, 1.5)
    assert account.rests
    account.try_again()
    before = stream.asked
    stream.run(4, 0.5)
    assert stream.asked - before >= 3


def test_a_forward_of_nothing_is_not_counted() -> None:
    account = TimeAccount()
    account.record(0, 0, 1.0, True)
    assert account.ask(TOKENS)
    assert account.pays is None


def test_forwards_that_were_not_looked_at_earn_as_much() -> None:
    account = TimeAccount()
    stream = Stream(account)
    stream.run(8, 1.0)
    account.spend(10.0)
    before = account.balance
    assert before is not None
    account.rested(50.0)
    assert account.balance == pytest.approx(before + 50.0 * SHARE)
