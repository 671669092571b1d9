"""The attention operator against a float64 judge that shares no code with it, on poisoned caches and masks.

Every test runs on the reference and on the native implementation.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from ops_cases import (
    BOTH,
    FLOATS,
    NAMES,
    Case,
    cases,
    check,
    clone,
    judge,
    run,
    slope,
)

from attmemo.fastseq.serving.ops.cache_attention import alibi_slopes

MIXED = [(1, 6), (1, 0), (3, 4), (5, 0)]


@BOTH
@pytest.mark.parametrize("layout", range(4))
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("bits", [0, 8, 4])
@pytest.mark.parametrize("dtype", FLOATS, ids=NAMES.get)
def test_all_layouts_modes_types_and_bits(
    implementation: str, layout: int, paged: bool, bits: int, dtype: torch.dtype
) -> None:
    case = Case(MIXED, layout=layout, paged=paged, bits=bits, dtype=dtype, decoding=2, layers=3, layer=1, mask="2d+")
    check(case, implementation)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(case=cases())
def test_anything_valid(case: Case) -> None:
    reference = check(case, "reference")
    native = check(case, "cpu")
    assert reference.shape == native.shape


@pytest.mark.slow
@settings(deadline=None, max_examples=3000, derandomize=True)
@given(case=cases())
def test_anything_valid_at_length(case: Case) -> None:
    check(case, "reference")
    check(case, "cpu")


@BOTH
@pytest.mark.parametrize("keys", [*range(1, 66), 96, 97, 511, 512, 513, 1025])
def test_every_remainder_of_a_block(implementation: str, keys: int) -> None:
    check(Case([(1, keys - 1), (1, 2)], heads=2, kv_heads=1, width=8, page=7, decoding=2, bits=8), implementation)


@BOTH
@pytest.mark.parametrize("bits", [0, 8])
def test_a_long_text(implementation: str, bits: int) -> None:
    check(Case([(1, 8300)], heads=2, kv_heads=1, width=8, page=128, bits=bits), implementation)


@BOTH
@pytest.mark.parametrize(("length", "before"), [(50, 0), (49, 30), (97, 5), (33, 64)])
def test_prompts_of_more_than_one_tile(implementation: str, length: int, before: int) -> None:
    case = Case([(length, before), (1, 3), (2, 0)], heads=4, kv_heads=1, width=16, bits=8, mask="2d", page=16)
    check(case, implementation)


@BOTH
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (4, 2), (6, 2), (8, 2), (12, 2), (8, 1), (16, 1)])
def test_query_heads_share_the_right_keys(implementation: str, heads: int, kv_heads: int) -> None:
    case = Case(MIXED, heads=heads, kv_heads=kv_heads)
    check(case, implementation)
    if heads == kv_heads:
        check(replace(case, extra={"num_kv_heads": 0}), implementation)


@BOTH
def test_a_hundred_query_heads_on_one_key_head(implementation: str) -> None:
    check(Case([(3, 2), (1, 5)], heads=100, kv_heads=1, width=8), implementation)


@BOTH
@pytest.mark.parametrize("width", [2, 7, 8, 16, 40, 80, 96, 128, 136, 256])
def test_any_width_and_its_scale(implementation: str, width: int) -> None:
    check(Case([(2, 3), (1, 33)], width=width, heads=2, kv_heads=1, mask="3d"), implementation)
    for bits, group in ((8, width), (4, 2)) if width % 2 == 0 else ():
        check(Case([(2, 3), (1, 33)], width=width, heads=2, kv_heads=1, bits=bits, group=group), implementation)


@BOTH
def test_causal_is_aligned_to_the_last_key(implementation: str) -> None:
    """One new token at a time sees what a chunk's last token sees: the whole chunk is right, not only its last row."""
    whole = Case([(6, 5)])
    inputs = whole.make()
    output = check(whole, implementation, clone(inputs))
    one = clone(inputs)
    for i in range(6):
        step = replace(whole, sequences=[(1, 5 + i)])
        part = one | {name: inputs[name][i : i + 1] for name in ("query", "current_key", "current_value")}
        part |= {
            "seqstarts": torch.tensor([0, 1]),
            "kvstarts": torch.tensor([0, 6 + i]),
            "start_pos": torch.tensor([5 + i]),
            "max_seqlen": 1,
            "max_kvlen": 6 + i,
        }
        torch.testing.assert_close(run(step, part, implementation), output[i : i + 1], atol=2e-6, rtol=2e-6)


@BOTH
def test_decoding_batches_see_everything(implementation: str) -> None:
    inputs = Case([(3, 2), (3, 2)]).make()
    outputs = [check(Case([(3, 2), (3, 2)], decoding=n), implementation, clone(inputs)) for n in range(3)]
    free = check(Case([(3, 2), (3, 2)], causal=False), implementation, clone(inputs))
    assert torch.equal(outputs[2], free)
    assert torch.equal(outputs[1][:3], free[:3])
    assert torch.equal(outputs[1][3:], outputs[0][3:])
    assert not torch.allclose(outputs[0][:3], free[:3])
    assert torch.allclose(outputs[0][2], free[2], atol=1e-6), "the last query sees all keys in any case"


