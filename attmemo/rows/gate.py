"""Does a lookup of rows pay? What lookups saved against what they cost, as this process measured both.

A lookup costs microseconds and saves rows of blocks, so it pays nearly always. On text that never repeats itself it
saves nothing: then lookups stop, but for one batch now and then, and begin again when these find something.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from attmemo.system.locking import thread_lock

LEARNED: Final = 4096  # tokens looked up before the first judgement
REMEMBERED: Final = 1 << 16  # tokens after which older ones count half
RARELY: Final = 64  # batches between two tries, at most


@dataclass(frozen=True, slots=True)
class _State:
    tokens: float = 0.0  # looked up
    saved: float = 0.0  # rows that were not computed
    seconds: float = 0.0  # of lookups
    left: int = 0  # batches without a lookup since the last one
    wait: int = 1  # so many batches go without a lookup before the next


class RowGate:
    """Decides whether a batch is looked up.

    Parameters
    ----------
    always : bool
        Look up every batch: nothing need be asked or recorded.
    """

    def __init__(self, always: bool = False) -> None:
        self.always = always
        self._state = _State()
        self._lock = thread_lock()

    def ask(self, seconds_per_row: float | None) -> bool:
        """Whether to look up, if the blocks take so long for a row; None: not known yet. Changes nothing."""
        state = self._state
        if self.always or seconds_per_row is None or state.tokens < LEARNED:
            return True
        return state.saved * seconds_per_row >= state.seconds or state.left >= state.wait

    def leave(self) -> None:
        """A batch was not looked up."""
        with self._lock:
            s = self._state
            self._state = _State(s.tokens, s.saved, s.seconds, s.left + 1, s.wait)

    def record(self, tokens: int, saved: int, seconds: float, seconds_per_row: float | None = None) -> None:
        """A batch of so many tokens was looked up, and so many rows need not be computed."""
        with self._lock:
            s = self._state
            kept = 0.5 if s.tokens > REMEMBERED else 1.0
            paid = saved > 0 and (seconds_per_row is None or saved * seconds_per_row >= seconds)
            wait = 1 if paid else min(RARELY, 2 * s.wait)
            self._state = _State(kept * s.tokens + tokens, kept * s.saved + saved, kept * s.seconds + seconds, 0, wait)
