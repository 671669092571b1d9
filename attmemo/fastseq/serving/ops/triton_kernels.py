# mypy: ignore-errors
# Not Python but Triton: its types are known when a kernel is compiled. Nor are annotations strings here.
"""The Triton kernels: storing, attending, and joining parts. Imported by triton.py when Triton is there.

Names as in the specification: sequence b, token or query i of it, key j, head h, D elements of a head. A tile's rows
are pairs (query, one of the heads that share a key-value head), so that one token being decoded fills a tile as far as
its heads do. Addresses are int64: a cache can have more than 2^31 elements.

Rounding to a type goes through `_round`, which rounds to bfloat16 by its bits: on every device, and in Triton's
interpreter, which would cut off the bits instead.
"""

import triton
import triton.language as tl


@triton.jit
def _round(x, dtype: tl.constexpr):
    """float32 numbers rounded to a type, half to even; still float32."""
    if dtype == tl.float16:
        return x.to(tl.float16).to(tl.float32)
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(x == x, even, bits).to(tl.float32, bitcast=True)
    return x


@triton.jit
def _half_even(x):
    """Numbers of less than 2^22 rounded to integers, half to even: what is lost in adding 1.5 * 2^23."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _code(x, scale, most: tl.constexpr, dtype: tl.constexpr):
    """Codes of numbers: the quotient is rounded to their type first; NaN gets 0."""
    code = _half_even(_round(tl.div_rn(x, scale), dtype))
    code = tl.where(code == code, code, 0.0)
    return tl.minimum(tl.maximum(code, -most), most).to(tl.int32)


@triton.jit
def _row(cachestarts, b, t, width, page: tl.constexpr, paged: tl.constexpr, live):
    """Where in the cache tokens t of a sequence lie, int64. Entries of pages not in use are never read."""
    if paged:
        start = tl.load(cachestarts + b * width + t // page, mask=live, other=0).to(tl.int64)
        return start + t % page
    return tl.load(cachestarts + b).to(tl.int64) + t


@triton.jit
def store(
    key, value, stride_kn, stride_kh, stride_kd, stride_vn, stride_vh, stride_vd,
    seqstarts, cachestarts, start_pos, batch, width,
    cache, stride_cp, stride_ct, stride_ch, stride_ce,
    scale, stride_sp, stride_st, stride_sh, stride_se,
    eps,
    D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, PAGED: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program writes one new token's one head: its key, or its value."""
    n, h, plane = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    low, high = 0, batch - 1  # the last sequence that begins at n or before; empty ones share their beginning
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(seqstarts + middle) <= n:
            low = middle
        else:
            high = middle - 1
    if n < tl.load(seqstarts + low + 1):
        t = tl.load(start_pos + low).to(tl.int64) + n - tl.load(seqstarts + low)
        row = _row(cachestarts, low, t, width, PAGE, PAGED, True)
        if plane == 0:
            source, step = key + n * stride_kn + h * stride_kh, stride_kd
        else:
            source, step = value + n * stride_vn + h * stride_vh, stride_vd
        target = cache + plane * stride_cp + row * stride_ct + h * stride_ch
        dtype = key.dtype.element_ty

        if BITS == 0:
            e = tl.arange(0, BLOCK_D).to(tl.int64)
            x = tl.load(source + e * step, mask=e < D, other=0.0).to(tl.float32)
            stored = cache.dtype.element_ty
            tl.store(target + e * stride_ce, _round(x, stored).to(stored), mask=e < D)
        else:
            g = tl.arange(0, BLOCK_G).to(tl.int64)[:, None]  # groups
            e = tl.arange(0, BLOCK_E).to(tl.int64)[None, :]  # elements of a group; with 4 bits pairs of them
            pair: tl.constexpr = 2 if BITS == 4 else 1
            most: tl.constexpr = 127.0 if BITS == 8 else 7.0
            inside = (g < D // GROUP) & (e < GROUP // pair)
            at = g * GROUP + e * pair
            x = tl.load(source + at * step, mask=inside, other=0.0).to(tl.float32)
            biggest = tl.max(tl.abs(x), 1)
            lost = tl.max((x != x).to(tl.int32), 1)  # a maximum may overlook NaN
            if BITS == 4:
                y = tl.load(source + (at + 1) * step, mask=inside, other=0.0).to(tl.float32)
                biggest = tl.maximum(biggest, tl.max(tl.abs(y), 1))
                lost = tl.maximum(lost, tl.max((y != y).to(tl.int32), 1))
            s = tl.maximum(_round(tl.div_rn(biggest, tl.full([BLOCK_G], most, tl.float32)), dtype), eps)
            s = tl.where(lost > 0, float("nan"), s)
            code = _code(x, s[:, None], most, dtype)
            if BITS == 4:
                code = (code & 15) | ((_code(y, s[:, None], most, dtype) & 15) << 4)
            tl.store(target + (g * (GROUP // pair) + e) * stride_ce, code.to(cache.dtype.element_ty), mask=inside)
            kept = scale.dtype.element_ty
            groups = tl.arange(0, BLOCK_G).to(tl.int64)
            place = scale + plane * stride_sp + row * stride_st + h * stride_sh + groups * stride_se
            tl.store(place, _round(s, kept).to(kept), mask=groups < D // GROUP)


@triton.jit
def _load(
    cache, scale, row, stride_ct, stride_ce, stride_st, stride_se, e, live, dtype: tl.constexpr, BITS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of keys or values, dequantised and rounded to the type of the queries; float32, zero outside."""
    if BITS == 0:
        x = tl.load(cache + row * stride_ct + e * stride_ce, mask=live, other=0.0)
        return _round(x.to(tl.float32), dtype)
    if BITS == 8:
        code = tl.load(cache + row * stride_ct + e * stride_ce, mask=live, other=0).to(tl.int32)
    else:
        both = tl.load(cache + row * stride_ct + (e // 2) * stride_ce, mask=live, other=0).to(tl.int32)
        code = (((both >> ((e % 2) * 4)) & 15) ^ 8) - 8
    s = tl.load(scale + row * stride_st + (e // GROUP) * stride_se, mask=live, other=0.0)
    return _round(_round(code.to(tl.float32) * s.to(tl.float32), scale.dtype.element_ty), dtype)


@triton.jit
def attend(
    query, stride_qn, stride_qh, stride_qd,
    seqstarts, kvstarts, cachestarts, width,
    cache, stride_cp, stride_ct, stride_ch, stride_ce,
    scale, stride_sp, stride_st, stride_sh, stride_se,
    mask, stride_mh, stride_mn, stride_mk,
    slopes, output, part_output, part_most, part_sum,
    decoding, softmax_scale, splits, tokens,
    D: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr,
    PAGED: tl.constexpr, CAUSAL: tl.constexpr, ALIBI: tl.constexpr, MASKED: tl.constexpr, SPLIT: tl.constexpr,
    DOT: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: some queries of one sequence, the heads that share one key-value head, and a part of the keys."""
    g = tl.program_id(1).to(tl.int64)  # key-value head
    b, part = tl.program_id(2) // splits, tl.program_id(2) % splits
    first = tl.load(seqstarts + b).to(tl.int64)
    sq = (tl.load(seqstarts + b + 1) - first).to(tl.int32)
    first_key = tl.load(kvstarts + b).to(tl.int64)
    kv = (tl.load(kvstarts + b + 1) - first_key).to(tl.int32)
    begin = tl.program_id(0) * BLOCK_Q
    if begin < sq:
        tile = tl.arange(0, BLOCK_Q * BLOCK_R)
        i, r = begin + tile // BLOCK_R, tile % BLOCK_R
        h = g * R + r
        asked = (i < sq) & (r < R)
        e = tl.arange(0, BLOCK_D).to(tl.int64)
        dtype = query.dtype.element_ty
        where = (first + i) * stride_qn + h * stride_qh
        q = tl.load(query + where[:, None] + e[None, :] * stride_qd, mask=asked[:, None] & (e < D)[None, :], other=0.0)
        q = q.to(DOT)
        causal = CAUSAL & (sq > 1) & (b >= decoding)
        if ALIBI:
            slope = tl.load(slopes + h, mask=asked, other=0.0)
            causal = True

        low, high = 0, kv
        if causal:
            high = tl.minimum(kv, kv - sq + begin + BLOCK_Q)  # behind the last query's own key nothing is seen
        if SPLIT:
            size = tl.cdiv(tl.cdiv(kv, splits), BLOCK_N) * BLOCK_N
            low = part * size
            high = tl.minimum(high, low + size)
        most = tl.full([BLOCK_Q * BLOCK_R], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_Q * BLOCK_R], tl.float32)
        sums = tl.zeros([BLOCK_Q * BLOCK_R, BLOCK_D], tl.float32)
        keys = cache + g * stride_ch
        key_scale = scale + g * stride_sh
        for start in range(low, high, BLOCK_N):
            j = start + tl.arange(0, BLOCK_N)
            row = _row(cachestarts, b, j, width, PAGE, PAGED, j < kv)
            live = (j < kv)[:, None] & (e < D)[None, :]
            k = _load(
                keys, key_scale, row[:, None], stride_ct, stride_ce, stride_st, stride_se, e[None, :], live, dtype,
                BITS, GROUP,
            )  # fmt: skip
            scores = tl.dot(q, tl.trans(k.to(DOT)), input_precision="ieee") * softmax_scale
            ahead = i[:, None] + (kv - sq) - j[None, :]  # how far behind its query a key lies
            if ALIBI:
                scores -= slope[:, None] * ahead.to(tl.float32)
            seen = asked[:, None] & (j < kv)[None, :]
            if MASKED:
                place = h[:, None] * stride_mh + (first + i)[:, None] * stride_mn
                place += (first_key + j)[None, :] * stride_mk
                scores += tl.load(mask + place, mask=seen, other=0.0).to(tl.float32)
            if causal:
                seen &= ahead >= 0
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(most, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing seen yet: -inf less -inf would be NaN
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(most - base)
            v = _load(
                keys + stride_cp, key_scale + stride_sp, row[:, None], stride_ct, stride_ce, stride_st, stride_se,
                e[None, :], live, dtype, BITS, GROUP,
            )  # fmt: skip
            total = total * shrink + tl.sum(weights, 1)
            sums = sums * shrink[:, None] + tl.dot(weights.to(DOT), v.to(DOT), input_precision="ieee")
            most = higher
        line = (first + i) * (tl.num_programs(1) * R) + h  # of [N, H]
        write = asked[:, None] & (e < D)[None, :]
        if SPLIT:
            line += part.to(tl.int64) * tokens * (tl.num_programs(1) * R)
            tl.store(part_output + line[:, None] * D + e[None, :], sums, mask=write)
            tl.store(part_most + line, most, mask=asked)
            tl.store(part_sum + line, total, mask=asked)
        else:
            result = sums / tl.where(total == 0.0, 1.0, total)[:, None]
            tl.store(output + line[:, None] * D + e[None, :], _round(result, dtype).to(dtype), mask=write)


@triton.jit
def join(
    part_output, part_most, part_sum, output, lines, splits,
    D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: one query's one head, from all parts of its keys. Parts that saw no key weigh nothing."""
    line = tl.program_id(0).to(tl.int64)
    s, e = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    at = line + s.to(tl.int64) * lines
    most = tl.load(part_most + at, mask=s < splits, other=float("-inf"))
    total = tl.load(part_sum + at, mask=s < splits, other=0.0)
    highest = tl.max(most, 0)
    weight = tl.exp(most - tl.where(highest == float("-inf"), 0.0, highest))
    sums = tl.load(
        part_output + at[:, None] * D + e[None, :], mask=(s < splits)[:, None] & (e < D)[None, :], other=0.0
    )
    whole = tl.sum(total * weight, 0)
    result = tl.sum(sums * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    dtype = output.dtype.element_ty
    tl.store(output + line * D + e, _round(result, dtype).to(dtype), mask=e < D)
