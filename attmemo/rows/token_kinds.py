"""Kinds of tokens: words, and all the rest: numbers, codes and punctuation.

Other numbers in the same place seldom change what a text says; another word may. The tokenizer says which token is
which; nothing else of the tokenizer is used.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from attmemo.kernels.kinds import NUMBER, WORD

STARTS: Final = ("\u2581", "\u0120")  # marks of tokens that begin a word: SentencePiece, byte-level BPE
INSIDE: Final = "##"  # mark of tokens inside of a word: WordPiece

_DIGITS = re.compile(r"[0-9a-f]*[0-9][0-9a-f]*", re.IGNORECASE)
_CODE = re.compile(r"[0-9a-f]{1,2}", re.IGNORECASE)
_SIGNS = re.compile(r"[\W_]+")


def kinds_of(tokenizer: Any) -> npt.NDArray[np.uint8]:
    """The kind of each token id, uint8 ``[V]``.

    A number is a token of digits, of digits and the letters a to f, of signs, or one or two of these letters inside of
    a word, as codes in hexadecimal digits are cut. Special tokens and all others are words.
    """
    count = len(tokenizer)
    names = tokenizer.convert_ids_to_tokens(list(range(count)))
    special = set(getattr(tokenizer, "all_special_ids", ()))
    pieces = any(name.startswith(INSIDE) and len(name) > len(INSIDE) for name in names if name)
    marked = any(name.startswith(STARTS) for name in names if name)
    found = np.full(count, WORD, np.uint8)
    for number, name in enumerate(names):
        if number in special or not name:
            continue
        inside = name.startswith(INSIDE) if pieces else marked and not name.startswith(STARTS)
        text = name.removeprefix(INSIDE).lstrip("".join(STARTS)) if pieces or marked else name
        if not text or _DIGITS.fullmatch(text) or _SIGNS.fullmatch(text) or (inside and _CODE.fullmatch(text)):
            found[number] = NUMBER
    return found


def find_tokenizer(model: Any) -> Any | None:
    """The tokenizer of a pipeline or a sentence-transformers model, or the one that was saved beside the weights."""
    own = getattr(model, "tokenizer", None)
    if own is not None and hasattr(own, "convert_ids_to_tokens"):
        return own
    path = getattr(getattr(model, "config", None), "_name_or_path", "")
    if not path:
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception:  # whatever is wrong with files beside the model, it serves without them
        return None
