"""Memoization of a whole stack of blocks: what `memoize` checks and makes for `reuse="none"` and `reuse="rows"`."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from typing import Any, Final

import torch
from torch import nn

from attmemo.adapters import Adapter, Site
from attmemo.adapters.blocks import Blocks, find_blocks
from attmemo.db import KIND_ROWS, Database
from attmemo.engine import Engine
from attmemo.errors import DatabaseError, UnsupportedModelError
from attmemo.handles.base import Memoization
from attmemo.kernels.align import Rule
from attmemo.planner import Planner, Whole
from attmemo.planner.rows import THRESHOLD, RowPlanner
from attmemo.reuse.packed import TYPES, Packed
from attmemo.reuse.row_store import DatabaseRows
from attmemo.reuse.rows import Rows
from attmemo.reuse.stack import Stack
from attmemo.selfchecks.blocks import check_blocks, check_stack
from attmemo.selfchecks.rows import check_rows
from attmemo.watch import Watch

_LOG = logging.getLogger("attmemo")

UNGUARDED: Final = (
    "reuse='rows' answers from rows of similar inputs, and nothing guards the answers yet: measure them on your own "
    "data with attmemo evaluate"
)


class StackMemoization(Memoization):
    """The handle of a model whose blocks run over packed rows.

    Attributes
    ----------
    packed : Packed
        The blocks, made ready.
    planner : Planner
    """

    def __init__(
        self, model: nn.Module, site: Site, engine: Engine, packed: Packed, planner: Planner, *, owned: bool = False
    ) -> None:
        super().__init__(model, [site], engine, owned=owned, followers=packed.blocks.followers)
        self.packed, self.planner = packed, planner

    @property
    def threshold(self) -> float | None:
        """Share of its tokens that a record must supply; None if nothing is reused."""
        return self.planner.threshold if isinstance(self.planner, RowPlanner) else None

    @property
    def reuse(self) -> str:
        """``"rows"`` or ``"none"``."""
        return self.engine.reuse.name

    def stats(self) -> dict[str, Any]:
        """Counters since the last reset, JSON-able.

        Returns
        -------
        dict
            ``sequences`` (run over packed rows), ``served`` (of these from a record), ``tokens`` (valid ones),
            ``rows_computed``, ``share_computed``, milliseconds by part (``ms_lookup``, ``ms_plan``: alignment and the
            choice, ``ms_fetch``, ``ms_blocks``), ``not_looked_up`` (sequences by reason), ``ineligible`` (sequences
            that the original code computed, by reason), ``failures`` (sequences after an error, by the error's text),
            ``weight_bytes`` (of weights made ready, beside the model's own).
        """
        counters = self.engine.counters.copy()
        done = counters.done
        return {
            "enabled": self.enabled,
            "reuse": self.reuse,
            "database": None if self.database is None else str(self.database.path),
            "threshold": self.threshold,
            "sequences": done.sequences,
            "served": done.served,
            "tokens": done.tokens,
            "rows_computed": done.rows,
            "share_computed": done.rows / done.tokens if done.tokens else None,
            "ms_lookup": 1e3 * done.lookup_seconds,
            "ms_plan": 1e3 * done.plan_seconds,
            "ms_fetch": 1e3 * done.fetch_seconds,
            "ms_blocks": 1e3 * done.blocks_seconds,
            "not_looked_up": dict(counters.skipped),
            "ineligible": dict(counters.ineligible),
            "failures": dict(counters.failures),
            "weight_bytes": self.packed.nbytes,
        }

    def __repr__(self) -> str:
        state = "on" if self.enabled else "off"
        if self.threshold is None:
            return f"<attmemo {state}: packed blocks, nothing reused>"
        return f"<attmemo {state}: rows of {self.database}, threshold {self.threshold}>"


def prepare_stack(encoder: nn.Module, adapter: Adapter) -> StackMemoization:
    """Check everything and make the handle for packed blocks; the model is not changed yet."""
    packed = _packed(encoder, adapter, "none")
    handle = _handle(encoder, adapter, packed, Stack(packed.blocks, packed), Whole(), None, owned=False)
    check_stack(handle, adapter, encoder)
    return handle


def prepare_rows(
    encoder: nn.Module, adapter: Adapter, opened: Database, *, owned: bool, threshold: Any, rule: Rule,
    gate: bool,
) -> StackMemoization:  # fmt: skip
    """Check everything and make the handle for rows; the model is not changed yet."""
    share = _share(threshold)
    packed = _packed(encoder, adapter, "rows")
    blocks = packed.blocks
    if opened.manifest.layers_kept(KIND_ROWS) != len(blocks.blocks):
        raise DatabaseError(
            f"{opened.path} keeps no rows of {len(blocks.blocks)} blocks.",
            "attmemo build-database --reuse rows --model … --data …",
        )
    with ExitStack() as undo:
        store = DatabaseRows(opened)
        undo.callback(store.close)
        planner = RowPlanner(store.index, share, rule, relative=blocks.relative, gated=gate)
        handle = _handle(encoder, adapter, packed, Rows(blocks, packed, store), planner, opened, owned=owned)
        check_stack(handle, adapter, encoder)
        check_rows(handle, adapter, encoder)
        undo.pop_all()
    _LOG.warning("attmemo: %s", UNGUARDED)
    return handle


def _packed(encoder: nn.Module, adapter: Adapter, reuse: str) -> Packed:
    packed = Packed(blocks_of(encoder, adapter, reuse), _dtype(encoder))
    check_blocks(adapter, encoder, packed)
    return packed


def _handle(
    encoder: nn.Module, adapter: Adapter, packed: Packed, reuse: Stack, planner: Planner, database: Database | None,
    *, owned: bool,
) -> StackMemoization:  # fmt: skip
    watch = Watch(adapter.host(encoder), [packed.blocks.modules])
    engine = Engine(adapter, watch, 1, database, reuse, planner)
    site = Site(0, "blocks", packed.blocks.module)
    return StackMemoization(encoder, site, engine, packed, planner, owned=owned)


def _share(threshold: Any) -> float:
    if isinstance(threshold, str) and threshold == "auto":
        return THRESHOLD
    if isinstance(threshold, int | float) and not isinstance(threshold, bool) and 0.0 <= threshold <= 1.0:
        return float(threshold)
    raise ValueError(f"for reuse='rows' a threshold is one share of tokens in [0, 1], or 'auto'; got {threshold!r}")


def _dtype(encoder: nn.Module) -> torch.dtype:
    return next(p for p in encoder.parameters() if p.is_floating_point()).dtype


def blocks_of(encoder: nn.Module, adapter: Adapter, reuse: str) -> Blocks:
    """The model's blocks, or UnsupportedModelError."""
    found, dtype = find_blocks(adapter, encoder), _dtype(encoder)
    reason = found if isinstance(found, str) else None
    if reason is None and dtype not in TYPES:
        reason = f"its weights are {dtype}; blocks are packed in {' and '.join(str(kind)[6:] for kind in TYPES)}"
    if reason is not None:
        raise UnsupportedModelError(
            f"reuse={reuse!r} cannot run the blocks of {type(encoder).__name__}: {reason}.",
            "reuse='maps' with a database of maps; attmemo families lists what each family can do",
        )
    assert not isinstance(found, str)
    return found
