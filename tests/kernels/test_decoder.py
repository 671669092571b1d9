"""What would make a decoding step useless: other numbers than plain attention and layers, in any instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attmemo.kernels import _decode as native
from attmemo.kernels.decoder import Block, DecoderStack, OwnKeys, SharedKeys, attend_in_torch
from attmemo.kernels.linear32 import Linear32
from attmemo.kernels.norms import Norm

HIDDEN = 24
SIZES = [(4, 4, 6), (4, 2, 16), (6, 1, 20), (2, 2, 64), (1, 1, 80)]
"""Heads, heads of keys, width of each: with and without whole vectors."""


def drawn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.5


def weights_of(heads: int, key_heads: int, width: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    size = heads * width
    shapes = {
        "qkv": (size + 2 * key_heads * width, HIDDEN), "out": (HIDDEN, size), "up": (40, HIDDEN), "down": (HIDDEN, 40),
    }  # fmt: skip
    return {name: drawn(generator, *shape) for name, shape in shapes.items()}


def stack_of(parts: dict[str, Tensor], heads: int, key_heads: int, width: int, attention: str) -> DecoderStack:
    layers = {
        name: Linear32.of([weight], [None], "relu" if name == "up" else "none") for name, weight in parts.items()
    }
    norm = Norm(torch.linspace(0.5, 1.5, HIDDEN), torch.linspace(-1, 1, HIDDEN), 1e-5, True)
    block = Block(**layers, before=norm, before_feed=norm)
    return DecoderStack([block, block], heads, key_heads, width, scale=0.3, last=norm, attention=attention)


class Plain:
    """The same blocks in torch, of one row: its keys and values lie in lists."""

    def __init__(self, parts: dict[str, Tensor], heads: int, key_heads: int, width: int) -> None:
        self.parts, self.heads, self.key_heads, self.width = parts, heads, key_heads, width
        self.keys: list[list[Tensor]] = [[], []]
        self.values: list[list[Tensor]] = [[], []]

    def copied(self) -> Plain:
        twin = Plain(self.parts, self.heads, self.key_heads, self.width)
        twin.keys, twin.values = [list(part) for part in self.keys], [list(part) for part in self.values]
        return twin

    def step(self, row: Tensor, shared: list[tuple[Tensor, Tensor]] | None, bias: Tensor | None) -> Tensor:
        def normed(x: Tensor) -> Tensor:
            return F.layer_norm(x, (HIDDEN,), torch.linspace(0.5, 1.5, HIDDEN), torch.linspace(-1, 1, HIDDEN), 1e-5)

        for layer in (0, 1):
            size, some = self.heads * self.width, self.key_heads * self.width
            query, key, value = (self.parts["qkv"] @ normed(row)).split((size, some, some))
            self.keys[layer].append(key.view(self.key_heads, -1))
            self.values[layer].append(value.view(self.key_heads, -1))
            keys, values = torch.stack(self.keys[layer]), torch.stack(self.values[layer])
            own = None if bias is None else bias[:, bias.shape[1] - len(keys) :]
            if shared is not None:
                before = shared[layer]
                keys, values = torch.cat((before[0], keys)), torch.cat((before[1], values))
                if own is not None:
                    own = torch.cat((torch.zeros(self.heads, len(before[0])), own), 1)
            found = attend_in_torch(query.view(self.heads, -1), keys, values, 0.3, own)
            row = row + self.parts["out"] @ found.flatten()
            row = row + self.parts["down"] @ torch.relu(self.parts["up"] @ normed(row))
        return normed(row)


@pytest.mark.parametrize("attention", native.instruction_sets())
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["own", "shared", "bias"])
def test_steps_are_those_of_plain_layers_while_rows_change_places(
    sizes: tuple[int, int, int], kind: str, attention: str
) -> None:
    if kind == "bias" and sizes[0] != sizes[1]:
        pytest.skip("biases are those of heads that have keys of their own")
    generator = torch.Generator().manual_seed(2)
    heads, key_heads, width = sizes
    parts = weights_of(*sizes)
    stack = stack_of(parts, *sizes, attention)
    samples, beams, lengths = 2, 3, [5, 21]
    own = OwnKeys(2, key_heads, width, samples * beams, torch.float32)
    shared, before = None, [None] * samples
    if kind == "shared":
        shared = SharedKeys(2, key_heads, width, lengths, torch.float32)
        given = [[drawn(generator, sum(lengths), key_heads * width) for _ in range(2)] for _ in range(2)]
        for layer, (keys, values) in enumerate(given):
            shared.put(layer, keys, values)
        cut: Any = [slice(0, 5), slice(5, 26)]
        before = [
            [(keys[cut[s]].view(-1, key_heads, width), values[cut[s]].view(-1, key_heads, width))
             for keys, values in given]
            for s in range(samples)
        ]  # fmt: skip
    bias = drawn(generator, heads, 100) if kind == "bias" else None
    rows = [Plain(parts, *sizes) for _ in range(samples * beams)]
    turned = np.array([2, 0, 0, 4, 4, 3])
    for step in range(70):  # more than a chunk
        hidden = drawn(generator, len(rows), HIDDEN)
        expected = torch.stack(
            [row.step(hidden[i], before[i // beams], bias) for i, row in enumerate(rows)]  # type: ignore[arg-type]
        )
        got = stack.step(hidden.clone(), beams, own, shared, bias=bias, threads=1 + step % 2)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=2e-4)
        if step % 3 == 1:
            own.take(turned)
            rows = [rows[i].copied() for i in turned]
        if step == 40:  # the first sample leaves
            own.take(np.arange(beams, 2 * beams))
            rows, before = rows[beams:], before[1:]
            turned = np.array([1, 1, 2])
            if shared is not None:
                shared.keep([1])


def test_a_row_has_the_same_bits_alone_and_beside_others() -> None:
    generator = torch.Generator().manual_seed(3)
    sizes = (4, 2, 16)
    stack = stack_of(weights_of(*sizes), *sizes, "")
    many, one = OwnKeys(2, 2, 16, 5, torch.float32), OwnKeys(2, 2, 16, 1, torch.float32)
    for _ in range(5):
        hidden = drawn(generator, 5, HIDDEN)
        whole = stack.step(hidden.clone(), 1, many)
        assert torch.equal(stack.step(hidden[3:4].clone(), 1, one)[0], whole[3])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("rows", "own keys"), ("type", "rows must be"), ("slot", "slot"), ("samples", "shared keys do not fit"),
        ("blocks", "shared keys do not fit"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_before_anything_is_written(wrong: str, message: str) -> None:
    sizes = (4, 2, 16)
    stack = stack_of(weights_of(*sizes), *sizes, "")
    own = OwnKeys(2, 2, 16, 4, torch.float32)
    hidden = torch.ones(4, HIDDEN)
    stack.step(hidden.clone(), 2, own)
    shared = None
    if wrong == "rows":
        hidden = hidden[:2]
    elif wrong == "type":
        hidden = hidden.double()
    elif wrong == "slot":
        own.table[1, 0] = 4
    else:
        count, layers = (3, 2) if wrong == "samples" else (2, 1)
        shared = SharedKeys(layers, 2, 16, [2] * count, torch.float32)
        for layer in range(layers):
            shared.put(layer, torch.ones(2 * count, 32), torch.ones(2 * count, 32))
    before = hidden.clone()
    with pytest.raises(ValueError, match=message):
        stack.step(hidden, 2, own, shared)
    assert torch.equal(hidden, before)
    assert own.length == 1


def test_layers_that_do_not_fit_each_other_are_refused() -> None:
    parts = weights_of(4, 2, 16)
    parts["down"] = parts["down"][:, :30]
    with pytest.raises(ValueError, match="do not fit each other"):
        stack_of(parts, 4, 2, 16, "")
