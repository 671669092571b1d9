"""Attention over a key-value cache, read in place: `native/cache_attention.c` and its oracle in plain torch.

Both store the new keys and values, then attend, for B sequences of different lengths; `attmemo.fastseq.ops` specifies
the operator. Shapes: N new tokens in all, H query heads, Hk key heads, D elements of a head, P pages of a sequence.
Every intermediate of the oracle is float32, with one exception: the specification quantises in the type of the keys.
All implementations store the same bits.
"""

from __future__ import annotations

import math
from functools import cache as remembered

import numpy as np
import numpy.typing as npt
import torch

from attmemo.kernels import _cache_attention as native
from attmemo.kernels.omp_team import join_torch

EPSILON = 1e-5  # the smallest scale

Ints = npt.NDArray[np.int64]
Indices = tuple[Ints, Ints, Ints, Ints]
"""seqstarts ``[B + 1]``, kvstarts ``[B + 1]``, cachestarts ``[B]`` or with pages ``[B, P]``, start_pos ``[B]``."""

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # as `enum type` has them
_NONE = (0, 0, 0, 0, 0)
_NO_SLOPES = np.empty(0, np.float32)
_UNPAGED = 2**62  # page size of a cache without pages: one page holds everything


def why_not(query: torch.Tensor, cache: torch.Tensor, scale: torch.Tensor | None) -> str | None:
    """Why the C kernel cannot attend over such tensors, or None."""
    if query.device.type != "cpu":
        return f"tensors are on {query.device}"
    for name, planes in (("cache", cache), ("scale", scale)):
        if planes is not None and planes.shape[-1] > 1 and planes.stride(-1) != 1:
            return f"elements of a head are not neighbours in {name}"
    return None


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    mask: torch.Tensor | None,
    indices: Indices,
    *,
    quant_bit: int = 0,
    page_size: int = 0,
    decoding_batches: int = 0,
    is_causal: bool = True,
    is_alibi: bool = False,
    isa: str = "",
) -> torch.Tensor:
    """Store new keys and values ``[N, Hk, D]`` in the cache, then attend over it: ``[N, H, D]`` in the query's type.

    `query` is ``[N, H, D]``, `cache` ``[2, rows, Hk, D]`` (``D / 2`` with 4 bits), `scale` of a quantised cache
    ``[2, rows, Hk, D / group]``, `mask` ``[1 or H, N, >= kvstarts[B]]``, added to the scores. Cache and scale are
    written. Entries of `cachestarts` are rows of the cache. The first `decoding_batches` sequences have no causal
    mask; linear biases hide later keys too. `isa` is one of `instruction_sets`; empty: the best.

    The output of a sequence depends neither on the others nor on the number of threads, which are torch's own.
    ValueError: indices lead outside the cache; nothing was written. MemoryError: none for a few hundred rows a thread.
    """
    output = torch.empty(query.shape, dtype=query.dtype, device="cpu")
    tokens, heads, width = query.shape
    kvstarts, cachestarts = indices[1], indices[2]
    if mask is not None and mask.shape[2] < kvstarts[-1]:
        raise ValueError(f"attn_mask has {mask.shape[2]} columns for {kvstarts[-1]} keys")
    # Native code gets addresses: these references keep the tensors alive until the call has returned.
    query, key, value = (_packed(tensor) for tensor in (query, key, value))
    mask = mask.float() if mask is not None and mask.dtype not in _TYPES else mask
    mask_of_heads = None if mask is None else mask.expand(heads, -1, -1)
    group = 1 if scale is None else width // scale.shape[-1]
    native.attend(
        (
            _tokens(query),
            _tokens(key),
            _tokens(value),
            _planes(cache),
            _NONE if scale is None else _planes(scale),
            _NONE if mask_of_heads is None else _columns(mask_of_heads),
        ),
        output.data_ptr(),
        indices,
        (tokens, cache.shape[1], heads, key.shape[1], width, quant_bit, group, *_pages(cachestarts, page_size)),
        (is_causal, decoding_batches, torch.get_num_threads()),
        _slopes(heads) if is_alibi else _NO_SLOPES,
        isa,
    )
    return output


