"""What a planner is, and the planner that serves every forward from nothing."""

from __future__ import annotations

from functools import lru_cache
from typing import Protocol

from attmemo.embed.lookup import LookupName
from attmemo.forward.context import Forward
from attmemo.forward.plan import Plan, Share
from attmemo.models import Call, Spans

BY_HAND = Plan("only forwards of the whole model are looked up", eligible=False)


class Planner(Protocol):
    """Plans forwards for one kind of reuse."""

    lookup: LookupName
    """"sequence": one plan serves all layers of a forward. "layer": each layer has a plan of its own."""

    def before(self) -> Plan | None:
        """A plan that is known before anything is read; None if there is no such plan."""

    def plan(self, layer: int, call: Call, spans: Spans, forward: Forward) -> Plan:
        """The plan for this layer and, if one lookup serves all layers, for those behind it.

        `forward.given` is None outside of a forward of the model.
        """

    def exact_ms(self, layer: int, batch: int, padded: int) -> float | None:
        """Milliseconds that the layer takes without reuse; None if they are not known."""


_nothing = lru_cache(maxsize=64)(Share.nothing)
"""Stacks do not read this share. Maps must not get it: `Rows` keeps tensors."""


class Whole:
    """Serves all sequences of every forward, from no record."""

    lookup: LookupName = "sequence"

    def before(self) -> Plan | None:
        return None

    def plan(self, layer: int, call: Call, spans: Spans, forward: Forward) -> Plan:
        if forward.given is None:
            return BY_HAND
        return Plan(spans=spans, layers={layer: _nothing(len(spans.lengths))})

    def exact_ms(self, layer: int, batch: int, padded: int) -> float | None:
        return None
