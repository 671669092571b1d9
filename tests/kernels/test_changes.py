"""What changed: the kernel gives what the oracle gives; slots and values mean the same in every record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_tools import BARE, Sequences, packed, sequences, walled

from attmemo.kernels import _changes
from attmemo.kernels.align import Rule, align
from attmemo.kernels.changes import Changes, changes, changes_in_python
from attmemo.kernels.kinds import NUMBER, WORD

TYPE = 1 << 24
"""The lowest bit of a token's type."""


def same(one: Changes, other: Changes) -> bool:
    return all(
        a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(one.columns, other.columns, strict=True)
    )


def arguments(
    inputs: Sequences, records: Sequences, rows: list[int], kinds: npt.NDArray[np.uint8], rule: Rule = BARE
) -> tuple[Any, ...]:
    """All that `changes` takes, with the partners that the alignment finds."""
    own, stored, numbers = packed(inputs), packed(records), np.array(rows, np.int64)
    partner = align(*own, numbers[:, None].copy(), *stored, rule).source
    return (*own, numbers, *stored, partner, kinds)


class Texts:
    """Words and numbers with the ids that they got first."""

    def __init__(self) -> None:
        self.ids: dict[str, int] = {}

    def tokens(self, text: str) -> list[int]:
        return [self.ids.setdefault(word, len(self.ids)) for word in text.split()]

    def between(self, text: str, record: str) -> Changes:
        """What changed from one text to the other."""
        own, stored = self.tokens(text), self.tokens(record)
        kinds = np.array([NUMBER if name.isdecimal() else WORD for name in self.ids], np.uint8)
        given_ = arguments([own], [stored], [0], kinds)
        found = changes(*given_)
        assert same(found, changes_in_python(*given_))
        return found


@pytest.fixture(name="texts")
def _texts() -> Texts:
    return Texts()


