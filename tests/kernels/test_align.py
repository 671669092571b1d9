"""Alignment of tokens: the kernel gives what the oracle gives, pairs are as many as can be, rules hold."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kernel_tools import BARE, RULES, Sequences, changed, every, planned, sequences

from attmemo.kernels import _sketch
from attmemo.kernels.align import (
    LONG,
    LONGEST,
    Alignment,
    Rule,
    aligned,
    nearest,
    nearest_in_numpy,
    pairs,
    with_long,
)
from attmemo.kernels.kinds import NO_KINDS, NUMBER, WORD, Kinds


def sources(own: list[int], record: list[int], rule: Rule, kinds: Kinds = NO_KINDS) -> list[int]:
    """What the kernel takes from one record."""
    return planned([own], np.array([[0]]), [record], rule, kinds).source.tolist()


def longest_common(one: list[int], other: list[int]) -> int:
    """Length of the longest common subsequence."""
    above = [0] * (len(other) + 1)
    for a in one:
        row = [0]
        for c, b in enumerate(other):
            row.append(above[c] + 1 if a == b else max(above[c + 1], row[c]))
        above = row
    return above[-1]


class TestAgainstTheOracle:
    @pytest.mark.parametrize("period", [1, 2, 3, 7])
    @pytest.mark.parametrize("most_moved", [None, 2])
    def test_repetitions_across_many_words(self, period: int, most_moved: int | None) -> None:
        own = [j % period for j in range(300)]
        record = [9, *[i % (period + 1) for i in range(260)], 9]
        rule = Rule(most_moved=most_moved)
        assert sources(own, record, rule) == aligned(own, record, rule)

    @pytest.mark.parametrize("far", [70, 140, 199])
    def test_a_carry_crosses_words_without_a_match(self, far: int) -> None:
        own, record = list(range(200)), [far, 5, -1]
        found = sources(own, record, BARE)
        assert found == aligned(own, record, BARE)
        assert found[5] == 1

    @settings(max_examples=200, deadline=None)
    @given(st.integers(0, 2**31), st.integers(0, 4), st.integers(0, 40), st.integers(1, 12))
    def test_the_nearest_are_those_with_the_highest_products(self, seed: int, rows: int, columns: int, k: int) -> None:
        scores = np.random.default_rng(seed).integers(-4, 6, (rows, columns)).astype(np.float32)
        assert np.array_equal(nearest(scores, k), nearest_in_numpy(scores, k))


class TestPairs:
    @settings(max_examples=300, deadline=None)
    @given(sequences())
    @example(([[1, 2, 3, 1, 2]], [[2, 3, 1, 2, 3]]))
    def test_pairs_are_equal_tokens_in_order_and_as_many_as_can_be(self, case: tuple[Sequences, Sequences]) -> None:
        for own in case[0]:
            for record in case[1]:
                partner = sources(own, record, BARE)
                taken = [i for i in partner if i >= 0]
                assert all(record[i] == own[j] for j, i in enumerate(partner) if i >= 0)
                assert all(a < b for a, b in pairwise(taken))
                assert len(taken) == longest_common(own, record)

    @settings(max_examples=200, deadline=None)
    @given(sequences(), st.integers(0, 5))
    def test_no_pair_moved_farther_than_allowed(self, case: tuple[Sequences, Sequences], most: int) -> None:
        for own in case[0]:
            for record in case[1]:
                partner = sources(own, record, replace(BARE, most_moved=most))
                assert all(abs(i - j) <= most for j, i in enumerate(partner) if i >= 0)

    def test_a_block_stays_whole_where_it_can(self) -> None:
        # Backwards, the 3 would be paired with the later 3: the block 1 2 3 would fall apart.
        assert sources([1, 2, 3, 7], [1, 2, 3, 8, 3, 9], BARE) == [0, 1, 2, -1]
        assert sources([5, 1, 2, 3, 7], [6, 1, 2, 3, 8, 3, 9], BARE) == [-1, 1, 2, 3, -1]

    @pytest.mark.parametrize("length", [8191, 8192])
    def test_long_sequences_are_aligned(self, length: int) -> None:
        own = np.arange(length)
        record = np.delete(own, [1000, 5000])
        own[7000] = -5
        expected = np.arange(length) - (np.arange(length) > 1000) - (np.arange(length) > 5000)
        expected[[1000, 5000, 7000]] = -1
        assert sources(own.tolist(), record.tolist(), BARE) == expected.tolist()

    def test_longer_ones_share_prefix_and_suffix(self) -> None:
        own = list(range(LONGEST + 1))
        record = [*own[:1000], -1, *own[1001:5000], -2, *own[5001:]]
        partner = sources(own, record, BARE)
        assert partner == [*range(1000), *[-1] * 4001, *range(5001, LONGEST + 1)]
        assert pairs(own, record) == partner


class TestRules:
    def test_the_first_and_the_last_row_are_computed(self) -> None:
        own = list(range(10))
        assert sources(own, [*own, 77], Rule()) == [-2, *range(1, 9), -2 - 9]
        assert sources(own, [*own, 77], Rule(ends=False)) == own

    def test_neighbours_of_what_changed_are_computed(self) -> None:
        own, record = list(range(10)), [0, 1, 2, 3, 4, -9, 6, 7, 8, 9]
        for near in (0, 1, 2, 3):
            partner = sources(own, record, Rule(near=near, ends=False))
            assert [j for j in range(10) if partner[j] < 0] == list(range(5 - near, 6 + near))

    @pytest.mark.parametrize(
        ("own", "record", "computed"),
        [
            ([9, 1, 9, 9], [9, 2, 9, 9], [1]),  # a number for a number
            ([9, 1, 9, 9], [9, 8, 9, 9], [0, 1, 2]),  # a number for a word
            ([9, 8, 9, 9], [9, 1, 9, 9], [0, 1, 2]),  # a word for a number
            ([9, 1, 7, 9], [9, 2, 8, 7, 9], [0, 1, 2]),  # a word of the record is not there
            ([9, 1, 9, 9], [9, 2, 9, 9, 8], [0, 1, 2]),  # nor at its end
        ],
    )
    def test_where_only_numbers_changed_their_own_neighbours_are_computed(
        self, own: list[int], record: list[int], computed: list[int]
    ) -> None:
        kinds = np.array([WORD, NUMBER, NUMBER], np.uint8)
        found = sources(own, record, Rule(near=1, near_numbers=0, ends=False), kinds)
        assert [j for j, row in enumerate(found) if row < 0] == computed

    def test_token_types_do_not_make_a_number_a_word(self) -> None:
        own, record = [9, 1 | 1 << 24, 9], [9, 2 | 1 << 24, 9]
        kinds = np.array([WORD, NUMBER, NUMBER], np.uint8)
        assert sources(own, record, Rule(near_numbers=0, ends=False), kinds) == [0, -1, 2]

    def test_a_rule_that_names_neighbours_has_them_beside_numbers_too(self) -> None:
        assert Rule.of(2).for_classes().near_where(words=False) == 2
        assert Rule.of(None).for_classes().near_where(words=False) == 0
        assert Rule.of(None).near_where(words=False) == Rule.of(None).near_where(words=True) == 1

    def test_the_first_token_behind_a_cut_of_the_record_is_computed(self) -> None:
        own, record = [1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 4, 5, 6]
        assert sources(own, record, Rule(ends=False)) == [0, 1, 2, -2 - 4, 5, 6]
        assert sources(own, record, Rule(ends=False, edges=False)) == [0, 1, 2, 4, 5, 6]

    @settings(max_examples=200, deadline=None)
    @given(sequences(), RULES)
    def test_exactly_the_rows_of_the_rule_are_computed(self, case: tuple[Sequences, Sequences], rule: Rule) -> None:
        for own in case[0]:
            for record in case[1]:
                partner = sources(own, record, replace(BARE, most_moved=rule.most_moved))
                wanted = []
                for j, i in enumerate(partner):
                    close = partner[max(0, j - rule.near) : j + rule.near + 1]
                    edge = j > 0 and i >= 0 and partner[j - 1] >= 0 and i != partner[j - 1] + 1
                    end = j in (0, len(own) - 1)
                    computed = -1 in close or (edge and rule.edges) or (end and rule.ends)
                    wanted.append(-2 - i if computed and i >= 0 else i)
                assert own == record or sources(own, record, rule) == wanted

    @pytest.mark.parametrize("wrong", [{"near": -1}, {"near_numbers": -1}, {"most_moved": -1}])
    def test_a_negative_number_is_no_rule(self, wrong: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="must not be negative"):
            Rule(**wrong)


class TestBest:
    def test_the_candidate_with_the_fewest_rows_is_taken_and_the_first_of_equals(self) -> None:
        inputs = [[1, 2, 3, 4, 5, 6], [7, 8]]
        records = [[1, 9, 9, 9, 9, 6], [1, 2, 3, 4, 9, 6], [1, 2, 3, 4, 8, 6]]
        found = planned(inputs, np.array([[0, 2, 1], [-1, -1, -1]]), records, Rule())
        assert found.record.tolist() == [2, -1]
        assert found.computed.tolist() == [4, 2]
        assert found.source.tolist() == [-2, 1, 2, -2 - 3, -1, -2 - 5, -1, -1]

    def test_an_input_does_not_depend_on_the_others(self) -> None:
        random = np.random.default_rng(0)
        records = [random.integers(0, 50, 90).tolist() for _ in range(5)]
        inputs = [changed(records[b % 5], random, 50) for b in range(12)]
        together = planned(inputs, every(inputs, records), records, Rule())
        starts = np.cumsum([0, *map(len, inputs)])
        for b, own in enumerate(inputs):
            alone = planned([own], every([own], records), records, Rule())
            assert alone.record[0] == together.record[b]
            assert alone.computed[0] == together.computed[b]
            assert np.array_equal(alone.source, together.source[starts[b] : starts[b + 1]])

    @pytest.mark.parametrize(("inputs", "tried"), [(0, 4), (3, 0), (0, 0)])
    def test_nothing_to_align(self, inputs: int, tried: int) -> None:
        found = planned([[1, 2]] * inputs, np.zeros((inputs, tried), np.int64), [[1, 2]], Rule())
        assert found.record.tolist() == [-1] * inputs
        assert found.computed.tolist() == [2] * inputs
        assert found.source.tolist() == [-1] * 2 * inputs

    def test_empty_sequences(self) -> None:
        found = planned([[], [1]], np.array([[0], [0]]), [[]], Rule())
        assert found.record.tolist() == [0, 0]
        assert found.computed.tolist() == [0, 1]

    def test_more_tokens_than_the_bits_are_kept_for(self) -> None:
        own = list(range(20_000))
        found = planned([own, [1, 2, 3]], np.array([[0], [1]]), [own[5:], [1, 5, 3]], Rule())
        assert found.computed.tolist() == [7, 3]


class TestNearest:
    @pytest.mark.parametrize(
        ("scores", "result"),
        [
            (np.zeros((2, 3)), np.zeros((2, 1), np.int64)), (np.zeros(3, np.float32), np.zeros((1, 1), np.int64)),
            (np.zeros((2, 3), np.float32), np.zeros((1, 1), np.int64)),
            (np.zeros((2, 3), np.float32), np.zeros((2, 0), np.int64)),
            (np.zeros((2, 3), np.float32).T, np.zeros((3, 1), np.int64)),
            (np.zeros((2, 3), np.float32), np.zeros((2, 1), np.int32)),
        ],
    )  # fmt: skip
    def test_wrong_scores_are_refused(self, scores: Any, result: Any) -> None:
        with pytest.raises(ValueError, match=r"must|at least"):
            _sketch.nearest(scores, result)

    def test_at_least_one_is_asked_for(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            nearest(np.zeros((1, 3), np.float32), 0)


@given(
    st.lists(st.lists(st.sampled_from([-1, -1, -2, -5, 0, 3, 7]), min_size=1, max_size=12), min_size=1, max_size=5)
)
def test_one_row_more_is_computed_in_front_of_long_changes(parts: list[list[int]]) -> None:
    lengths = [len(part) for part in parts]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    source = np.array([row for part in parts for row in part], np.int32)
    computed = np.array([sum(row < 0 for row in part) for part in parts])
    found = Alignment(np.arange(len(parts)), source.copy(), computed)
    seen = with_long(found, starts)
    expected = []
    for part in parts:
        own = list(part)
        for j in range(2, len(part) - LONG + 1):
            begins = part[j - 1] != -1 and all(row == -1 for row in part[j : j + LONG])
            if begins and part[j - 2] >= 0:
                own[j - 2] = -2 - part[j - 2]
        expected.append(own)
    assert seen.source.tolist() == [row for own in expected for row in own]
    assert seen.computed.tolist() == [sum(row < 0 for row in own) for own in expected]
    assert found.source.tolist() == source.tolist(), "only asks"


def test_rows_in_front_of_long_changes_are_computed_without_a_guard_and_a_setting_of_ones_own() -> None:
    assert Rule.of(None).for_unguarded().before_long
    assert not Rule.of(1).for_unguarded().before_long
    assert not Rule.of(None).before_long
