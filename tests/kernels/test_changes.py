"""What changed between inputs and their records: slots and values mean the same in every record."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_tools import BARE, Sequences, planned

from attmemo.kernels.changes import LONG_TEXT, PASSAGE, Changes
from attmemo.kernels.kinds import NUMBER, WORD, Kinds

TYPE = 1 << 24
"""The lowest bit of a token's type."""


def changes_of(inputs: Sequences, records: Sequences, rows: list[int], kinds: Kinds) -> Changes:
    """What the kernel finds between inputs and these records; -1: an input has none."""
    return planned(inputs, np.array(rows, np.int64)[:, None].copy(), records, BARE, kinds).changes


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
        return changes_of([own], [stored], [0], kinds)


@pytest.fixture(name="texts")
def _texts() -> Texts:
    return Texts()


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
        assert changes_of([[1, 4]], [[1, 3]], [0], kinds).word == 0
        assert changes_of([[1, 5]], [[1, 3]], [0], kinds).word == 1
        assert changes_of([[1, -2]], [[1, 3]], [0], kinds).word == 1

    def test_types_of_tokens_name_no_other_slots(self) -> None:
        kinds = np.array([WORD] * 3 + [NUMBER] * 3, np.uint8)
        plain = changes_of([[1, 4, 2]], [[1, 3, 2]], [0], kinds)
        typed = changes_of([[1 + TYPE, 4 + TYPE, 2]], [[1 + TYPE, 3 + TYPE, 2]], [0], kinds)
        assert np.array_equal(plain.slot, typed.slot)
        assert not np.array_equal(plain.value, typed.value), "another type is another value"


def said(count: int, first: int = 0) -> str:
    """So many words, none of them twice."""
    return " ".join(f"word{number}" for number in range(first, first + count))


class TestPassages:
    """In long texts: gaps of many tokens, and gaps at the end."""

    TEXT = said(2 * LONG_TEXT)

    def test_texts_that_go_on_change_in_one_slot_whatever_they_say(self, texts: Texts) -> None:
        found = [texts.between(f"{text} {said(3, 500 + 9 * n)} end", f"{text} end")
                 for n, text in enumerate((self.TEXT, said(2 * LONG_TEXT, 900)))]  # fmt: skip
        assert [len(one) for one in found] == [1, 1]
        assert found[0].slot == found[1].slot
        assert found[0].change != found[1].change
        assert found[0].value == found[0].former != found[1].value

    def test_the_same_words_behind_another_text_are_the_same_value_and_another_change(self, texts: Texts) -> None:
        """What they did to one answer says little of another text's."""
        found = [texts.between(f"{text} do not buy", text) for text in (self.TEXT, said(2 * LONG_TEXT, 900))]
        assert found[0].slot == found[1].slot
        assert found[0].value == found[1].value
        assert found[0].change != found[1].change

    @pytest.mark.parametrize("end", ["", " end"])
    def test_a_text_that_lost_its_end_has_changed_in_the_same_slot(self, texts: Texts, end: str) -> None:
        longer, shorter = f"{self.TEXT} {said(3, 500)}{end}", f"{self.TEXT}{end}"
        there, back = texts.between(longer, shorter), texts.between(shorter, longer)
        assert there.slot == back.slot
        assert there.change == back.change
        assert there.value == back.former

    @pytest.mark.parametrize("place", [10, 40, 100])
    def test_a_passage_lies_in_the_slot_of_its_size_wherever_it_stands(self, texts: Texts, place: int) -> None:
        def edited(at: int) -> Changes:
            words = self.TEXT.split()
            new = [*words[:at], *said(PASSAGE, 500).split(), *words[at + PASSAGE :]]
            return texts.between(" ".join(new), self.TEXT)

        one, other = edited(place), edited(70)
        assert (len(one), one.word) == (1, 1)
        assert one.slot == other.slot

    def test_passages_of_other_sizes_lie_in_other_slots(self, texts: Texts) -> None:
        slots = {int(texts.between(f"{self.TEXT} {said(count, 500)}", self.TEXT).slot[0]) for count in (3, 9, 30, 90)}
        assert len(slots) == 4

    def test_numbers_alone_are_no_passage(self, texts: Texts) -> None:
        many = " ".join(map(str, range(2 * PASSAGE)))
        one, other = texts.between(f"for {many} {self.TEXT}", f"for {self.TEXT}"), texts.between("for 1", "for 2")
        assert one.slot == other.slot
        assert one.word == 0

    def test_a_few_tokens_within_a_long_text_lie_where_they_stand(self, texts: Texts) -> None:
        few = said(PASSAGE - 1, 500)
        one, other = (texts.between(f"for {few} {text}", f"for {text}") for text in (self.TEXT, "now"))
        assert one.slot == other.slot, "behind a word that both share"

    def test_a_short_text_has_no_passages(self, texts: Texts) -> None:
        text = said(LONG_TEXT - PASSAGE - 2)
        for new in (said(PASSAGE, 500), "root"):
            assert texts.between(f"{text} for {new}", f"{text} for").slot == texts.between("for a", "for b").slot


class TestBatches:
    def test_each_sequence_has_its_own_gaps(self) -> None:
        inputs, records = [[1, 2, 3], [1, 5], [], [7, 8], [1, 9, 3, 4]], [[1, 2, 4], [1, 2, 3]]
        rows, kinds = [1, 0, 0, -1, 1], np.zeros(9, np.uint8)
        together = changes_of(inputs, records, rows, kinds)
        assert set(together.sequence.tolist()) == {1, 2, 4}
        for number, (own, row) in enumerate(zip(inputs, rows, strict=True)):
            alone = changes_of([own], records, [row], kinds)
            part = together.of(number)
            assert (part.sequence == number).all()
            assert all(np.array_equal(a, b) for a, b in zip(alone.columns[1:], part.columns[1:], strict=True))
        assert sum(len(together.of(number)) for number in range(5)) == len(together)
        assert len(together.of(17)) == 0

    @pytest.mark.parametrize("records", [[], [[1, 2]]])
    def test_without_an_input_or_a_record_there_are_no_gaps(self, records: Sequences) -> None:
        assert len(changes_of([], records, [], np.zeros(3, np.uint8))) == 0
        assert len(changes_of([[1, 2], [3]], records, [-1, -1], np.zeros(3, np.uint8))) == 0

    def test_an_empty_record_lacks_all(self) -> None:
        assert changes_of([[1, 2], []], [[]], [0, 0], np.zeros(0, np.uint8)).sequence.tolist() == [0]
