"""DeBERTa-v2 and v3: disentangled attention, for which no fused kernel exists.

A hit skips Q, K, QK^T and the two position terms with their gathers, which is most of the layer's time. The module is
called by position, as `(hidden_states, attention_mask, output_attentions, …)`. The mask is the outer product of the
padding mask, ``[B, 1, L, L]``. Rows of padding are fully masked (uniform maps), so only rows of valid tokens matter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Call
from attmemo.adapters.masks import Spans


class DisentangledAdapter(Adapter):
    """The common part of all versions of DeBERTa."""

    parameters = (
        "hidden_states", "attention_mask", "output_attentions", "query_states", "relative_pos", "rel_embeddings",
    )  # fmt: skip
    harmless = frozenset({"relative_pos", "rel_embeddings"})
    # relative_pos [1, L, L] and rel_embeddings [2 * span, H] belong to the layer, not to the batch. They must not be
    # cut, even if their first dimension equals the batch size.
    unbatched = frozenset({"relative_pos", "rel_embeddings"})
    out = None
    heads, width = "num_attention_heads", "attention_head_size"
    maps_on_request = True

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        if kwargs.get("query_states") is not None or (len(args) > 3 and args[3] is not None):
            return "separate query states"
        return super().read(module, args, kwargs)

    def spans(self, module: nn.Module, mask: Any, batch: int, length: int) -> Spans | None:
        if mask is None:
            return Spans([length] * batch)
        if not isinstance(mask, Tensor) or mask.shape != (batch, 1, length, length):
            return None
        return super().spans(module, mask.bool(), batch, length)


class DebertaV2Adapter(DisentangledAdapter):
    """`encoder.layer.i.attention.self` of DeBERTa-v2."""

    family = "deberta-v2"
    models = ("DeBERTa-v2", "DeBERTa-v3")
    projections = ("query_proj", "key_proj", "value_proj")
    marks = ("relative_attention", "pos_att_type")
