"""What changed between made-up texts, for tests of the guard."""

from __future__ import annotations

import numpy as np

from attmemo.kernels.changes import Changes

Gap = tuple[int, int, int, bool]  # slot, value, former value, whether it is a word


def gaps(*found: Gap) -> Changes:
    """Gaps with plain numbers in place of hashes."""
    slot, value, former, change, word = [], [], [], [], []
    for place, new, old, is_word in found:
        slot.append(2 * place + is_word)
        value.append(1000 * slot[-1] + new)
        former.append(1000 * slot[-1] + old)
        low, high = sorted((new, old))
        change.append(1_000_000 * slot[-1] + 1000 * low + high)
        word.append(is_word)
    hashes = (np.array(column, np.uint64) for column in (slot, value, former, change))
    return Changes(np.zeros(len(found), np.int64), *hashes, np.array(word, np.uint8))


def number(slot: int, value: int, former: int) -> Gap:
    return slot, value, former, False


def word(slot: int, value: int, former: int) -> Gap:
    return slot, value, former, True
