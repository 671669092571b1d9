"""What the engine needs to know about one family's attention: the adapter protocol.

An adapter is data plus a few small methods, one file a family. The engine never looks inside a module itself.

Shapes: B sequences of padded length L, hidden size H, h heads of width d, n valid tokens in a sequence.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Site:
    """One self-attention layer of a model: where `forward` is replaced."""

    layer: int
    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a site, read: what goes in and which mask applies.

    ``mask`` is the module's own mask argument (None: everything may attend everything).
    """

    hidden: Tensor  # [B, L, H], as the module sees it
    mask: Tensor | None


class Rows:
    """Some rows of a batch, to be taken out of a call's arguments.

    Parameters
    ----------
    batch : int
        B, the rows that there are.
    rows : array of int
        Which to take.
    mask : Tensor, optional
        An argument that many layers share: its rows are taken once.
    """

    def __init__(self, batch: int, rows: npt.NDArray[np.int64], mask: Tensor | None = None) -> None:
        self.batch, self.rows = batch, rows
        self._index = torch.from_numpy(rows)
        self._mask = mask
        self._of_mask: Tensor | None = None

    def of(self, value: Any) -> Any:
        """Rows of a tensor whose first dimension is the batch; anything else belongs to all rows alike."""
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self.batch or self.batch == 1:
            return value
        if value is not self._mask:
            return value[self._index]
        if self._of_mask is None:
            self._of_mask = value[self._index]
        return self._of_mask


class Adapter(ABC):
    """One family of attention modules.

    Attributes
    ----------
    family : str
        Name shown to users and stored in a database.
    mask_kind : str
        ``"bidirectional"``; a record serves only calls of the same kind.
    """

    family: ClassVar[str]
    mask_kind: ClassVar[str] = "bidirectional"

    @abstractmethod
    def sites(self, model: nn.Module) -> list[Site]:
        """Self-attention modules in the order of layers, found by structure; empty if this is another family."""

    @abstractmethod
    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        """The call's hidden states and mask, or the reason why it must stay exact."""

    @abstractmethod
    def valid_lengths(self, mask: Tensor | None, batch: int, length: int) -> list[int] | None:
        """Valid tokens of each sequence, or None unless the mask is plain padding at the end."""

    @abstractmethod
    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        """V for packed tokens: ``[N, H]`` to ``[N, h * d]``."""

    @abstractmethod
    def finish(self, module: nn.Module, context: Tensor) -> Any:
        """What `forward` returns, from the context ``[B, L, h * d]``."""

    @abstractmethod
    def context_of(self, output: Any) -> Tensor:
        """The context ``[B, L, h * d]`` inside what the original `forward` returned."""

    @abstractmethod
    def map_of(self, output: Any) -> Tensor:
        """The attention map ``[B, h, L, L]`` inside what `forward` returned while capturing."""

    @abstractmethod
    def take_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows) -> Arguments:
        """The same call for some rows of the batch."""

    @abstractmethod
    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Heads and head width ``(h, d)``."""

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """While inside, model calls made with the yielded keyword arguments return their maps."""
        yield {"output_attentions": True}


def prefix_lengths(valid: Tensor) -> list[int] | None:
    """Lengths of the valid prefixes in a ``[B, L]`` boolean tensor; None if any row is not a non-empty prefix."""
    counts = valid.sum(-1)
    prefix = torch.arange(valid.shape[-1], device=valid.device) < counts[:, None]
    if not torch.equal(prefix, valid):
        return None
    lengths = [int(n) for n in counts.tolist()]
    return lengths if min(lengths, default=0) > 0 else None


def is_row_invariant(mask: Tensor) -> bool:
    """True if a ``[B, 1, L, L]`` mask is the same for every query row (an expanded view costs nothing to check)."""
    return mask.shape[-2] == 1 or mask.stride(-2) == 0 or bool((mask == mask[..., :1, :]).all())


def layers_named(model: nn.Module, attributes: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules that have all the attributes, as Linear layers or anything else, in the order of the model."""
    return [(name, module) for name, module in model.named_modules() if all(hasattr(module, a) for a in attributes)]
