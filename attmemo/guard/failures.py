"""Failures of guarded forwards are counted, and cost no request. Verifying that fails again and again is an alarm."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from attmemo.forward.engine import Engine
from attmemo.guard.guard import Guard

_LOG = logging.getLogger("attmemo")

FAILS: Final = 3
"""Verifications that fail, one behind the other, before there is an alarm."""


class Failures:
    """Counts what failed, and tells of alarms.

    Parameters
    ----------
    engine : Engine
        Counts them.
    guard : callable
        Gives the guard that is asked now.
    """

    def __init__(self, engine: Engine, guard: Callable[[], Guard]) -> None:
        self._engine, self._guard = engine, guard
        self._fails = 0  # verifications that failed in a row

    def note(self, what: str, error: Exception) -> None:
        """Count and tell that something failed."""
        if count := self._engine.counters.failure(what, error, 1):
            debug = _LOG.isEnabledFor(logging.DEBUG)
            _LOG.warning("attmemo: %s: %s (%d so far)", what, error, count, exc_info=debug)

    def unverified(self, error: Exception) -> None:
        """Answers could not be verified. If that goes on, none is reused: it would not be seen that they change."""
        self.note("an answer could not be verified", error)
        self._fails += 1
        if self._fails % FAILS == 0:
            self._guard().alarm()
            self.tell_alarm()

    def verified(self) -> None:
        """Answers could be verified."""
        self._fails = 0

    def tell_alarm(self) -> None:
        """Tell that an alarm began."""
        guard = self._guard()
        _LOG.warning("attmemo: %s", guard.state().sentence(guard.confidence))
