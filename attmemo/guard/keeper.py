"""Keeps the file of a guard up to date, off the way of requests."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from contextlib import suppress
from typing import Final

from attmemo.guard.file import Ledger
from attmemo.guard.guard import Guard
from attmemo.system.locking import weakly

_LOG = logging.getLogger("attmemo")

EVERY: Final = 10.0
"""Seconds between two syncs, while something is learned."""


class Keeper:
    """Reads what was learned before, and writes what is learned, until it is closed.

    Parameters
    ----------
    guard : Guard
    ledger : Ledger
    every : float
        Seconds between two syncs.
    """

    def __init__(self, guard: Guard, ledger: Ledger, every: float = EVERY) -> None:
        self._guard, self._ledger = guard, ledger
        self._closing, self._told = threading.Event(), False
        self._mend()
        if ledger.read() is not None:
            self.sync()
        own = weakref.ref(self)  # a keeper that nothing else holds ends its thread
        threading.Thread(target=_run, args=(own, self._closing, every), daemon=True, name="attmemo-guard").start()
        self._leave = weakly(self.close)
        atexit.register(self._leave)
        os.register_at_fork(after_in_child=weakly(guard.leave_to_parent))

    def _mend(self) -> None:
        with suppress(OSError):  # the first sync tells
            place = self._ledger.set_aside()
            if place is not None:
                _LOG.warning("attmemo: %s is damaged. It is set aside as %s, and the guard collects evidence again",
                             self._ledger.path, place.name)  # fmt: skip

    def sync(self) -> None:
        """Share what was learned. A file that cannot be written is told once."""
        try:
            self._guard.sync(self._ledger)
        except OSError as error:
            if not self._told:
                self._told = True
                _LOG.warning("attmemo: the guard's evidence is not kept: %s cannot be written: %s",
                             self._ledger.path, error)  # fmt: skip

    def sync_if_dirty(self) -> None:
        """Share what was learned, if anything was."""
        if self._guard.dirty:
            self.sync()

    def close(self) -> None:
        """Share for the last time."""
        if not self._closing.is_set():
            self._closing.set()
            atexit.unregister(self._leave)
            self.sync_if_dirty()


def _run(own: weakref.ref[Keeper], closing: threading.Event, every: float) -> None:
    while not closing.wait(every):
        keeper = own()
        if keeper is None:
            return
        keeper.sync_if_dirty()
        del keeper
