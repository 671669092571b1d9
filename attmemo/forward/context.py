"""The context of a forward: what was asked of it, what was decided, and what its blocks did.

A thread has one context at a time, that of its innermost forward. It is the only thing that travels from hook to hook
beside arguments and return values. A replay of a part of a forward opens another context within.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attmemo.embed.lookup import Found
from attmemo.errors import AttmemoError
from attmemo.forward.plan import Plan
from attmemo.forward.row_usage import Observed
from attmemo.forward.stats import Counters
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
AWAITED: Final = "let nothing await inside of model.attmemo.namespace(): what runs meanwhile would be in it"


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
    left : bool
        Whether its guard leaves it to the blocks: it is looked up nowhere, and nothing is verified.
    asking : object
        What its guard decides (`attmemo.guard.planner.Asking`).
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
    left: bool = False
    asking: Any = None
    space: Any = None
    given: Given | None = None
    plan: Plan | None = None
    masks: dict[tuple[int, int | None, int, int], tuple[Any, Spans | str]] = field(default_factory=dict)
    turns: Counter[int] = field(default_factory=Counter)
    firsts: int = 0
    outcome: Outcome = NOTHING
    opened_by_model: bool = False  # and closed by it: no hook stands around the model

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
    """Innermost forward of each thread; None: the thread runs none.

    Attributes
    ----------
    found : Found or None
        What the lookup of the thread's last forward found.
    """

    forward: Forward | None = None
    found: Found | None = None

    @contextmanager
    def open(self, counters: Counters, **asked: Any) -> Iterator[Forward]:
        """Open the context of a forward within the one that runs; other arguments are fields of `Forward`."""
        outer = self.forward
        if outer is not None:
            inherited = {name: getattr(outer, name) for name in ("observed", "whole", "forced", "packed", "space")}
            asked = inherited | asked
        self.forward = opened = Forward(counters, **asked)
        try:
            yield opened
        finally:
            mixed, self.forward = self.forward is not opened, outer
            if mixed and opened.space is not None:  # another coroutine runs inside of it: it would keep the namespace
                self.forward = None
                raise AttmemoError("a namespace was left while another one of the same thread was open.", AWAITED)
