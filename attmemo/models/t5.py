"""T5's encoder: a relative position bias, which the first layer makes for all other layers.

A hit in the first layer must still make the bias, for later layers that miss. Scores are not scaled, and `forward`
returns three values.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from attmemo.models.base import Adapter, Call, takes
from attmemo.models.cache_name import CACHE_NAME


class T5Adapter(Adapter):
    """`encoder.block.i.layer.0.SelfAttention`."""

    family = "t5"
    models = ("T5", "mT5", "Flan-T5")
    limits = "the decoder stays exact; UMT5 is refused"
    part, layers = "encoder", "num_layers"
    parameters = ("hidden_states", "mask", "key_value_states", "position_bias", CACHE_NAME)
    mask_name = "mask"
    harmless = frozenset({"mask", "position_bias"})
    shared = frozenset({"mask", "position_bias"})
    projections = ("q", "k", "v")
    out = "o"
    heads, width = "n_heads", "key_value_proj_dim"

    def is_one(self, name: str, module: nn.Module) -> bool:
        return not getattr(module, "is_decoder", True) and takes(module, "position_bias", "mask")

    def pack(self, module: nn.Module, output: Tensor, call: Call) -> Any:
        bias = call.given.get("position_bias")
        length = call.hidden.shape[1]
        if bias is None and module.has_relative_attention_bias:
            bias = module.compute_bias(length, length, device=output.device)  # type: ignore[operator]
        elif bias is None:
            bias = output.new_zeros(1, self.shape(module)[0], length, length)
        return output, bias, None

    def map_of(self, returned: Any) -> Tensor:
        probabilities: Tensor = returned[2]
        return probabilities
