"""How the fast path says no. Never seen by the user: the original path then runs, and the reason is counted."""

from __future__ import annotations


class Refusal(Exception):
    """The fast path does not cover this; `str` of it is the reason that `stats()` shows."""
