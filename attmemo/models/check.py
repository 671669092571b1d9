"""The self-check of an adapter: given the map the model itself made, a hit must give the model's own output."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.errors import AdapterCheckError, AttmemoError, UnsupportedModelError
from attmemo.models.base import Adapter, Site, by_module
from attmemo.models.projections import share_heads

UNKNOWN = "the model's attention was changed in a way this version does not know; leave it unmemoized"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-9}
QUANTIZED = 5e-2  # int8 activations: the scale of a tensor depends on all of its rows


def context_from_maps(adapter: Adapter, module: nn.Module, tokens: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """The plain hit path, the oracle of the engine's faster one: A·V, one sequence at a time, ``[n, h * d]`` each.

    `tokens` are the valid ones of all sequences, packed, ``[sum n, H]``; each sequence has a map ``[h, n, n]``.
    """
    heads, width = adapter.shape(module)
    values = share_heads(adapter.value(module, tokens), heads, width)
    contexts, start = [], 0
    for apm in maps:
        n = apm.shape[-1]
        v = values[start : start + n].view(n, heads, width).transpose(0, 1)  # [h, n, d]
        contexts.append(torch.matmul(apm.to(v.dtype), v).transpose(0, 1).reshape(n, heads * width))
        start += n
    return contexts


def check_adapter(adapter: Adapter, model: nn.Module, sites: Sequence[Site]) -> float:
    """Run a tiny padded batch through the exact model and reproduce every layer's output from its own map.

    Layers are compared as they run, so that no more than one map is held. Of decoders also the keys are compared that
    a hit would put into a key-value cache. Returns the greatest absolute difference, relative to the largest output
    value. Raises `AdapterCheckError`, which names the first layer that is not reproduced; nothing has been changed.
    """
    if not adapter.has_maps:
        what = f"maps of this family ({adapter.family}) are not proven."
        raise UnsupportedModelError(what, "reuse='none': its blocks run without padding, exactly")
    host = adapter.host(model)
    with checking(model, "a small input cannot be checked with this model") as stack:
        inputs, lengths = adapter.sample(model)
        check = _Check(adapter, lengths, tolerance(model, QUANTIZED))
        for group in by_module(sites):
            adapter.forget(group[0].module)
            handle = group[0].module.register_forward_hook(check.hook(group), with_kwargs=True)
            stack.callback(handle.remove)
        with torch.no_grad(), adapter.capturing(model) as extra:
            if adapter.causal:
                extra = extra | {"use_cache": True}
            device = next(model.parameters()).device
            host(**{name: tensor.to(device) for name, tensor in inputs.items()}, **extra)
    for site in sites:
        if site.layer not in check.seen:
            raise AdapterCheckError(
                f"layer {site.layer} ({site.name}) is not called in a forward of this model.", UNKNOWN
            )
    return check.worst


@contextmanager
def checking(model: nn.Module, failure: str) -> Iterator[ExitStack]:
    """The model in evaluation mode; afterwards it is as before, and so is all that the stack undoes.

    An error of the model's code becomes an `AdapterCheckError` that begins with `failure`.
    """
    training = [module for module in model.modules() if module.training]
    with ExitStack() as stack:
        try:
            model.eval()
            yield stack
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            if isinstance(error, AttmemoError):
                raise
            what = f"{failure} ({type(error).__name__}: {str(error).splitlines()[0]})."
            raise AdapterCheckError(what, UNKNOWN) from error
        finally:
            for module in training:  # one by one: a model may be in training mode in parts
                module.training = True


def tolerance(model: nn.Module, rounded: float) -> float:
    """Greatest relative difference that a check allows; `rounded` where projections round by the batch."""
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    return TOLERANCE.get(dtype, 1e-5) if is_exact(model) else rounded


def difference(seen: Tensor, expected: Tensor) -> float:
    """Greatest absolute difference, relative to the largest expected value; NaN where either is."""
    return float((seen - expected).abs().max()) / (float(expected.abs().max()) or 1.0)


def require(worst: float, allowed: float, what: str, how: str = UNKNOWN) -> None:
    """Raise AdapterCheckError where `what` differs by more than is allowed, or by no number; `how`: what helps."""
    if not worst <= allowed:
        raise AdapterCheckError(f"{what} by {worst:.2e} of its range (allowed {allowed:.0e}).", how)


class _Check:
    """What is compared in each layer, and the greatest difference so far."""

    def __init__(self, adapter: Adapter, lengths: list[int], allowed: float) -> None:
        self.adapter, self.lengths, self.allowed = adapter, lengths, allowed
        self.worst = 0.0
        self.seen: set[int] = set()

    def hook(self, sites: Sequence[Site]) -> Any:
        turn = iter(sites)

        def compare(_module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
            site = next(turn, None)
            if site is None:
                raise AdapterCheckError(
                    f"layer {sites[0].layer} ({sites[0].name}) is called more often than expected.", UNKNOWN
                )
            self.seen.add(site.layer)
            self._layer(site, args, kwargs, returned)

        return compare

    def _layer(self, site: Site, args: Any, kwargs: Any, returned: Any) -> None:
        adapter, module, lengths = self.adapter, site.module, self.lengths
        cache = adapter.named(args, kwargs).get(adapter.cache_name)
        call = adapter.read_captured(module, args, kwargs)
        where = f"layer {site.layer} ({site.name})"
        if isinstance(call, str):
            raise AdapterCheckError(f"{where} cannot be memoized: {call}.", UNKNOWN)
        spans = adapter.spans(module, call.mask, *call.hidden.shape[:2])
        if spans is None or spans.lengths != lengths or spans.left:
            found = "no plain padding" if spans is None else f"lengths {spans.lengths}"
            raise AdapterCheckError(f"{where}: the mask reads as {found}, not lengths {lengths}.", UNKNOWN)
        apm, expected = adapter.map_of(returned), adapter.output_of(returned)
        if not isinstance(apm, Tensor):
            raise AdapterCheckError(f"{where} gives no attention map.", UNKNOWN)
        tokens = torch.cat([call.hidden[b, :n] for b, n in enumerate(lengths)])
        contexts = context_from_maps(adapter, module, tokens, [apm[b, :, :n, :n] for b, n in enumerate(lengths)])
        for b, n in enumerate(lengths):
            output = adapter.finish(module, contexts[b][None], call.hidden[b : b + 1, :n])[0]
            self._compare(where, "a hit on the layer's own map", output, expected[b, :n])
        if adapter.causal and cache is not None:
            keys = cache.layers[adapter.layer_index(module)].keys
            ours = adapter.key(module, call)
            ours = ours[..., ours.shape[-2] - keys.shape[-2] :, :]  # a cache with a window keeps the last ones
            if ours.shape != keys.shape:
                raise AdapterCheckError(
                    f"{where}: keys for the cache are {list(ours.shape)}, the model's {list(keys.shape)}.", UNKNOWN
                )
            self._compare(where, "what a hit puts into the key-value cache", ours, keys)

    def _compare(self, where: str, what: str, seen: Tensor, expected: Tensor) -> None:
        found = difference(seen, expected)
        # max() would forget a NaN that another row follows
        self.worst = found if math.isnan(found) or found > self.worst else self.worst
        require(self.worst, self.allowed, f"{where}: {what} differs from the exact output")


def is_exact(model: nn.Module) -> bool:
    """Whether no projection rounds its inputs by what else is in the batch, as dynamic int8 quantization does."""
    return not any("quantized" in type(module).__module__ for module in model.modules())
