"""Kinds of tokens: numbers, codes and signs are numbers in every kind of tokenizer, all others are words."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tiny_models import SPECIAL
from transformers import PreTrainedTokenizerFast

from attmemo.kernels.kinds import NUMBER, WORD
from attmemo.rows.token_kinds import find_tokenizer, kinds_of


class Fake:
    """A tokenizer that only has names."""

    def __init__(self, names: list[str | None], special: list[int] | None = None) -> None:
        self._names = names
        if special is not None:
            self.all_special_ids = special

    def __len__(self) -> int:
        return len(self._names)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self._names[number] for number in ids]


def numbers(names: list[str], *others: str) -> set[str]:
    """Which of these tokens are numbers; others only show what kind of tokenizer it is."""
    found = kinds_of(Fake([*names, *others]))
    assert found.dtype == np.uint8
    assert set(found.tolist()) <= {NUMBER, WORD}
    return {name for name, kind in zip(names, found.tolist(), strict=False) if kind == NUMBER}


ANYWHERE = ["7", "2024", "0f", "a1", "00ff", "DEAD10", ".", "...", "--", "_", "(", "=>"]
"""Numbers, codes with a digit, and signs: wherever they stand."""
NEVER = ["root", "failed", "x7", "7th", "g1", "face", "abc", "über", "да", "no"]
"""Words, and what is not in hexadecimal digits."""
CODES = ["a", "ab", "F", "cD"]
"""One or two letters from a to f: codes inside of a word only."""


class TestStyles:
    def test_wordpiece(self) -> None:
        names = [*ANYWHERE, *NEVER, *CODES]
        inside = [f"##{name}" for name in names if name[0].isalnum()]
        found = numbers([*names, *inside])
        expected = {*ANYWHERE, *(f"##{name}" for name in (*ANYWHERE, *CODES) if name[0].isalnum())}
        assert found == expected

    @pytest.mark.parametrize("mark", ["\u0120", "\u2581"])
    def test_byte_level_bpe_and_sentencepiece(self, mark: str) -> None:
        """A mark says where a word begins; a token without one lies inside of a word."""
        names = [*ANYWHERE, *NEVER, *CODES]
        found = numbers([*names, *(mark + name for name in names)])
        assert found == {*ANYWHERE, *CODES, *(mark + name for name in ANYWHERE)}

    @pytest.mark.parametrize("mark", ["\u0120", "\u2581"])
    def test_a_mark_alone_is_a_number_and_more_marks_are_one(self, mark: str) -> None:
        two = 2 * mark
        assert numbers([mark, two, two + "12", two + "ab"]) == {mark, two, two + "12"}

    def test_whole_words(self) -> None:
        """Without marks nothing lies inside of a word."""
        assert numbers([*ANYWHERE, *NEVER, *CODES]) == set(ANYWHERE)

    def test_signs_of_wordpiece_that_stand_alone(self) -> None:
        assert numbers(["#", "##", "##ab", "##xyz"]) == {"#", "##", "##ab"}

    def test_tokens_in_other_scripts_are_words(self) -> None:
        assert numbers(["\u0661\u0662", "\u4e94", "caf\u00e9", "\u2026"]) == {"\u2026"}


class TestSpecial:
    def test_special_tokens_are_words_whatever_their_names(self) -> None:
        found = kinds_of(Fake(["[CLS]", "7", "...", "<s>", "8", ""], [0, 1, 2, 5]))
        assert found.tolist() == [WORD, WORD, WORD, WORD, NUMBER, WORD]

    def test_ids_without_a_name_are_words(self) -> None:
        assert kinds_of(Fake(["##a", None, "", "7"])).tolist() == [NUMBER, WORD, WORD, NUMBER]

    def test_a_tokenizer_without_tokens_has_no_kinds(self) -> None:
        assert kinds_of(Fake([])).tolist() == []


def test_a_real_tokenizer(tiny_bert: str) -> None:
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(tiny_bert)
    kinds = kinds_of(tokenizer)
    assert len(kinds) == len(tokenizer)
    names = tokenizer.convert_ids_to_tokens(list(range(len(kinds))))
    by_name = dict(zip(names, kinds.tolist(), strict=True))
    assert all(by_name[name] == WORD for name in SPECIAL)
    assert all(kind == NUMBER for name, kind in by_name.items() if name.isdecimal())
    letters = [kind for name, kind in by_name.items() if name.isalpha()]
    assert letters
    assert all(kind == WORD for kind in letters)


class TestFinding:
    def test_a_pipeline_has_its_own(self, tiny_bert: str) -> None:
        own = Fake(["a"])
        assert find_tokenizer(SimpleNamespace(tokenizer=own)) is own

    def test_one_that_was_saved_beside_the_weights(self, tiny_bert: str) -> None:
        model = SimpleNamespace(tokenizer="text", config=SimpleNamespace(_name_or_path=tiny_bert))
        found = find_tokenizer(model)
        assert found is not None
        assert len(kinds_of(found)) == len(found) > 0

    @pytest.mark.parametrize("path", ["", None, "nothing/of-this-name"])
    def test_none_is_no_error(self, path: str | None) -> None:
        assert find_tokenizer(SimpleNamespace(config=SimpleNamespace(_name_or_path=path))) is None
        assert find_tokenizer(object()) is None
