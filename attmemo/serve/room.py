"""Bytes that requests may hold at a time: bodies on their way in, answers on their way out."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Final

from attmemo.serve.refusal import Refusal, overloaded

STALLED: Final = 1.0
"""Seconds without a byte after which a request that is still arriving gives way to others."""


class Room:
    """One bound for all requests together.

    A request that is still arriving and has stalled gives way to others, the one that has sent nothing for longest
    first. So clients that hold bodies back do not keep others out.

    Parameters
    ----------
    most : int
        Bytes that are held at a time.
    small : int
        A request that holds no more than this is let in, whatever others hold; all that are arriving give way to it.

    Attributes
    ----------
    held : int
        Bytes that are held now.
    """

    def __init__(self, most: int, small: int = 0) -> None:
        self.most, self._small, self.held = most, small, 0
        self._arriving: OrderedDict[Share, tuple[float, asyncio.Timeout]] = OrderedDict()  # the last byte's time

    def share(self) -> Share:
        """The share of one request, empty."""
        return Share(self)

    def _make(self, count: int, small: bool) -> None:
        """Have others give way to so many bytes more; a `Refusal` if that does not suffice."""
        while self.held + count > self.most and self._arriving:
            other, (moved, clock) = next(iter(self._arriving.items()))
            if not small and moved > time.monotonic() - STALLED:
                break
            other.free()
            other.lost = True
            if not clock.expired():
                clock.reschedule(0.0)
        if self.held + count > self.most and not small:
            raise overloaded()


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

    def make_room(self, count: int) -> None:
        """Have others give way to so many bytes more, or raise a `Refusal`."""
        if self.held + count > self._room.most:
            what = f"the answer would have more than {self._room.most} bytes: ask for less at a time"
            raise Refusal("validation", what, 413, reason="answer")
        self._room._make(count, self.held + count <= self._room._small)

    def take(self, count: int, clock: asyncio.Timeout | None = None) -> None:
        """Hold so many bytes more, or raise a `Refusal`; with a clock, they may be taken away, and it rings."""
        if self.lost:
            raise overloaded()
        self.keep()
        self.make_room(count)
        self.held += count
        self._room.held += count
        if clock is not None:
            self._room._arriving[self] = time.monotonic(), clock

    def keep(self) -> None:
        """Give way no more: all bytes are there."""
        self._room._arriving.pop(self, None)

    def free(self) -> None:
        """Hold nothing."""
        self.keep()
        self._room.held -= self.held
        self.held = 0
