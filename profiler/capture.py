"""Capture what every attention layer saw and produced: its input and its map, over valid tokens only."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.errors import UnsupportedModelError
from attmemo.models import Adapter, Site, Spans, adapter_for
from attmemo.models.base import by_module
from attmemo.models.check import UNKNOWN
from attmemo.models.masks import consecutive


@dataclass
class Captured:
    """One forward: hidden states ``[B, L, H]`` and maps ``[B, h, L, L]`` per layer, and where valid tokens lie."""

    inputs: list[Tensor]
    maps: list[Tensor]
    spans: Spans

    def sequence(self, row: int) -> tuple[list[Tensor], list[Tensor]]:
        """Maps ``[h, n, n]`` and inputs ``[n, H]`` of one sequence, every layer, cut to its valid tokens."""
        length, n = self.inputs[0].shape[1], self.spans.lengths[row]
        own = slice(length - n, length) if self.spans.left else slice(n)
        return [m[row, :, own, own] for m in self.maps], [x[row, own] for x in self.inputs]

    def __iter__(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        return (self.sequence(row) for row in range(len(self.spans.lengths)))


class Capture:
    """Runs a model so that it gives its maps; a context manager around many `run` calls, which leaves it as it was."""

    def __init__(self, model: nn.Module, adapter: Adapter, sites: Sequence[Site]) -> None:
        self._model, self._adapter, self._sites = model, adapter, list(sites)
        self._host = adapter.host(model)
        self._calls: dict[int, list[tuple[Any, Any, Any]]] = {}
        self._stack = ExitStack()
        self._extra: dict[str, Any] = {}

    def __enter__(self) -> Capture:
        for sites in by_module(self._sites):
            handle = sites[0].module.register_forward_hook(self._keep, with_kwargs=True)
            self._stack.callback(handle.remove)
        self._extra = self._stack.enter_context(self._adapter.capturing(self._model))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._calls.clear()

    def run(self, inputs: dict[str, Tensor]) -> Captured:
        """One forward of the layers (an encoder without the decoder behind it, no head), exact, with maps."""
        self._calls.clear()
        with torch.inference_mode():
            self._host(**inputs, **self._extra)
        turns = {key: iter(calls) for key, calls in self._calls.items()}
        maps, states, found = [], [], Spans([])
        for site in self._sites:
            args, kwargs, output = next(turns[id(site.module)])
            call = self._adapter.read_captured(site.module, args, kwargs)
            if isinstance(call, str):
                raise UnsupportedModelError(f"layer {site.layer} cannot be captured: {call}.", UNKNOWN)
            spans = self._adapter.spans(site.module, call.mask, *call.hidden.shape[:2])
            if spans is None:
                why = "the mask is not plain padding on one side"
                raise UnsupportedModelError(f"layer {site.layer} cannot be captured: {why}.", UNKNOWN)
            positions = inputs.get("position_ids")
            if self._adapter.rotary and not consecutive(positions, spans, call.hidden.shape[1]):
                raise UnsupportedModelError(
                    f"layer {site.layer} cannot be captured: positions are not consecutive.", "leave position_ids out"
                )
            found = spans
            states.append(call.hidden)
            maps.append(self._adapter.map_of(output))
        self._calls.clear()
        return Captured(states, maps, found)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._calls.setdefault(id(module), []).append((args, kwargs, output))


@contextmanager
def attention_seconds(model: nn.Module) -> Iterator[list[float]]:
    """Seconds that each layer's attention takes, added up while inside."""
    sites = adapter_for(model)[1]
    spent, begun = [0.0] * len(sites), 0.0

    def begin(*_: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def end(turn: Iterator[Site]) -> Any:
        def add(*_: Any) -> None:
            spent[next(turn).layer] += time.perf_counter() - begun

        return add

    with ExitStack() as stack:
        for group in by_module(sites):  # a module that several layers share is called once for each, in their order
            stack.callback(group[0].module.register_forward_pre_hook(begin).remove)
            stack.callback(group[0].module.register_forward_hook(end(cycle(group))).remove)
        yield spent
