"""Norms of rows, as native code ends rows with them: layer norms, and norms by the mean square alone (RMS)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.kernels.linear import sample

_SAME = 1e-5  # relative: rounding of float32 in another order
_BY_SQUARES = "RMSNorm", "T5LayerNorm"  # names of norms by the mean square contain one of these
_CENTRED = ("DebertaLayerNorm",)  # the same of layer norms of a class of their own
_EPS = ("variance_epsilon", "eps")  # names of what is added to the variance


@dataclass(frozen=True)
class Norm:
    """A norm of rows ``[N, H]``.

    Attributes
    ----------
    weight : Tensor
        ``[H]``, what rows are multiplied with.
    bias : Tensor or None
        ``[H]``; None: zeros.
    eps : float
        Is added to the variance.
    centred : bool
        Whether the mean is taken off first, as in a layer norm.
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """The norm of rows of any type, computed in float32: the oracle of the native one."""
        wide = rows.float()
        if self.centred:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return (wide if self.bias is None else wide + self.bias.float()).to(rows.dtype)


NativeNorm = tuple[int, int, float, int, bool]
NO_NORM: Final[NativeNorm] = (0, 0, 0.0, 0, True)


class KeptNorms:
    """Norms as native code has them: copies in float32 that stay where they are while this object lives."""

    def __init__(self) -> None:
        self._parts: list[Tensor] = []

    def native(self, norm: Norm | None, width: int) -> NativeNorm:
        """A norm of rows of this width; ValueError: it is one of others."""
        if norm is None:
            return NO_NORM
        if len(norm.weight) != width:
            raise ValueError(f"a norm of {len(norm.weight)} numbers does not fit rows of {width}")
        parts = [None if part is None else part.detach().clone().float() for part in (norm.weight, norm.bias)]
        self._parts += [part for part in parts if part is not None]
        weight, bias = (0 if part is None else part.data_ptr() for part in parts)
        return weight, bias, norm.eps, 0, norm.centred


def is_norm(module: object) -> bool:
    """Whether a module has the structure of a norm; what it computes is seen by `norm_of`."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1:
        return False
    if type(module) is nn.LayerNorm:
        return True
    names, biased = (_BY_SQUARES, False) if getattr(module, "bias", None) is None else (_CENTRED, True)
    fits = not biased or getattr(module.bias, "shape", None) == weight.shape  # type: ignore[attr-defined]
    return fits and any(name in type(module).__name__ for name in names) and isinstance(_eps_of(module), float)


def _eps_of(module: object) -> object:
    return next((getattr(module, name) for name in _EPS if hasattr(module, name)), None)


def norm_of(module: nn.Module) -> Norm | None:
    """The norm that a module is; None if it is of an unknown form.

    Norms by the mean square have no class of their own in most families, and some multiply with ``1 + weight``. What a
    module is shows in what it computes.
    """
    weight: Any = getattr(module, "weight", None)
    if not is_norm(module) or weight.device.type != "cpu":
        return None
    if isinstance(module, nn.LayerNorm):
        return Norm(weight.detach(), None if module.bias is None else module.bias.detach(), module.eps, True)
    eps: Any = _eps_of(module)
    rows, bias = sample(len(weight), torch.float32), getattr(module, "bias", None)
    with torch.inference_mode():
        seen, own = module(rows), weight.detach().float()
        forms = (
            [Norm(own, None, eps, False), Norm(1 + own, None, eps, False)] if bias is None
            else [Norm(own, bias.detach().float(), eps, True)]
        )  # fmt: skip
        for found in forms:
            if _are_same(seen, found(rows), weight.dtype):
                return found
    return None


def _are_same(seen: object, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether a norm gave this, up to rounding of its weights' type."""
    if not isinstance(seen, Tensor) or seen.shape != expected.shape:
        return False
    allowed = _SAME + (0 if dtype == torch.float32 else torch.finfo(dtype).eps)
    return bool((seen.float() - expected).abs().max() <= allowed * expected.abs().max())
