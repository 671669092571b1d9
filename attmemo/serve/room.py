"""Bytes that requests may hold at a time: bodies on their way in, answers on their way out."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from attmemo.serve.refusal import Refusal, overloaded


class Room:
    """One bound for all requests together.

    A request whose bytes are still arriving gives way to others, the one that has sent nothing for longest first. So
    clients that hold bodies back keep nobody out.

    Parameters
    ----------
    most : int
        Bytes that are held at a time.
    small : int
        A request that holds no more than this is let in, whatever others hold.
    """

    def __init__(self, most: int, small: int = 0) -> None:
        self.most, self._small, self._held = most, small, 0
        self._arriving: OrderedDict[Share, asyncio.Timeout] = OrderedDict()  # longest without a byte first

    @property
    def held(self) -> int:
        """Bytes that are held now."""
        return self._held

    def share(self) -> Share:
        """The share of one request, empty."""
        return Share(self)

    def _take(self, share: Share, count: int) -> None:
        while self._held + count > self.most and self._arriving:
            other, clock = self._arriving.popitem(last=False)
            if other is not share:
                other.free()
                other.lost = True
                if not clock.expired():
                    clock.reschedule(0.0)
        if self._held + count > self.most and share.held + count > self._small:
            raise overloaded()
        self._held += count


class Share:
    """What one request holds.

    Attributes
    ----------
    held : int
        Bytes.
    lost : bool
        It had to give way.
    """

    def __init__(self, room: Room) -> None:
        self._room, self.held, self.lost = room, 0, False

    def take(self, count: int, clock: asyncio.Timeout | None = None) -> None:
        """Hold so many bytes more, or raise a `Refusal`; with a clock, they may be taken away, and it rings."""
        if self.lost:
            raise overloaded()
        if self.held + count > self._room.most:
            what = f"the answer would have more than {self._room.most} bytes: ask for less at a time"
            raise Refusal("validation", what, 413, reason="answer")
        self._room._arriving.pop(self, None)
        self._room._take(self, count)
        self.held += count
        if clock is not None:
            self._room._arriving[self] = clock

    def keep(self) -> None:
        """Give way no more: all bytes are there."""
        self._room._arriving.pop(self, None)

    def free(self) -> None:
        """Hold nothing."""
        self.keep()
        self._room._held -= self.held
        self.held = 0
