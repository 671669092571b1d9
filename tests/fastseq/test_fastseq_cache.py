"""Rows that move in place, leave, and share: each against the plain way of doing it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo.fastseq.generate.beam_cache import BeamArena, _gather, copy_order, hole_filling
from attmemo.fastseq.generate.encoder import length_groups
from attmemo.fastseq.generate.refusal import Refusal


def filled(rows: int, layers: int = 2, steps: int = 5, room: int = 3) -> tuple[BeamArena, list[list[torch.Tensor]]]:
    """An arena that has grown on the way, and what was put into it: for each layer keys and values `[R, h, t, d]`."""
    torch.manual_seed(0)
    arena = BeamArena(layers, room)
    given_states = [[torch.empty(rows, 2, 0, 3), torch.empty(rows, 2, 0, 3)] for _ in range(layers)]
    for _ in range(steps):
        for layer in range(layers):
            new = [torch.randn(rows, 2, 1, 3), torch.randn(rows, 2, 1, 3)]
            given_states[layer] = [torch.cat(both, dim=2) for both in zip(given_states[layer], new, strict=True)]
            keys, values = arena.append(layer, *new)
            assert torch.equal(keys, given_states[layer][0])
            assert torch.equal(values, given_states[layer][1])
    return arena, given_states


def held(arena: BeamArena, layer: int) -> list[torch.Tensor]:
    assert arena.store is not None
    return [arena.store[:, layer, part, :, : arena.length] for part in range(2)]


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 9).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
def test_rows_follow_any_choice_of_parents_in_place(source: list[int]) -> None:
    arena, states = filled(len(source))
    arena.move(torch.tensor(source))
    for layer, expected in enumerate(states):
        for got, one in zip(held(arena, layer), expected, strict=True):
            assert torch.equal(got, one[source])
    copies = [step for step in copy_order(source) if step[1] is not None]
    assert len(copies) == sum(target != origin for target, origin in enumerate(source)), "a row was copied twice"


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("source", [[0, 1, 2, 3], [3, 3, 0, 1], [1, 2, 3, 0], [2, 2, 2, 2]])
def test_rows_follow_their_parents_on_another_device(source: list[int], kind: torch.dtype) -> None:
    arena, states = filled(len(source), steps=9)
    assert arena.store is not None
    _gather(arena.store[..., : arena.length, :], torch.tensor(source, dtype=kind))
    for layer, expected in enumerate(states):
        for got, one in zip(held(arena, layer), expected, strict=True):
            assert torch.equal(got, one[source])


def test_another_device_is_asked_which_rows_change() -> None:
    """A list of them would wait for the device at every step."""
    arena = BeamArena(2, 4)
    for layer in range(2):
        arena.append(layer, *(torch.zeros(4, 2, 1, 3, device="meta") for _ in range(2)))
    arena.move(torch.zeros(4, dtype=torch.int32, device="meta"))  # which has nothing that could be listed


@settings(max_examples=100, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=8).filter(any))
def test_samples_leave_and_few_move(alive: list[bool]) -> None:
    order = hole_filling(alive)
    assert sorted(order) == [sample for sample, stays in enumerate(alive) if stays]
    assert all(origin == target or origin >= len(order) for target, origin in enumerate(order)), (
        "one that stays was moved"
    )
    arena, states = filled(2 * len(alive))
    rows = [2 * sample + beam for sample in order for beam in range(2)]
    arena.keep(rows)
    for layer, expected in enumerate(states):
        for got, one in zip(held(arena, layer), expected, strict=True):
            assert torch.equal(got, one[rows])


def test_the_arena_counts_what_is_filled_and_repeats_rows() -> None:
    arena, states = filled(3)
    assert arena.bytes() == 3 * 2 * 2 * 2 * 5 * 3 * 4
    arena.repeat(2)
    assert torch.equal(held(arena, 1)[0], states[1][0].repeat_interleave(2, dim=0))
    arena.drop(0, 1)
    arena.drop(1, 1)
    assert arena.length == 4
    assert BeamArena(2, 4).bytes() == 0


def test_layers_of_different_shapes_are_refused() -> None:
    arena = BeamArena(2, 4)
    arena.append(0, torch.zeros(2, 2, 1, 3), torch.zeros(2, 2, 1, 3))
    with pytest.raises(Refusal, match="layer 1"):
        arena.append(1, torch.zeros(2, 2, 1, 5), torch.zeros(2, 2, 1, 5))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 1000))
def test_groups_of_similar_length_hold_every_sample_once(lengths: list[int], budget: int) -> None:
    groups = length_groups(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert len(group) == 1 or len(group) * longest <= budget
        assert longest <= 16 or all(lengths[i] >= longest - longest // 8 for i in group)