@BOTH
def test_one_query_is_never_masked(implementation: str) -> None:  # "when sequence length > 1" is each sequence's
    inputs = Case([(1, 4), (3, 0)]).make()
    causal = run(Case([(1, 4), (3, 0)]), clone(inputs), implementation)
    free = run(Case([(1, 4), (3, 0)], causal=False), clone(inputs), implementation)
    assert torch.equal(causal[0], free[0])


@BOTH
def test_order_and_company_do_not_matter(implementation: str) -> None:
    """Alone, in company and in another order: with the native implementation the same bits."""
    case = Case([(1, 40), (1, 600), (4, 9), (30, 0)], heads=4, kv_heads=2, bits=8, page=16)
    inputs = case.make()
    together = run(case, clone(inputs), implementation)
    for b, (length, before) in enumerate(case.sequences):
        first, last = int(inputs["seqstarts"][b]), int(inputs["seqstarts"][b + 1])
        alone = clone(inputs) | {name: inputs[name][first:last] for name in ("query", "current_key", "current_value")}
        alone |= {
            "seqstarts": torch.tensor([0, length]),
            "kvstarts": torch.tensor([0, length + before]),
            "cachestarts": inputs["cachestarts"][b : b + 1],
            "start_pos": inputs["start_pos"][b : b + 1],
        }
        alone |= {"max_seqlen": None, "max_kvlen": None}
        output = run(replace(case, sequences=[(length, before)]), alone, implementation)
        if implementation == "cpu":
            assert torch.equal(output, together[first:last])
        else:
            torch.testing.assert_close(output, together[first:last], atol=2e-6, rtol=2e-6)


@BOTH
@pytest.mark.parametrize(
    "sequences", [[], [(0, 0)], [(0, 5)], [(0, 3), (3, 0)], [(3, 0), (0, 2), (2, 1)], [(2, 0), (0, 0)]], ids=str
)
@pytest.mark.parametrize("paged", [False, True])
def test_sequences_without_new_tokens(implementation: str, sequences: list[tuple[int, int]], paged: bool) -> None:
    check(Case(sequences, paged=paged, mask="2d+"), implementation)


@BOTH
@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_large_and_equal_scores(implementation: str, scale: float) -> None:
    case = Case([(1, 70), (3, 20)], width=4)
    inputs = case.make()
    inputs["query"] *= scale
    output = run(case, inputs, implementation)
    expected = torch.from_numpy(judge(case, inputs))
    # A score of 10^4 is known to 10^-3 in float32, and so is a weight.
    assert (output.double() - expected).abs().max() < 2e-7 * scale * 10
    inputs = case.make()
    inputs["query"].zero_()
    check(case, implementation, inputs)


@BOTH
def test_infinity_and_nan_stay_with_who_sees_them(implementation: str) -> None:
    case = Case([(1, 40), (1, 12)], heads=4, kv_heads=2, decoding=2)
    inputs = case.make()
    clean = run(case, clone(inputs), implementation)
    for poison in (math.nan, math.inf, -math.inf):
        for plane in (0, 1):
            dirty = clone(inputs)
            dirty["cache"][case.address(plane, case.row(inputs["cachestarts"], 0, 35), 1)] = poison
            output = run(case, dirty, implementation)
            assert torch.equal(output[1], clean[1]), "another sequence"
            assert torch.equal(output[0, :2], clean[0, :2]), "another head"
            if not (plane == 0 and math.isinf(poison)):
                assert not output[0, 2:].isfinite().all()


# F. Masks


@BOTH
@pytest.mark.parametrize("mask", ["2d", "2d+", "3d", "3d+", "1d", "1d+"])
@pytest.mark.parametrize("mask_dtype", [*FLOATS, torch.float64], ids=str)
def test_masks_of_all_shapes_and_types(implementation: str, mask: str, mask_dtype: torch.dtype) -> None:
    """The blocks of other sequences, and the columns behind the last, are NaN."""
    check(Case([(2, 3), (1, 6), (4, 0)], mask=mask, mask_dtype=mask_dtype, alibi=True), implementation)


@BOTH
def test_a_query_that_sees_nothing_gets_zeros(implementation: str) -> None:
    case = Case([(2, 3), (1, 40), (1, 600)], causal=False, mask="2d", hidden=0.0)
    inputs = case.make()
    clean = check(case, implementation, clone(inputs))
    keys = inputs["kvstarts"]
    for row, b in ((1, 0), (2, 1), (3, 2)):
        inputs["attn_mask"][row, keys[b] : keys[b + 1]] = -math.inf
    output = check(case, implementation, inputs)
    assert torch.equal(output[0], clean[0])
    assert torch.equal(output[1:], torch.zeros_like(output[1:]))


@BOTH
def test_the_first_block_may_be_hidden(implementation: str) -> None:
    case = Case([(1, 700), (3, 100)], causal=False, mask="2d", hidden=0.0)
    inputs = case.make()
    inputs["attn_mask"][0, :650] = -math.inf
    inputs["attn_mask"][1:, 701:800] = -math.inf
    check(case, implementation, inputs)