class TestAgainstTheOracle:
    @settings(max_examples=300, deadline=None)
    @given(sequences(), st.sampled_from([None, 0, 3]), st.integers(0, 2**31))
    def test_the_kernel_finds_the_same_changes(
        self, case: tuple[Sequences, Sequences], most_moved: int | None, seed: int
    ) -> None:
        inputs, records = case
        random = np.random.default_rng(seed)
        kinds = random.integers(0, 2, random.integers(0, 40)).astype(np.uint8)
        rows = random.integers(-1, len(records), len(inputs)).tolist()
        rule = Rule(near=0, edges=False, ends=False, most_moved=most_moved)
        given_ = arguments(inputs, records, rows, kinds, rule)
        found = changes(*given_)
        assert same(found, changes_in_python(*given_))
        assert (np.diff(found.sequence) >= 0).all()

    @settings(max_examples=100, deadline=None)
    @given(st.integers(0, 2**31))
    def test_also_for_partners_that_no_alignment_gives(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        own, record = random.integers(0, 2**31, 30), random.integers(0, 2**31, 40)
        count = int(random.integers(0, 30))
        partner = np.full(30, -1, np.int32)
        partner[np.sort(random.choice(30, count, replace=False))] = np.sort(random.choice(40, count, replace=False))
        kinds = random.integers(0, 2, 2**10).astype(np.uint8)
        given_ = (*packed([own.tolist()]), np.zeros(1, np.int64), *packed([record.tolist()]), partner, kinds)
        assert same(changes(*given_), changes_in_python(*given_))

    def test_every_token_of_an_input_may_be_a_gap_of_its_own(self) -> None:
        """As many gaps as there is room for."""
        own = list(range(1, 9))
        record = [0, *(token for number in own for token in (number, 0))]
        given_ = arguments([own], [record], [0], np.zeros(0, np.uint8))
        found = changes(*given_)
        assert len(found) == len(own) + 1
        assert same(found, changes_in_python(*given_))


class TestMeaning:
    def test_the_same_words_name_the_same_slot_in_every_record(self, texts: Texts) -> None:
        one = texts.between("Failed password for guest from 7", "Failed password for root from 7")
        other = texts.between("22 daemon says no to password for root", "22 daemon says no to password for guest")
        third = texts.between("Access for admin", "Access for root")
        assert len(one) == len(other) == len(third) == 1
        assert one.slot == other.slot == third.slot
        assert one.value == other.former
        assert one.former == other.value == third.former
        assert one.change == other.change != third.change
        assert one.word == 1

    def test_another_word_to_the_left_is_another_slot(self, texts: Texts) -> None:
        one = texts.between("password for root", "password for guest")
        other = texts.between("password of root", "password of guest")
        assert one.slot != other.slot
        assert one.value != other.value
        assert one.change != other.change

    def test_a_change_has_no_direction_but_values_have(self, texts: Texts) -> None:
        one = texts.between("for root from 7 port 22", "for guest from 8 port 23 9")
        back = texts.between("for guest from 8 port 23 9", "for root from 7 port 22")
        assert len(one) == 3
        assert np.array_equal(one.slot, back.slot)
        assert np.array_equal(one.change, back.change)
        assert np.array_equal(one.value, back.former)
        assert np.array_equal(one.former, back.value)
        assert not set(one.value.tolist()) & set(one.former.tolist())

    def test_numbers_and_words_behind_the_same_word_lie_in_two_slots(self, texts: Texts) -> None:
        numbers = texts.between("port 22 open", "port 23 open")
        words = texts.between("port ssh open", "port http open")
        mixed = texts.between("port 22 open", "port http open")
        assert (numbers.word, words.word, mixed.word) == (0, 1, 1)
        assert words.slot == mixed.slot != numbers.slot

    def test_a_shared_number_is_no_place(self, texts: Texts) -> None:
        one = texts.between("for 22 root", "for 22 guest")
        other = texts.between("for root", "for guest")
        assert one.slot == other.slot
        assert one.change == other.change

    def test_the_beginning_is_a_slot_too(self, texts: Texts) -> None:
        one = texts.between("root logs in", "guest logs in")
        other = texts.between("22 root", "22 guest")
        assert one.slot == other.slot
        assert one.slot != texts.between("root logs in", "root logs out").slot

    def test_what_was_put_in_and_what_was_taken_out(self, texts: Texts) -> None:
        """Nothing is a value as well: it is the same in both directions."""
        more, less = texts.between("for the root", "for root"), texts.between("for root", "for the root")
        assert (len(more), len(less)) == (1, 1)
        assert more.value == less.former
        assert more.former == less.value == texts.between("for", "for guest").value
        assert more.change == less.change

    def test_the_order_and_number_of_tokens_are_part_of_a_value(self, texts: Texts) -> None:
        found = [texts.between(f"for {words} now", "for root now").value[0] for words in ("a b", "b a", "a", "a b b")]
        assert len(set(found)) == 4

    def test_equal_texts_have_no_gap(self, texts: Texts) -> None:
        assert len(texts.between("for root from 7", "for root from 7")) == 0

    def test_texts_that_share_nothing_have_one_gap(self, texts: Texts) -> None:
        found = texts.between("22 23", "24 25 26")
        assert (len(found), found.word) == (1, 0)

    def test_one_word_among_numbers_makes_a_word(self, texts: Texts) -> None:
        assert texts.between("port 22", "port 23 and 24").word == 1

    def test_tokens_without_a_kind_are_words(self) -> None:
        kinds = np.zeros(5, np.uint8)
        assert changes(*arguments([[1, 4]], [[1, 3]], [0], kinds)).word == 0
        assert changes(*arguments([[1, 5]], [[1, 3]], [0], kinds)).word == 1
        assert changes(*arguments([[1, -2]], [[1, 3]], [0], kinds)).word == 1

    def test_types_of_tokens_name_no_other_slots(self) -> None:
        kinds = np.array([WORD] * 3 + [NUMBER] * 3, np.uint8)
        plain = changes(*arguments([[1, 4, 2]], [[1, 3, 2]], [0], kinds))
        typed = changes(*arguments([[1 + TYPE, 4 + TYPE, 2]], [[1 + TYPE, 3 + TYPE, 2]], [0], kinds))
        assert np.array_equal(plain.slot, typed.slot)
        assert not np.array_equal(plain.value, typed.value), "another type is another value"


class TestBatches:
    def test_each_sequence_has_its_own_gaps(self) -> None:
        inputs, records = [[1, 2, 3], [1, 5], [], [7, 8], [1, 9, 3, 4]], [[1, 2, 4], [1, 2, 3]]
        rows, kinds = [1, 0, 0, -1, 1], np.zeros(9, np.uint8)
        together = changes(*arguments(inputs, records, rows, kinds))
        assert set(together.sequence.tolist()) == {1, 2, 4}
        for number, (own, row) in enumerate(zip(inputs, rows, strict=True)):
            alone = changes(*arguments([own], records, [row], kinds))
            part = together.of(number)
            assert (part.sequence == number).all()
            assert all(np.array_equal(a, b) for a, b in zip(alone.columns[1:], part.columns[1:], strict=True))
        assert sum(len(together.of(number)) for number in range(5)) == len(together)
        assert len(together.of(17)) == 0

    def test_an_empty_batch_has_no_gaps(self) -> None:
        for records in ([], [[1, 2]]):
            given_ = arguments([], records, [], np.zeros(3, np.uint8))
            assert len(changes(*given_)) == 0
            assert same(changes(*given_), changes_in_python(*given_))

    def test_without_a_record_there_are_no_gaps(self) -> None:
        for records in ([], [[1, 2]]):
            given_ = arguments([[1, 2], [3]], records, [-1, -1], np.zeros(3, np.uint8))
            assert len(changes(*given_)) == 0
            assert same(changes(*given_), changes_in_python(*given_))

    def test_an_empty_record_lacks_all(self) -> None:
        found = changes(*arguments([[1, 2], []], [[]], [0, 0], np.zeros(0, np.uint8)))
        assert found.sequence.tolist() == [0]

    def test_threads_that_ask_at_once_do_not_disturb_each_other(self) -> None:
        random = np.random.default_rng(3)
        jobs = []
        for _ in range(4):
            inputs = [random.integers(0, 30, 150).tolist() for _ in range(5)]
            records = [random.integers(0, 30, 150).tolist() for _ in range(3)]
            jobs.append(arguments(inputs, records, [0, 1, 2, -1, 0], random.integers(0, 2, 20).astype(np.uint8)))
        expected = [changes_in_python(*job) for job in jobs]
        wrong: list[int] = []

        def work(number: int) -> None:
            for _ in range(50):
                if not same(changes(*jobs[number]), expected[number]):
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong


OUTPUTS = range(7, 13)


def broken(change: Callable[[list[Any]], None]) -> list[Any]:
    """Arguments of the native function with something wrong."""
    found: list[Any] = [
        np.arange(5, dtype=np.int32),
        np.array([0, 2, 5]),
        np.array([0, 1]),
        np.array([0, 7, 2, 8, 4, 9], np.int32),
        np.array([0, 2, 6]),
        np.array([0, -1, 0, -1, 2], np.int32),
        np.zeros(10, np.uint8),
        np.full(7, 77),
        *(np.full(7, 77, np.uint64) for _ in range(4)),
        np.full(7, 77, np.uint8),
    ]
    change(found)
    return found


def put(place: int, value: Any) -> Callable[[list[Any]], None]:
    return lambda arguments_: arguments_.__setitem__(place, value)


def twice(array: Any) -> Any:
    """The same numbers, with a gap behind each."""
    return np.repeat(array, 2)[::2]


class TestRefusals:
    @pytest.mark.parametrize(
        "change",
        [
            put(0, np.arange(5)), put(0, np.arange(5, dtype=np.uint32)), put(0, np.arange(5, dtype=np.float32)),
            put(0, np.arange(5, dtype=">i4")), put(0, np.arange(4, dtype=np.int32)),
            put(0, np.zeros((1, 5), np.int32)), put(0, np.zeros((), np.int32)),
            put(0, twice(np.arange(5, dtype=np.int32))),
            put(1, np.array([1, 2, 5])), put(1, np.array([0, 6, 5])), put(1, np.array([0, -1, 5])),
            put(1, np.array([0, 2, 6])), put(1, np.array([0, 5])), put(1, np.array([0, 2, 5], np.int32)),
            put(1, np.array([-1, 2, 5])), put(1, np.array([0, 2**62, 5])), put(1, np.empty(0, np.int64)),
            put(2, np.array([0, 2])), put(2, np.array([2**62, 1])), put(2, np.array([0])), put(2, np.array([[0, 1]])),
            put(3, np.arange(5, dtype=np.int32)), put(3, np.arange(6)), put(4, np.array([0, 2, 7])),
            put(4, np.array([-1, 2, 6])), put(4, np.array([0, 7, 6])), put(4, np.empty(0, np.int64)),
            put(5, np.array([0, -1, 1, 0, 2], np.int32)), put(5, np.array([0, -1, 0, 0, 2], np.int32)),
            put(5, np.array([2, -1, 0, -1, 2], np.int32)), put(5, np.array([0, -1, 0, -1, 4], np.int32)),
            put(5, np.array([0, -1, 0, -1], np.int32)), put(5, np.array([0, -1, 0, -1, 2])),
            put(6, np.zeros(10, np.int8)), put(6, np.zeros(10, bool)), put(6, np.zeros((2, 5), np.uint8)),
            put(6, twice(np.zeros(5, np.uint8))),
            *(put(place, np.full(6, 77, np.uint64)) for place in OUTPUTS),
            *(put(place, np.full(7, 77, np.float64)) for place in OUTPUTS),
            *(put(place, np.full(14, 77, np.uint64)[::2]) for place in OUTPUTS),
        ],
    )  # fmt: skip
    def test_wrong_arguments_are_refused_and_nothing_is_written(self, change: Callable[[list[Any]], None]) -> None:
        given_ = broken(change)
        with pytest.raises(ValueError, match=r"another type|fit together|must rise|does not exist"):
            _changes.changes(*given_)
        assert all((given_[place] == 77).all() for place in OUTPUTS)

    def test_starts_end_with_all_tokens(self) -> None:
        given_ = broken(put(1, np.array([0, 2, 4])))
        with pytest.raises(ValueError, match="starts must rise from 0 to all tokens"):
            _changes.changes(*given_)

    def test_an_address_between_two_numbers_is_refused(self) -> None:
        octets = np.zeros(21, np.uint8)
        given_ = broken(put(0, octets[1:].view(np.int32)))
        with pytest.raises(ValueError, match="another type"):
            _changes.changes(*given_)

    def test_right_arguments_are_taken(self) -> None:
        given_ = broken(lambda _: None)
        expected = changes_in_python(*given_[:7])
        assert _changes.changes(*given_) == len(expected) > 0
        for place, column in zip(OUTPUTS, expected.columns, strict=True):
            assert np.array_equal(given_[place][: len(expected)], column)
            assert (given_[place][len(expected) :] == 77).all()

    @pytest.mark.parametrize("place", OUTPUTS)
    def test_read_only_results_are_never_written(self, place: int) -> None:
        given_ = broken(lambda _: None)
        given_[place].flags.writeable = False
        with pytest.raises((ValueError, BufferError), match="read-only"):
            _changes.changes(*given_)
        assert all((given_[other] == 77).all() for other in OUTPUTS)

    @pytest.mark.parametrize("count", [0, 12, 14])
    def test_another_number_of_arguments_is_refused(self, count: int) -> None:
        given_ = broken(lambda _: None)
        with pytest.raises(TypeError, match="takes 13 arguments"):
            _changes.changes(*(given_ * 2)[:count])

    @pytest.mark.parametrize("place", range(7))
    def test_strides_are_refused_and_read_only_parts_give_the_same(self, place: int) -> None:
        given_ = broken(lambda _: None)
        expected = changes(*given_[:7])
        with pytest.raises(ValueError, match="no contiguous vector"):
            changes(*given_[:place], twice(given_[place]), *given_[place + 1 : 7])
        part = np.concatenate([given_[place][:1], given_[place], given_[place][:1]])[1:-1]
        part.flags.writeable = False
        assert same(changes(*given_[:place], part, *given_[place + 1 : 7]), expected)


@pytest.mark.parametrize("length", [1, 7, 64, 200])
def test_nothing_behind_the_arrays_is_touched(length: int) -> None:
    random = np.random.default_rng(length)
    records = [random.integers(0, 9, length).tolist() for _ in range(2)]
    inputs = [random.integers(0, 9, length).tolist() for _ in range(3)]
    given_ = arguments(inputs, records, [1, 0, -1], random.integers(0, 2, 7).astype(np.uint8))
    most = 3 * length + 3
    results = [np.zeros(most, np.int64), *np.zeros((4, most), np.uint64), np.zeros(most, np.uint8)]
    walls = [walled(array) for array in results]
    count = _changes.changes(*map(walled, given_), *walls)
    assert same(Changes(*(column[:count] for column in walls)), changes_in_python(*given_))
