"""Kinds of slots: what a record keeps, and how each kind is checked before it is stored.

The manifest lists the kinds of its database: those of maps, or those of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attmemo.db.encodings import ROW_STORAGE, STORAGE, TYPES, pack
from attmemo.errors import DatabaseCorruptError
from attmemo.system.json_fields import Field

if TYPE_CHECKING:
    from attmemo.db.manifest import ModelInfo

KIND_MAP: Final = "map"  # the attention map of a layer over the valid tokens
KIND_INPUT: Final = "input"  # the hidden states that entered the layer
KIND_TOKENS: Final = "tokens"  # ids of the valid tokens, with their types
KIND_ROWS: Final = "rows"  # K, then V, of a layer
KIND_SCALES: Final = "scales"  # of rows in 8 bits: one number for each row and head
KIND_LAST: Final = "last"  # the hidden states that left the last layer
LENGTH, TRIANGLE = "n", "n(n+1)/2"  # sizes of a shape
CAUSAL: Final = "causal"  # mask kind of a model whose maps are lower triangles
INPUTS: Final = ("all", "first")  # setting: the layers whose hidden states are kept


@dataclass(frozen=True)
class SlotKind:
    """One kind of slot."""

    name: str
    layers: int  # slots in a record: one for each of the layers 0 to layers - 1, or 1 for a whole sequence
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
        known = [kind for kind in _possible_kinds(model, storage) if kind.name == name]
        if found not in known:
            field.refuse(" or ".join(map(str, dict.fromkeys(known))))
        return found


@dataclass(frozen=True)
class Form:
    """How slots of a kind are stored.

    `store` gives the tensor to store, or DatabaseCorruptError for one that must not become a record. Only `served`
    slots get 2 MiB pages.
    """

    store: Callable[[Tensor, SlotKind], Tensor]
    served: bool = False


def kinds_of_maps(model: ModelInfo, storage: str, settings: Mapping[str, Any]) -> tuple[SlotKind, ...]:
    """The kinds of a database that serves maps; `settings` may hold ``inputs``, one of `INPUTS`."""
    of_maps, of_inputs = STORAGE[storage]
    shape = (model.heads, TRIANGLE) if model.mask_kind == CAUSAL else (model.heads, LENGTH, LENGTH)
    kept = model.layers if settings.get("inputs", "all") == "all" else 1
    return (
        SlotKind(KIND_MAP, model.layers, of_maps, shape),
        SlotKind(KIND_INPUT, kept, of_inputs, (LENGTH, model.hidden)),
    )


def kinds_of_rows(model: ModelInfo, storage: str) -> tuple[SlotKind, ...]:
    """The kinds of a database that serves rows."""
    of_rows, of_last = ROW_STORAGE[storage]
    scales = SlotKind(KIND_SCALES, model.layers, "float32", (2, LENGTH, model.heads))
    return (
        SlotKind(KIND_TOKENS, 1, "int32", (LENGTH,)),
        SlotKind(KIND_ROWS, model.layers, of_rows, (2, LENGTH, model.hidden)),
        *([scales] if storage == "int8" else []),
        SlotKind(KIND_LAST, 1, of_last, (LENGTH, model.hidden)),
    )


def _possible_kinds(model: ModelInfo, storage: str) -> Iterator[SlotKind]:
    """All kinds that a database of this model and storage may keep."""
    if storage in STORAGE:
        for inputs in INPUTS:
            yield from kinds_of_maps(model, storage, {"inputs": inputs})
    if storage in ROW_STORAGE:
        yield from kinds_of_rows(model, storage)


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


def _store_as_it_is(tensor: Tensor, kind: SlotKind) -> Tensor:
    """Tokens, and codes and scales that `forms.quantize` has made."""
    stored = tensor.detach().contiguous()
    if stored.is_floating_point() and not bool(torch.isfinite(stored).all()):
        raise DatabaseCorruptError(f"the {kind.name} are not finite", "check the model in this precision")
    return stored


def _store_rows(rows: Tensor, kind: SlotKind) -> Tensor:
    return _store_as_it_is(rows, kind) if kind.dtype == "int8" else _store_input(rows, kind)


FORMS: Final = {
    KIND_MAP: Form(_store_map, served=True),
    KIND_INPUT: Form(_store_input),
    KIND_TOKENS: Form(_store_as_it_is),
    KIND_ROWS: Form(_store_rows, served=True),
    KIND_SCALES: Form(_store_as_it_is, served=True),
    KIND_LAST: Form(_store_input),
}
"""All kinds, by name."""
