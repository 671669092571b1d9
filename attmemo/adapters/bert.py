"""BERT and the families that share its attention: RoBERTa, XLM-R, ELECTRA, CamemBERT.

`*SelfAttention` holds separate Linear layers `query`, `key`, `value`; the output projection lives in the parent
(`*SelfOutput`), so a hit returns the bare context. Scores go through the attention interface, which is called
with Q, K and V already projected and therefore cannot skip them: `forward` of the module is replaced instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.adapters.base import (
    Adapter,
    Arguments,
    Call,
    Rows,
    Site,
    is_row_invariant,
    layers_named,
    prefix_lengths,
)

# What `forward` is called with that does not change a map. Anything else might (is_causal, cu_seq_lens_q, …).
HARMLESS = {
    "hidden_states", "attention_mask", "past_key_values", "encoder_hidden_states", "encoder_attention_mask",
    "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict",
}  # fmt: skip


class BertAdapter(Adapter):
    """`encoder.layer.i.attention.self` of BERT-shaped encoders."""

    family = "bert"

    def sites(self, model: nn.Module) -> list[Site]:
        found = layers_named(model, ("query", "key", "value", "num_attention_heads", "attention_head_size", "scaling"))
        keep = [
            (name, module)
            for name, module in found
            if all(type(getattr(module, part)) is nn.Linear for part in ("query", "key", "value"))
            and "crossattention" not in name
            and not getattr(module, "is_decoder", False)
            and not getattr(module, "is_causal", False)
        ]
        return [Site(layer, name, module) for layer, (name, module) in enumerate(keep)]

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        hidden = args[0] if args else kwargs.get("hidden_states")
        mask = args[1] if len(args) > 1 else kwargs.get("attention_mask")
        past = args[2] if len(args) > 2 else kwargs.get("past_key_values")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return "hidden states are not [batch, length, hidden]"
        if past is not None:
            return "a key-value cache is in use"
        if kwargs.get("encoder_hidden_states") is not None:
            return "cross-attention"
        if kwargs.get("output_attentions"):
            return "output_attentions"
        for name, value in kwargs.items():
            if name not in HARMLESS and value is not None and value is not False:
                return f"the argument {name}"
        return Call(hidden, mask)

    def valid_lengths(self, mask: Tensor | None, batch: int, length: int) -> list[int] | None:
        if mask is None:
            return [length] * batch
        if not isinstance(mask, Tensor):  # a BlockMask of flex attention
            return None
        if mask.dim() != 4 or mask.shape[-1] != length or mask.shape[1] != 1 or mask.shape[0] not in (1, batch):
            return None
        if not is_row_invariant(mask):
            return None
        row = mask[:, 0, 0, :]
        if row.dtype is torch.bool:
            valid = row
        elif not row.is_floating_point():
            return None
        else:
            # Additive mask: 0 attends, the dtype's lowest value does not; anything between is a bias we do not know.
            valid = row == 0
            if not bool((valid | (row <= torch.finfo(row.dtype).min / 2)).all()):
                return None
        return prefix_lengths(valid.expand(batch, length))

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        projected: Tensor = module.value(tokens)  # type: ignore[operator]
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
        return tuple(map(rows.of, args)), {name: rows.of(value) for name, value in kwargs.items()}

    def shape(self, module: nn.Module) -> tuple[int, int]:
        return int(module.num_attention_heads), int(module.attention_head_size)  # type: ignore[arg-type]

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        # Only the eager implementation has a map to return. The setting is read at each call, so it is switched for
        # the time of the capture and put back.
        config: Any = model.config
        before = config._attn_implementation
        config._attn_implementation = "eager"
        try:
            yield {}
        finally:
            config._attn_implementation = before
