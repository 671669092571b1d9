"""The self-check of `memoize`: a small batch of hits and misses goes through the very path that serves.

`models.check` shows that a family's arithmetic is right, with plain torch. This check runs the rest: the hooks, the
plan, `take_rows`, the kernel on maps in the database's form, and `pack`. Each layer is compared on the input that it
really got, so errors do not add up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.db import KIND_MAP, Database
from attmemo.db.encodings import pack, unpack
from attmemo.errors import AdapterCheckError
from attmemo.forward.engine import Engine
from attmemo.forward.plan import Plan, Share
from attmemo.forward.trial import Handle, enable_within, not_served
from attmemo.maps.serve import Maps
from attmemo.maps.source import HeldMaps
from attmemo.models import Adapter, Rows, Site, Spans
from attmemo.models.base import by_module
from attmemo.models.check import QUANTIZED, UNKNOWN, checking, context_from_maps, difference, require, tolerance

_ROUNDED = 4 * QUANTIZED  # int8 activations are rounded by all sequences of the batch, of which misses see only some


class MapHandle(Handle, Protocol):
    """The part of `MapMemoization` that is checked."""

    store: Database


def check_serving(handle: MapHandle, reuse: Maps, model: nn.Module, sites: Sequence[Site]) -> None:
    """Serve half of a few small sequences, of two lengths, and compare every layer with the plain path.

    Raises
    ------
    AdapterCheckError
        Names the first layer that differs. Nothing has been changed.
    """
    engine, adapter = handle.engine, reuse.adapter
    host = adapter.host(model)
    inputs, lengths = _doubled(*adapter.sample(model))
    hits = (0, 3) if len(lengths) == 4 else (0,)  # one of each length
    form = next(kind.dtype for kind in handle.store.manifest.kinds if kind.name == KIND_MAP)
    with checking(model, "a small batch cannot be answered") as stack, torch.inference_mode():
        maps = _maps(adapter, model, sites, inputs, lengths)
        stored = {key: pack(apm, form, adapter.causal) for key, apm in maps.items()}
        stack.callback(setattr, reuse, "source", reuse.source)
        reuse.source = HeldMaps(stored)
        check = _Check(adapter, engine, lengths, hits, stored, tolerance(model, _ROUNDED))
        for group in by_module(sites):
            exact = group[0].module.forward
            hook = group[0].module.register_forward_hook(check.hook(group, exact), with_kwargs=True)
            stack.callback(hook.remove)
        stack.enter_context(engine.planned(_plan(lengths, hits, len(sites))))
        enable_within(handle, stack)
        host(**inputs, **({"use_cache": True} if adapter.causal else {}))
    if check.seen != len(sites):
        raise AdapterCheckError(f"{check.seen} of {len(sites)} layers are called in a forward.", UNKNOWN)


def _doubled(inputs: Mapping[str, Tensor], lengths: list[int]) -> tuple[dict[str, Tensor], list[int]]:
    """The adapter's sample, and behind it the same lengths with other contents."""
    both = {}
    for name, value in inputs.items():
        other = value.flip(-1) if name not in ("attention_mask", "token_type_ids") else value
        if name == "input_ids":
            other = value.roll(1, 0).roll(3, 1)
        both[name] = torch.cat([value, other])
    return both, [*lengths, *lengths]


def _maps(
    adapter: Adapter, model: nn.Module, sites: Sequence[Site], inputs: Mapping[str, Tensor], lengths: Sequence[int]
) -> dict[tuple[int, int], Tensor]:
    """The model's own maps ``[h, n, n]`` of the sample, by layer and sequence."""
    maps: dict[tuple[int, int], Tensor] = {}

    def keep(sites: Sequence[Site]) -> Any:
        turn = iter(sites)

        def hook(_module: nn.Module, _args: Any, returned: Any) -> None:
            layer, found = next(turn).layer, adapter.map_of(returned)
            for sequence, n in enumerate(lengths):
                maps[layer, sequence] = found[sequence, :, :n, :n].float()

        return hook

    with ExitStack() as stack:
        for group in by_module(sites):
            stack.callback(group[0].module.register_forward_hook(keep(group)).remove)
        extra = stack.enter_context(adapter.capturing(model))
        adapter.host(model)(**inputs, **extra)
    return maps


def _plan(lengths: Sequence[int], hits: Sequence[int], layers: int) -> Plan:
    places = np.asarray(hits, np.int64)
    share = Share(places, places, Rows.without(len(lengths), places), 0.0)
    return Plan(spans=Spans(list(lengths)), layers=dict.fromkeys(range(layers), share))


class _Check:
    """Compares each layer of the served forward with the plain path on the same input."""

    def __init__(
        self,
        adapter: Adapter,
        engine: Engine,
        lengths: Sequence[int],
        hits: Sequence[int],
        stored: Mapping[tuple[int, int], Tensor],
        allowed: float,
    ) -> None:
        self._adapter, self._engine, self._stored, self._allowed = adapter, engine, stored, allowed
        self.seen = 0
        self._lengths, self._hits = lengths, hits

    def hook(self, sites: Sequence[Site], exact: Any) -> Any:
        turn = iter(sites)

        def compare(_module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
            self._layer(next(turn), exact, args, kwargs, returned)

        return compare

    def _layer(self, site: Site, exact: Any, args: Any, kwargs: Any, returned: Any) -> None:
        adapter, module = self._adapter, site.module
        self.seen += 1
        if self._engine.counters.layers[site.layer].hits != len(self._hits):
            raise not_served(f"layer {site.layer} ({site.name})", self._engine)
        # The call has filled its cache by now: the plain path runs without one.
        given = adapter.named(args, kwargs)
        given |= {adapter.cache_name: None} if adapter.cache_name in given else {}
        call = adapter.read(module, (), given)
        if isinstance(call, str):
            raise AdapterCheckError(f"layer {site.layer} ({site.name}) cannot be answered: {call}.", UNKNOWN)
        seen, plain = adapter.output_of(returned), adapter.output_of(exact(**given))
        for sequence, n in enumerate(self._lengths):
            hidden, expected = call.hidden[sequence, :n], plain[sequence, :n]
            if sequence in self._hits:
                apm = unpack(self._stored[site.layer, sequence])
                context = context_from_maps(adapter, module, hidden, [apm])[0]
                expected = adapter.finish(module, context[None], hidden[None])[0]
            found = difference(seen[sequence, :n], expected)
            what = "a hit" if sequence in self._hits else "a miss beside hits"
            require(found, self._allowed, f"layer {site.layer} ({site.name}): {what} differs from the plain path")
