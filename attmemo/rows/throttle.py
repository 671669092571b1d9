"""How fast a thread may work beside requests: it rests a multiple of the time that it worked.

A record of 50 tokens of MiniLM is half a megabyte. To store it takes about a millisecond of one core, as long as the
request whose answer it keeps. Where every core is busy, requests take longer by all that the thread takes, for their
threads wait for each other. So what the thread does beside requests is paid for from an account of time, and where the
account has nothing left the thread takes hardly anything. Cores that are idle cost nothing.
"""

from __future__ import annotations

import time
from typing import Final, Protocol

from attmemo.system.machine import cores

SHARE: Final = 0.01
"""Share of one core that the thread takes while its process keeps the cores busy, and no account pays."""
PAID: Final = 0.5
"""The same, while the account pays and there is room."""
EACH: Final = 0.008
"""Seconds of paid work beside one forward, at most: a batch of many inputs takes not much longer for it."""
FREE: Final = 0.25
"""Share of one core while the process leaves more than half of its cores idle."""
LEARNS: Final = 0.1
"""Weight of the newest forward in how long one takes."""
_LOOK: Final = 0.2
"""Seconds between two looks at how busy the process is."""


class Account(Protocol):
    """Pays for work beside requests (`attmemo.guard.time_account`)."""

    @property
    def learns(self) -> bool:
        """Whether there is something left."""

    def spend(self, seconds: float) -> None:
        """Take so many seconds from the account."""


class Pace:
    """Rests of one thread, by the processor time that it took.

    Attributes
    ----------
    account : Account or None
        Pays for work beside requests; to be set.
    has_room : bool
        Whether records can be added and nothing has to go; to be set. Where each new record costs an old one, to
        store fast takes more time than it saves.
    owed : float
        Seconds of rest that could not be taken yet.
    forward_takes : float
        Seconds that a forward takes lately.
    """

    def __init__(self) -> None:
        self.account: Account | None = None
        self.has_room = True
        self.forward_takes = 0.0
        self.begin()

    def begin(self) -> None:
        """Begin in this process: nothing is owed, and how busy it is, is not known."""
        self.owed = 0.0
        self._cores = cores()
        self._looked, self._used, self._busy = time.monotonic(), time.process_time(), True

    @property
    def is_slow(self) -> bool:
        """Whether the thread takes little: cores are busy, and no account pays."""
        return self.share <= SHARE

    @property
    def share(self) -> float:
        """Share of one core that the thread may take now."""
        share = SHARE
        if self.has_room and self.account is not None and self.account.learns:
            share = max(SHARE, min(PAID, EACH / self.forward_takes if self.forward_takes else PAID))
        return share if self._busy else max(share, FREE)

    def forward(self, seconds: float) -> None:
        """A forward took so long. A count lost now and then does no harm."""
        self.forward_takes += (LEARNS if self.forward_takes else 1.0) * (seconds - self.forward_takes)

    def look(self) -> None:
        """See how busy the process is."""
        now = time.monotonic()
        if now - self._looked >= _LOOK:
            used = time.process_time()
            self._busy = used - self._used > 0.5 * (now - self._looked) * self._cores
            self._looked, self._used = now, used

    def spend(self, worked: float) -> float:
        """Seconds that belong behind so many seconds of work, which the account pays for if cores are busy."""
        share = self.share
        if self._busy and self.account is not None:
            self.account.spend(worked)
        return worked * (1.0 / share - 1.0)

    def rest(self, worked: float, least: float = 0.0) -> float:
        """Seconds to rest after so many seconds of work.

        `least`: the share of one core that this work must get. What it cannot rest now, it rests behind other work.
        """
        rest = self.spend(worked)
        if not self.is_slow:  # an account pays, or cores are idle: what was owed is forgiven
            self.owed = 0.0
        self.owed += rest
        rest = min(self.owed, worked * (1.0 / least - 1.0)) if least else self.owed
        self.owed -= rest
        return rest