def are_sound(
    indices: Indices,
    *,
    tokens: int,
    rows: int,
    page_size: int,
    decoding_batches: int,
    max_seqlen: int | None,
    max_kvlen: int | None,
    mask_columns: int | None,
) -> bool:
    """Whether indices agree with each other, with the limits (None: none) and with a cache of `rows` rows."""
    new, keys, columns = (-1 if limit is None else limit for limit in (max_seqlen, max_kvlen, mask_columns))
    sizes = (tokens, rows, *_pages(indices[2], page_size), decoding_batches, new, keys, columns)
    return native.is_sound(indices, sizes)


def instruction_sets() -> list[str]:
    """The instruction sets of this processor that the kernel was built for, best first."""
    return native.instruction_sets()


def attend_in_torch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    mask: torch.Tensor | None,
    indices: Indices,
    *,
    quant_bit: int = 0,
    page_size: int = 0,
    decoding_batches: int = 0,
    is_causal: bool = True,
    is_alibi: bool = False,
) -> torch.Tensor:
    """`attend` in plain torch, on any device: the same parameters and the same result, up to rounding."""
    seqstarts, kvstarts, cachestarts, start_pos = indices
    batch = range(len(start_pos))
    new = [slice(seqstarts[b], seqstarts[b + 1]) for b in batch]
    for b in batch:
        first, last = start_pos[b], start_pos[b] + seqstarts[b + 1] - seqstarts[b]
        rows = cache_rows(cachestarts[b], first, last, page_size)
        store(cache, scale, rows, key[new[b]], value[new[b]], quant_bit)
    output = torch.zeros_like(query, memory_format=torch.contiguous_format)  # [N, H, D]
    for b in batch:
        length = seqstarts[b + 1] - seqstarts[b]
        if length == 0:
            continue
        rows = cache_rows(cachestarts[b], 0, kvstarts[b + 1] - kvstarts[b], page_size)
        keys, values = load(cache, scale, rows, quant_bit, query.dtype)
        columns = slice(kvstarts[b], kvstarts[b + 1])
        bias = None if mask is None else mask[:, new[b], columns].float()
        causal = is_alibi or (is_causal and length > 1 and b >= decoding_batches)
        output[new[b]] = _attend_sequence(query[new[b]], keys, values, bias, causal, is_alibi)
    return output


