"""DeBERTa v1: as v2, but one projection without bias computes Q, K and V, interleaved head by head."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attmemo.models.blocks import Blocks, bert_block
from attmemo.models.deberta_v2 import DisentangledAdapter, DistanceBlocks
from attmemo.models.projections import Slices, is_plain, why_not


class DebertaAdapter(DisentangledAdapter):
    """`encoder.layer.i.attention.self` of DeBERTa v1."""

    family = "deberta"
    models = ("DeBERTa (v1)",)
    projections = ()
    marks = ("in_proj", "q_bias", "v_bias", "pos_att_type")
    limits = "talking_head and a quantized or adapted in_proj are refused"

    def __init__(self) -> None:
        # By heads and width. The rows of V lie apart in the weight, and BLAS needs them together.
        self._slices: dict[tuple[int, int], Slices] = {}

    def refusal(self, model: nn.Module) -> str | None:
        for site in self.sites(model):
            if site.module.talking_head:
                return "its heads are mixed after the softmax, so its maps are not probabilities (talking_head)"
            if not is_plain(site.module.in_proj):
                return why_not(site.module, ("in_proj",))
        return None

    def forget(self, module: nn.Module) -> None:
        for slices in self._slices.values():
            slices.forget(module)

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        heads, width = self.shape(module)
        slices = self._slices.setdefault(
            (heads, width), Slices(lambda weight: weight.view(heads, 3, width, -1)[:, 2].flatten(0, 1))
        )
        weight = slices.of(module, module.in_proj.weight)  # type: ignore[union-attr, arg-type]
        return linear(tokens, weight, module.v_bias)  # type: ignore[arg-type]

    def blocks(self, model: nn.Module) -> Blocks | str:
        host: Any = self.host(model)
        encoder = self.encoder_of(host)
        if isinstance(encoder, str):
            return encoder
        found = []
        for layer in encoder.layer:
            own, out = layer.attention.self, layer.attention.output
            found.append(bert_block(layer, (_untangled(own, *self.shape(own)),), out.dense, out.LayerNorm))
        own = encoder.layer[0].attention.self
        heads, width = self.shape(own)
        blocks = DebertaBlocks(encoder, found, heads, width, (width * (1 + len(own.pos_att_type))) ** -0.5)
        blocks.relative = getattr(host.embeddings, "position_embeddings", None) is None
        return blocks


def _untangled(own: Any, heads: int, width: int) -> nn.Linear:
    """The projection with Q of all heads first, then K, then V, and with the biases of Q and V."""
    weight = own.in_proj.weight.detach()
    made = nn.Linear(weight.shape[1], len(weight), device="meta")
    turned = weight.view(heads, 3, width, -1).transpose(0, 1).flatten(0, 2).contiguous()
    bias = torch.cat([own.q_bias.detach(), torch.zeros_like(own.q_bias), own.v_bias.detach()])
    made.weight, made.bias = (nn.Parameter(part, requires_grad=False) for part in (turned, bias))
    return made


class DebertaBlocks(DistanceBlocks):
    """Blocks of DeBERTa v1: a row of the relative embeddings for each distance, with layers of their own."""

    def relative_keys(self, own: Any) -> tuple[Tensor | None, Tensor | None]:
        encoder: Any = self.module
        if not own.relative_attention:
            return None, None
        embedded = encoder.get_rel_embedding()
        key = own.pos_proj(embedded) if "c2p" in own.pos_att_type else None
        return key, own.pos_q_proj(embedded) if "p2c" in own.pos_att_type else None

    def buckets(self, own: Any, span: int) -> npt.NDArray[np.int32]:
        most = own.max_relative_positions
        found: npt.NDArray[np.int32] = np.clip(np.arange(1 - span, span) + most, 0, 2 * most - 1).astype(np.int32)
        return found

    @property
    def nbytes(self) -> int:
        turned = [part for block in self.blocks for part in block.qkv[0].parameters()]
        return super().nbytes + sum(part.nbytes for part in turned)
