"""Kinds of tokens: numbers and words. The tokenizer tells them apart (`attmemo.rows.token_kinds`)."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Kinds = npt.NDArray[np.uint8]
"""`NUMBER` or `WORD` for each token id; ids from the end on are words."""

NUMBER: Final = 0
WORD: Final = 1
IDS: Final = (1 << 24) - 1
"""The bits of a token that are its id; token types lie above."""
NO_KINDS: Final[Kinds] = np.zeros(0, np.uint8)
"""All tokens are words."""


def is_word(kinds: Kinds, token: int) -> bool:
    """Whether a token is a word."""
    known = token & IDS
    return known >= len(kinds) or bool(kinds[known] == WORD)
