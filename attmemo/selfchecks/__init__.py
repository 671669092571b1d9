"""Self-checks of `memoize`: a small batch goes through the very path that serves. One file for each kind of reuse."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from attmemo.engine import Engine

DEEP = 10  # times the tolerance of one block: errors of all blocks add up


class Handle(Protocol):
    """The part of a `Memoization` that is checked."""

    engine: Engine

    def enable(self) -> None: ...
    def disable(self) -> None: ...
    def reset_stats(self) -> None: ...


def enable_within(handle: Handle, stack: ExitStack) -> None:
    """Serve until the stack is undone; the counters begin anew then."""
    stack.callback(handle.reset_stats)
    handle.enable()
    stack.callback(handle.disable)
