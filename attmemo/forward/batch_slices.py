"""Some sequences of a batch: of what a model is given, and of what it gives out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor


def _tensor_in(given: Mapping[str, Any], name: str) -> Tensor | None:
    found = given.get(name)
    for value in given.values():
        if found is None and isinstance(value, Mapping):
            found = value.get(name)
    return found if isinstance(found, Tensor) else None


mask_in = partial(_tensor_in, name="attention_mask")
"""Gives the attention mask among the arguments, also inside of a dict of features; None: there is none."""
ids_in = partial(_tensor_in, name="input_ids")
"""The same of token ids."""


def tokens_in(mask: Tensor) -> int:
    """How many tokens a mask ``[B, L]`` does not hide."""
    plain = type(mask) is Tensor and mask.is_cpu
    return int(np.count_nonzero(mask.numpy()) if plain else mask.count_nonzero())  # numpy: a fifth of the time


def shallow(value: Any) -> Any:
    """Copies of containers with the same tensors."""
    if isinstance(value, Mapping):
        copied = dict(value)
        for name, item in copied.items():
            if type(item) is not Tensor:
                copied[name] = shallow(item)
        return copied
    if type(value) in (tuple, list):
        return type(value)(map(shallow, value))
    return value


def take(value: Any, places: Tensor, batch: int) -> Any:
    """The same arguments for some sequences of the batch."""
    if isinstance(value, Tensor):
        return value.index_select(0, places) if value.dim() and value.shape[0] == batch else value
    if isinstance(value, dict):
        return {name: take(item, places, batch) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(take(item, places, batch) for item in value)
    return value


def put(value: Any, new: Any, places: Tensor, batch: int) -> Any:
    """An output with some sequences replaced; its type stays."""
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != batch or not isinstance(new, Tensor):
            return value
        return value.index_copy(0, places, new.to(value.dtype))
    if isinstance(value, dict):  # model outputs of transformers are dicts
        for name in list(value):
            value[name] = put(value[name], new.get(name), places, batch)
        return value
    if isinstance(value, (tuple, list)):
        parts = [put(one, other, places, batch) for one, other in zip(value, new, strict=True)]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def tensors_in(value: Any) -> list[Tensor] | None:
    """All tensors of an output; None if it holds anything else."""
    if value is None or isinstance(value, Tensor):
        return [] if value is None else [value]
    if not isinstance(value, (Mapping, tuple, list)):
        return None
    found: list[Tensor] = []
    for part in value.values() if isinstance(value, Mapping) else value:
        own = tensors_in(part)
        if own is None:
            return None
        found += own
    return found


def has_loss(output: Any) -> bool:
    """Whether some number of an output belongs to the whole batch: no part of it can be computed again."""
    for value in output.values() if isinstance(output, Mapping) else output if isinstance(output, tuple) else ():
        if isinstance(value, Tensor) and not value.dim():
            return True
    return False
