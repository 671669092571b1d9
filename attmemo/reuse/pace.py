"""How fast a thread may work beside requests: it rests a multiple of the time that it worked.

A record of 50 tokens of MiniLM is one megabyte. To store it takes a millisecond of one core, a tenth of the time that
its request took with two. Where every core is busy, a request waits longer than that: its threads wait for each other.
So of inputs that are never alike only some are stored. The first ones fill an empty database and are stored faster,
and so are all as long as stored records save more than that takes.

Of a small model on a fast processor a record takes longer to store than its request took: then even the first ones
are stored slowly. Batches of 16 log lines, MiniLM in bfloat16 with a matrix unit, took 40 milliseconds in place of 24
while the thread took half of a core.
"""

from __future__ import annotations

import os
import time
from typing import Final

SHARE: Final = 0.01
"""Share of one core that the thread takes while its process keeps the cores busy."""
FAST_SHARE: Final = 0.5
"""The same, while there is work left that is paid for."""
DEAR_SHARE: Final = 0.15
"""The same, where records are dear."""
DEAR: Final = 0.5
"""Records are dear if a token takes this part of the processor time that a row takes to compute."""
FIRST: Final = 1.5
"""Seconds of work that are paid for at the beginning: about a thousand records of a small model."""
EARNED: Final = 0.25
"""Seconds of work that a second which reuse saved pays for."""
FREE: Final = 0.25
"""Share of one core while the process leaves more than half of its cores idle."""
_LOOK: Final = 0.2
"""Seconds between two looks at how busy the process is."""


class Pace:
    """Rests of one thread, by the processor time that it took."""

    def __init__(self) -> None:
        self._paid, self._dear = FIRST, False
        self._looked, self._used, self._busy = time.monotonic(), time.process_time(), True

    def look(self) -> None:
        """See how busy the process is."""
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            used = time.process_time()
            self._busy = used - self._used > 0.5 * (now - self._looked) * len(os.sched_getaffinity(0))
            self._looked, self._used = now, used

    def earn(self, seconds: float) -> None:
        """Reuse saved so many seconds of processor time."""
        self._paid = min(FIRST, self._paid + EARNED * seconds)

    def weigh(self, stored: float, computed: float) -> None:
        """Seconds of processor time that a token takes to store, and a row to compute."""
        self._dear = stored > DEAR * computed

    def rest(self, worked: float) -> float:
        """Seconds to rest after so many seconds of work."""
        self._paid = max(0.0, self._paid - worked)
        share = SHARE if not self._paid else DEAR_SHARE if self._dear else FAST_SHARE
        if not self._busy:
            share = max(share, FREE)
        return worked * (1.0 / share - 1.0)
