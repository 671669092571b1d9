"""Cases for the tests of the attention operator: ragged calls from a seed, and a float64 judge that shares no code."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from attmemo.fastseq.ops import cache_shape, multi_head_cache_attention, scale_shape

NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}  # times (1 + abs(expected))
NOISE = {torch.float32: 1e-12, torch.float16: 1e-6, torch.bfloat16: 5e-5}  # squared error over squared output


@dataclass
class Case:
    """Everything that makes a call; sequences are (new tokens, tokens before). Tensors come from `make`."""

    sequences: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None  # None: as dtype, int8 or uint8
    scale_dtype: torch.dtype = torch.float32
    causal: bool = True
    alibi: bool = False
    decoding: int = 0
    layers: int = 1
    layer: int = 0
    bits: int = 0
    group: int = 8
    paged: bool = True
    layout: int = 0
    page: int = 4
    mask: str = "none"  # none, 2d, 3d, 1d (one for all heads, three axes); a + after it: with more columns
    mask_dtype: torch.dtype | None = None
    hidden: float = 0.2  # of the mask's entries are -inf
    seed: int = 0
    magnitude: float = 1.0
    extra: dict[str, Any] = field(default_factory=dict)

    def attributes(self) -> dict[str, Any]:
        """The operator's attributes."""
        return {
            "num_heads": self.heads,
            "head_dim": self.width,
            "is_causal": self.causal,
            "is_alibi": self.alibi,
            "num_kv_heads": self.kv_heads,
            "num_layer": self.layers,
            "layer_idx": self.layer,
            "quant_bit": self.bits,
            "quant_group": self.group,
            "cache_mode": int(self.paged),
            "cache_layout": self.layout,
            "page_size": self.page,
        } | self.extra

    def make(self) -> dict[str, Any]:
        """Inputs of one call: random, in a cache that is poisoned wherever nothing lives."""
        generator = torch.Generator().manual_seed(self.seed)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator) * self.magnitude

        new = [length for length, _ in self.sequences]
        total = [length + before for length, before in self.sequences]
        count = sum(new)
        cachestarts, tokens = self._places(total, generator)
        cache, scale = self._pool(tokens, total, cachestarts, generator)
        mask = None
        if self.mask != "none":
            columns = sum(total) + (5 if self.mask.endswith("+") else 0)
            shape = {"2": (count, columns), "3": (self.heads, count, columns), "1": (1, count, columns)}[self.mask[0]]
            mask = torch.randn(shape, generator=generator)
            mask[torch.rand(shape, generator=generator) < self.hidden] = -math.inf
            live = torch.zeros(count, columns, dtype=torch.bool)
            row = column = 0
            for length, keys in zip(new, total, strict=True):
                live[row : row + length, column : column + keys] = True
                row, column = row + length, column + keys
            mask[..., ~live] = math.nan  # must never be read
            mask = mask.to(self.mask_dtype or self.dtype)
        return {
            "query": randn(count, self.heads, self.width).to(self.dtype),
            "current_key": randn(count, self.kv_heads, self.width).to(self.dtype),
            "current_value": randn(count, self.kv_heads, self.width).to(self.dtype),
            "seqstarts": torch.tensor([0, *np.cumsum(new)], dtype=torch.int64),
            "kvstarts": torch.tensor([0, *np.cumsum(total)], dtype=torch.int64),
            "cachestarts": cachestarts,
            "start_pos": torch.tensor([before for _, before in self.sequences], dtype=torch.int64),
            "decoding_batches": torch.tensor([self.decoding]),
            "max_seqlen": torch.tensor([max(new, default=0)]),
            "max_kvlen": torch.tensor([max(total, default=0)]),
            "cache": cache,
            "scale": scale,
            "attn_mask": mask,
        }

    def _places(self, total: list[int], generator: torch.Generator) -> tuple[torch.Tensor, int]:
        """Pages (or, by offset, sequences) in random order with gaps, not aligned; entries not in use are -1."""
        size = self.page if self.paged else 0
        pieces = []  # (sequence, place, rows)
        for b, keys in enumerate(total):
            if not self.paged:
                pieces.append((b, 0, keys))
                continue
            pieces += [(b, place, size) for place in range(-(-keys // size))]
        width = max((place for _, place, _ in pieces), default=0) + 2
        starts = torch.full((len(total), width) if self.paged else (len(total),), -1, dtype=torch.int64)
        at = 3
        for index in torch.randperm(len(pieces), generator=generator).tolist():
            b, place, rows = pieces[index]
            if self.paged:
                starts[b, place] = at
            else:
                starts[b] = at
            at += rows + int(torch.randint(0, 3, (), generator=generator))
        if not self.paged:
            starts.clamp_(min=0)
        return starts, at + 2

    def _pool(
        self, tokens: int, total: list[int], cachestarts: torch.Tensor, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = cache_shape(self.layout, tokens, self.layers, self.kv_heads, self.width, self.bits)
        live = torch.zeros(tokens, dtype=torch.bool)
        for b, (_, before) in enumerate(self.sequences):
            for t in range(before):
                live[self.row(cachestarts, b, t)] = True
        index: list[Any] = [slice(None)] * 5
        index[self.layout] = ~live  # as it happens, the axis of tokens
        if not self.bits:
            cache = torch.randn(shape, generator=generator).to(self.cache_dtype or self.dtype) * self.magnitude
            cache[tuple(index)] = math.nan
            self._poison_layers(cache)
            return cache, None
        kind = self.cache_dtype or (torch.int8 if self.bits == 8 else torch.uint8)
        low = 1 if self.bits == 8 else 0  # -128 is never written; a test of its own reads it
        octets = torch.randint(low, 256, shape, generator=generator).add(128 if self.bits == 8 else 0)
        cache = octets.to(torch.uint8).view(kind)
        sizes = scale_shape(self.layout, tokens, self.layers, self.kv_heads, self.width, self.group)
        step = self.magnitude / (50 if self.bits == 8 else 3)
        scale = (torch.rand(sizes, generator=generator) * step + 1e-4).to(self.scale_dtype)
        scale[tuple(index)] = math.nan
        self._poison_layers(scale)
        return cache, scale

    def _poison_layers(self, tensor: torch.Tensor) -> None:
        axis = 1 if self.layout == 0 else 0
        for layer in range(self.layers):
            if layer != self.layer:
                tensor.select(axis, layer).fill_(math.nan)

    def row(self, cachestarts: torch.Tensor, b: int, t: int) -> int:
        """Where token t of sequence b lies in the cache."""
        if not self.paged:
            return int(cachestarts[b]) + t
        return int(cachestarts[b, t // self.page]) + t % self.page

    def address(self, plane: int, row: int, head: int) -> tuple[int, ...]:
        """Index of one token's numbers of one head in the cache, as the specification writes it."""
        return [
            (row, self.layer, plane, head),
            (self.layer, row, plane, head),
            (self.layer, plane, row, head),
            (self.layer, plane, head, row),
        ][self.layout]


def written(case: Case, inputs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Addresses in the cache of all that a call writes."""
    return [
        case.address(plane, case.row(inputs["cachestarts"], b, before + i), head)
        for b, (length, before) in enumerate(case.sequences)
        for i in range(length)
        for plane in (0, 1)
        for head in range(case.kv_heads)
    ]


def octets(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, so that NaN equals NaN."""
    return tensor.contiguous().view(torch.uint8)


def clone(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs in memory of their own."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def stored(case: Case, inputs: dict[str, Any], b: int, t: int, plane: int, head: int) -> np.ndarray[Any, Any]:
    """What the cache says of one token, float64, rounded as the specification demands. Decoded number by number."""
    at = case.address(plane, case.row(inputs["cachestarts"], b, t), head)
    raw = inputs["cache"][at]
    if not case.bits:
        return raw.to(case.dtype).double().numpy()
    if case.bits == 8:
        codes = [int(code) for code in raw.view(torch.int8)]
    else:
        halves = [c for octet in raw.tolist() for c in (octet % 256 % 16, octet % 256 // 16)]
        codes = [c - 16 if c > 7 else c for c in halves]
    scale = inputs["scale"][at]
    products = torch.tensor(codes, dtype=torch.float64) * scale.double().repeat_interleave(case.group)
    return products.to(scale.dtype).to(case.dtype).double().numpy()


def slope(head: int, heads: int) -> float:
    """ALiBi's, from the closed form."""
    power = 1
    while power * 2 <= heads:
        power *= 2
    return 2.0 ** (-8 * (head + 1) / power) if head < power else 2.0 ** (-4 * (2 * (head - power) + 1) / power)


def judge(case: Case, inputs: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Attention in float64 over what now stands in the cache: the output that the call should have had."""
    query = inputs["query"].double().numpy()
    out = np.zeros(query.shape)
    row = column = 0
    for b, (length, before) in enumerate(case.sequences):
        keys = length + before
        for g in range(case.kv_heads):
            k, v = (
                np.array([stored(case, inputs, b, t, plane, g) for t in range(keys)]).reshape(keys, case.width)
                for plane in (0, 1)
            )
            for h in range(g * case.heads // case.kv_heads, (g + 1) * case.heads // case.kv_heads):
                for i in range(length):
                    score = k @ query[row + i, h] / math.sqrt(case.width)
                    distance = before + i - np.arange(keys)
                    if case.alibi:
                        score = np.where(distance >= 0, score - slope(h, case.heads) * distance, -math.inf)
                    if case.causal and length > 1 and b >= case.decoding:
                        score = np.where(distance >= 0, score, -math.inf)
                    if inputs["attn_mask"] is not None:
                        mask = inputs["attn_mask"]
                        mask = mask if mask.dim() == 2 else mask[h if len(mask) > 1 else 0]
                        score = score + mask[row + i, column : column + keys].double().numpy()
                    if np.all(score == -math.inf):
                        continue
                    weight = np.exp(score - score.max())
                    out[row + i, h] = weight @ v / weight.sum()
        row, column = row + length, column + keys
    return out


BOTH = pytest.mark.parametrize("implementation", ["reference", "cpu"])


FLOATS = list(NAMES)


def run(case: Case, inputs: dict[str, Any], implementation: str) -> torch.Tensor:
    """The operator on these inputs, whose cache it updates; what is not to be written must not change."""
    before = clone(inputs)
    inputs = inputs | {"decoding_batches": case.decoding}
    with torch.inference_mode():
        output = multi_head_cache_attention(**inputs, **case.attributes(), implementation=implementation)
    for name in ("cache", "scale"):
        if inputs[name] is None:
            continue
        for address in written(case, inputs):
            before[name][address] = inputs[name][address]
        assert torch.equal(octets(before[name]), octets(inputs[name])), f"{name}: bytes outside the new rows changed"
    return output


def check(case: Case, implementation: str, inputs: dict[str, Any] | None = None) -> torch.Tensor:
    """Run a case and compare with the judge; poison that reached the output would be NaN."""
    inputs = inputs or case.make()
    output = run(case, inputs, implementation)
    expected = torch.from_numpy(judge(case, inputs))
    assert output.dtype == case.dtype
    assert output.shape == expected.shape
    error = (output.double() - expected).abs() / (1 + expected.abs())
    assert not output.isnan().any(), "poison reached the output"
    assert float(error.max() if error.numel() else 0) <= TOLERANCE[case.dtype], case
    size = float(expected.square().sum())
    # The mean of many values is small, while each adds its rounding error.
    most = NOISE[case.dtype] * max(1.0, max((new + before for new, before in case.sequences), default=0) / 1000)
    assert size == 0 or float((output.double() - expected).square().sum()) / size <= most, case
    return output


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Anything that is valid."""
    repeats, kv_heads = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    width = draw(st.sampled_from([2, 6, 8, 16, 20, 40, 64]))
    bits = draw(st.sampled_from([0, 8, 4]))
    groups = [g for g in (1, 2, 3, 4, 5, 8, 16, 32, 64) if width % g == 0 and (bits != 4 or g % 2 == 0)]
    sequences = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=4))
    layers = draw(st.integers(1, 2))
    return Case(
        sequences,
        heads=repeats * kv_heads,
        kv_heads=kv_heads,
        width=width,
        dtype=draw(st.sampled_from(FLOATS)),
        cache_dtype=draw(st.sampled_from([None, *FLOATS])) if bits == 0 else draw(st.sampled_from([None, torch.int8])),
        scale_dtype=draw(st.sampled_from(FLOATS)),
        causal=draw(st.booleans()),
        alibi=draw(st.booleans()),
        decoding=draw(st.integers(0, len(sequences))),
        layers=layers,
        layer=draw(st.integers(0, layers - 1)),
        bits=bits,
        group=draw(st.sampled_from(groups)),
        paged=draw(st.booleans()),
        layout=draw(st.integers(0, 3)),
        page=draw(st.sampled_from([1, 2, 3, 5, 16])),
        mask=draw(st.sampled_from(["none", "2d", "2d+", "3d", "3d+", "1d"])),
        mask_dtype=draw(st.sampled_from([None, *FLOATS, torch.float64])),
        seed=draw(st.integers(0, 999)),
    )
