"""The fast implementation for CPUs: `native/cache_attention.c`, which reads the cache as it lies.

Keys and values are never gathered, and never unpacked further than into a few hundred rows in the processor's cache.
The output of a sequence depends neither on what it is served with nor on the number of threads, which are torch's own,
as many as `torch.get_num_threads` says.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch

from attmemo.fastseq.ops.arguments import Arguments
from attmemo.fastseq.ops.reference import alibi_slopes
from attmemo.kernels import _cache_attention as native
from attmemo.kernels.team import join_torch

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as `enum type` has them
_NONE = (0, 0, 0, 0, 0)
_NO_SLOPES = np.empty(0, np.float32)


def why_not(a: Arguments) -> str | None:
    """Why this implementation cannot do the call, or None."""
    if a.query.device.type != "cpu":
        return f"tensors are on {a.query.device}"
    for name, planes in (("cache", a.cache_planes), ("scale", a.scale_planes)):
        if planes is not None and planes.shape[-1] > 1 and planes.stride(-1) != 1:
            return f"elements of a head are not neighbours in {name}"
    return None


def attend(a: Arguments, isa: str = "") -> torch.Tensor:
    """Write the new keys and values into the cache, then attend over it: ``[N, H, D]`` in the query's type.

    Parameters
    ----------
    a : Arguments
        Such that `why_not` has nothing against.
    isa : str
        One of `instruction_sets`; empty: the best.

    Raises
    ------
    ValueError
        If the index inputs, which may not have been checked, lead outside the cache. Nothing was written.
    MemoryError
        If there is no memory for a few hundred rows for each thread.
    """
    output = torch.empty(a.query.shape, dtype=a.query.dtype, device="cpu")
    at = a.indices
    if a.mask is not None and a.mask.shape[2] < at.kvstarts[-1]:
        raise ValueError(f"attn_mask has {a.mask.shape[2]} columns for {at.kvstarts[-1]} keys")
    # Kept until the call has returned: native code is given addresses.
    query, key, value = (_packed(tensor) for tensor in (a.query, a.key, a.value))
    mask = a.mask.float() if a.mask is not None and a.mask.dtype not in _TYPES else a.mask
    heads_of_mask = None if mask is None else mask.expand(a.num_heads, -1, -1)
    native.attend(
        (
            _rows(query),
            _rows(key),
            _rows(value),
            _planes(a.cache_planes),
            _NONE if a.scale_planes is None else _planes(a.scale_planes),
            _NONE if heads_of_mask is None else _mask(heads_of_mask),
        ),
        output.data_ptr(),
        (at.seqstarts, at.kvstarts, at.cachestarts, at.start_pos),
        (
            a.query.shape[0],
            a.tokens,
            a.num_heads,
            a.num_kv_heads,
            a.head_dim,
            a.quant_bit,
            a.quant_group,
            a.pages,
            a.rows_of_page,
        ),
        (a.is_causal, a.decoding_batches, torch.get_num_threads()),
        _slopes(a.num_heads) if a.is_alibi else _NO_SLOPES,
        isa,
    )
    return output


def instruction_sets() -> list[str]:
    """Those that this processor has and the library was built for, best first."""
    return native.instruction_sets()


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _rows(tensor: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Of a tensor ``[N, heads, D]``: address, type, and strides of planes, tokens and heads."""
    token, head, _ = tensor.stride()
    return tensor.data_ptr(), _TYPES[tensor.dtype], 0, token, head


def _planes(tensor: torch.Tensor) -> tuple[int, int, int, int, int]:
    """The same of a view ``[2, tokens, heads, E]``; the type of codes does not matter."""
    plane, token, head, _ = tensor.stride()
    return tensor.data_ptr(), _TYPES.get(tensor.dtype, 0), plane, token, head


def _mask(tensor: torch.Tensor) -> tuple[int, int, int, int, int]:
    """The same of a mask ``[H, N, K]``: its planes are columns, its tokens rows."""
    head, row, column = tensor.stride()
    return tensor.data_ptr(), _TYPES[tensor.dtype], column, row, head


@cache
def _slopes(heads: int) -> npt.NDArray[np.float32]:
    slopes: npt.NDArray[np.float32] = alibi_slopes(heads).numpy()
    return slopes


join_torch(native.use_team)
