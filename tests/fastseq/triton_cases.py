"""Run by test_ops_triton.py in a process of its own, where Triton interprets its kernels: against reference and judge.

On a machine with a GPU the same cases run there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from ops_cases import Case, clone, judge

from attmemo.errors import ImplementationError
from attmemo.fastseq.ops import multi_head_cache_attention
from attmemo.fastseq.serving.ops import reference, triton
from attmemo.fastseq.serving.ops.arguments import check_arguments

DEVICE = "cpu" if triton.is_interpreted() else "cuda"
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 2.5e-2}
RAGGED = [(1, 8), (1, 21), (2, 0), (0, 4), (3, 15)]


def bits(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The bytes of a tensor; every NaN the same."""
    if tensor is None:
        return None
    tensor = tensor.cpu()
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor)
    return tensor.contiguous().view(torch.uint8)


def compare(case: Case, inputs: dict[str, Any] | None = None, **options: Any) -> torch.Tensor:
    """Cache and scales are the reference's, bit for bit, and the output is right; the output."""
    inputs = inputs or case.make()
    expected, given = clone(inputs), {k: v.to(DEVICE) if v is not None else None for k, v in clone(inputs).items()}
    for name, value in inputs.items():  # `clone` makes strided tensors dense
        if isinstance(value, torch.Tensor) and not value.is_contiguous() and name not in ("cache", "scale"):
            expected[name], given[name] = value, value.to(DEVICE)
    plain = reference.attend(check_arguments(**expected, **case.attributes()))
    output = triton.attend(check_arguments(**given, **case.attributes()), **options).cpu()
    for name in ("cache", "scale"):
        one, other = bits(expected[name]), bits(given[name])
        assert (one is None and other is None) or torch.equal(one, other), f"{name} differs from the reference"
    true = torch.from_numpy(judge(case, {k: v if v is None else v.cpu() for k, v in given.items()}))
    limit = TOLERANCE[case.dtype] * (1 + true.abs()) * max(1.0, case.magnitude)
    assert output.dtype == case.dtype
    assert bool(((output.double() - true).abs() <= limit).all()), float((output.double() - true).abs().max())
    assert bool(((plain.double() - true).abs() <= limit).all())
    return output


@pytest.mark.parametrize(
    ("layout", "paged", "quant"),
    [(0, True, 8), (1, True, 4), (2, True, 0), (3, True, 8), (0, False, 4), (1, False, 0), (2, False, 8)],
)
def test_every_layout_mode_and_width(layout: int, paged: bool, quant: int) -> None:
    compare(Case(RAGGED, layout=layout, paged=paged, bits=quant, layers=2, layer=layout % 2, decoding=2), block=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("scale_dtype", "quant"), [(torch.float32, 4), (torch.float16, 8), (torch.bfloat16, 8)])
def test_every_type_of_numbers_and_scales(dtype: torch.dtype, scale_dtype: torch.dtype, quant: int) -> None:
    compare(Case(RAGGED, dtype=dtype, scale_dtype=scale_dtype, bits=quant, group=4), block=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_a_cache_of_another_type_is_rounded_to(dtype: torch.dtype, stored: torch.dtype) -> None:
    compare(Case(RAGGED, dtype=dtype, cache_dtype=stored), block=16)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "group"),
    [(1, 1, 8, 8), (4, 4, 20, 10), (6, 2, 40, 40), (8, 1, 80, 2), (9, 3, 96, 32), (24, 1, 36, 6)],
)
def test_heads_and_widths_that_are_no_powers_of_two(heads: int, kv_heads: int, width: int, group: int) -> None:
    case = Case([(1, 6), (3, 4)], heads=heads, kv_heads=kv_heads, width=width, group=group, bits=4, page=3)
    compare(case, block=16)


@pytest.mark.parametrize(("page", "keys"), [(1, 1), (3, 15), (16, 16), (16, 33), (3, 17), (128, 31)])
def test_every_remainder_of_keys_by_block_and_page(page: int, keys: int) -> None:
    compare(Case([(1, keys - 1), (min(keys, 3), keys - min(keys, 3))], page=page, bits=8), block=16)


@pytest.mark.parametrize(
    ("mask", "alibi", "causal"),
    [("2d", False, False), ("2d+", True, False), ("3d+", False, True), ("3d+", True, True), ("1d", True, False)],
)
def test_masks_add_up_with_the_rest(mask: str, alibi: bool, causal: bool) -> None:
    case = Case(RAGGED, heads=6, mask=mask, alibi=alibi, causal=causal, decoding=4, hidden=0.5)
    compare(case, block=16, splits=1 if mask == "2d" else 3)


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_a_mask_of_another_type_is_converted(kind: torch.dtype) -> None:
    compare(Case(RAGGED, mask="3d", mask_dtype=kind))