def cache_rows(starts: Ints, first: int, last: int, page_size: int) -> torch.Tensor:
    """Rows of the cache with the tokens `first` to `last` - 1 of a sequence, whose `cachestarts` are given."""
    token = np.arange(first, last)
    if np.ndim(starts) == 0:
        return torch.from_numpy(starts + token)
    return torch.from_numpy(starts[token // page_size] + token % page_size)


def store(
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    rows: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    quant_bit: int,
) -> None:
    """Write one sequence's new tokens to these rows: keys to plane 0, values to plane 1; quantised for codes."""
    rows = rows.to(cache.device)
    for plane, new in enumerate((key, value)):  # [sq, Hk, D]
        if scale is None:
            cache[plane, rows] = new.to(cache.dtype)
            continue
        codes, scales = quantize(new, quant_bit, new.shape[-1] // scale.shape[-1])
        if quant_bit == 4:
            codes = pack(codes)
        cache[plane, rows] = codes.view(cache.dtype)
        scale[plane, rows] = scales.to(scale.dtype)


def load(
    cache: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor, quant_bit: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of these rows, dequantised: two of ``[kv, Hk, D]``."""
    rows = rows.to(cache.device)
    stored = cache[:, rows]  # [2, kv, Hk, D]; with 4 bits [2, kv, Hk, D / 2]
    if scale is not None:
        stored = dequantize(unpack(stored) if quant_bit == 4 else stored, scale[:, rows])
    stored = stored.to(dtype)
    return stored[0], stored[1]


def quantize(numbers: torch.Tensor, quant_bit: int, quant_group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) and scales of groups of the last axis; symmetric, in the type of `numbers`.

    The scale is ``max(amax / 127, 1e-5)``, with 4 bits ``max(amax / 7, 1e-5)``. The quotient is rounded to the type,
    then half to even. A group with NaN or infinity reads back as NaN.
    """
    most = 2 ** (quant_bit - 1) - 1
    groups = numbers.reshape(*numbers.shape[:-1], numbers.shape[-1] // quant_group, quant_group)
    scale = groups.abs().amax(-1, keepdim=True) / torch.tensor(most, dtype=numbers.dtype, device=numbers.device)
    scale = torch.maximum(scale, torch.tensor(EPSILON, dtype=numbers.dtype, device=numbers.device))
    codes = torch.round(groups / scale).clamp(-most, most).nan_to_num(0)
    return codes.flatten(-2).to(torch.int8), scale.squeeze(-1)


def dequantize(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes times scales, rounded to the type of the scales."""
    groups = codes.reshape(*scale.shape, codes.shape[-1] // scale.shape[-1]).to(scale.dtype)
    return (groups * scale.unsqueeze(-1)).flatten(-2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes of [-8, 7] a byte, in two's complement: element 2k in the low half, 2k + 1 in the high half."""
    nibbles = codes.view(torch.uint8) & 15
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes (int8), two for each byte."""
    octets = packed.view(torch.uint8)
    nibbles = torch.stack((octets & 15, octets >> 4), -1).flatten(-2).view(torch.int8)
    return (nibbles ^ 8) - 8


def alibi_slopes(heads: int) -> torch.Tensor:
    """Slope of each head's linear bias, ``[heads]``, float32: ALiBi, arXiv 2108.12409."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2 ** (-4 * n / power) for n in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def _attend_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    alibi: bool,
) -> torch.Tensor:
    """Attention of one sequence's new tokens ``[sq, H, D]`` over all its keys ``[kv, Hk, D]``."""
    heads, width = query.shape[1:]
    repeats = heads // key.shape[1]
    key, value = (tensor.float().repeat_interleave(repeats, 1) for tensor in (key, value))  # [kv, H, D]
    scores = torch.einsum("ihd,jhd->hij", query.float(), key) / math.sqrt(width)  # [H, sq, kv]

    length, kv_length = scores.shape[1:]
    # Tokens from the key to the query; below 0 the key lies in the future. The last query sees the last key.
    places = torch.arange(kv_length, device=query.device)
    distance = places[kv_length - length :, None] - places  # [sq, kv]
    if alibi:
        scores = scores - alibi_slopes(heads).to(query.device)[:, None, None] * distance
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(distance < 0, -math.inf)

    hidden = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key gets zeros, not NaN
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0)
    return torch.einsum("hij,jhd->ihd", weights, value).to(query.dtype)


def _pages(cachestarts: Ints, page_size: int) -> tuple[int, int]:
    """Pages of each sequence, and tokens of a page."""
    return (cachestarts.shape[1], page_size) if cachestarts.ndim == 2 else (1, _UNPAGED)


def _packed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _tokens(tensor: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Of a tensor ``[N, heads, D]``: address, type, and strides of planes, tokens and heads."""
    token, head, _ = tensor.stride()
    return tensor.data_ptr(), _TYPES[tensor.dtype], 0, token, head


def _planes(tensor: torch.Tensor) -> tuple[int, int, int, int, int]:
    """The same of a view ``[2, rows, heads, E]``; the kernel ignores the type of codes."""
    plane, token, head, _ = tensor.stride()
    return tensor.data_ptr(), _TYPES.get(tensor.dtype, 0), plane, token, head


def _columns(tensor: torch.Tensor) -> tuple[int, int, int, int, int]:
    """The same of a mask ``[H, N, K]``: its columns are planes, its lines tokens."""
    head, line, column = tensor.stride()
    return tensor.data_ptr(), _TYPES[tensor.dtype], column, line, head


@remembered
def _slopes(heads: int) -> npt.NDArray[np.float32]:
    slopes: npt.NDArray[np.float32] = alibi_slopes(heads).numpy()
    return slopes


join_torch(native.use_team)
