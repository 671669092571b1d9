"""The self-check of packed blocks: each block on the input that it really got, then all of them through the hooks."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from attmemo.errors import AdapterCheckError
from attmemo.forward.hooks import Hook
from attmemo.forward.trial import DEEP, Handle, enable_within, not_served
from attmemo.kernels.linear8 import Linear8, linear8_in_torch
from attmemo.kernels.row_attention import Layout
from attmemo.models import Adapter
from attmemo.models.check import UNKNOWN, checking, difference, require, tolerance
from attmemo.packed.runner import Angles, Packed
from attmemo.packed.stack import places_of
from attmemo.packed.whole_model import Parts, WholeModel, parts_of

_LOG = logging.getLogger("attmemo")

_ROUNDED = 5e-2  # int8 activations are rounded by all rows of a batch, padding included
_LINEAR8 = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of an 8-bit layer to its oracle, relative to the range
_NEAR8 = 0.1  # of a block with 8-bit layers to the original's, relative to the range: 0.05 was seen
_FAR8 = 0.5  # of the last hidden states: 0.17 was seen
_UNSURE = 0.25  # share of rows
_SAMPLE = 7  # rows of that check: one more than a strip of the kernel


def allowed_for(packed: Packed, model: nn.Module, deep: bool = True) -> float:
    """Greatest relative difference to the original's, of the last hidden states or of one block."""
    if packed.linear != "exact":
        return _FAR8 if deep else _NEAR8
    return tolerance(model, _ROUNDED) * (DEEP if deep else 1)


def apart(packed: Packed, seen: Tensor, expected: Tensor) -> float:
    """Greatest difference of rows ``[..., H]``, relative to the range; NaN where a number is none.

    A router chooses other experts where two are all but equal, and rounding in few digits decides. So of routed blocks
    `_UNSURE` of the rows are left out, but in float32.
    """
    found = (seen - expected).abs().float()
    if not packed.is_routed or (packed.dtype == torch.float32 and packed.linear == "exact"):
        return difference(seen, expected)
    rows = found.view(-1, found.shape[-1]).amax(1)
    largest = rows.kthvalue(max(1, round((1 - _UNSURE) * len(rows)))).values
    return float(largest / expected.abs().max()) if bool(rows.isfinite().all()) else math.nan


def check_layers(packed: Packed) -> None:
    """Compare each 8-bit layer with its oracle, on rows without a pattern; AdapterCheckError: one differs."""
    for number, layer, modules in packed.linears:
        if not isinstance(layer, Linear8):
            continue
        x = torch.arange(1.0, _SAMPLE * layer.inputs + 1).mul_(1.618).sin_().view(_SAMPLE, -1).to(packed.dtype)
        parts: list[Any] = list(modules)
        with torch.no_grad():
            expected = linear8_in_torch(
                x, [part.weight for part in parts], [part.bias for part in parts], layer.activation,
                gated=layer.gated,
            )  # fmt: skip
        worst, allowed = difference(layer(x), expected), _LINEAR8[packed.dtype]
        what = f"an 8-bit layer of block {number} differs from plain arithmetic"
        require(worst, allowed, what, "leave out linear='int8'")


def check_blocks(adapter: Adapter, model: nn.Module, packed: Packed) -> type[Any]:
    """Run a small padded batch through the original blocks, and each block again over its packed rows.

    8-bit layers are compared with their oracle first. They are near the original only, so a block of them shows what
    is in a wrong place, not what is a little wrong.

    Returns
    -------
    type
        Class of what the module that holds the blocks gives out.

    Raises
    ------
    AdapterCheckError
        Names the first block that differs. Nothing has been changed.
    """
    check_layers(packed)
    inputs, lengths = adapter.sample(model)
    padded, allowed = max(lengths), allowed_for(packed, model, deep=False)
    places = places_of(lengths, padded)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    layout, known = Layout(starts, starts), packed.positions(padded)
    angles = Angles(known, layout)
    seen: list[int] = []
    given_out: list[type[Any]] = []

    def compare(number: int, args: Any, kwargs: Any, returned: Any) -> None:
        if number < 0:
            raise AdapterCheckError("one of its blocks is called more often than expected.", UNKNOWN)
        hidden = args[0] if args else kwargs["hidden_states"]
        expected = returned if isinstance(returned, Tensor) else returned[0]
        found = packed.block(number, _rows(hidden, places), layout, known, angles)
        worst = apart(packed, found, _rows(expected, places))
        seen.append(number)
        require(worst, allowed, f"block {number} over packed rows differs from the original")

    with checking(model, "a small batch cannot be checked with this model") as stack, torch.inference_mode():
        turns: dict[nn.Module, list[int]] = {}  # a module may be several blocks
        for number, block in enumerate(packed.blocks.blocks):
            turns.setdefault(block.module, []).append(number)
        for module, numbers in turns.items():

            def hook(_: nn.Module, args: Any, kwargs: Any, returned: Any, numbers: list[int] = numbers) -> None:
                compare(numbers.pop(0) if numbers else -1, args, kwargs, returned)

            stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        watch = packed.blocks.module.register_forward_hook(lambda _, __, returned: given_out.append(type(returned)))
        stack.callback(watch.remove)
        adapter.host(model)(**inputs)
    if seen != list(range(len(packed.blocks.blocks))):
        raise AdapterCheckError(f"its blocks are called in the order {seen}, not one after the other.", UNKNOWN)
    return given_out[0]