@pytest.mark.parametrize(("splits", "quant"), [(2, 4), (5, 0), (16, 0)])
def test_parts_of_the_keys_join_to_the_whole(splits: int, quant: int) -> None:
    """Sixteen parts of 41 keys: some have none, and weigh nothing."""
    case = Case([(1, 40), (1, 0), (2, 20)], bits=quant, decoding=2)
    whole = compare(case, block=16)
    torch.testing.assert_close(compare(case, block=16, splits=splits), whole, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("decoding", [0, 1, 3])
def test_sequences_being_decoded_see_all_their_keys(decoding: int) -> None:
    compare(Case([(3, 5), (4, 0), (2, 9)], decoding=decoding), block=16)


def test_linear_biases_far_behind_are_not_rounded() -> None:
    compare(Case([(1, 700), (1, 300)], heads=6, kv_heads=1, dtype=torch.float16, alibi=True), block=64, splits=2)


def test_a_query_that_sees_no_key_gets_zeros() -> None:
    case = Case([(1, 20), (4, 3)], mask="2d", hidden=0.0)
    inputs = case.make()
    inputs["attn_mask"][2] = -math.inf
    for splits in (1, 3):
        output = compare(case, inputs, block=16, splits=splits)
        assert torch.equal(output[2], torch.zeros_like(output[2]))
        assert bool((output[[0, 1, 3, 4]].abs().amax((1, 2)) > 0).all())


def test_a_block_without_a_visible_key_leaves_no_nan() -> None:
    case = Case([(1, 50), (3, 40)], mask="2d", hidden=0.0)
    inputs = case.make()
    inputs["attn_mask"][:, :33] = -math.inf  # the first two blocks of the first sequence
    inputs["attn_mask"][1:, 51:84] = -math.inf
    compare(case, inputs, block=16)


def test_scores_of_thousands_do_not_overflow() -> None:
    case = Case([(1, 20), (3, 4)], magnitude=50.0)
    compare(case, block=16)


def test_strange_numbers_get_the_codes_of_the_reference() -> None:
    """Ties, zeros, tiny and huge numbers, infinities and NaN; in float16 also scales that are subnormal."""
    rows = [
        [127, 0.5, 1.5, 2.5, -0.5, -1.5, -127, 126.5],
        [0.0] * 8,
        [5e-6, -5e-6, 1e-8, -0.0, 4.9e-6, 1e-7, 0, 0],
        [65504, -65504, 1, 3, 700, 515.9, 258, -773.9],
        [7, 0.5, 1.5, 2.5, 3.5, -4.5, -6.5, 6.4999],
        [3e-3, -2e-3, 1e-4, 7e-5, 1e-3, -3e-3, 2.5e-3, 6e-5],
        [math.nan, 1, 2, 3, 4, 5, 6, 7],
        [math.inf, 1, 2, 3, 4, 5, 6, 7],
    ]
    wide = torch.randn(len(rows), 8, generator=torch.Generator().manual_seed(2)) * torch.logspace(-8, 4, 8)[:, None]
    numbers = torch.stack((torch.tensor(rows), wide), 1)  # [8, 2, 8]
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for quant, group in ((8, 8), (8, 1), (4, 2)):
            case = Case([(len(rows), 0)], width=8, dtype=dtype, bits=quant, group=group)
            inputs = case.make()
            inputs["current_key"], inputs["current_value"] = numbers.to(dtype), numbers.flip(0).to(dtype)
            expected, given = clone(inputs), {k: None if v is None else v.to(DEVICE) for k, v in clone(inputs).items()}
            reference.attend(check_arguments(**expected, **case.attributes()))
            triton.attend(check_arguments(**given, **case.attributes()))
            assert torch.equal(bits(given["cache"]), bits(expected["cache"])), (dtype, quant, group)
            assert torch.equal(bits(given["scale"]), bits(expected["scale"])), (dtype, quant, group)


def test_a_code_that_is_never_written_is_read() -> None:
    case = Case([(1, 9)], bits=8)
    inputs = case.make()
    inputs["cache"][inputs["cache"] == 5] = -128
    inputs["cache"].view(-1)[::7] = -128
    compare(case, inputs)


def test_slices_and_expanded_masks_are_read_where_they_lie() -> None:
    case = Case([(1, 6), (3, 4)], mask="3d")
    inputs = case.make()
    fused = torch.randn(4, 4 + 2 + 2, 2 * 16, generator=torch.Generator().manual_seed(8))[..., ::2]
    inputs["query"], inputs["current_key"], inputs["current_value"] = fused.split([4, 2, 2], 1)
    inputs["attn_mask"] = inputs["attn_mask"][:1].expand(4, -1, -1)
    assert not inputs["current_value"].is_contiguous()
    compare(case, inputs, block=16)
    inputs["attn_mask"] = inputs["attn_mask"][0].T.contiguous().T
    compare(case, inputs, block=16)


def test_indices_may_be_of_32_bits() -> None:
    case = Case(RAGGED, bits=8)
    inputs = case.make()
    for name in ("seqstarts", "kvstarts", "cachestarts", "start_pos"):
        inputs[name] = inputs[name].int()
    compare(case, inputs, block=16)


@pytest.mark.parametrize("sequences", [[], [(0, 0)], [(0, 5), (0, 0)], [(0, 3), (2, 0), (0, 0), (1, 1), (0, 7)]])
def test_nothing_to_do_is_done(sequences: list[tuple[int, int]]) -> None:
    compare(Case(sequences))


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] if n >= 6 else []) for n in range(120)])
def test_any_call(seed: int) -> None:
    draw = np.random.default_rng(seed)

    def one_of(*choices: Any) -> Any:
        return choices[draw.integers(len(choices))]

    repeats, kv_heads = int(draw.integers(1, 6)), int(draw.integers(1, 4))
    group, quant = one_of(2, 4, 8, 6), one_of(0, 8, 4)
    count = int(draw.integers(1, 5))
    case = Case(
        [(int(draw.integers(0, 5)) if draw.random() < 0.6 else 1, int(draw.integers(0, 25))) for _ in range(count)],
        heads=repeats * kv_heads,
        kv_heads=kv_heads,
        width=group * int(draw.integers(1, 6)),
        dtype=one_of(torch.float32, torch.float16, torch.bfloat16),
        scale_dtype=one_of(torch.float32, torch.float16),
        causal=bool(draw.integers(2)),
        alibi=bool(draw.random() < 0.3),
        decoding=int(draw.integers(0, count + 1)),
        layers=2,
        layer=int(draw.integers(2)),
        bits=quant,
        group=group,
        paged=bool(draw.random() < 0.7),
        layout=int(draw.integers(4)),
        page=one_of(1, 3, 4, 16),
        mask=one_of("none", "none", "2d", "2d+", "3d", "1d+"),
        seed=seed,
    )
    compare(case, block=one_of(16, 32, None), splits=one_of(1, 1, 2, 3))


