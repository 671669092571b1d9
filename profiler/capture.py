"""Capture what every attention layer saw and produced: its input and its map, over valid tokens only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.adapters import Adapter, Site
from attmemo.adapters.check import UNKNOWN
from attmemo.errors import UnsupportedModelError


@dataclass
class Captured:
    """One forward: hidden states ``[B, L, H]`` and maps ``[B, h, L, L]`` per layer, and each row's valid length."""

    inputs: list[Tensor]
    maps: list[Tensor]
    lengths: list[int]

    def sequence(self, row: int) -> tuple[list[Tensor], list[Tensor]]:
        """Maps ``[h, n, n]`` and inputs ``[n, H]`` of one row, every layer, cut to its valid tokens."""
        n = self.lengths[row]
        return [m[row, :, :n, :n] for m in self.maps], [x[row, :n] for x in self.inputs]

    def __iter__(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        return (self.sequence(row) for row in range(len(self.lengths)))


class Capture:
    """Runs a model so that it gives its maps; the model is left as it was afterwards.

    Use as a context manager around many `run` calls.
    """

    def __init__(self, model: nn.Module, adapter: Adapter, sites: Sequence[Site]) -> None:
        self._model, self._adapter, self._sites = model, adapter, list(sites)
        self._calls: dict[int, tuple[Any, Any, Any]] = {}
        self._stack = ExitStack()
        self._extra: dict[str, Any] = {}

    def __enter__(self) -> Capture:
        for site in self._sites:
            handle = site.module.register_forward_hook(self._keep(site.layer), with_kwargs=True)
            self._stack.callback(handle.remove)
        self._extra = self._stack.enter_context(self._adapter.capturing(self._model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._calls.clear()

    def run(self, inputs: dict[str, Tensor]) -> Captured:
        """One forward, exact, with maps."""
        self._calls.clear()
        with torch.inference_mode():
            self._model(**inputs, **self._extra)
        maps, states, lengths = [], [], None
        for site in self._sites:
            args, kwargs, output = self._calls[site.layer]
            kwargs = {k: v for k, v in kwargs.items() if k != "output_attentions"}
            call = self._adapter.read(site.module, args[:2], kwargs)
            if isinstance(call, str):
                raise UnsupportedModelError(f"layer {site.layer} cannot be captured: {call}.", UNKNOWN)
            batch, length = call.hidden.shape[:2]
            lengths = self._adapter.valid_lengths(call.mask, batch, length)
            if lengths is None:
                raise UnsupportedModelError(
                    f"layer {site.layer} cannot be captured: the mask is not plain padding.", UNKNOWN
                )
            states.append(call.hidden)
            maps.append(self._adapter.map_of(output))
        self._calls.clear()
        return Captured(states, maps, lengths or [])

    def _keep(self, layer: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._calls[layer] = (args, kwargs, output)

        return hook
