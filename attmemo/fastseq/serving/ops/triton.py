"""The implementation for GPUs, in Triton. Without Triton it says so, and nothing else depends on it.

Two launches, or three: all new tokens are stored, then each program attends for a few queries of one sequence over its
keys, block by block with a running maximum; when there are too few programs to fill the device, the keys are split
among several and a last launch joins their results. Nothing is read back to the host as long as `max_seqlen` and
`max_kvlen` are given and the call is not validated.
"""

from __future__ import annotations

import importlib.util
import math
import os
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch

from attmemo.fastseq.serving.ops.arguments import Arguments
from attmemo.fastseq.serving.ops.cache_attention import EPSILON, alibi_slopes

_WIDEST = 256  # elements of a head: the widest whose blocks are known to fit shared memory


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in Python, on tensors in the host's memory: TRITON_INTERPRET=1."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0", "false", "False")


def why_not(a: Arguments) -> str | None:
    """Why this implementation cannot do the call, or None."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if a.query.device.type == "cpu" and not is_interpreted():
        return "the tensors are in the host's memory"
    if a.head_dim > _WIDEST:
        return f"head_dim {a.head_dim} is more than {_WIDEST}"
    return None


def attend(a: Arguments, *, block: int | None = None, splits: int | None = None) -> torch.Tensor:
    """The operator; see `multi_head_cache_attention`.

    Parameters
    ----------
    a : Arguments
        The call.
    block : int, optional
        Keys a program takes at a time, a power of two; chosen by the width of a head if not given.
    splits : int, optional
        Parts that the keys of a sequence are split into; chosen by how full the device is if not given.

    Returns
    -------
    Tensor, shape [N, H, D]
    """
    from attmemo.fastseq.serving.ops import triton_kernels as kernels

    output = torch.empty_like(a.query, memory_format=torch.contiguous_format)  # [N, H, D]
    if not a.batch or not len(a.query):
        return output
    seqstarts, kvstarts, cachestarts, start_pos = (
        tensor.contiguous() for tensor in (a.seqstarts, a.kvstarts, a.cachestarts, a.start_pos)
    )
    with torch.cuda.device(a.query.device) if a.query.is_cuda else nullcontext():
        _store(kernels, a, seqstarts, cachestarts, start_pos)
        _attend(kernels, a, output, seqstarts, kvstarts, cachestarts, block, splits)
    return output


def _planes(a: Arguments) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Cache and scales as a kernel takes them: where they begin, and strides of plane, token, head and element."""
    cache, scale = a.cache_planes, a.scale_planes
    none = (cache, 0, 0, 0, 0)  # never read
    return (cache, *cache.stride()), none if scale is None else (scale, *scale.stride())


def _store(
    kernels: Any, a: Arguments, seqstarts: torch.Tensor, cachestarts: torch.Tensor, start_pos: torch.Tensor
) -> None:
    cache, scale = _planes(a)
    kernels.store[(len(a.query), a.num_kv_heads, 2)](
        a.key, a.value, *a.key.stride(), *a.value.stride(),
        seqstarts, cachestarts, start_pos, a.batch, cachestarts.shape[-1],
        *cache, *scale,
        _epsilon(a.query.dtype),
        D=a.head_dim, BITS=a.quant_bit, GROUP=a.quant_group, PAGE=a.page_size, PAGED=a.paged,
        BLOCK_G=_power(a.head_dim // a.quant_group), BLOCK_E=_power(a.quant_group // (2 if a.quant_bit == 4 else 1)),
        BLOCK_D=_power(a.head_dim), num_warps=1,
    )  # fmt: skip


def _attend(
    kernels: Any,
    a: Arguments,
    output: torch.Tensor,
    seqstarts: torch.Tensor,
    kvstarts: torch.Tensor,
    cachestarts: torch.Tensor,
    block: int | None,
    splits: int | None,
) -> None:
    longest = int(a.indices.lengths.max()) if a.max_seqlen is None else a.max_seqlen
    heads = _power(a.repeats)
    rows = 64 if longest * heads > 16 else 16  # of queries times heads; a matrix product has 16 at least
    queries = max(1, rows // heads)
    width = _power(max(16, a.head_dim))
    block = block or (64 if width * a.query.element_size() <= 128 else 32)  # what fits 99 KiB of shared memory
    blocks = -(-longest // queries)
    if splits is None:
        splits = _choose_splits(a, blocks, block)
    mask = a.mask.float() if a.mask is not None and a.mask.dtype == torch.float64 else a.mask
    strides = (0, 0, 0) if mask is None else (mask.stride(0) if len(mask) > 1 else 0, *mask.stride()[1:])
    slopes = _slopes(a.num_heads, a.query.device) if a.is_alibi else output
    parts: tuple[torch.Tensor, ...] = (output, output, output)
    lines = len(a.query) * a.num_heads
    if splits > 1:
        parts = (
            output.new_empty((splits, lines, a.head_dim), dtype=torch.float32),
            output.new_empty((splits, lines), dtype=torch.float32),
            output.new_empty((splits, lines), dtype=torch.float32),
        )
    cache, scale = _planes(a)
    # In the interpreter a product of two bfloat16 matrices would multiply their bits as integers.
    dot = torch.float32 if a.query.dtype == torch.bfloat16 and is_interpreted() else a.query.dtype
    kernels.attend[(max(1, blocks), a.num_kv_heads, a.batch * splits)](
        a.query, *a.query.stride(),
        seqstarts, kvstarts, cachestarts, cachestarts.shape[-1],
        *cache, *scale,
        output if mask is None else mask, *strides,
        slopes, output, *parts,
        a.decoding_batches, 1 / math.sqrt(a.head_dim), splits, len(a.query),
        D=a.head_dim, R=a.repeats, BITS=a.quant_bit, GROUP=a.quant_group, PAGE=a.page_size, PAGED=a.paged,
        CAUSAL=a.is_causal, ALIBI=a.is_alibi, MASKED=mask is not None, SPLIT=splits > 1,
        DOT=getattr(kernels.tl, str(dot).removeprefix("torch.")),
        BLOCK_Q=queries, BLOCK_R=heads, BLOCK_N=block, BLOCK_D=width, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        kernels.join[(lines,)](
            *parts, output, lines, splits, D=a.head_dim, BLOCK_S=_power(splits), BLOCK_D=width, num_warps=1
        )  # fmt: skip


@cache
def _epsilon(dtype: torch.dtype) -> float:
    """The least scale, rounded to a type."""
    return float(torch.tensor(EPSILON, dtype=dtype, device="cpu"))


@cache
def _slopes(heads: int, device: torch.device) -> torch.Tensor:
    """Copied to the device once: a copy in each call would wait for it."""
    return alibi_slopes(heads).to(device)


def _choose_splits(a: Arguments, blocks: int, block: int) -> int:
    """More parts than one only where queries are few and keys are many, so that every processor has work."""
    if not a.query.is_cuda or blocks > 1:
        return 1
    longest = int(a.indices.kv_lengths.max()) if a.max_kvlen is None else a.max_kvlen
    processors = torch.cuda.get_device_properties(a.query.device).multi_processor_count
    programs = blocks * a.num_kv_heads * a.batch
    return max(1, min(2 * processors // programs, -(-longest // (4 * block)), 64))


def _power(number: int) -> int:
    """The lowest power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()
