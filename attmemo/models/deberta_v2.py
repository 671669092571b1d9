"""DeBERTa-v2 and v3: disentangled attention, for which no fused kernel exists.

A hit skips Q, K, QK^T and the two position terms with their gathers, which is most of the layer's time. The module is
called by position, as `(hidden_states, attention_mask, output_attentions, …)`. The mask is the outer product of the
padding mask, ``[B, 1, L, L]``. Rows of padding are fully masked (uniform maps), so only rows of valid tokens matter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from attmemo.kernels.exact_layers import exact_layer
from attmemo.kernels.packed_weights import Panels
from attmemo.kernels.row_attention import Disentangled
from attmemo.models.base import Adapter, Call
from attmemo.models.blocks import Blocks, bert_block
from attmemo.models.embeddings import Embeddings, embeddings_named
from attmemo.models.masks import Spans


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

    @staticmethod
    def encoder_of(host: Any) -> Any:
        """The encoder of a model; or why its blocks cannot be run."""
        encoder = getattr(host, "encoder", None)
        if encoder is None or not hasattr(encoder, "get_rel_embedding"):
            return "it has no encoder with blocks"
        return "its last block runs more than once (z_steps)" if getattr(host, "z_steps", 0) > 1 else encoder

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

    def embeddings(self, model: nn.Module) -> Embeddings | None:
        found = embeddings_named(self.host(model))
        # Positions come before types here. A sum of two has no order.
        return None if found is None or (found.types is not None and found.positions is not None) else found

    def blocks(self, model: nn.Module) -> Blocks | str:
        host = self.host(model)
        encoder = self.encoder_of(host)
        if isinstance(encoder, str):
            return encoder
        found = []
        for layer in encoder.layer:
            own, out = layer.attention.self, layer.attention.output
            found.append(
                bert_block(layer, (own.query_proj, own.key_proj, own.value_proj), out.dense, out.LayerNorm)
            )
        own = encoder.layer[0].attention.self
        terms = 1 + ("c2p" in own.pos_att_type) + ("p2c" in own.pos_att_type)  # counted also where they are not used
        heads, width = self.shape(own)
        blocks = DisentangledBlocks(encoder, found, heads, width, (width * terms) ** -0.5)
        blocks.relative = getattr(host.embeddings, "position_embeddings", None) is None
        if encoder.conv is not None:
            blocks.added_norm = encoder.conv.LayerNorm
        return blocks


class DistanceBlocks(Blocks, ABC):
    """Blocks of all versions of DeBERTa: scores gain q·PK and k·PQ of the distance between query and key."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._kept: dict[int, tuple[Tensor | None, Tensor | None]] = {}

    def leave(self, hidden: Tensor, call: Call) -> Any:
        from transformers.modeling_outputs import BaseModelOutput  # seconds to import

        # The model takes the last of all hidden states, and drops them before it returns.
        if not call.given.get("return_dict", True):
            return hidden, (hidden,)
        return BaseModelOutput(last_hidden_state=hidden, hidden_states=(hidden,))

    @abstractmethod
    def relative_keys(self, own: Any) -> tuple[Tensor | None, Tensor | None]:
        """PK and PQ of an attention module, ``[R, H]``; None: its scores have no such term."""

    @abstractmethod
    def buckets(self, own: Any, span: int) -> npt.NDArray[np.int32]:
        """Row of both for each distance of query less key, from ``1 - span`` to ``span - 1``."""

    def disentangled(self, layer: int, span: int) -> Disentangled | None:
        encoder: Any = self.module
        own = encoder.layer[layer].attention.self
        if layer not in self._kept:  # one pair for sequences of any length
            self._kept[layer] = self.relative_keys(own)
        key, query = self._kept[layer]
        return None if key is None and query is None else Disentangled(key, query, self.buckets(own, span))

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for pair in self._kept.values() for part in pair if part is not None)


class DisentangledBlocks(DistanceBlocks):
    """Blocks of DeBERTa-v2.

    In some models a convolution over the embedded tokens is added to what the first block gives. It is a linear layer
    on each token beside its neighbours, which kernels of attmemo compute where they have the instructions: torch's
    convolution rounds by the shape of the whole batch, and computes padding.
    """

    def added(self, call: Call, places: Tensor | None) -> Tensor | None:
        module: Any = self.module
        if module.conv is None:
            return None
        layer, hidden = self._convolution, call.hidden
        if layer is None:
            found: Tensor = module.conv.conv(hidden.transpose(1, 2).contiguous()).transpose(1, 2).flatten(0, 1)
            return self._activated(found if places is None else found.index_select(0, places))
        batch, padded, width = hidden.shape
        near = layer.inputs // width  # a token and those beside it
        rows = pad(hidden, (0, 0, near // 2, near // 2)).flatten(0, 1)
        every = torch.arange(batch * padded) if places is None else places
        first = every + every.div(padded, rounding_mode="floor") * (near - 1)
        found = layer(rows[first[:, None] + torch.arange(near)].flatten(1))
        return found if layer.activation != "none" else self._activated(found)

    @cached_property
    def _convolution(self) -> Panels | None:
        """The convolution as a linear layer on a token and its neighbours; None: none, or torch computes it."""
        module: Any = self.module
        conv = None if module.conv is None else module.conv.conv
        if conv is None or conv.groups > 1 or conv.kernel_size[0] % 2 == 0:
            return None
        weight, name = conv.weight.detach().transpose(1, 2).flatten(1), module.conv.conv_act
        name = name if name in ("gelu", "relu") else "none"
        return exact_layer([weight], [conv.bias], name)

    def _activated(self, rows: Tensor) -> Tensor:
        from transformers.activations import ACT2FN  # seconds to import

        module: Any = self.module
        found: Tensor = ACT2FN[module.conv.conv_act](rows)
        return found

    def relative_keys(self, own: Any) -> tuple[Tensor | None, Tensor | None]:
        encoder: Any = self.module
        terms = own.pos_att_type if own.relative_attention else ()
        key = query = None
        if "c2p" in terms or "p2c" in terms:
            embedded = encoder.get_rel_embedding()[: 2 * own.pos_ebd_size]
        if "c2p" in terms:
            key = (own.key_proj if own.share_att_key else own.pos_key_proj)(embedded)
        if "p2c" in terms:
            query = (own.query_proj if own.share_att_key else own.pos_query_proj)(embedded)
        return key, query

    def buckets(self, own: Any, span: int) -> npt.NDArray[np.int32]:
        from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position  # seconds to import

        distances = torch.arange(1 - span, span)
        if own.position_buckets > 0 and own.max_relative_positions > 0:
            distances = make_log_bucket_position(distances, own.position_buckets, own.max_relative_positions)
        rows = torch.clamp(distances + own.pos_ebd_size, 0, 2 * own.pos_ebd_size - 1)
        return rows.to(torch.int32).numpy()

    @property
    def nbytes(self) -> int:
        return super().nbytes + (0 if self._convolution is None else self._convolution.nbytes)
