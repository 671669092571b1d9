"""From texts to batches: tokenized, cut to what the model takes, sorted by length, padded."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from attmemo.errors import AttmemoError, DataError

Padding = Literal["longest", "max_length"]


@dataclass(frozen=True)
class Batch:
    """Texts that are generated together.

    Attributes
    ----------
    rows : list of int
        Which texts of the input they are.
    ids, mask : Tensor
        int64 ``[B, N]``: token ids, and 1 where they are not padding.
    truncated : list of bool
        Which of them were cut.
    """

    rows: list[int]
    ids: Tensor
    mask: Tensor
    truncated: list[bool]

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, places: Sequence[int]) -> Batch:
        """Some of the texts, with the padding that only the others needed taken off."""
        ids, mask = self.ids[list(places)], self.mask[list(places)]
        used = mask.any(0).nonzero()
        if len(used):
            first, last = int(used[0]), int(used[-1]) + 1
            ids, mask = ids[:, first:last], mask[:, first:last]
        return Batch([self.rows[p] for p in places], ids, mask, [self.truncated[p] for p in places])


@dataclass(frozen=True)
class Window:
    """A stretch of the input, encoded."""

    batches: list[Batch]
    blank: list[int] = field(default_factory=list)


class Encoder:
    """Tokenizes windows of the input and cuts them into batches; may be called from several threads.

    Parameters
    ----------
    tokenizers : Copies
        One is borrowed for each window: a tokenizer that encodes must not be told to pad by another thread.
    size : callable
        Gives the number of texts in a batch whose longest has so many tokens.
    prefix : str
        Put before every text.
    limit : int or None
        Tokens that longer texts are cut to.
    truncate : bool
        False: a text beyond `limit` is an error.
    buckets : bool
        Sort a window's texts by length, so that little is padded; else batches are of neighbours.
    padding : {"longest", "max_length"}
        To the longest of the batch, or to `limit`.
    side : {"left", "right"}
        Where padding goes.

    Notes
    -----
    Batches are a function of the window and these parameters alone, so that a run that is resumed has the same.
    """

    def __init__(
        self,
        tokenizers: Copies,
        size: Callable[[int], int],
        *,
        prefix: str = "",
        limit: int | None = None,
        truncate: bool = True,
        buckets: bool = True,
        padding: Padding = "longest",
        side: str = "right",
    ) -> None:
        self._tokenizers = tokenizers
        self._size = size
        self._prefix = prefix
        self._limit = limit
        self._truncate = truncate
        self._buckets = buckets
        self._padding = padding
        self._side = side

    def __call__(self, window: tuple[int, Sequence[str]]) -> Window:
        """Encode texts, the first of which is the given row of the input.

        Raises
        ------
        DataError
            A text is too long and must not be cut, or is no text.
        """
        first, texts = window
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                raise DataError(
                    f"text {first + place + 1:,} is a {type(text).__name__}; expected a str.",
                    "give an iterable of str",
                )
        blank = [first + place for place, text in enumerate(texts) if not text.strip()]
        kept = [(first + place, self._prefix + text) for place, text in enumerate(texts) if text.strip()]
        if not kept:
            return Window([], blank)
        rows = [row for row, _ in kept]
        with self._tokenizers.lent() as tokenizer:
            ids, truncated = self._encode(tokenizer, rows, [text for _, text in kept])
            return self._window(tokenizer, rows, ids, truncated, blank)

    def _window(
        self, tokenizer: Any, rows: list[int], ids: list[list[int]], truncated: list[bool], blank: list[int]
    ) -> Window:
        # A text of characters that the tokenizer drops has no tokens: nothing to generate from, like a blank line.
        empty = {place for place, tokens in enumerate(ids) if not tokens}
        blank += [rows[place] for place in empty]
        order = [place for place in range(len(rows)) if place not in empty]
        if self._buckets:
            # The longest first: if memory does not do, that shows at once.
            order.sort(key=lambda place: (-len(ids[place]), place))
        batches = [self._pad(tokenizer, rows, ids, truncated, part) for part in self._cut(order, ids)]
        return Window(batches, sorted(blank))

    def _encode(self, tokenizer: Any, rows: list[int], texts: list[str]) -> tuple[list[list[int]], list[bool]]:
        ids: list[list[int]] = tokenizer(texts, truncation=False, padding=False, verbose=False)["input_ids"]
        long = [place for place, tokens in enumerate(ids) if self._limit is not None and len(tokens) > self._limit]
        if long and not self._truncate:
            raise DataError(
                f"line {rows[long[0]] + 1:,} has {len(ids[long[0]]):,} tokens, the model takes {self._limit:,}.",
                "leave out --no-truncation, or shorten the line",
            )
        if long:
            # Once more, since only the tokenizer knows which special tokens stand at the end.
            cut = tokenizer([texts[place] for place in long], truncation=True, max_length=self._limit, padding=False)
            for place, tokens in zip(long, cut["input_ids"], strict=True):
                ids[place] = tokens
        cuts = set(long)
        return ids, [place in cuts for place in range(len(ids))]

    def _cut(self, order: list[int], ids: list[list[int]]) -> Iterator[list[int]]:
        start = 0
        while start < len(order):
            size = self._size(len(ids[order[start]]))
            if not self._buckets:
                # Not sorted: the longest may stand further back, and with it fewer fit.
                while size > 1 and size > (fit := self._size(max(len(ids[p]) for p in order[start : start + size]))):
                    size = fit
            yield order[start : start + size]
            start += size

    def _pad(
        self, tokenizer: Any, rows: list[int], ids: list[list[int]], truncated: list[bool], part: list[int]
    ) -> Batch:
        length = self._limit if self._padding == "max_length" else None
        padded = tokenizer.pad(
            {"input_ids": [ids[place] for place in part]},
            padding="longest" if length is None else "max_length",
            max_length=length,
            padding_side=self._side,
            return_attention_mask=True,
            return_tensors="pt",
            verbose=False,
        )
        return Batch(
            [rows[p] for p in part],
            padded["input_ids"].to(torch.int64),
            padded["attention_mask"].to(torch.int64),
            [truncated[p] for p in part],
        )


class Copies:
    """Copies of a tokenizer, one for each thread that uses it at the moment.

    The fast ones keep truncation and padding as state, and refuse ("Already borrowed") to change it while another
    thread uses them. A copy of a large vocabulary takes a tenth of a second: they are kept and lent again.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._original = tokenizer
        self._lock = threading.Lock()
        self._idle: list[Any] = []

    @contextmanager
    def lent(self) -> Iterator[Any]:
        """A copy for this caller alone."""
        with self._lock:
            tokenizer = self._idle.pop() if self._idle else copy.deepcopy(self._original)
        try:
            yield tokenizer
        finally:
            self._idle.append(tokenizer)


def with_padding(tokenizer: Any) -> Any:
    """The tokenizer, or a copy that pads with its end token, as is usual for decoders that never learned padding."""
    if tokenizer.pad_token_id is not None:
        return tokenizer
    own = copy.deepcopy(tokenizer)
    if own.eos_token is None:
        raise AttmemoError(
            "the tokenizer has neither a padding token nor an end token.",
            "set tokenizer.pad_token to one of its tokens",
        )
    own.pad_token = own.eos_token
    return own
