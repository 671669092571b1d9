"""How fast a thread may work beside requests: it rests a multiple of the time that it worked.

A record of 50 tokens of MiniLM is one megabyte. To store it takes one or two milliseconds of one core, a tenth of the
time that its request took with two. Where every core is busy, requests take longer by all that the thread takes, for
their threads wait for each other. So the thread takes little, and of inputs that are never alike only some are stored.
The first ones fill an empty database, a little faster. Records that are found pay for more of them, and these are
stored much faster: while there is room for them.
"""

from __future__ import annotations

import time
from typing import Final

from attmemo.system.machine import cores

SHARE: Final = 0.01
"""Share of one core that the thread takes while its process keeps the cores busy."""
FAST_SHARE: Final = 0.5
"""The same, while found records pay and there is room."""
FIRST_SHARE: Final = 0.03
"""The same, for the first work of an empty database."""
EACH: Final = 0.008
"""Seconds of fast or first work beside one forward, at most: a batch of many inputs takes not much longer for it."""
FIRST: Final = 0.3
"""Seconds of first work: two hundred records of a small model."""
GIVEN: Final = 0.05
"""Seconds of work that are paid for at the beginning, for the very first records of an empty database."""
ENOUGH: Final = 200
"""A database that begins with so many records has no first work."""
EARNED: Final = 0.8
"""Seconds of work that are paid for by finding records that would take a second to compute."""
MOST: Final = 1.5
"""Most seconds of work that are paid for at one time."""
FREE: Final = 0.25
"""Share of one core while the process leaves more than half of its cores idle."""
LEARNS: Final = 0.1
"""Weight of the newest forward in how long one takes."""
_LOOK: Final = 0.2
"""Seconds between two looks at how busy the process is."""


class Pace:
    """Rests of one thread, by the processor time that it took.

    Parameters
    ----------
    records : int
        How many there are at the beginning.

    Attributes
    ----------
    has_room : bool
        Whether records can be added and nothing has to go; to be set. Without room nothing is paid for: where each new
        record costs an old one, to store fast takes more time than it saves.
    owed : float
        Seconds of rest that could not be taken yet.
    """

    def __init__(self, records: int = 0) -> None:
        self.has_room = True
        empty = max(0.0, 1.0 - records / ENOUGH)
        self._first, self._paid = FIRST * empty, GIVEN * empty
        self._forward = 0.0  # seconds that a forward takes
        self.begin()

    def begin(self) -> None:
        """Begin in this process: nothing is owed, and how busy it is, is not known."""
        self.owed = 0.0
        self._cores = cores()
        self._looked, self._used, self._busy = time.monotonic(), time.process_time(), True

    @property
    def is_slow(self) -> bool:
        """Whether the thread takes little: cores are busy, no work is paid for, and the first work is done."""
        return self.share <= SHARE

    @property
    def share(self) -> float:
        """Share of one core that the thread may take now."""
        share = SHARE
        if self.has_room:
            share = FAST_SHARE if self._paid else FIRST_SHARE if self._first else SHARE
            if share * self._forward > EACH:
                share = max(SHARE, EACH / self._forward)
        return share if self._busy else max(share, FREE)

    def forward(self, seconds: float) -> None:
        """A forward took so long. A count lost now and then does no harm."""
        self._forward += (LEARNS if self._forward else 1.0) * (seconds - self._forward)

    def look(self) -> None:
        """See how busy the process is."""
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            used = time.process_time()
            self._busy = used - self._used > 0.5 * (now - self._looked) * self._cores
            self._looked, self._used = now, used

    def earn(self, seconds: float) -> None:
        """Records were found that would take so many seconds of processor time to compute."""
        if self.has_room:
            self._paid = min(MOST, self._paid + EARNED * seconds)

    def spend(self, worked: float) -> float:
        """Seconds that belong behind so many seconds of work; what is paid for is used first."""
        if self.has_room:
            if self._paid:
                self._paid = max(0.0, self._paid - worked)
            else:
                self._first = max(0.0, self._first - worked)
        return worked * (1.0 / self.share - 1.0)

    def rest(self, worked: float, least: float = 0.0) -> float:
        """Seconds to rest after so many seconds of work.

        `least`: the share of one core that this work must get. What it cannot rest now, it rests behind other work.
        """
        rest = self.spend(worked)
        if self.share > FIRST_SHARE:  # found records pay, or cores are idle: what was owed is forgiven
            self.owed = 0.0
        self.owed += rest
        rest = min(self.owed, worked * (1.0 / least - 1.0)) if least else self.owed
        self.owed -= rest
        return rest
