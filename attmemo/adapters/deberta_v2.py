"""DeBERTa-v2 and v3: disentangled attention, for which no fused kernel exists.

A hit skips Q, K, QK^T and the two position terms with their gathers, which is most of the layer's time. The
module is called positionally as `(hidden_states, attention_mask, output_attentions, …)`; the mask is the outer
product of the padding mask, ``[B, 1, L, L]``; rows of padding are fully masked (uniform maps), so only valid rows
carry meaning.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Arguments, Call, Rows, Site, layers_named, prefix_lengths


class DebertaV2Adapter(Adapter):
    """`encoder.layer.i.attention.self` of DeBERTa-v2."""

    family = "deberta-v2"

    def sites(self, model: nn.Module) -> list[Site]:
        found = layers_named(
            model, ("query_proj", "key_proj", "value_proj", "num_attention_heads", "relative_attention")
        )
        keep = [(name, module) for name, module in found if hasattr(module, "pos_att_type")]
        return [Site(layer, name, module) for layer, (name, module) in enumerate(keep)]

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        names = ("hidden_states", "attention_mask", "output_attentions", "query_states")
        given = dict(zip(names, args, strict=False)) | kwargs
        hidden = given.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return "hidden states are not [batch, length, hidden]"
        if given.get("output_attentions"):
            return "output_attentions"
        if given.get("query_states") is not None:
            return "separate query states"
        return Call(hidden, given.get("attention_mask"))

    def valid_lengths(self, mask: Tensor | None, batch: int, length: int) -> list[int] | None:
        if mask is None:
            return [length] * batch
        if mask.dim() != 4 or mask.shape != (batch, 1, length, length):
            return None
        allowed = mask[:, 0].bool()  # [B, L, L]
        lengths = prefix_lengths(allowed.diagonal(dim1=1, dim2=2))
        if lengths is None:
            return None
        if min(lengths) == length:
            return lengths if bool(allowed.all()) else None
        valid = torch.arange(length, device=mask.device) < torch.tensor(lengths, device=mask.device)[:, None]
        outer = valid[:, :, None] & valid[:, None, :]
        return lengths if torch.equal(outer, allowed) else None

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        projected: Tensor = module.value_proj(tokens)  # type: ignore[operator]
        return projected

    def finish(self, module: nn.Module, context: Tensor) -> Any:
        return context, None

    def context_of(self, output: Any) -> Tensor:
        context: Tensor = output[0]
        return context

    def map_of(self, output: Any) -> Tensor:
        probabilities: Tensor = output[1]
        return probabilities

    def take_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows) -> Arguments:
        # relative_pos [1, L, L] and rel_embeddings [2 * span, H] belong to the layer, not to the batch: a batch of
        # as many rows must not cut them.
        shared = ("relative_pos", "rel_embeddings")
        taken = tuple(value if place >= 4 else rows.of(value) for place, value in enumerate(args))
        named = {name: value if name in shared else rows.of(value) for name, value in kwargs.items()}
        return taken, named

    def shape(self, module: nn.Module) -> tuple[int, int]:
        return int(module.num_attention_heads), int(module.attention_head_size)  # type: ignore[arg-type]
