"""The online engine: one forward of a memoized model.

    forward of the model
      eligible? ──no────────────────────────────────► the original code
      spans: where valid tokens lie
      plan:  what could serve (lookup) → may it (threshold) → does it pay (gate)      one decision a forward
      maps, each layer:   the plan has a share for the layer ─► reuse.serve the hits, reuse.join the misses
      rows, blocks once:  the plan has a share ───────────────► reuse.serve all sequences over packed rows
                          else ────────────────────────────────► the original code

Source: AttMEMO (arXiv 2301.09262), section 4 and Fig. 8. The paper looks up in every layer. This engine can also look
up once for each sequence, at the first layer, and reuse the record in every layer whose predicted score reaches the
layer's threshold.

Promises for maps. A call of which no sequence is served runs the original code on the original arguments, whatever the
reason. Misses beside hits run the original code as a smaller batch. The record of a sequence, and the output of a hit,
depend on the sequence's own hidden states alone; whether serving pays is asked for the whole batch.

Promises for rows and packed blocks. All sequences of a call run in one packed batch, those without a record whole. A
call that cannot be packed runs the original code.

Outputs of padding behind a served sequence are zero.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.db import Database
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.embed.lookup import Found
from attmemo.errors import AttmemoError
from attmemo.forward.context import Current, Forward, Given, Opened
from attmemo.forward.plan import Plan
from attmemo.forward.planning import Planner
from attmemo.forward.reuse import Exact, Reuse
from attmemo.forward.stats import Counters
from attmemo.forward.watch import CHANGED, Watch
from attmemo.models import Adapter, Call, Site, Spans
from attmemo.models.cache_name import cache_of
from attmemo.system.locking import weakly

_LOG = logging.getLogger("attmemo")

# A file that went away, a machine without memory (torch: RuntimeError) or descriptors: they cost time, not requests.
FAILURES = (AttmemoError, OSError, MemoryError, RuntimeError, ValueError, IndexError, KeyError)

_TRAINING = attrgetter("training")
TRACED = "the model is traced or exported: what is stored would become constants"
_NO_LOOKUP = Plan("the lookup failed")
_BY_HAND = Plan("a layer that stands for several was called by hand", eligible=False)


class Engine:
    """Serves the layers of one model.

    Parameters
    ----------
    adapter : Adapter
        Knows the model's modules.
    watch : Watch
        Notices changed weights.
    layers : int
        Number of sites: attention layers for maps, 1 for a stack of blocks.
    database : Database, SharedPool or None
        Where records come from.
    reuse : Reuse
        The kind of reuse.
    planner : Planner
        Makes the plan of a forward.
    """

    def __init__(
        self, adapter: Adapter, watch: Watch, layers: int, database: Database | SharedPool | None, reuse: Reuse,
        planner: Planner,
    ) -> None:  # fmt: skip
        self.adapter, self.layers, self.database, self.reuse = adapter, layers, database, reuse
        self.planner = planner
        self.watch, self._told = watch, False
        self.current = Current(ContextVar("attmemo_forward", default=None))
        self.space: Any = None  # the handle of the namespace that it serves; None: the model's own engine
        self._inside: Counter[int] = Counter()  # forwards that run, by thread
        self._counting = threading.Condition()
        self.reset_stats()
        os.register_at_fork(after_in_child=weakly(self.leave_to_parent))

    # -- the path

    def attend(self, sites: Sequence[Site], exact: Exact, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a hooked module: `exact(*args, **kwargs)`, or the same from records.

        `sites` holds the one layer that the module is, or all layers that share the module.
        """
        forward = self.current.running.get()
        if forward is None:  # a layer is called by hand
            forward = Forward(self.counters)
        elif (own := self.of(forward)) is not self:
            return own.attend(sites, exact, args, kwargs)
        site = sites[0] if len(sites) == 1 else _turn(sites, forward)
        if site is None:
            self.counters.call(0, _BY_HAND, _sequences(args, kwargs))
            return exact(*args, **kwargs)
        plan, call = self._decide(forward, site, args, kwargs)
        share = plan.layers.get(site.layer)
        if share is None or call is None or plan.spans is None:
            self.counters.call(site.layer, plan, _sequences(args, kwargs))
            return exact(*args, **kwargs)
        batch, padded = call.hidden.shape[:2]
        start = perf_counter()
        try:
            served = self.reuse.serve(site, call, plan.spans, share, forward)
        except FAILURES as error:
            failed = Plan(self.reuse.failure)
            if self.reuse.whole:
                forward.plan = failed  # no follower may leave its work to this call
            self.counters.call(site.layer, failed, batch)
            self.failed(site.layer, failed, error, batch if self.reuse.whole else len(share.sequences))
            return exact(*args, **kwargs)
        serving = perf_counter() - start
        output, spent = self.reuse.join(site, call, share, served, exact, (args, kwargs))
        expected = self.planner.exact_ms(site.layer, batch, padded)
        saved = 0.0 if expected is None else expected - 1e3 * (perf_counter() - start)
        self.counters.call(site.layer, plan, batch, serving, spent, saved)
        return output

    def serve(self, site: Site, call: Call, spans: Spans, given: Mapping[str, Any]) -> Tensor | Plan:
        """Serve a forward of the model whose modules are not called.

        Parameters
        ----------
        site : Site
            The stack of blocks.
        call : Call
            What the model would give its first block; no argument keeps it exact.
        spans : Spans
        given : mapping
            Arguments of the model by name.

        Returns
        -------
        Tensor or Plan
            Last hidden states ``[B, L, H]``; or the plan that the modules are to follow.
        """
        forward = self._begin(Given(None, given))
        own = self if forward.space is None else self.of(forward)
        try:
            plan = forward.plan = own.planner.before() or own.planner.plan(site.layer, call, spans, forward)
            share = plan.layers.get(site.layer)
            if share is None:
                return plan
            start = perf_counter()
            served: Tensor = own.reuse.serve(site, call, spans, share, forward)
            own.counters.call(site.layer, plan, len(spans.lengths), perf_counter() - start)
            return served
        finally:
            self.end_forward()

    def follow(self, exact: Exact, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of a block whose work the first block of this forward has done, or else `exact`."""
        forward = self.current.running.get()
        plan = None if forward is None else forward.plan
        if plan is None or not plan.layers:
            return exact(*args, **kwargs)
        return self.reuse.passed(args[0] if args else kwargs["hidden_states"])

    def _decide(
        self, forward: Forward, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan, Call | None]:
        """The plan that holds for this call, and the call if it is to be served."""
        inside, plan = forward.given is not None, forward.plan
        if inside and site.layer == 0 and not self._stays_idle(site, plan):
            plan = forward.plan = None
        if plan is not None and not plan.layers:
            return plan, None
        try:
            read = self._read(forward, site, args, kwargs)
            if isinstance(read, str):
                plan = Plan(read, eligible=False)
                return self._kept(forward, plan) if site.layer == 0 else plan, None
            call, spans = read
            if plan is None:
                plan = forward.forced or self.planner.plan(site.layer, call, spans, forward)
                plan = self._kept(forward, plan)
        except FAILURES as error:
            layers = self.layers - site.layer if inside and self.planner.lookup == "sequence" else 1
            self.failed(site.layer, _NO_LOOKUP, error, layers * _sequences(args, kwargs))
            return self._kept(forward, _NO_LOOKUP), None
        if plan.spans is not None and plan.spans != spans:
            return Plan("the mask differs from the first layer's", eligible=False), None
        return plan, call

    def _kept(self, forward: Forward, plan: Plan) -> Plan:
        """The plan, kept for the layers behind if one lookup serves all of them."""
        if self.planner.lookup == "sequence" and forward.given is not None:
            forward.plan = plan
        return plan

    def failed(self, layer: int, plan: Plan, error: Exception, sequences: int) -> None:
        """Count sequences of a layer that an error leaves exact, and tell of it now and then."""
        if count := self.counters.failure(str(plan.reason), error, sequences):
            debug = _LOG.isEnabledFor(logging.DEBUG)
            told = "attmemo: %s, layer %d stays exact: %s (%d sequences so far)"
            _LOG.warning(told, plan.reason, layer, error, count, exc_info=debug)

    # -- reading a call

    def _read(
        self, forward: Forward, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Call, Spans] | str:
        """The call and where its valid tokens lie, or the reason why the call must stay exact."""
        given, modules = forward.given, self.reuse.modules(site)
        if any(map(_TRAINING, modules)):
            return "training mode"
        if self.watch.drops(site.layer):
            return "dropout in training mode"
        if given is not None and given.reason is not None:
            return given.reason
        if given is None:
            if is_traced():
                return TRACED
            if self.changed():
                return CHANGED
        call = self.reuse.read(site, args, kwargs)
        if isinstance(call, str):
            return call
        hidden = call.hidden
        if type(hidden) is not Tensor:
            return f"hidden states are a {type(hidden).__name__}"
        if torch.is_grad_enabled():
            weights = (weight for module in modules for weight in module.parameters())
            if hidden.requires_grad or any(weight.requires_grad for weight in weights):
                return "gradients are recorded (use torch.inference_mode)"
        if hidden.device.type != "cpu":
            return f"the model is on {hidden.device.type}"
        spans = self._spans(forward, site.module, call)
        return spans if isinstance(spans, str) else (call, spans)

    def _spans(self, forward: Forward, module: nn.Module, call: Call) -> Spans | str:
        """Where valid tokens lie, or why this is unknown. The layers of a forward get the same mask, or one of two."""
        batch, padded = int(call.hidden.shape[0]), int(call.hidden.shape[1])
        key = id(call.mask), self.reuse.window(module), batch, padded
        if forward.given is not None and key in forward.masks:
            return forward.masks[key][1]
        found: Spans | str = "the batch is empty"
        if batch and padded:
            found = self.reuse.spans(module, call, None if forward.given is None else forward.given.arguments)
        if forward.given is not None:
            forward.masks[key] = call.mask, found  # holding the mask keeps its identity from reuse
        return found

    # -- a forward of the model

    def begin_forward(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Before a forward of the model; arguments that only the exact path can honour keep all of it exact."""
        forward = self._begin(Given(self._refusal(model, given), given))
        if forward.forced is None and (forward.given is None or forward.given.reason is None):
            forward.plan = self.of(forward).planner.before()  # if there is one, not even a mask is read

    def _begin(self, given: Given) -> Forward:
        with self._counting:
            self._inside[me := threading.get_ident()] += 1
        forward = self.current.running.get()
        if forward is not None and forward.thread != me:
            forward = self.current.forward
        if forward is None:
            forward = Forward(self.counters, opened_by_model=True)
            self.current.running.set(forward)
        if forward.given is not None or forward.turns:
            forward.forget()
        own = self if forward.space is None else self.of(forward)
        forward.counters, forward.given = own.counters, given
        return forward

    def end_forward(self) -> None:
        """After a forward of the model, or after an error in it."""
        forward = self.current.running.get()
        if forward is not None:
            self.current.found = None if forward.plan is None else forward.plan.found  # the plan itself holds masks
            forward.forget()
            if forward.opened_by_model:
                self.current.running.set(None)
        with self._counting:
            me = threading.get_ident()
            self._inside[me] -= 1
            if self._inside[me] <= 0:
                del self._inside[me]
                self._counting.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until no other thread is inside a forward of the model. False: it takes longer."""
        with self._counting:
            return self._counting.wait_for(lambda: not self._inside.keys() - {threading.get_ident()}, seconds)

    def _stays_idle(self, site: Site, plan: Plan | None) -> bool:
        """Whether the plan was made before the first layer, and holds."""
        holds = not site.module.training and not torch.is_grad_enabled()
        return holds and plan is not None and plan is self.planner.before()

    def _refusal(self, model: nn.Module, given: Mapping[str, Any]) -> str | None:
        if is_traced():
            return TRACED
        config = getattr(model, "config", None)
        for wanted in ("output_attentions", "output_hidden_states"):
            value = given.get(wanted)
            if getattr(config, wanted, False) if value is None else value is not False:  # 0 selects a layer
                return wanted
        past = getattr(cache_of(given), "get_seq_length", None)
        if past is not None and int(past()) > 0:
            return "cached decoding"
        return CHANGED if self.changed() else None

    def changed(self) -> bool:
        """Whether weights or settings changed since `memoize`: then the model stays exact."""
        changed = self.watch.changed()
        if changed and not self._told:
            self._told = True
            _LOG.warning("attmemo: the model stays exact: %s", CHANGED)
        return changed

    @property
    def last_found(self) -> Found | None:
        """What the lookup of this thread's last forward found; None if there was no lookup."""
        return self.current.found

    def planned(self, plan: Plan) -> AbstractContextManager[Forward]:
        """While inside, every eligible forward of this thread follows this plan (for checks and measurements)."""
        return self.open(forced=plan)

    def open(self, **asked: Any) -> AbstractContextManager[Forward]:
        """Open the context of this thread's forwards; the arguments are fields of `Forward`."""
        if self.space is not None:
            asked["space"] = self.space
        return Opened(self.current.running, self.counters, asked)

    # -- namespaces

    def of(self, forward: Forward | None) -> Engine:
        """The engine that serves a forward: this one, or that of the forward's namespace."""
        found: Engine = self if forward is None or forward.space is None else forward.space.engine
        return found

    def serve_within(self, outer: Engine, space: Any) -> None:
        """Serve forwards behind the hooks of another engine, of one namespace; `space` is its handle."""
        self.current, self.space = outer.current, space

    # -- counters

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.counters = Counters(self.layers)

    def leave_to_parent(self) -> None:
        """In a forked child: other threads are gone, and locks may be held by them."""
        me = threading.get_ident()
        own = self._inside[me]
        self._counting, self._inside = threading.Condition(), Counter({me: own} if own else {})

    def close(self) -> None:
        """Give windows back. The database stays open: others may use it."""
        self.reuse.close()


def _turn(sites: Sequence[Site], forward: Forward) -> Site | None:
    """Which of the layers that share a module is called; only a forward of the model can count the calls."""
    key = id(sites[0].module)
    turn = forward.turns[key]
    forward.turns[key] += 1
    return sites[turn] if forward.given is not None and turn < len(sites) else None


def _sequences(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Sequences in a call."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return int(hidden.shape[0]) if isinstance(hidden, Tensor) and hidden.dim() else 1


def is_exporting() -> bool:
    """Whether `torch.export` traces this call: a lookup cannot be part of a graph."""
    asked = getattr(torch.compiler, "is_exporting", None)  # torch 2.6 has none, and sets a flag
    return bool(torch.compiler._is_compiling_flag if asked is None else asked())


def is_traced() -> bool:
    """Whether a tracer or an exporter records this call. A compiler that breaks its graph here does not count."""
    return bool(torch.jit.is_tracing()) or is_exporting()  # type: ignore[attr-defined, no-untyped-call]
