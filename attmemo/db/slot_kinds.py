"""Kinds of slots: what a record keeps, and how each kind is checked before it is stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attmemo.db.encodings import STORAGE, TYPES, pack
from attmemo.errors import DatabaseCorruptError
from attmemo.system.json_fields import Field

if TYPE_CHECKING:
    from attmemo.db.manifest import ModelInfo

KIND_MAP: Final = "map"  # the attention map of a layer over the valid tokens
KIND_INPUT: Final = "input"  # the hidden states that entered the layer
LENGTH, TRIANGLE = "n", "n(n+1)/2"  # sizes of a shape
CAUSAL: Final = "causal"  # mask kind of a model whose maps are lower triangles
INPUTS: Final = ("all", "first")  # setting: the layers whose hidden states are kept


@dataclass(frozen=True)
class SlotKind:
    """One kind of slot."""

    name: str
    layers: int  # slots in a record: one for each of the layers 0 to layers - 1
    dtype: str  # a name of `attmemo.db.encodings.TYPES`
    shape: tuple[int | str, ...]  # for n valid tokens: positive numbers, and the words "n" and "n(n+1)/2"

    def shape_for(self, n: int) -> tuple[int, ...]:
        words = {LENGTH: n, TRIANGLE: n * (n + 1) // 2}
        return tuple(size if isinstance(size, int) else words[size] for size in self.shape)

    def nbytes(self, n: int) -> int:
        """Bytes of a slot of a sequence of n valid tokens."""
        return math.prod(self.shape_for(n)) * TYPES[self.dtype].itemsize

    @classmethod
    def read(cls, field: Field, model: ModelInfo, storage: str) -> SlotKind:
        """Read one entry of the manifest: a kind that a database of this model and storage may keep."""
        name, layers, dtype = field["name"].text(among=FORMS), field["layers"].integer(), field["dtype"].text()
        found = cls(name, layers, dtype, tuple(size.value for size in field["shape"].items()))  # type: ignore[misc]
        all_kinds = (kind for inputs in INPUTS for kind in kinds_of_maps(model, storage, {"inputs": inputs}))
        known = [kind for kind in all_kinds if kind.name == name]
        if found not in known:
            field.refuse(" or ".join(map(str, dict.fromkeys(known))))
        return found


def kinds_of_maps(model: ModelInfo, storage: str, settings: Mapping[str, Any]) -> tuple[SlotKind, ...]:
    """The kinds of a database; `settings` may hold ``inputs``, one of `INPUTS`."""
    of_maps, of_inputs = STORAGE[storage]
    shape = (model.heads, TRIANGLE) if model.mask_kind == CAUSAL else (model.heads, LENGTH, LENGTH)
    kept = model.layers if settings.get("inputs", "all") == "all" else 1
    return (
        SlotKind(KIND_MAP, model.layers, of_maps, shape),
        SlotKind(KIND_INPUT, kept, of_inputs, (LENGTH, model.hidden)),
    )


def _store_map(apm: Tensor, kind: SlotKind) -> Tensor:
    causal = TRIANGLE in kind.shape
    if apm.dim() != 3 or apm.shape[-1] != apm.shape[-2]:
        raise ValueError(f"a map has shape [heads, n, n], not {tuple(apm.shape)}")
    if causal and bool(torch.triu(apm, 1).any()):
        hint = "this is a fault of the adapter; leave the model unmemoized"
        raise DatabaseCorruptError("the model is causal, but its attention looks ahead", hint)
    sums = apm.float().sum(-1)
    # A row of 512 bfloat16 probabilities sums to 1 within 2 %; a tensor that is no map is far off.
    if not (bool(torch.isfinite(sums).all()) and bool((apm >= 0).all()) and float((sums - 1).abs().max()) < 0.05):
        found = f"row sums from {float(sums.min()):.3g} to {float(sums.max()):.3g}"
        hint = "check the model in this precision; bfloat16 or float32 often cures an overflow"
        raise DatabaseCorruptError(f"the model's attention is not a probability matrix ({found})", hint)
    return pack(apm, kind.dtype, causal)


def _store_input(hidden: Tensor, kind: SlotKind) -> Tensor:
    stored = hidden.detach().to("cpu", TYPES[kind.dtype]).contiguous()
    # Through float32: float8 has no infinity and no isfinite.
    if not bool(torch.isfinite(stored.float()).all()):
        hint = "store in a type of wider range: --dtype bfloat16 or float32"
        raise DatabaseCorruptError(f"the hidden states are not finite in {kind.dtype}", hint)
    return stored


FORMS: Final[dict[str, Callable[[Tensor, SlotKind], Tensor]]] = {KIND_MAP: _store_map, KIND_INPUT: _store_input}
"""All kinds by name: what gives the tensor to store, or DatabaseCorruptError for one that must not become a record."""
