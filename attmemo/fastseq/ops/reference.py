"""The operator in plain torch, one sequence after the other, in the words of the specification.

Slow, and right: the other implementations are compared with this one. Every intermediate is float32, except where the
specification fixes another type: quantisation is done in the type of the keys, so that codes and scales are the same
bits everywhere.
"""

from __future__ import annotations

import math

import torch

from attmemo.fastseq.ops.arguments import Arguments

EPSILON = 1e-5  # the smallest scale


def attend(a: Arguments) -> torch.Tensor:
    """Write the new keys and values into the cache, then attend over it: ``[N, H, D]`` in the query's type."""
    for b in range(a.batch):
        store(a, b)
    output = torch.zeros_like(a.query, memory_format=torch.contiguous_format)  # [N, H, D]
    for b in range(a.batch):
        first, last = int(a.indices.seqstarts[b]), int(a.indices.seqstarts[b + 1])
        if last > first:
            output[first:last] = _attend_sequence(a, b, a.query[first:last])
    return output


def rows(a: Arguments, sequence: int, first: int, last: int) -> torch.Tensor:
    """Where in the cache a sequence's tokens `first` to `last` - 1 lie: ``[last - first]``."""
    token = torch.arange(first, last, device=a.query.device)
    if not a.paged:
        return a.cachestarts[sequence].long() + token
    return a.cachestarts[sequence].long()[token // a.page_size] + token % a.page_size


def store(a: Arguments, b: int) -> None:
    """The new tokens of one sequence: keys into plane 0, values into plane 1, quantised if the cache is."""
    first, last = int(a.indices.seqstarts[b]), int(a.indices.seqstarts[b + 1])
    position = int(a.indices.start_pos[b])
    where = rows(a, b, position, position + last - first)
    for plane, new in enumerate((a.key[first:last], a.value[first:last])):  # [sq, Hk, D]
        if a.scale_planes is None:
            a.cache_planes[plane, where] = new.to(a.cache.dtype)
            continue
        codes, scale = quantize(new, a.quant_bit, a.quant_group)
        if a.quant_bit == 4:
            codes = pack(codes)
        a.cache_planes[plane, where] = codes.view(a.cache.dtype)
        a.scale_planes[plane, where] = scale.to(a.scale_planes.dtype)


def load(a: Arguments, b: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of one sequence, dequantised: two of ``[kv, Hk, D]`` in the query's type."""
    where = rows(a, b, 0, int(a.indices.kvstarts[b + 1] - a.indices.kvstarts[b]))
    if a.scale_planes is None:
        stored = a.cache_planes[:, where].to(a.query.dtype)
    else:
        codes = a.cache_planes[:, where]  # [2, kv, Hk, D], or D / 2 bytes
        codes = unpack(codes) if a.quant_bit == 4 else codes
        stored = dequantize(codes, a.scale_planes[:, where]).to(a.query.dtype)
    return stored[0], stored[1]


def quantize(numbers: torch.Tensor, quant_bit: int, quant_group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) and scales of groups of the last axis; symmetric, and all of it in the type of `numbers`.

    The scale is ``max(amax / 127, 1e-5)``, with 4 bits ``max(amax / 7, 1e-5)``; the quotient is rounded to the type
    before it is rounded half to even. A group with NaN or infinity gets such a scale and codes 0 where it has no
    quotient, so that it reads back as NaN.
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
    """Two codes of [-8, 7] a byte, in two's complement: element 2k in the low half, 2k + 1 in the high one."""
    nibbles = codes.view(torch.uint8) & 15
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Codes (int8) of twice as many elements as there are bytes."""
    octets = packed.view(torch.uint8)
    nibbles = torch.stack((octets & 15, octets >> 4), -1).flatten(-2).view(torch.int8)
    return (nibbles ^ 8) - 8


def alibi_slopes(heads: int) -> torch.Tensor:
    """How fast each head forgets, ``[heads]``, float32: ALiBi, arXiv 2108.12409."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * n / power) for n in range(1, power + 1)]
    slopes += [2 ** (-4 * n / power) for n in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def _attend_sequence(a: Arguments, b: int, query: torch.Tensor) -> torch.Tensor:
    """Attention of one sequence's new tokens ``[sq, H, D]`` over all its keys."""
    key, value = load(a, b)  # [kv, Hk, D]
    key, value = (tensor.float().repeat_interleave(a.repeats, 1) for tensor in (key, value))  # [kv, H, D]
    scores = torch.einsum("ihd,jhd->hij", query.float(), key) / math.sqrt(a.head_dim)  # [H, sq, kv]

    length, kv_length = scores.shape[1:]
    # How far behind its query a key lies; below 0 it lies in the future. The last query sees the last key.
    places = torch.arange(kv_length, device=query.device)
    distance = places[kv_length - length :, None] - places  # [sq, kv]
    if a.is_alibi:
        scores = scores - alibi_slopes(a.num_heads).to(query.device)[:, None, None] * distance
    if a.mask is not None:
        columns = slice(int(a.indices.kvstarts[b]), int(a.indices.kvstarts[b + 1]))
        lines = slice(int(a.indices.seqstarts[b]), int(a.indices.seqstarts[b + 1]))
        scores = scores + a.mask[:, lines, columns].float()
    if a.is_masked_causally(b):
        scores = scores.masked_fill(distance < 0, -math.inf)

    hidden = (scores == -math.inf).all(-1, keepdim=True)  # a query that sees no key gets zeros, not NaN
    weights = torch.softmax(scores, -1).masked_fill(hidden, 0)
    return torch.einsum("hij,jhd->ihd", weights, value).to(query.dtype)
