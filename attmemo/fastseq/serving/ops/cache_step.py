"""One step of a server on a key-value cache: which sequences get new tokens, as inputs of the operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class CacheStep:
    """New tokens of several sequences, as the operator wants them: B sequences, N tokens one behind the other."""

    sequences: tuple[int, ...]  # whose tokens these are, in their order
    versions: tuple[int, ...]  # of these, when the step was made
    seqstarts: torch.Tensor  # [B + 1] int64
    kvstarts: torch.Tensor  # [B + 1] int64
    cachestarts: torch.Tensor  # [B] with offsets, [B, most pages] with pages: token offsets, -1 where unused
    start_pos: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [N] int64: of each token in its sequence
    decoding_batches: int  # sequences in front with one token
    max_seqlen: int
    max_kvlen: int
    tokens: int  # N
    keys: int  # of all sequences: kvstarts[B]

    @property
    def last(self) -> torch.Tensor:
        """Where each sequence's last token stands among the N; ``[B]``. Its logits choose the next one.

        Meaningless for a sequence without new tokens.
        """
        return self.seqstarts[1:] - 1


@dataclass
class CachedSequence:
    """What a cache knows of one sequence."""

    length: int = 0
    pages: list[int] = field(default_factory=list)  # enough for `length` tokens, or more: reserved
    reserved: int = 0  # pages that it keeps whatever its length
    version: int = 0  # grows when tokens are taken away or moved: a step made before would write elsewhere


def make_step(
    requests: Sequence[tuple[int, CachedSequence, int]], *, page_size: int, paged: bool, device: torch.device
) -> CacheStep:
    """The operator's inputs for new tokens behind those of each sequence, whose pages have room for both.

    Parameters
    ----------
    requests : sequence of (int, CachedSequence, int)
        Number, sequence, and how many new tokens.
    page_size : int
        Tokens of a page.
    paged : bool
        False: the pages of each sequence are neighbours, and `cachestarts` names the first.
    """
    new = [tokens for _, _, tokens in requests]
    past = [sequence.length for _, sequence, _ in requests]
    total = [before + tokens for before, tokens in zip(past, new, strict=True)]
    pages = [[page * page_size for page in sequence.pages] for _, sequence, _ in requests]
    if paged:
        used = [-(-tokens // page_size) for tokens in total]
        width = max(used, default=0) or 1
        table = [rows[:count] + [-1] * (width - count) for rows, count in zip(pages, used, strict=True)]
        starts = torch.tensor(table, dtype=torch.int64, device=device).view(len(new), width)
    else:
        starts = torch.tensor([rows[0] if rows else 0 for rows in pages], dtype=torch.int64, device=device)
    positions = [position for begin, end in zip(past, total, strict=True) for position in range(begin, end)]
    return CacheStep(
        sequences=tuple(number for number, _, _ in requests),
        versions=tuple(sequence.version for _, sequence, _ in requests),
        seqstarts=_starts(new, device),
        kvstarts=_starts(total, device),
        cachestarts=starts,
        start_pos=torch.tensor(past, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        decoding_batches=next((place for place, tokens in enumerate(new) if tokens != 1), len(new)),
        max_seqlen=max(new, default=0),
        max_kvlen=max(total, default=0),
        tokens=sum(new),
        keys=sum(total),
    )


def _starts(lengths: list[int], device: torch.device) -> torch.Tensor:
    """Where each of several pieces begins, and where the last ends: ``[B + 1]``."""
    ends = torch.tensor([0, *lengths], dtype=torch.int64, device=device)
    return ends.cumsum(0)
