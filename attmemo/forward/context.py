"""The context of a forward: what was asked of it, what was decided, and what its blocks did.

A thread, and a task of asyncio, has one context at a time, that of its innermost forward. It is the only thing that
travels from hook to hook beside arguments and return values. A replay of a part of a forward opens another context
within.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.embed.lookup import Found
from attmemo.errors import AttmemoError
from attmemo.forward.plan import Plan
from attmemo.forward.row_usage import Observed
from attmemo.forward.stats import Counters, Skip
from attmemo.models import Spans


@dataclass(frozen=True, slots=True)
class Given:
    """One forward of the model, as its caller made it."""

    reason: str | None  # why the whole forward stays exact
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a stack of blocks did.

    Attributes
    ----------
    served : frozenset of int
        Sequences that took rows of records.
    offers : mapping of int to Offer
        What sequences offer to become records (`attmemo.rows.candidate`), by place in the batch.
    beside : mapping of int to Tensor
        Last hidden states ``[L, H]`` from records, of sequences that were computed whole too.
    last : Tensor or None
        The last hidden states ``[B, L, H]``, if some sequences are in `beside`.
    """

    served: frozenset[int] = frozenset()
    offers: Mapping[int, Any] = field(default_factory=dict)
    beside: Mapping[int, Tensor] = field(default_factory=dict)
    last: Tensor | None = None


NOTHING = Outcome()
IN_TURNS: Final = "leave namespaces in the order in which they were entered, the last one first, in the same task"
INHERITED: Final = ("observed", "whole", "forced", "packed", "space")
"""What a forward has of the one that it runs within."""


@dataclass(slots=True)
class Forward:
    """One forward, or several that are asked for alike.

    Attributes
    ----------
    counters : Counters
        Of its engine.
    observed : Observed or None
        Sees what the forward computes. Forwards within inherit it.
    whole : bool
        Whether it is to be served from no record. Inherited.
    forced : Plan or None
        What it follows if it is eligible, in place of a plan of its own. Inherited.
    repeats : bool
        Whether it is a replay: it computes a part of another forward again, exactly, or from `last`.
    last : Tensor or None
        Last hidden states ``[B, L, H]`` that its blocks give.
    packed : Packed or None
        Blocks that run in place of the stack's own (`attmemo.packed.runner`). Inherited.
    first : bool
        Whether the first row of each sequence alone is asked for: all others are NaN.
    unpooled : bool
        Whether what the model's pooler gives is not read.
    left : bool or Skip
        Whether its guard leaves it to the blocks, and why, if that counts: it is looked up nowhere, and nothing is
        verified.
    asking : object
        What its guard decides (`attmemo.guard.asking.Asking`).
    space : object
        The handle of the namespace whose records and guard serve it (`attmemo.handle.namespaces`). None: those of the
        model. Inherited.
    given : Given or None
        The call of the model; None: no call of the model runs.
    plan : Plan or None
        The one decision.
    masks : dict
        Every mask is read once.
    turns : Counter
        Calls of modules that several layers share.
    firsts : int
        Calls of blocks that gave first rows alone.
    outcome : Outcome
        What the blocks did last.
    """

    counters: Counters
    observed: Observed | None = None
    whole: bool = False
    forced: Plan | None = None
    repeats: bool = False
    last: Tensor | None = None
    packed: Any = None
    first: bool = False
    unpooled: bool = False
    left: bool | Skip = False
    asking: Any = None
    space: Any = None
    given: Given | None = None
    plan: Plan | None = None
    masks: dict[tuple[int, int | None, int, int], tuple[Any, Spans | str]] = field(default_factory=dict)
    turns: Counter[int] = field(default_factory=Counter)
    firsts: int = 0
    outcome: Outcome = NOTHING
    opened_by_model: bool = False  # and closed by it: no hook stands around the model
    thread: int = field(default_factory=get_ident)

    @property
    def is_plain(self) -> bool:
        """Whether nothing is asked of it, but perhaps a namespace, and what it computes."""
        asked = self.forced, self.last, self.packed, self.asking, self.given
        return not self.whole and not self.repeats and all(part is None for part in asked)

    def note_computed(self, counters: Counters, lengths: npt.NDArray[np.int64]) -> None:
        """Note a forward that computed sequences of these lengths, and looked nothing up."""
        self.counters, self.outcome = counters, NOTHING
        self.firsts += self.first
        if self.observed is not None:
            rows = lengths.tolist()
            self.observed.see(rows, rows, self.repeats)

    def forget(self) -> None:
        """Drop what belongs to one call of the model."""
        self.given, self.plan = None, None
        self.masks.clear()
        self.turns.clear()


class Current(threading.local):
    """Innermost forward of each thread and task; None: none runs.

    Parameters
    ----------
    running : ContextVar

    Attributes
    ----------
    running : ContextVar
        The innermost forward, or that of the thread by which this one was given its context.
    found : Found or None
        What the lookup of the thread's last forward found.
    """

    found: Found | None = None

    def __init__(self, running: ContextVar[Forward | None]) -> None:
        self.running = running

    @property
    def forward(self) -> Forward | None:
        """The innermost forward."""
        running = self.running.get()
        if running is not None and running.thread != get_ident():  # `asyncio.to_thread` hands its context on
            running = Forward(running.counters, **{name: getattr(running, name) for name in INHERITED})
            self.running.set(running)
        return running


@dataclass(eq=False, slots=True)
class Opened:
    """While inside, the context of a forward within the one that runs is the innermost one.

    A class, and no generator: one that is never left is dropped without a word, whichever task runs then.

    Attributes
    ----------
    running : ContextVar
        As that of `Current`.
    counters : Counters
    asked : mapping
        Other fields of `Forward`.
    """

    running: ContextVar[Forward | None]
    counters: Counters
    asked: Mapping[str, Any]
    own: Forward | None = None
    outer: Forward | None = None

    def __enter__(self) -> Forward:
        self.outer = outer = self.running.get()
        inherited = {} if outer is None else {name: getattr(outer, name) for name in INHERITED}
        self.own = Forward(self.counters, **{**inherited, **self.asked})
        self.running.set(self.own)
        return self.own

    def __exit__(self, *_: object) -> None:
        mixed = self.running.get() is not self.own and self.own is not None and self.own.space is not None
        self.running.set(None if mixed else self.outer)
        if mixed:  # what runs now would keep the namespace
            raise AttmemoError("a namespace was left while another one of the same task was open.", IN_TURNS)
