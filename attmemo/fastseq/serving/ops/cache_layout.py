"""How the cache and its scales lie in memory: the four layouts of the specification, and one view of them all."""

from __future__ import annotations

import torch

from attmemo.errors import ArgumentError

# Axes of each layout: tokens T, layers L, planes P (0 keys, 1 values), heads H, elements E.
AXES = ("TLPHE", "LTPHE", "LPTHE", "LPHTE")


def _shape(layout: int, tokens: int, layers: int, heads: int, elements: int) -> tuple[int, ...]:
    if layout not in range(len(AXES)):
        raise ArgumentError(f"cache_layout is {layout}, expected 0, 1, 2 or 3")
    sizes = {"T": tokens, "L": layers, "P": 2, "H": heads, "E": elements}
    return tuple(sizes[axis] for axis in AXES[layout])


def cache_shape(
    layout: int, tokens: int, layers: int, num_kv_heads: int, head_dim: int, quant_bit: int = 0
) -> tuple[int, ...]:
    """Shape of `cache`: five axes; with ``quant_bit=4`` two elements share a byte, so the last is ``head_dim / 2``.

    Parameters
    ----------
    layout : int
        0 ``(tokens, layers, 2, num_kv_heads, E)``, 1 ``(layers, tokens, 2, num_kv_heads, E)``,
        2 ``(layers, 2, tokens, num_kv_heads, E)``, 3 ``(layers, 2, num_kv_heads, tokens, E)``.
    tokens : int
        Rows of the cache: MaxT of the specification.
    layers, num_kv_heads, head_dim, quant_bit : int
        As the operator's attributes.

    Raises
    ------
    ArgumentError
        If there is no such layout.
    """
    return _shape(layout, tokens, layers, num_kv_heads, head_dim // 2 if quant_bit == 4 else head_dim)


def scale_shape(
    layout: int, tokens: int, layers: int, num_kv_heads: int, head_dim: int, quant_group: int
) -> tuple[int, ...]:
    """Shape of `scale`: that of the cache with one number for each group of ``quant_group`` elements."""
    return _shape(layout, tokens, layers, num_kv_heads, head_dim // quant_group)


def layer_planes(tensor: torch.Tensor, layout: int, layer: int) -> torch.Tensor:
    """One layer of a cache or of its scales as a view ``[2, tokens, heads, elements]``, whatever the layout."""
    axes = AXES[layout]
    one = tensor.select(axes.index("L"), layer)
    rest = axes.replace("L", "")
    return one.permute([rest.index(axis) for axis in "PTHE"])


def page_offsets(block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """`cachestarts` for a table of page *numbers* ``[B, MaxP]``, as other libraries have it; negative entries stay.

    This operator's entries are token offsets; given page numbers, it would silently read the wrong rows.
    """
    table = block_table.to(torch.int64)
    return torch.where(table < 0, table, table * page_size)
