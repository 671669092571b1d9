"""What `memoize` checks and makes for `reuse="prefix"` and `reuse="local"`: packed blocks, and stored equal rows."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from attmemo.errors import ArgumentError, UnsupportedModelError
from attmemo.forward.planning import Whole
from attmemo.handle.growing import bound_of
from attmemo.handle.namespaces import Namespaces
from attmemo.handle.stack import StackMemoization, handle_of, packed_of
from attmemo.kernels.linear8 import LinearName
from attmemo.models import Adapter
from attmemo.models.blocks import Blocks
from attmemo.packed.check import check_stack
from attmemo.packed.prefix_check import check_prefixes
from attmemo.packed.prefixes import CUT
from attmemo.prefix.check import check_local
from attmemo.prefix.local import LocalStore
from attmemo.prefix.pages import Pages
from attmemo.prefix.serve import LocalRows, PrefixRows
from attmemo.prefix.store import PrefixStore

EqualName = Literal["prefix", "local"]
"""Whose rows are equal: of texts that begin alike, or that are alike around a token."""


def prepare_equal(
    encoder: nn.Module, adapter: Adapter, linear: LinearName, max_bytes: int | None, namespaces: int, reuse: EqualName
) -> StackMemoization:  # fmt: skip
    """Check everything and make the handle; the model is not changed yet. `namespaces`: so many may be named later.

    Raises
    ------
    UnsupportedModelError
        The model has no packed blocks, or its tokens see too much: those behind them, or all.
    AdapterCheckError
        What is read from the store is not what the model computes.
    ArgumentError
        A page takes more than `max_bytes`.
    """
    packed = packed_of(encoder, adapter, reuse, linear)
    blocks, config = packed.blocks, adapter.host(encoder).config
    _check_reach(encoder, blocks, reuse)
    hidden: Any = config.hidden_size  # type: ignore[union-attr]
    sizes = len(blocks.blocks), blocks.key_heads * blocks.width, int(hidden), packed.dtype, bound_of(max_bytes)
    store: Pages = PrefixStore(*sizes) if blocks.reach is None else LocalStore(*sizes, blocks.reach)
    if not store.max_bytes:
        what = f"max_bytes is less than the {store.page_bytes:,} bytes of one page of {reuse} rows."
        raise ArgumentError(what, "a larger max_bytes")
    kind = PrefixRows if blocks.reach is None else LocalRows
    handle = handle_of(encoder, adapter, packed, kind(blocks, packed, store), Whole())
    check_stack(handle, adapter, encoder, packed)
    if blocks.reach is None:
        check_prefixes(handle, adapter, encoder, packed, times=2)
    else:
        check_local(handle, adapter, encoder, packed, blocks.reach, CUT * (store.max_bytes // store.page_bytes))
    store.forget()

    def make(name: str, nbytes: int) -> StackMemoization:
        del name, nbytes  # one room, in which what was used least recently goes
        rows = kind(blocks, packed, store, store.begin())
        found = handle_of(encoder, adapter, packed, rows, Whole())
        found.engine.serve_within(handle.engine, found)
        return found

    handle.spaces = Namespaces(handle, make, namespaces)
    return handle


def _check_reach(encoder: nn.Module, blocks: Blocks, reuse: EqualName) -> None:
    """UnsupportedModelError: rows of this model are not equal where those of another text are."""
    name = type(encoder).__name__
    similar = "budget=0.01 reuses rows of similar inputs, and changes at most 1 % of the answers"
    if reuse == "local":
        if blocks.reach is None:
            why = "its tokens see all tokens before them" if blocks.causal else "some of its layers are not local"
            raise UnsupportedModelError(
                f"reuse='local' is not for {name}: {why}.", "reuse='prefix'" if blocks.causal else similar
            )
        return
    if not blocks.causal:
        raise UnsupportedModelError(
            f"reuse='prefix' is not for {name}: its tokens see those behind them, so nothing that begins alike is "
            "equal.",
            similar if blocks.reach is None else "reuse='local': all of its layers are local",
        )
    if not blocks.has_prefixes:
        what = f"reuse='prefix' is not for {name}: prefixes of its family are not proven."
        raise UnsupportedModelError(what, "reuse='none': its blocks run without padding, exactly")
