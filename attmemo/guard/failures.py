"""Failures of guarded forwards are counted, and cost no request. Verifying that fails again and again is an alarm."""

from __future__ import annotations

import logging
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
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fails = 0  # verifications that failed in a row

    def note(self, what: str, error: Exception) -> None:
        """Count and tell that something failed."""
        if count := self._engine.counters.failure(what, error, 1):
            debug = _LOG.isEnabledFor(logging.DEBUG)
            _LOG.warning("attmemo: %s: %s (%d so far)", what, error, count, exc_info=debug)

    def unverified(self, error: Exception, guard: Guard) -> None:
        """Answers could not be verified. If that goes on, none is reused: it would not be seen that they change."""
        self.note("an answer could not be verified", error)
        self._fails += 1
        if self._fails % FAILS == 0:
            guard.alarm()
            self.tell_alarm(guard)

    def verified(self) -> None:
        """Answers could be verified."""
        self._fails = 0

    @staticmethod
    def tell_alarm(guard: Guard) -> None:
        """Tell that an alarm of this guard began."""
        _LOG.warning("attmemo: %s", guard.state().sentence(guard.confidence))
