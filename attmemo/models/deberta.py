"""DeBERTa v1: as v2, but one projection without bias computes Q, K and V, interleaved head by head."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import linear

from attmemo.models.deberta_v2 import DisentangledAdapter
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