def check_stack(handle: Handle, adapter: Adapter, model: nn.Module, packed: Packed) -> None:
    """Serve a small padded batch through the hooks and compare the last hidden states with the original's.

    Raises
    ------
    AdapterCheckError
        Names what differs. Nothing has been changed.
    """
    inputs, lengths = adapter.sample(model)
    host = adapter.host(model)
    places = places_of(lengths, max(lengths))
    with checking(model, "a small batch cannot be answered") as stack, torch.inference_mode():
        expected = _rows(host(**inputs)[0], places)
        enable_within(handle, stack)
        seen = _rows(host(**inputs)[0], places)
        if handle.engine.counters.done.sequences != len(lengths):
            raise not_served("a small batch", handle.engine)
    what = "the output of the blocks differs from the original's"
    require(apart(packed, seen, expected), allowed_for(packed, model), what)


def check_whole(handle: Handle, adapter: Adapter, model: nn.Module, dtype: torch.dtype) -> Parts | None:
    """Compare forwards of the whole model in few calls with those through its modules and the hooked blocks.

    Returns
    -------
    Parts or None
        What such forwards need. None: the model is of another form, or a number differs in a bit; all forwards go
        through its modules then.
    """
    host, engine = adapter.host(model), handle.engine
    if adapter.embeddings(model) is None:
        return None
    try:
        with checking(model, "a small batch cannot be answered") as stack, torch.inference_mode():
            enable_within(handle, stack)
            parts = parts_of(adapter, model, dtype, host(**adapter.sample(model)[0]))
            if parts is None:
                return None
            hooks = [(module, module.forward) for module in host.modules() if isinstance(module.forward, Hook)]
            names = tuple(inspect.signature(host.forward).parameters)
            whole = WholeModel(host, parts, engine, names, hooks)
            for inputs in _samples(adapter, model, parts):
                seen, expected = whole((), inputs), host(**inputs)
                if seen is None or not _are_same(seen, expected):
                    _LOG.debug("attmemo: %s goes through its modules: %s differs", type(host).__name__, list(inputs))
                    return None
    except Exception as error:  # what is wrong with the model itself is told by the other checks
        _LOG.debug("attmemo: %s goes through its modules: %s", type(host).__name__, error)
        return None
    return parts


def _samples(adapter: Adapter, model: nn.Module, parts: Parts) -> Iterator[dict[str, Tensor]]:
    """Batches for `check_whole`: with a mask and without, with types, with a twin, and one line."""
    inputs, lengths = adapter.sample(model)
    ids, mask = inputs["input_ids"].clone(), inputs["attention_mask"]
    if parts.embeddings.padding >= 0:
        ids[0, 1] = parts.embeddings.padding
    again = torch.cat((ids, ids[:1])), torch.cat((mask, mask[:1]))
    yield {"input_ids": ids, "attention_mask": mask}
    yield {"input_ids": ids}
    yield {"input_ids": again[0], "attention_mask": again[1]}
    yield {"input_ids": ids[:1, : lengths[0]], "attention_mask": mask[:1, : lengths[0]]}
    if parts.embeddings.types is not None:
        kinds = (ids // 2) % parts.embeddings.types.num_embeddings
        yield {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}


def _are_same(seen: Any, expected: Any) -> bool:
    """Whether two outputs are of one class, and hold the same numbers."""
    if type(seen) is not type(expected) or list(seen) != list(expected):
        return False
    return all(torch.equal(seen[name], expected[name]) for name in expected)


def _rows(hidden: Tensor, places: Tensor | None) -> Tensor:
    """Rows ``[N, H]`` of ``[B, L, H]`` at these places; None: all."""
    every = hidden.reshape(-1, hidden.shape[-1])
    return every if places is None else every.index_select(0, places)
