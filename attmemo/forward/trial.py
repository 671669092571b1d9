"""Self-checks of `memoize`: a small batch goes through the very path that serves. One file for each kind of reuse."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Protocol

from attmemo.errors import AdapterCheckError
from attmemo.forward.engine import Engine
from attmemo.models.check import UNKNOWN

DEEP = 10  # times the tolerance of one block: errors of all blocks add up


class Handle(Protocol):
    """The part of a `Memoization` that is checked."""

    engine: Engine

    def enable(self) -> None: ...
    def disable(self) -> None: ...
    def reset_stats(self) -> None: ...


def not_served(what: str, engine: Engine) -> AdapterCheckError:
    """The error for `what` stayed exact: why, and how that is undone."""
    counters = engine.counters
    reason, hint = counters.reason(), UNKNOWN
    if reason in ("output_attentions", "output_hidden_states"):
        reason = f"the configuration asks for them in every call (config.{reason})"
        hint = f"model.config.{counters.reason()} = False, and give it to the calls that want them"
    elif reason in counters.ineligible:
        hint = "undo that, and call memoize again; or leave the model unmemoized"
    return AdapterCheckError(f"{what} cannot be answered: {reason}.", hint)


def enable_within(handle: Handle, stack: ExitStack) -> None:
    """Serve until the stack is undone; the counters begin anew then."""
    stack.callback(handle.reset_stats)
    handle.enable()
    stack.callback(handle.disable)
