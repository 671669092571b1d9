"""What would make a decoding step useless: other numbers than plain attention and layers, in any instruction set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from attmemo.fastseq.generate.decoder_stack import Block, DecoderStack, OwnKeys, SharedKeys, attend_in_torch
from attmemo.kernels import _decode as native
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


@pytest.mark.parametrize("attention", native.instruction_sets())
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("biased", [False, True])
def test_tokens_that_follow_each_other_have_the_bits_of_single_steps(
    sizes: tuple[int, int, int], biased: bool, attention: str
) -> None:
    heads, key_heads, width = sizes
    if biased and heads != key_heads:
        pytest.skip("biases are those of heads that have keys of their own")
    generator = torch.Generator().manual_seed(4)
    stack = stack_of(weights_of(*sizes), *sizes, attention)
    bias = drawn(generator, heads, 100) if biased else None
    shared = SharedKeys(2, key_heads, width, [7], torch.float32)
    for layer in (0, 1):
        shared.put(layer, drawn(generator, 7, key_heads * width), drawn(generator, 7, key_heads * width))
    one, many = (OwnKeys(2, key_heads, width, 1, torch.float32) for _ in range(2))
    hidden = drawn(generator, 80, HIDDEN)  # more than a chunk
    single = torch.cat([stack.step(row[None].clone(), 1, one, shared, bias=bias) for row in hidden])
    done = 0
    for count in (1, 4, 5, 60, 10):
        wrong = drawn(generator, count, HIDDEN)
        stack.step(wrong, count, many, shared, chained=True, bias=bias)  # is taken back
        many.length = done
        got = stack.step(hidden[done : done + count].clone(), count, many, shared, chained=True, bias=bias)
        assert torch.equal(got, single[done : done + count])
        done += count
        assert many.length == done


@pytest.mark.parametrize("attention", native.instruction_sets())
@pytest.mark.parametrize("sizes", SIZES)
def test_a_prompt_that_is_read_at_once_gives_what_its_tokens_give_one_by_one(
    sizes: tuple[int, int, int], attention: str
) -> None:
    generator = torch.Generator().manual_seed(5)
    _, key_heads, width = sizes
    parts = weights_of(*sizes)
    stack = stack_of(parts, *sizes, attention)
    lengths = [70, 1, 33]
    hidden, shared = drawn(generator, sum(lengths), HIDDEN), SharedKeys(2, key_heads, width, lengths, torch.float32)
    got = stack.read(hidden.clone(), lengths, shared, causal=True, threads=2)
    after = drawn(generator, 3, HIDDEN)
    behind = stack.step(after.clone(), 1, OwnKeys(2, key_heads, width, 3, torch.float32), shared)
    first = 0
    for sample, length in enumerate(lengths):
        plain = Plain(parts, *sizes)
        rows = torch.stack([plain.step(row, None, None) for row in hidden[first : first + length]])
        torch.testing.assert_close(got[first : first + length], rows, rtol=1e-3, atol=2e-4)
        torch.testing.assert_close(behind[sample], plain.step(after[sample], None, None), rtol=1e-3, atol=2e-4)
        first += length


@pytest.mark.parametrize("attention", native.instruction_sets())
@pytest.mark.parametrize("sizes", SIZES)
def test_all_tokens_of_a_source_see_each_other_with_a_bias_for_each_distance(
    sizes: tuple[int, int, int], attention: str
) -> None:
    generator = torch.Generator().manual_seed(6)
    heads, key_heads, width = sizes
    parts = weights_of(*sizes)
    stack = stack_of(parts, *sizes, attention)
    lengths, most = [40, 9], 45
    bias = drawn(generator, heads, 2 * most - 1) if heads == key_heads else None
    hidden = drawn(generator, sum(lengths), HIDDEN)
    got = stack.read(hidden.clone(), lengths, causal=False, bias=bias)
    norm = (torch.linspace(0.5, 1.5, HIDDEN), torch.linspace(-1, 1, HIDDEN), 1e-5)
    size, some = heads * width, key_heads * width
    for rows, found in zip(hidden.split(lengths), got.split(lengths), strict=True):
        far = torch.arange(len(rows)) - torch.arange(len(rows))[:, None] + most - 1
        for _ in range(2):
            query, key, value = (F.layer_norm(rows, (HIDDEN,), *norm) @ parts["qkv"].T).split((size, some, some), 1)
            keys, values = (part.view(-1, key_heads, width) for part in (key, value))
            mixed = torch.stack([
                attend_in_torch(one.view(heads, -1), keys, values, 0.3, None if bias is None else bias[:, far[i]])
                for i, one in enumerate(query)
            ])  # fmt: skip
            rows = rows + mixed.flatten(1) @ parts["out"].T
            rows = rows + torch.relu(F.layer_norm(rows, (HIDDEN,), *norm) @ parts["up"].T) @ parts["down"].T
        torch.testing.assert_close(found, F.layer_norm(rows, (HIDDEN,), *norm), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [("rows", "not those of the samples"), ("blocks", "shared keys do not fit"), ("bias", "no bias for a distance")],
)
def test_what_cannot_be_read_is_refused(wrong: str, message: str) -> None:
    sizes = (4, 4, 16)
    stack = stack_of(weights_of(*sizes), *sizes, "")
    shared = SharedKeys(3 if wrong == "blocks" else 2, 4, 16, [3, 5], torch.float32)
    hidden = torch.ones(7 if wrong == "rows" else 8, HIDDEN)
    bias = torch.zeros(4, 7) if wrong == "bias" else None
    with pytest.raises(ValueError, match=message):
        stack.read(hidden, [3, 5], shared, causal=False, bias=bias)


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
