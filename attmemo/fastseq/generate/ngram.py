"""No n-gram twice: tokens that would repeat one get the score -inf before the next token is chosen.

FastSeq (arXiv 2106.04718), Algorithm 1. transformers (5.15 and later) makes a mask of rows times vocabulary and
fills a copy of the scores; its variant for n-grams of the source loops in Python. Here a kernel writes the few
banned scores in place: C on a CPU, Triton on a GPU; elsewhere the oracle's mask
(`attmemo.fastseq.generate.ngram_mask`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor

from attmemo.fastseq.generate import ngram_mask as kernel

_NOTHING = -1  # the id of no token; fills the shorter rows of a source


def ban_ngrams(scores: Tensor, tokens: Tensor, size: int, source: Tensor | None = None) -> None:
    """Set to -inf, in place, the score of each token that would complete an n-gram of the sequence's text.

    Parameters
    ----------
    scores : Tensor
        ``[R, V]``, floating point. Written.
    tokens : Tensor
        ``[R, T]`` of int64: what each row has said so far, prompt and padding included, as transformers has it.
    size : int
        n, at least 1. With 1 every token of the text is banned.
    source : Tensor, optional
        ``[R / k, S]`` of int64: the texts whose n-grams are banned, each for k rows that follow each other, its
        beams. Default: `tokens`.

    Raises
    ------
    ValueError
        If shapes or types do not fit; nothing was written.

    Notes
    -----
    Ids outside the vocabulary, negative ones too, are passed over: nothing can generate them.
    """
    text = tokens if source is None else source
    if scores.dim() != 2 or tokens.dim() != 2 or text.dim() != 2 or scores.shape[0] != tokens.shape[0] or size < 1:
        raise ValueError(
            f"cannot ban n-grams of {size} tokens: scores {list(scores.shape)}, tokens {list(tokens.shape)}, source "
            f"{list(text.shape)}; expected [R, V], [R, T], [R / k, S] and at least one token"
        )
    if scores.shape[0] and (text.shape[0] == 0 or scores.shape[0] % text.shape[0]):
        raise ValueError(f"{scores.shape[0]} rows of scores are not a multiple of the {text.shape[0]} source texts")
    if tokens.dtype != torch.int64 or text.dtype != torch.int64:
        raise ValueError(f"tokens are {tokens.dtype}, source {text.dtype}; expected torch.int64")
    if not scores.is_floating_point():
        raise ValueError(f"scores are {scores.dtype}; expected a floating-point type")
    if kernel.takes(scores, tokens, text):
        kernel.ban_ngrams(scores, tokens, text, size)
    elif scores.is_cuda and _has_triton() and not torch.compiler.is_compiling():
        from attmemo.fastseq.generate.ngram_triton import ban_ngrams as ban_on_gpu

        ban_on_gpu(scores, tokens, text, size)
    else:
        scores.masked_fill_(kernel.banned_mask(scores, tokens, text, size), -float("inf"))


class NoRepeatNGram(LogitsProcessor):  # type: ignore[misc]
    """As ``NoRepeatNGramLogitsProcessor`` of transformers, with the same result, by a kernel.

    Parameters
    ----------
    ngram_size : int
        n, at least 1.
    in_place : bool
        Write into the scores that were handed over and return them. Beam search allows it; sampling does unless it
        is asked for ``output_logits``, which it keeps without a copy. The default, as in transformers: a new tensor.
    """

    def __init__(self, ngram_size: int, *, in_place: bool = False) -> None:
        if not isinstance(ngram_size, int) or ngram_size <= 0:
            raise ValueError(f"`ngram_size` has to be a strictly positive integer, but is {ngram_size}")
        self.ngram_size = ngram_size
        self.in_place = in_place

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[R, V]`` after the rows ``[R, T]``."""
        if input_ids.shape[-1] < self.ngram_size:
            return scores  # itself, as in transformers
        result = scores if self.in_place else scores.clone()
        ban_ngrams(result, input_ids, self.ngram_size)
        return result


class EncoderNoRepeatNGram(LogitsProcessor):  # type: ignore[misc]
    """As ``EncoderNoRepeatNGramLogitsProcessor``: no n-gram of the source; by a kernel, not by loops in Python.

    Parameters
    ----------
    ngram_size : int
        n, at least 1.
    encoder_input_ids : Tensor
        ``[B, S]``, or ``[S]`` for one text, int64, padding included.
    in_place : bool
        As in `NoRepeatNGram`.

    Notes
    -----
    Ids beyond the vocabulary are passed over; the original raises, and takes negative ones (a padding of -100) for
    places counted from the vocabulary's end.
    """

    def __init__(self, ngram_size: int, encoder_input_ids: Tensor, *, in_place: bool = False) -> None:
        if not isinstance(ngram_size, int) or ngram_size <= 0:
            raise ValueError(f"`ngram_size` has to be a strictly positive integer, but is {ngram_size}")
        self.ngram_size = ngram_size
        self.in_place = in_place
        self.source = encoder_input_ids.unsqueeze(0) if encoder_input_ids.dim() == 1 else encoder_input_ids

    @property
    def batch_size(self) -> int:
        """Number of source texts."""
        return self.source.shape[0]

    def select_rows(self, rows: Tensor) -> None:
        """Keep only these source texts ``[B']``, in this order: when finished ones leave the batch."""
        self.source = self.source.index_select(0, rows.to(self.source.device))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores ``[B * M, V]`` after the rows ``[B * M, T]``; the M beams of a text follow each other."""
        if self.source.device != scores.device:
            self.source = self.source.to(scores.device)
        result = scores if self.in_place else scores.clone()
        ban_ngrams(result, input_ids, self.ngram_size, self.source)
        return result


def swap_ngram_processors(
    processors: LogitsProcessorList, *, source: Tensor | None = None, in_place: bool = False
) -> int:
    """Put ours in the places of the original n-gram processors; the list is changed, its order is kept.

    Parameters
    ----------
    processors : LogitsProcessorList
        As `generate` prepares it.
    source : Tensor, optional
        ``[B, S]``: the encoder's input. Without it what is banned is read from transformers' own table.
    in_place : bool
        As in `NoRepeatNGram`.

    Returns
    -------
    int
        How many were swapped. Subclasses stay: they may do something else.
    """
    swapped = 0
    for place, processor in enumerate(processors):
        if type(processor) is NoRepeatNGramLogitsProcessor:
            processors[place] = NoRepeatNGram(processor.ngram_size, in_place=in_place)
        elif type(processor) is EncoderNoRepeatNGramLogitsProcessor:
            size = processor.ngram_size
            text = _text_of(processor.generated_ngrams, size) if source is None else source
            processors[place] = EncoderNoRepeatNGram(size, text, in_place=in_place)
        else:
            continue
        swapped += 1
    return swapped


def _text_of(tables: Sequence[Mapping[tuple[int, ...], Sequence[int]]], size: int) -> Tensor:
    """A text ``[B, S]`` with the n-grams of the original tables and no others: each is followed by no token's id."""
    rows = []
    for table in tables:
        ngrams = ((*prefix, token, _NOTHING) for prefix, tokens in table.items() for token in dict.fromkeys(tokens))
        rows.append([token for ngram in ngrams for token in ngram])
    text = torch.full((len(rows), max([size, *map(len, rows)])), _NOTHING, dtype=torch.int64)
    for place, row in enumerate(rows):
        text[place, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return text


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True
