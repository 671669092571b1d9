"""The self-check of an adapter: given the map the model itself made, a hit must give the model's own output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Site
from attmemo.errors import AdapterCheckError

# Two lengths, so that padding, the mask and the row order are all exercised.
CHECK_LENGTHS = (7, 11)
UNKNOWN = "the model's attention was changed in a way this version does not know; leave it unmemoized"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3, torch.float64: 1e-9}


def context_from_maps(adapter: Adapter, module: nn.Module, tokens: Tensor, maps: Sequence[Tensor]) -> list[Tensor]:
    """The plain hit path: A·V, one sequence at a time. The oracle of the engine's faster one.

    Parameters
    ----------
    tokens : Tensor
        Valid tokens of all sequences, packed, ``[sum n, H]``.
    maps : sequence of Tensor
        One map per sequence, ``[h, n, n]``.

    Returns
    -------
    list of Tensor
        Contexts, ``[n, h * d]`` each.
    """
    heads, width = adapter.shape(module)
    values = adapter.value(module, tokens)
    contexts, start = [], 0
    for apm in maps:
        n = apm.shape[-1]
        v = values[start : start + n].view(n, heads, width).transpose(0, 1)  # [h, n, d]
        contexts.append(torch.matmul(apm.to(v.dtype), v).transpose(0, 1).reshape(n, heads * width))
        start += n
    return contexts


def check_adapter(adapter: Adapter, model: nn.Module, sites: Sequence[Site]) -> float:
    """Run a tiny padded batch through the exact model and reproduce every layer's context from its own map.

    Returns
    -------
    float
        The greatest absolute difference seen, relative to the largest context value.

    Raises
    ------
    AdapterCheckError
        Names the first layer that is not reproduced; nothing has been changed.
    """
    dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
    vocabulary = int(getattr(model.config, "vocab_size", 100))
    longest = max(CHECK_LENGTHS)
    # Ids all over the vocabulary, special ones perhaps among them: to a layer they are numbers like others. Not drawn:
    # the user may have seeded the generator.
    ids = (
        torch.arange(len(CHECK_LENGTHS) * longest).view(len(CHECK_LENGTHS), longest) * 7919 + vocabulary // 3
    ) % vocabulary
    mask = torch.arange(longest)[None] < torch.tensor(CHECK_LENGTHS)[:, None]
    calls: dict[int, tuple[tuple[Any, ...], dict[str, Any], Any]] = {}

    def keep(layer: int) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[layer] = (args, kwargs, output)

        return hook

    handles = [site.module.register_forward_hook(keep(site.layer), with_kwargs=True) for site in sites]
    base: nn.Module = getattr(model, "base_model", model)
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        with torch.no_grad(), adapter.capturing(model) as extra:
            base(input_ids=ids.to(_device(model)), attention_mask=mask.long().to(_device(model)), **extra)
    finally:
        for module in training:  # one by one: a model may be in training mode in parts
            module.training = True
        for handle in handles:
            handle.remove()

    worst = 0.0
    for site in sites:
        if site.layer not in calls:
            raise AdapterCheckError(
                f"layer {site.layer} ({site.name}) is not called in a forward of this model.", UNKNOWN
            )
        args, kwargs, output = calls[site.layer]
        wanted = dict(kwargs) | {"output_attentions": False}
        call = adapter.read(site.module, args[:2], {k: v for k, v in wanted.items() if k != "output_attentions"})
        if isinstance(call, str):
            raise AdapterCheckError(f"layer {site.layer} ({site.name}) cannot be memoized: {call}.", UNKNOWN)
        lengths = adapter.valid_lengths(call.mask, len(CHECK_LENGTHS), longest)
        if lengths != list(CHECK_LENGTHS):
            raise AdapterCheckError(
                f"layer {site.layer} ({site.name}): the mask reads as lengths {lengths}, not {list(CHECK_LENGTHS)}.",
                UNKNOWN,
            )
        apm, expected = adapter.map_of(output), adapter.context_of(output)
        if not isinstance(apm, Tensor):
            raise AdapterCheckError(f"layer {site.layer} ({site.name}) gives no attention map.", UNKNOWN)
        with torch.no_grad():
            tokens = torch.cat([call.hidden[b, :n] for b, n in enumerate(lengths)])
            contexts = context_from_maps(
                adapter, site.module, tokens, [apm[b, :, :n, :n] for b, n in enumerate(lengths)]
            )
        scale = float(expected.abs().max()) or 1.0
        for b, n in enumerate(lengths):
            difference = float((contexts[b] - expected[b, :n]).abs().max()) / scale
            # max() would forget a NaN that another row follows
            worst = difference if math.isnan(difference) or difference > worst else worst
            if math.isnan(worst):
                break
        if not worst <= TOLERANCE.get(dtype, 1e-5):
            raise AdapterCheckError(
                f"layer {site.layer} ({site.name}): a hit on the layer's own map differs from the exact output by "
                f"{worst:.2e} of its range (allowed {TOLERANCE.get(dtype, 1e-5):.0e}).",
                UNKNOWN,
            )
    return worst


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
