"""The texts of a table: a first part that prepares, and a stream in windows, some of which all paths answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from attmemo.errors import DataError
from attmemo.profiler.models import LoadedModel, Tokens, tokenize
from attmemo.wording import counted

FIRST: Final = 0.2
"""Share of the texts that prepare: ranges of 8-bit numbers are taken from them. The stream begins behind them."""
MOST_FIRST: Final = 400
BATCHES: Final = 3
"""Batches of the largest size in a window."""
_FEWEST: Final = 2  # windows' worth of texts


@dataclass(frozen=True, slots=True)
class Text(Tokens):
    """Tokens beside their text, which pipelines with a tokenizer of their own take."""

    text: str


class Turn(NamedTuple):
    """One batch, and whether all paths answer it; then also a batch of the same window in the order of lengths."""

    window: int
    whole: bool
    texts: list[Tokens]
    by_length: list[Tokens]


@dataclass(frozen=True, slots=True)
class Stream:
    """Texts in their order; the rows of both parts are numbered from 0."""

    first: list[Tokens]  # what prepares
    texts: list[Tokens]  # what is asked
    window: int  # texts in a window; the last window may be shorter
    sampled: frozenset[int]  # windows that all paths answer

    @property
    def windows(self) -> int:
        return -(-len(self.texts) // self.window)

    @property
    def whole(self) -> int:
        """Windows that are not shorter; at least 1."""
        return max(1, len(self.texts) // self.window)

    @property
    def asked_of_all(self) -> int:
        """Texts of the windows that all paths answer."""
        return sum(len(self._window(number)) for number in self.sampled)

    def turns(self, size: int) -> Iterator[Turn]:
        """Batches of this size in the order of the stream; no batch lies in two windows."""
        for number in range(self.windows):
            texts = self._window(number)
            ordered = sorted(texts, key=len)
            for start in range(0, len(texts), size):
                part = slice(start, start + size)
                yield Turn(number, number in self.sampled, texts[part], ordered[part])

    def duplicates(self) -> float:
        """Share of the texts whose very tokens came before in the stream."""
        return 1.0 - len({tuple(text.ids) for text in self.texts}) / len(self.texts)

    def _window(self, number: int) -> list[Tokens]:
        return self.texts[number * self.window : (number + 1) * self.window]


def make_stream(loaded: LoadedModel, texts: Sequence[str], length: int, largest: int, sample: int) -> Stream:
    """Tokenize texts, to `length` tokens at most, and cut them for batches of up to `largest` texts.

    About `sample` texts are answered by all paths. DataError: there are too few texts.
    """
    cut = min(MOST_FIRST, round(FIRST * len(texts)))
    rest = len(texts) - cut
    if rest < _FEWEST * largest or cut < 1:
        least = round(_FEWEST * largest / (1.0 - FIRST)) + 1
        seen = counted(len(texts), "text is", "texts are")
        what = f"{seen} too few for batches of {largest}, expected {least} or more."
        raise DataError(what, "give more texts, or smaller batches: --batch 1,8")
    window = min(BATCHES * largest, max(largest, sample // largest * largest))
    count = max(1, rest // window)  # whole windows; a shorter one at the end is never sampled
    wanted = min(count, max(1, round(sample / window)))
    sampled = frozenset(int((2 * place + 1) * count / (2 * wanted)) for place in range(wanted))
    return Stream(_tokenized(loaded, texts[:cut], length), _tokenized(loaded, texts[cut:], length), window, sampled)


def _tokenized(loaded: LoadedModel, texts: Sequence[str], length: int) -> list[Tokens]:
    tokens = tokenize(loaded, texts, length)
    return [Text(one.row, one.ids, one.segments, text) for one, text in zip(tokens, texts, strict=True)]
