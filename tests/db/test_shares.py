"""One bound for several pools: the sum of what they may take never exceeds it, and the unused give way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attmemo.db.pools.shares import Sharer, Shares, claims


@given(
    total=st.integers(0, 10_000),
    pools=st.lists(st.tuples(st.integers(0, 10_000), st.floats(0, 100)), min_size=1, max_size=8),
)
def test_claims_add_up_to_the_bound_at_most(total: int, pools: list[tuple[int, float]]) -> None:
    sharers = [Sharer(lambda: 0, used) for _, used in pools]
    held = {id(one): nbytes for one, (nbytes, _) in zip(sharers, pools, strict=True)}
    found = claims(total, sharers, held, since=50.0)
    assert sum(found) <= total
    for one, claim in zip(sharers, found, strict=True):
        if one.used < 50.0:
            assert claim <= held[id(one)]


def test_one_pool_alone_has_all() -> None:
    shares = Shares(1000)
    assert shares.of(shares.add(lambda: 10)) == 1000


def test_a_new_pool_waits_until_another_one_has_given_back_what_it_was_told() -> None:
    shares, held = Shares(1600), [1600]
    large = shares.add(lambda: held[0], told=1600)
    small = shares.add(lambda: 0)
    assert shares.of(small) == 0
    assert shares.of(large) == 1500
    assert shares.of(small) == 0, "it has not shrunk yet"
    held[0] = 1500
    assert shares.of(small) == 100


def test_what_a_pool_holds_is_not_taken_from_it_for_what_others_were_told() -> None:
    shares = Shares(1600)
    shares.add(lambda: 0, told=1600)
    assert shares.of(shares.add(lambda: 700, used=0.0)) == 700


def test_pools_in_use_that_all_want_more_get_the_same() -> None:
    shares, held = Shares(1600), [800, 800]
    both = [shares.add(lambda place=place: held[place], told=800) for place in (0, 1)]
    assert [shares.of(one) for one in both] == [800, 800]


def test_the_pool_that_was_used_longest_ago_gives_way_first() -> None:
    sharers = [Sharer(lambda: 0, used) for used in (100.0, 20.0, 10.0)]
    for wanted, expected in ((500, [562, 300, 138]), (800, [862, 138, 0]), (940, [1000, 0, 0])):
        held = dict(zip(map(id, sharers), (wanted, 300, 200), strict=True))
        assert claims(1000, sharers, held, since=50.0) == expected