def test_the_operator_takes_it_by_name() -> None:
    case = Case(RAGGED, bits=8)
    expected, given = case.make(), {k: None if v is None else v.to(DEVICE) for k, v in case.make().items()}
    plain = multi_head_cache_attention(**expected, **case.attributes(), implementation="reference")
    output = multi_head_cache_attention(**given, **case.attributes(), implementation="triton")
    torch.testing.assert_close(output.cpu(), plain, atol=2e-6, rtol=2e-6)
    assert torch.equal(given["cache"].cpu(), expected["cache"])


def test_what_does_not_fit_a_program_is_refused() -> None:
    case = Case([(1, 0)], width=520)
    given = {k: None if v is None else v.to(DEVICE) for k, v in case.make().items()}
    before = given["cache"].clone()
    with pytest.raises(ImplementationError, match="head_dim 520 is more than 256"):
        multi_head_cache_attention(**given, **case.attributes(), implementation="triton")
    assert torch.equal(bits(given["cache"]), bits(before))


def test_trusted_indices_are_not_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers given as numbers, not validated: nothing waits for the device."""
    case = Case([(1, 9), (1, 4)], decoding=2)
    inputs = {k: None if v is None else v.to(DEVICE) for k, v in case.make().items()}
    inputs |= {"decoding_batches": 2, "max_seqlen": 1, "max_kvlen": 10}
    arguments = check_arguments(**inputs, **case.attributes(), validate=False)

    def read_back(self: Any) -> Any:
        raise AssertionError("the indices were read back")

    monkeypatch.setattr(type(arguments), "indices", property(read_back))
    triton.attend(arguments)
