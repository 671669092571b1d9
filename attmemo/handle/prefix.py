"""What `memoize` checks and makes for `reuse="prefix"`: blocks over packed rows, and stored prefixes."""

from __future__ import annotations

from typing import Any

from torch import nn

from attmemo.errors import ArgumentError, UnsupportedModelError
from attmemo.forward.planning import Whole
from attmemo.handle.growing import bound_of
from attmemo.handle.namespaces import Namespaces
from attmemo.handle.stack import StackMemoization, handle_of, packed_of
from attmemo.kernels.linear8 import LinearName
from attmemo.models import Adapter
from attmemo.packed.check import check_stack
from attmemo.packed.prefix_check import check_prefixes
from attmemo.prefix.serve import PrefixRows
from attmemo.prefix.store import PrefixStore


def prepare_prefix(
    encoder: nn.Module, adapter: Adapter, linear: LinearName, max_bytes: int | None, namespaces: int = 0
) -> StackMemoization:  # fmt: skip
    """Check everything and make the handle; the model is not changed yet. `namespaces`: so many may be named later.

    Raises
    ------
    UnsupportedModelError
        The model has no packed blocks, or its tokens see those behind them.
    AdapterCheckError
        What is read from the store is not what the model computes.
    ArgumentError
        A page takes more than `max_bytes`.
    """
    packed = packed_of(encoder, adapter, "prefix", linear)
    blocks, config = packed.blocks, adapter.host(encoder).config
    if not blocks.causal:
        raise UnsupportedModelError(
            f"reuse='prefix' cannot serve {type(encoder).__name__}: its tokens see those behind them, so nothing that "
            "begins alike is equal.",
            "budget=0.01 reuses rows of similar inputs, and changes at most 1 % of the answers",
        )
    if not blocks.has_prefixes:
        what = f"reuse='prefix' cannot serve {type(encoder).__name__}: prefixes of its family are not proven."
        raise UnsupportedModelError(what, "reuse='none': its blocks run without padding, exactly")
    hidden: Any = config.hidden_size  # type: ignore[union-attr]
    store = PrefixStore(
        len(blocks.blocks), blocks.key_heads * blocks.width, int(hidden), packed.dtype, bound_of(max_bytes)
    )
    if not store.max_bytes:
        what = f"max_bytes is less than the {store.page_bytes:,} bytes of one page of prefixes."
        raise ArgumentError(what, "a larger max_bytes")
    handle = handle_of(encoder, adapter, packed, PrefixRows(blocks, packed, store), Whole())
    check_stack(handle, adapter, encoder, packed)
    check_prefixes(handle, adapter, encoder, packed, times=2)
    store.forget()

    def make(name: str, nbytes: int) -> StackMemoization:
        del name, nbytes  # one room, in which what was used least recently goes
        reuse = PrefixRows(blocks, packed, store, store.begin())
        found = handle_of(encoder, adapter, packed, reuse, Whole())
        found.engine.serve_within(handle.engine, found)
        return found

    handle.spaces = Namespaces(handle, make, namespaces)
    return handle
