"""Memoization of a whole stack of blocks: what `memoize(reuse="none")` checks and makes."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from attmemo.adapters import Adapter, Site
from attmemo.adapters.blocks import Blocks
from attmemo.engine import Engine
from attmemo.errors import UnsupportedModelError
from attmemo.handle import Memoization
from attmemo.planner import Whole
from attmemo.reuse.packed import TYPES, Packed
from attmemo.reuse.stack import Stack
from attmemo.stackcheck import check_blocks, check_stack
from attmemo.watch import Watch


class StackMemoization(Memoization):
    """The handle of a model whose blocks run over packed rows.

    Attributes
    ----------
    packed : Packed
        The blocks, made ready.
    """

    reuse: ClassVar[str] = "none"

    def __init__(self, model: nn.Module, sites: list[Site], engine: Engine, packed: Packed, owned: bool) -> None:
        super().__init__(model, sites, engine, owned=owned, followers=packed.blocks.followers)
        self.packed = packed

    def stats(self) -> dict[str, Any]:
        """Counters since the last reset, JSON-able.

        Returns
        -------
        dict
            ``sequences`` (run over packed rows), ``tokens`` (their valid tokens), ``rows_computed``, ``ms_blocks``,
            ``ineligible`` (sequences that the original code computed, by reason), ``failures`` (the same after an
            error, by the error's text), ``weight_bytes`` (of weights made ready, beside the model's own).
        """
        counters = self.engine.counters.copy()
        layer, done = counters.layers[0], counters.done
        return {
            "enabled": self.enabled,
            "reuse": self.reuse,
            "sequences": layer.sequences,
            "tokens": done.tokens,
            "rows_computed": done.rows,
            "ms_blocks": 1e3 * done.blocks_seconds,
            "ineligible": dict(counters.ineligible),
            "failures": dict(counters.failures),
            "weight_bytes": self.packed.nbytes,
        }

    def __repr__(self) -> str:
        return f"<attmemo {'on' if self.enabled else 'off'}: packed blocks, nothing reused>"


def prepare_stack(encoder: nn.Module, adapter: Adapter) -> StackMemoization:
    """Check everything and make the handle; the model is not changed yet."""
    blocks = blocks_of(encoder, adapter, StackMemoization.reuse)
    packed = Packed(blocks, next(p for p in encoder.parameters() if p.is_floating_point()).dtype)
    check_blocks(adapter, encoder, packed)
    site = [Site(0, "blocks", blocks.module)]
    engine = Engine(adapter, Watch(adapter.host(encoder), [blocks.modules]), 1, None, Stack(blocks, packed), Whole())
    handle = StackMemoization(encoder, site, engine, packed, owned=False)
    check_stack(handle, adapter, encoder)
    return handle


def blocks_of(encoder: nn.Module, adapter: Adapter, reuse: str) -> Blocks:
    """The model's blocks, or UnsupportedModelError."""
    found = adapter.blocks(encoder)
    reason = found if isinstance(found, str) else found.refusal()
    dtype = next(p for p in encoder.parameters() if p.is_floating_point()).dtype
    if reason is None and dtype not in TYPES:
        reason = f"its weights are {dtype}; blocks are packed in {' and '.join(str(kind)[6:] for kind in TYPES)}"
    if reason is not None:
        raise UnsupportedModelError(
            f"reuse={reuse!r} does not know the blocks of {type(encoder).__name__}: {reason}.",
            "reuse='maps' with a database of maps; attmemo families lists what each family can do",
        )
    assert not isinstance(found, str)
    return found
