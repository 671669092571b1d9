"""Spans of a text, as a model that tags tokens finds them: one whole number stands for the list of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attmemo.errors import AnswerError

OUTSIDE: Final = ("O", "")
"""Labels of tokens that lie in no span."""
BEGIN: Final = ("B", "S", "U")
END: Final = ("E", "L", "S", "U")
"""Letters in front of ``-``, of the first and of the last token of a span (BIO, BIOES, BILOU). Others continue one."""
SPECIAL: Final = ("cls", "sep", "bos", "eos", "pad")
"""Tokens of no text: what is said of them is no answer."""
_WIDTH: Final = 8  # bytes of a number that stands for a list


class Spans:
    """Reads the spans of texts from the logits of their tokens.

    Parameters
    ----------
    labels : sequence of str
        Names of classes: ``B-PER`` begins a span of this type, ``I-PER`` continues one or begins it. Of labels without
        such letters, equal ones side by side are one span.
    special : iterable of int
        Ids of tokens that lie in no span.
    """

    def __init__(self, labels: Sequence[str], special: Iterable[int] = ()) -> None:
        parts = [_part(label) for label in labels]
        names = sorted({name for _, name in parts if name not in OUTSIDE})
        self._names = names
        self._types = np.array([names.index(name) + 1 if name in names else 0 for _, name in parts])
        self._begin = np.array([letter in BEGIN for letter, _ in parts])
        self._end = np.array([letter in END for letter, _ in parts])
        self._special = torch.tensor(sorted(special), dtype=torch.int64)

    def of_text(self, mask: Tensor, ids: Any) -> Tensor:
        """A mask ``[B, L]`` of tokens with -1 at special ones: these are tokens, and have no answer."""
        if not isinstance(ids, Tensor) or ids.shape != mask.shape:
            return mask
        return mask.long().masked_fill(torch.isin(ids, self._special) & (mask > 0), -1)

    def read(self, logits: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """A number for the spans of each text, int64 ``[B]``, and the smallest margin of its tokens, ``[B]``.

        Parameters
        ----------
        logits : Tensor [B, L, C]
        mask : Tensor [B, L] or None
            Positive at tokens that count. None: all do.

        Raises
        ------
        AnswerError
            The logits are none of these labels, or the mask has another shape.
        """
        count = len(self._types)
        if logits.dim() != 3 or logits.shape[2] != count or count < 2:
            what = f"logits {tuple(logits.shape)} are no tags of tokens with {count} labels."
            raise AnswerError(what, "answer='spans' needs a model that tags tokens, and labels in its configuration")
        if mask is not None and mask.shape != logits.shape[:2]:
            what = f"logits {tuple(logits.shape)} are those of other tokens than a mask {tuple(mask.shape)} has."
            raise AnswerError(what, "give answer= a function of the model's output")
        counts = torch.ones(logits.shape[:2], dtype=torch.bool) if mask is None else mask > 0
        best = logits.detach().float().softmax(-1).topk(2, -1).values
        margins = (best[..., 0] - best[..., 1]).masked_fill(~counts, 1.0).amin(1)
        own = counts.numpy()
        codes = self._codes(logits.argmax(-1).numpy(), own)
        texts = [row[valid].tobytes() for row, valid in zip(codes, own, strict=True)]
        found = b"".join(blake2b(text, digest_size=_WIDTH).digest() for text in texts)
        return torch.from_numpy(np.frombuffer(found, "<i8").astype(np.int64)), margins

    def of_labels(self, labels: Any, ids: Sequence[int]) -> list[tuple[str, int, int]]:
        """The spans of one text, each with its type, its first token, and the one behind its last.

        Parameters
        ----------
        labels : int array [n]
            The best class of each token.
        ids : sequence of int
            Token ids: special ones lie in no span.
        """
        own = ~np.isin(np.asarray(ids), self._special.numpy())
        codes = self._codes(np.asarray(labels)[None], own[None])[0]
        types, edges = codes >> 1, np.flatnonzero((codes & 1) | (np.diff(codes >> 1, prepend=0) != 0))
        return [
            (self._names[types[first] - 1], int(first), int(stop))
            for first, stop in zip(edges, [*edges[1:], len(codes)], strict=True) if types[first]
        ]  # fmt: skip

    def _codes(self, labels: Any, counts: Any) -> Any:
        """A number for each token, int32 ``[B, L]``: its type, 0 outside of spans, and whether it begins a span."""
        types = np.where(counts, self._types[labels], 0)
        before = np.pad(types, ((0, 0), (1, 0)))[:, :-1]
        ended = np.pad(self._end[labels], ((0, 0), (1, 0)))[:, :-1]
        begins = (types > 0) & (self._begin[labels] | ended | (types != before))
        return (2 * types + begins).astype(np.int32)


def spans_in(config: Any, tokenizer: Any) -> Spans:
    """Those of a model with this configuration; tokenizer: knows special tokens, else the configuration does."""
    names = {int(number): str(name) for number, name in (getattr(config, "id2label", None) or {}).items()}
    known = (getattr(tokenizer or config, f"{name}_token_id", None) for name in SPECIAL)
    return Spans([names[number] for number in sorted(names)], {one for one in known if isinstance(one, int)})


def _part(label: str) -> tuple[str, str]:
    """The letter of a label, and the type behind it."""
    letter, dash, name = label.partition("-")
    return (letter, name) if dash and len(letter) == 1 and letter.isupper() else ("", label)
