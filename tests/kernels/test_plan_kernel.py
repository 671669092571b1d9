"""Plans of rows: one call of the kernel gives what the oracle gives, candidate by candidate."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import RULES, Sequences, changed, every, packed, sequences, walled

from attmemo.kernels import _plan
from attmemo.kernels.align import Rule
from attmemo.kernels.changes import Changes
from attmemo.kernels.kinds import NUMBER, WORD
from attmemo.kernels.plan import Demand, Evidence, Mark, RowPlan, Table, plan, plan_in_python, table_of

EVERYTHING = Demand()


def full(known: dict[int, tuple[Mark, int]]) -> Table:
    """A table with these keys, nearly full."""
    keys, marks = np.array(list(known), np.uint64), np.array([mark for mark, _ in known.values()], np.uint8)
    data = np.array([own for _, own in known.values()], np.uint64)
    return table_of(keys, marks, data, 1 << len(known).bit_length())


def known_of(gaps: Changes, random: np.random.Generator) -> dict[int, tuple[Mark, int]]:
    """Something about some of these gaps."""
    known: dict[int, tuple[Mark, int]] = {}
    for _, slot, value, former, change, _ in zip(*(column.tolist() for column in gaps.columns), strict=True):
        if random.random() < 0.9:
            known[slot] = Mark.SLOT, int(random.integers(0, 9)) | int(random.integers(0, 3) == 0) << 32
        for one in (value, former):
            if random.random() < 0.6:
                known[one] = (Mark.HARMFUL, 0) if random.random() < 0.1 else (Mark.VALUE, int(random.integers(2)))
        if random.random() < 0.4:
            known[change] = (Mark.HARMFUL if random.random() < 0.2 else Mark.CHANGE), 0
    return known


def same(one: RowPlan, other: RowPlan) -> bool:
    names = ("record", "source", "computed", "evidence")
    pairs = [(getattr(one, name), getattr(other, name)) for name in names]
    pairs += zip(one.changes.columns, other.changes.columns, strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


def arguments(inputs: Sequences, records: Sequences) -> tuple[Any, ...]:
    """All that `plan` takes in front of the kinds."""
    return (*packed(inputs), every(inputs, records), *packed(records), np.full(len(records), np.nan, np.float32))


class TestAgainstTheOracle:
    @settings(max_examples=400, deadline=None)
    @given(
        sequences(), RULES, st.sampled_from([-1.0, 0.0, 0.3, 0.5, 1.0]), st.integers(1, 5), st.booleans(),
        st.integers(0, 2**31),
    )  # fmt: skip
    def test_the_kernel_makes_the_same_plan(
        self, case: tuple[Sequences, Sequences], rule: Rule, share: float, tried: int, rounds: bool, seed: int
    ) -> None:
        random = np.random.default_rng(seed)
        inputs, records = case
        inputs = [*inputs, inputs[0], records[1]]  # the same twice, and one that is a record
        given_ = arguments(inputs, records)
        given_[2][random.random(given_[2].shape) < 0.2] = -1
        given_[5][:] = np.where(random.random(len(records)) < 0.5, random.random(len(records)), np.nan)
        kinds = random.integers(0, 2, 40).astype(np.uint8)
        near = plan(*given_, kinds, rule, EVERYTHING).changes
        table = full(known_of(near, random))
        demand = Demand(share, 0.3, 0.6, tried, 2, 6, 4, rounds)
        assert same(plan(*given_, kinds, rule, demand, table), plan_in_python(*given_, kinds, rule, demand, table))

    def test_every_token_of_an_input_may_be_a_gap_of_its_own(self) -> None:
        """As many gaps as there is room for."""
        own = list(range(1, 9))
        given_ = arguments([own], [[0, *(token for number in own for token in (number, 0))]])
        found = plan(*given_, WORDS, RULE, EVERYTHING)
        assert len(found.changes) == len(own) + 1
        assert same(found, plan_in_python(*given_, WORDS, RULE, EVERYTHING))

    @pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 128, 200])
    def test_nothing_behind_the_arrays_is_touched(self, length: int) -> None:
        random = np.random.default_rng(length)
        records = [random.integers(0, 9, length).tolist() for _ in range(3)]
        inputs = [random.integers(0, 9, length).tolist(), changed(records[2], random, 9)]
        given_ = (*map(walled, arguments(inputs, records)), walled(random.integers(0, 2, 7).astype(np.uint8)), Rule())
        assert same(plan(*given_, EVERYTHING), plan_in_python(*given_, EVERYTHING))

    @pytest.mark.parametrize("threads", [1, 2, 5])
    def test_a_batch_that_threads_share_has_the_same_plan(self, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
        """Candidates that only differ in what the rule adds, inputs of all lengths, and some that come again."""
        random = np.random.default_rng(threads)
        records = [random.integers(0, 30, 30).tolist() for _ in range(6)]
        inputs = [changed(records[int(random.integers(6))], random, 30) for _ in range(80)]
        inputs[70:] = inputs[:10]  # the last of them are too far behind to be found
        given_ = arguments(inputs, records)
        table = full(known_of(plan(*given_, WORDS, RULE, EVERYTHING).changes, random))
        demand = Demand(0.2, 0.3, 0.6, 3, 2, 6, 4)
        monkeypatch.setattr("torch.get_num_threads", lambda: threads)
        for rule in (RULE, Rule()):
            assert same(plan(*given_, WORDS, rule, demand, table), plan_in_python(*given_, WORDS, rule, demand, table))

    def test_threads_that_plan_at_once_do_not_disturb_each_other(self) -> None:
        random = np.random.default_rng(1)
        records = [random.integers(0, 30, 200).tolist() for _ in range(4)]
        jobs = [arguments([changed(records[b % 4], random, 30) for b in range(5)], records) for _ in range(4)]
        expected = [plan(*job, WORDS, Rule(), EVERYTHING) for job in jobs]

        def work(number: int) -> list[bool]:
            return [same(plan(*jobs[number], WORDS, Rule(), EVERYTHING), expected[number]) for _ in range(50)]

        with ThreadPoolExecutor(4) as pool:
            assert all(map(all, pool.map(work, range(4))))


WORDS = np.full(20, WORD, np.uint8)
RECORD = [1, 2, 3, 4, 5, 6]
RULE = Rule(near=0, edges=False, ends=False)


def evidence(
    inputs: Sequences, demand: Demand, table: Table, own: float = np.nan, records: Sequences | None = None
) -> Any:
    """How well each input is known beside records of this sureness."""
    given_ = arguments(inputs, [RECORD] if records is None else records)
    given_[5][:] = own
    return plan(*given_, WORDS, RULE, demand, table)


def learned(old: list[int], new: list[int]) -> Changes:
    return plan(*arguments([new], [old]), WORDS, RULE, EVERYTHING).changes


class TestEvidence:
    def test_an_equal_input_takes_all_rows_of_its_record_unless_records_are_rounded(self) -> None:
        found = evidence([RECORD], EVERYTHING, full({}), records=[[1, 2, 3], RECORD, RECORD])
        assert (found.evidence.tolist(), found.record.tolist(), found.computed.tolist()) == ([Evidence.SAME], [1], [0])
        assert found.source.tolist() == [0, 1, 2, 3, 4, 5]
        rounded = evidence([RECORD], EVERYTHING._replace(rounds=True), full({}))
        assert (rounded.evidence.tolist(), rounded.record.tolist()) == ([Evidence.ROUNDED], [-1])
        assert rounded.computed.tolist() == [6]

    def test_a_change_is_unknown_until_it_is_in_the_table(self) -> None:
        changed = [1, 2, 9, 4, 5, 6]
        gaps = learned(RECORD, changed)
        table = full({int(gaps.slot[0]): (Mark.SLOT, 2), int(gaps.change[0]): (Mark.CHANGE, 0)})
        assert evidence([changed], EVERYTHING, full({})).evidence.tolist() == [Evidence.UNKNOWN]
        assert evidence([changed], EVERYTHING, table).evidence.tolist() == [Evidence.FULLY]

    def test_words_of_one_group_that_were_never_exchanged_are_known_freely(self) -> None:
        changed = [1, 2, 9, 4, 5, 6]
        gaps = learned(RECORD, changed)
        assert gaps.word.tolist() == [1]
        known = {int(gaps.slot[0]): (Mark.SLOT, 2), int(gaps.former[0]): (Mark.VALUE, 7)}
        for group, wanted in ((7, Evidence.FREELY), (8, Evidence.UNKNOWN)):
            table = full(known | {int(gaps.value[0]): (Mark.VALUE, group)})
            assert evidence([changed], EVERYTHING, table).evidence.tolist() == [wanted]
            exchanged = full(known | {int(gaps.value[0]): (Mark.VALUE, group), int(gaps.change[0]): (Mark.CHANGE, 0)})
            assert evidence([changed], EVERYTHING, exchanged).evidence.tolist() == [Evidence.FULLY]

    def test_a_record_whose_own_answer_is_unsure_does_not_serve_a_known_change(self) -> None:
        changed = [1, 2, 9, 4, 5, 6]
        gaps = learned(RECORD, changed)
        table = full({int(gaps.slot[0]): (Mark.SLOT, 2), int(gaps.change[0]): (Mark.CHANGE, 0)})
        demand = EVERYTHING._replace(least=0.5)
        assert evidence([changed], demand, table, 0.4).evidence.tolist() == [Evidence.UNSURE]
        assert evidence([changed], demand, table, 0.5).evidence.tolist() == [Evidence.FULLY]
        assert evidence([RECORD], demand, table, 0.4).evidence.tolist() == [Evidence.SAME]

    def test_a_known_change_of_a_farther_record_is_better_than_an_unknown_one_of_the_nearest(self) -> None:
        changed, far = [1, 2, 9, 4, 5, 6], [1, 7, 8, 4, 5, 6]
        gaps = learned(far, changed)
        table = full({int(gaps.slot[0]): (Mark.SLOT, 2), int(gaps.change[0]): (Mark.CHANGE, 0)})
        found = evidence([changed], EVERYTHING._replace(tried=2), table, records=[RECORD, far])
        assert (found.record.tolist(), found.evidence.tolist()) == ([1], [Evidence.FULLY])
        assert found.source.tolist() == [0, -1, -1, 3, 4, 5]
        assert found.changes.change.tolist() == gaps.change.tolist()
        one = evidence([changed], EVERYTHING._replace(tried=1), table, records=[RECORD, far])
        assert (one.record.tolist(), one.evidence.tolist()) == ([0], [Evidence.UNKNOWN])

    def test_a_record_that_supplies_too_little_is_none(self) -> None:
        found = evidence([[1, 9, 9, 9, 9, 9]], EVERYTHING._replace(share=0.5), full({}))
        assert (found.record.tolist(), found.evidence.tolist(), found.computed.tolist()) == ([-1], [0], [6])
        assert found.source.tolist() == [-1] * 6
        assert not len(found.changes)


RESULTS = range(10, 20)


def broken(place: int | None = None, value: Any = None) -> list[Any]:
    """Arrays of the native function, of two inputs and two records, perhaps with something wrong."""
    arrays: list[Any] = [
        np.arange(5, dtype=np.int32), np.array([0, 2, 5]), np.array([[0, 1], [1, -1]]), np.arange(6, dtype=np.int32),
        np.array([0, 2, 6]), np.zeros(3, np.uint8), np.zeros(2, np.float32), np.zeros(2, np.uint64),
        np.zeros(2, np.uint8), np.zeros(2, np.uint64), np.full(2, 77), np.full(5, 77, np.int32), np.full(2, 77),
        np.full(2, 77, np.uint8), np.full(7, 77), *(np.full(7, 77, np.uint64) for _ in range(4)),
        np.full(7, 77, np.uint8),
    ]  # fmt: skip
    if place is not None:
        arrays[place] = value(arrays[place]) if callable(value) else value
    return arrays


def run(arrays: list[Any], near: int = 1, near_numbers: int = 0) -> int:
    return _plan.plan(tuple(arrays), (near, near_numbers, -1, True, True), EVERYTHING, 1)


def shorter(array: Any) -> Any:
    return array[:-1].copy()


class TestRefused:
    def test_results_that_end_at_a_page_are_not_written_past(self) -> None:
        assert run([walled(array) for array in broken()]) > 0

    @pytest.mark.parametrize("place", range(20))
    @pytest.mark.parametrize(
        "wrong", [lambda a: a.astype(np.float64), lambda a: a[None], lambda a: np.repeat(a, 2, -1)[..., ::2]]
    )
    def test_an_array_of_another_type_or_with_gaps_is_named(self, place: int, wrong: Callable[[Any], Any]) -> None:
        with pytest.raises(ValueError, match="an array has another type"):
            run(broken(place, wrong))

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            (0, shorter), (1, np.array([0, 2, 4])), (1, np.array([1, 2, 5])), (1, np.array([0, 6, 5])),
            (1, np.array([0, -1, 5])), (1, np.array([0, 2**62, 5])), (1, shorter), (1, np.empty(0, np.int64)),
            (2, np.array([[0, 2], [1, 1]])), (2, np.array([[0, 2**62], [1, 1]])), (2, np.array([[0, 1]])),
            (3, shorter), (4, np.array([0, 2, 7])), (4, np.array([-1, 2, 6])), (4, np.array([0, 7, 6])),
            (4, np.empty(0, np.int64)), (6, shorter), *((place, shorter) for place in RESULTS),
        ],
    )  # fmt: skip
    def test_wrong_arrays_are_refused_and_nothing_is_written(self, place: int, value: Any) -> None:
        arrays = broken(place, value)
        with pytest.raises(ValueError, match=r"must|lead|is no record"):
            run(arrays)
        assert all((arrays[one] == 77).all() for one in RESULTS)

    @pytest.mark.parametrize(("near", "near_numbers"), [(-1, 0), (0, -1)])
    def test_a_negative_number_of_neighbours_is_refused(self, near: int, near_numbers: int) -> None:
        with pytest.raises(ValueError, match="must not be negative"):
            run(broken(), near, near_numbers)

    @pytest.mark.parametrize("place", RESULTS)
    def test_read_only_results_are_never_written(self, place: int) -> None:
        arrays = broken()
        arrays[place].flags.writeable = False
        with pytest.raises((ValueError, BufferError), match="read-only"):
            run(arrays)

    def test_a_candidate_that_is_no_record_is_named(self) -> None:
        own, stored = packed([[1]]), packed([[1]])
        with pytest.raises(ValueError, match="a candidate is no record"):
            plan(*own, np.array([[1]]), *stored, np.zeros(1, np.float32), WORDS, RULE, EVERYTHING)

    def test_a_table_without_a_power_of_two_of_places_is_named(self) -> None:
        own, stored = packed([[1]]), packed([[1]])
        table = Table(np.zeros(3, np.uint64), np.zeros(3, np.uint8), np.zeros(3, np.uint64))
        with pytest.raises(ValueError, match="power of two"):
            plan(*own, np.array([[0]]), *stored, np.zeros(1, np.float32), WORDS, RULE, EVERYTHING, table)


def test_numbers_in_a_free_slot_are_known() -> None:
    kinds = np.full(20, WORD, np.uint8)
    kinds[[3, 9]] = NUMBER
    given_ = arguments([[1, 2, 9, 4]], [[1, 2, 3, 4]])
    slot = int(plan(*given_, kinds, RULE, EVERYTHING).changes.slot[0])
    for count, blamed, expected in ((1, 0, Evidence.UNKNOWN), (2, 0, Evidence.FULLY), (9, 1, Evidence.UNKNOWN),
                                    (10, 1, Evidence.FULLY)):  # fmt: skip
        table = full({slot: (Mark.SLOT, count | blamed << 32)})
        found = plan(*given_, kinds, RULE, Demand(numbers=2, words=6, penalty=4), table)
        assert found.evidence.tolist() == [expected]
