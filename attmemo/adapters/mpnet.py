"""MPNet: no attention interface and no fused attention; a relative position bias is added to the scores.

The bias is made once by the encoder and given to each layer, so a hit need not know it. Maps are asked for with
`output_attentions`; without, one value is returned alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from attmemo.adapters.base import Adapter, Call, Site, layers_named, number
from attmemo.adapters.projections import are_linear


class MPNetAdapter(Adapter):
    """`encoder.layer.i.attention.attn`."""

    family = "mpnet"
    models = ("MPNet",)
    parameters = ("hidden_states", "attention_mask", "position_bias", "output_attentions")
    harmless = frozenset({"position_bias"})
    shared = frozenset({"attention_mask", "position_bias"})

    def sites(self, model: nn.Module) -> list[Site]:
        found = layers_named(model, ("q", "k", "v", "o", "num_attention_heads", "all_head_size"))
        return number([(name, module) for name, module in found if are_linear(module, "q", "k", "v", "o")])

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        projected: Tensor = module.v(tokens)  # type: ignore[operator]
        return projected

    def finish(self, module: nn.Module, context: Tensor, hidden: Tensor) -> Tensor:
        output: Tensor = module.o(context)  # type: ignore[operator]
        return output

    def pack(self, module: nn.Module, output: Tensor, call: Call) -> Any:
        return (output,)

    def shape(self, module: nn.Module) -> tuple[int, int]:
        return int(module.num_attention_heads), int(module.attention_head_size)  # type: ignore[arg-type]

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        yield {"output_attentions": True}