@BOTH
def test_a_finite_low_row_is_uniform(implementation: str) -> None:
    case = Case([(1, 9)], mask="2d", hidden=0.0)
    inputs = case.make()
    inputs["attn_mask"].fill_(-1e9)
    inputs["query"].mul_(0.1)
    output = run(case, inputs, implementation)
    rows = [case.address(1, case.row(inputs["cachestarts"], 0, t), 0) for t in range(10)]
    mean = torch.stack([inputs["cache"][row] for row in rows]).mean(0)
    torch.testing.assert_close(output[0, 0], mean)


@BOTH
def test_masks_with_any_strides(implementation: str) -> None:
    case = Case([(2, 3), (4, 1)], mask="3d", hidden=0.0)
    inputs = case.make()
    expected = check(case, implementation, clone(inputs))
    mask = inputs["attn_mask"]
    wide = torch.full((*mask.shape, 2), math.nan)
    wide[..., 0] = mask
    for other in (mask.permute(2, 1, 0).contiguous().permute(2, 1, 0), wide[..., 0], mask.flip(1).clone().flip(1)):
        assert torch.equal(run(case, clone(inputs) | {"attn_mask": other}, implementation), expected)
    row = torch.randn(10)
    expanded = run(replace(case, mask="2d"), clone(inputs) | {"attn_mask": row.expand(6, 10)}, implementation)
    copied = run(replace(case, mask="2d"), clone(inputs) | {"attn_mask": row.repeat(6, 1)}, implementation)
    assert torch.equal(expanded, copied)


@BOTH
def test_a_mask_can_do_what_causal_does(implementation: str) -> None:
    case = Case([(4, 3), (5, 0)], mask="2d", hidden=0.0)
    inputs = case.make()
    inputs["attn_mask"].zero_()
    causal = run(case, clone(inputs), implementation)
    for row, column, length, before in ((0, 0, 4, 3), (4, 7, 5, 0)):
        block = torch.full((length, length + before), -math.inf).triu(before + 1)
        inputs["attn_mask"][row : row + length, column : column + length + before] = block
    masked = run(replace(case, causal=False), clone(inputs), implementation)
    torch.testing.assert_close(masked, causal, atol=1e-6, rtol=1e-6)


@BOTH
def test_an_empty_mask_is_none(implementation: str) -> None:
    case = Case(MIXED)
    inputs = case.make()
    expected = run(case, clone(inputs), implementation)
    assert torch.equal(run(case, inputs | {"attn_mask": torch.empty(0)}, implementation), expected)


# G. ALiBi


@pytest.mark.parametrize("heads", [*range(1, 65), 71, 112])
def test_slopes_against_the_closed_form(heads: int) -> None:
    assert alibi_slopes(heads).tolist() == pytest.approx([slope(h, heads) for h in range(heads)], rel=1e-7)


def test_slopes_of_six_heads() -> None:
    assert alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]


@BOTH
def test_alibi_of_a_chunk_and_of_tokens_agree(implementation: str) -> None:
    check(Case([(3, 9), (1, 6), (5, 0)], alibi=True, heads=6, kv_heads=2), implementation)


@BOTH
def test_alibi_hides_the_future_always(implementation: str) -> None:
    inputs = Case([(4, 2)]).make()
    causal = run(Case([(4, 2)], alibi=True), clone(inputs), implementation)
    assert torch.equal(run(Case([(4, 2)], alibi=True, causal=False), clone(inputs), implementation), causal)
    assert torch.equal(run(Case([(4, 2)], alibi=True, decoding=1), clone(inputs), implementation), causal)


@BOTH
def test_alibi_is_exact_far_away_in_half_precision(implementation: str) -> None:
    case = Case([(1, 4095)], heads=2, kv_heads=1, width=4, dtype=torch.float16, alibi=True, page=64)
    inputs = case.make()
    inputs["query"].zero_()  # only the bias counts: weights e^(-d / 16) and e^(-d / 256)
    check(case, implementation, inputs)


@BOTH
def test_alibi_with_mask_is_a_mask_for_each_head(implementation: str) -> None:
    case = Case([(3, 2), (1, 4)], alibi=True, mask="2d", hidden=0.0, heads=6, kv_heads=2)
    inputs = case.make()
    output = check(case, implementation, clone(inputs))
    mask = inputs["attn_mask"].expand(6, -1, -1).clone()
    for h in range(6):
        for b, (length, before) in enumerate(case.sequences):
            row, column = int(inputs["seqstarts"][b]), int(inputs["kvstarts"][b])
            for i in range(length):
                distance = before + i - np.arange(length + before)
                bias = np.where(distance >= 0, -slope(h, 6) * distance, -np.inf)
                mask[h, row + i, column : column + length + before] += torch.from_numpy(bias)
    other = replace(case, alibi=False, causal=False, mask="3d")
    torch.testing.assert_close(run(other, inputs | {"attn_mask": mask}, implementation), output, atol=2e-6, rtol=2e-6)
