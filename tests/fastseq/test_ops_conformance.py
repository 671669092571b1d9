"""The attention operator beside ppl.pmx's, in whose words the specification is written.

Needs a checkout of ppl.pmx, named by the environment variable OPMX_REFERENCE; it runs in a process of its own, and
tensors are exchanged as files. Cache and scales must be equal bit by bit, outputs within the type's tolerance; where
we mean to differ, both behaviours are asserted.
"""

from __future__ import annotations

import math
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_cases import Case, clone, judge, octets

from attmemo.errors import ArgumentError, ArgumentTypeError, CacheRangeError
from attmemo.fastseq.ops import multi_head_cache_attention

VARIABLE = "OPMX_REFERENCE"
CHECKOUT = os.environ.get(VARIABLE)
pytestmark = pytest.mark.skipif(not CHECKOUT, reason=f"{VARIABLE} does not name a checkout of ppl.pmx")

LIMITS = {torch.float32: (3e-6, 3e-6), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3e-2, 1e-2)}
HEADS = [(1, 1), (4, 4), (8, 2), (6, 3), (9, 3), (16, 1)]
BATCHES = [[1], [5], [1, 1, 1], [1, 4, 7], [0, 3], [3, 0, 2]]


def ask(calls: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """What the checkout's operator answers."""
    torch.save(calls, folder / "calls.pt")
    program = Path(__file__).with_name("ops_oracle.py")
    done = subprocess.run(
        [sys.executable, program, str(CHECKOUT), folder / "calls.pt", folder / "answers.pt"],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = torch.load(folder / "answers.pt", weights_only=True)
    return answers


def call_of(case: Case, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """A call in the oracle's terms: the cache is that of the first step."""
    steps = [clone(step) for step in steps]
    return {
        "cache": steps[0]["cache"],
        "scale": steps[0]["scale"],
        "steps": [{name: value for name, value in step.items() if name not in ("cache", "scale")} for step in steps],
        "attributes": case.attributes(),
    }


def sample(generator: random.Random, layout: int, paged: bool, bits: int, seed: int) -> Case:
    """A case with all other factors drawn."""
    heads, kv_heads = generator.choice(HEADS)
    width = generator.choice([8, 40, 64, 128])
    page = generator.choice([1, 3, 16, 128])
    dtype = generator.choice([torch.float32, torch.float32, torch.float16, torch.bfloat16])
    alibi = generator.random() < 0.3
    if alibi and dtype != torch.float32:  # its biases are rounded to half precision there, ours are not
        heads = kv_heads = generator.choice([1, 4])
    # Beyond the oracle, not beyond us: with pages, a cache of another type than the input's; quantisation of nothing.
    batch = generator.choice([lengths for lengths in BATCHES if 0 not in lengths or not bits])
    layers = generator.choice([1, 3])
    return Case(
        [(length, generator.choice([0, 1, page - 1, page, page + 1, 17]) if page < 90 else 17) for length in batch],
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        dtype=dtype,
        cache_dtype=generator.choice([None, None, torch.float32, torch.float16]) if not (bits or paged) else None,
        scale_dtype=dtype if paged else generator.choice([torch.float32, torch.float16]),
        causal=generator.random() < 0.7,
        alibi=alibi,
        decoding=generator.choice([0, min(1, len(batch)), len(batch)]),
        layers=layers,
        layer=generator.randrange(layers),
        bits=bits,
        group=generator.choice([g for g in (1, 2, 4, 8, 16, width) if width % g == 0]),
        paged=paged,
        layout=layout,
        page=page,
        mask=generator.choice(["none", "none", "2d", "2d+", "3d"]),
        hidden=0.1,
        seed=seed,
    )


def cases() -> list[Case]:
    """All layouts, modes and bits, each with some draws of the rest."""
    generator = random.Random(0)
    return [
        sample(generator, layout, paged, bits, 100 * n + layout)
        for n in range(12)
        for layout in range(4)
        for paged in (False, True)
        for bits in (0, 8)
    ]


def without_hidden_rows(case: Case, inputs: dict[str, Any]) -> None:
    """Queries that a drawn mask leaves no key: the one thing in which we mean to differ, tested below."""
    mask = inputs["attn_mask"]
    if mask is not None:
        for b, (length, before) in enumerate(case.sequences):
            row, column = int(inputs["seqstarts"][b]), int(inputs["kvstarts"][b])
            block = mask[..., row : row + length, column : column + length + before]
            block[..., :1] = block[..., :1].nan_to_num(0.5, neginf=0.5)


def test_everything_agrees(tmp_path: Path) -> None:
    drawn = cases()
    made = [case.make() for case in drawn]
    for case, inputs in zip(drawn, made, strict=True):
        without_hidden_rows(case, inputs)
    answers = ask([call_of(case, [inputs]) for case, inputs in zip(drawn, made, strict=True)], tmp_path)
    worse = []
    for case, inputs, answer in zip(drawn, made, answers, strict=True):
        assert "error" not in answer, (answer, case)
        theirs = answer["outputs"][0]
        golden = None
        for implementation in ("reference", "cpu"):
            own = clone(inputs)
            ours = multi_head_cache_attention(**own, **case.attributes(), implementation=implementation)
            assert torch.equal(octets(own["cache"]), octets(answer["cache"])), case
            assert not case.bits or torch.equal(octets(own["scale"]), octets(answer["scale"])), case
            if golden is None:
                golden = torch.from_numpy(judge(case, own))
            absolute, relative = LIMITS[case.dtype]
            torch.testing.assert_close(ours.double(), theirs.double(), atol=absolute, rtol=relative)
            error, other = (
                (output.double() - golden).abs().amax() if golden.numel() else 0.0 for output in (ours, theirs)
            )
            ulp = torch.finfo(case.dtype).eps * float(golden.abs().max() if golden.numel() else 0)
            if error > 1.5 * other + ulp:
                worse.append((implementation, float(error), float(other), case))
    assert not worse, f"{len(worse)} less exact than the oracle: {worse[:3]}"  # check 43
    assert len(drawn) >= 190


def test_a_prompt_and_then_tokens(tmp_path: Path) -> None:
    """State carried over four calls, on both sides apart."""
    drawn = [
        Case(
            [(5, 0), (3, 4)],
            layers=2,
            bits=bits,
            layout=layout,
            paged=paged,
            page=3,
            dtype=dtype,
            scale_dtype=dtype,
            layer=1,
        )
        for bits in (0, 8)
        for layout in range(4)
        for paged in (False, True)
        for dtype in (torch.float32, torch.float16)
    ]
    calls, states = [], []
    for case in drawn:
        room = replace(case, sequences=[(length + 3, before) for length, before in case.sequences])
        whole = room.make()
        steps, at = [], [before for _, before in case.sequences]
        lengths = [length for length, _ in case.sequences]
        for step in range(4):
            new = lengths if step == 0 else [1, 1]
            count = sum(new)
            fresh = replace(case, sequences=[(1, 0)] * count, seed=step).make()
            inputs = whole | {name: fresh[name] for name in ("query", "current_key", "current_value")}
            inputs |= {
                "seqstarts": torch.tensor([0, *torch.tensor(new).cumsum(0)]),
                "kvstarts": torch.tensor([0, *(torch.tensor(new) + torch.tensor(at)).cumsum(0)]),
                "start_pos": torch.tensor(at),
                "max_seqlen": torch.tensor([max(new)]),
                "max_kvlen": torch.tensor([max(a + n for a, n in zip(at, new, strict=True))]),
            }
            steps.append(inputs)
            at = [a + n for a, n in zip(at, new, strict=True)]
        calls.append(call_of(case, steps))
        states.append(steps)
    for case, steps, answer in zip(drawn, states, ask(calls, tmp_path), strict=True):
        assert "error" not in answer, (answer, case)
        for implementation in ("reference", "cpu"):
            own = clone(steps[0])
            for step, theirs in zip(steps, answer["outputs"], strict=True):
                inputs = step | {"cache": own["cache"], "scale": own["scale"]}
                ours = multi_head_cache_attention(**inputs, **case.attributes(), implementation=implementation)
                absolute, relative = LIMITS[case.dtype]
                torch.testing.assert_close(ours, theirs, atol=absolute, rtol=relative)
            assert torch.equal(octets(own["cache"]), octets(answer["cache"]))
            assert not case.bits or torch.equal(octets(own["scale"]), octets(answer["scale"]))


def test_the_oracle_is_what_we_take_it_for(tmp_path: Path) -> None:
    """Its layouts agree with each other, it is right by float64, and poison does not reach its output."""
    drawn = [Case([(3, 2), (1, 5)], layout=layout, mask="2d+", hidden=0.0) for layout in range(4)]
    made = [case.make() for case in drawn]
    for inputs in made:
        for name in ("query", "current_key", "current_value", "attn_mask"):
            inputs[name] = made[0][name]
    answers = ask([call_of(case, [inputs]) for case, inputs in zip(drawn, made, strict=True)], tmp_path)
    for case, inputs, answer in zip(drawn, made, answers, strict=True):
        golden = torch.from_numpy(judge(case, inputs | {"cache": answer["cache"]}))
        assert float((answer["outputs"][0].double() - golden).abs().max()) < 2e-6


def both(tmp_path: Path, case: Case, inputs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """The oracle's answer, and ours: an output or an error."""
    (answer,) = ask([call_of(case, [inputs])], tmp_path)
    try:
        return answer, multi_head_cache_attention(**clone(inputs), **case.attributes())
    except ArgumentError as error:
        return answer, error


# The intended deviations, one by one


def test_deviation_plain_attention_with_alibi(tmp_path: Path) -> None:
    """The oracle's MultiHeadAttention computes ALiBi and drops it; there is no such operator here: bias is applied."""
    query, key, value = torch.randn(3, 4, 8), torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    starts = torch.tensor([0, 3])
    plain = [
        [
            query,
            key,
            value,
            starts,
            starts,
            torch.tensor([0]),
            torch.tensor([3]),
            torch.tensor([3]),
            None,
            4,
            8,
            True,
            a,
        ]
        for a in (False, True)
    ]
    without, with_alibi = (answer["outputs"][0] for answer in ask([{"plain": p} for p in plain], tmp_path))
    assert torch.equal(without, with_alibi)
    case = Case([(3, 0)], kv_heads=4, width=8)
    inputs = case.make() | {"query": query, "current_key": key, "current_value": value}
    ours = [multi_head_cache_attention(**clone(inputs), **replace(case, alibi=a).attributes()) for a in (False, True)]
    torch.testing.assert_close(ours[0], without, atol=3e-6, rtol=3e-6)
    assert not torch.allclose(ours[1], ours[0])


def test_deviation_alibi_in_half_precision(tmp_path: Path) -> None:
    """The oracle rounds biases to float16, where far ones collapse; ours are float32."""
    case = Case([(1, 4099)], heads=2, kv_heads=1, width=8, dtype=torch.float16, alibi=True, page=4200)
    inputs = case.make()
    inputs["query"].zero_()
    inputs["cache"].nan_to_num_(0)
    for t in range(4099):  # values that tell near from far
        inputs["cache"][case.address(1, case.row(inputs["cachestarts"], 0, t), 0)] = 8.0 if t % 2 else -8.0
    mask = torch.full((1, 4100), -math.inf)
    mask[0, :64] = 0  # only what is far away counts: distances of 4036 to 4099
    inputs["attn_mask"] = mask
    answer, ours = both(tmp_path, case, inputs)
    after = clone(inputs)
    multi_head_cache_attention(**after, **case.attributes())
    golden = torch.from_numpy(judge(case, after))
    assert float((ours.double() - golden).abs().max()) < 4e-3
    assert not float((answer["outputs"][0].double() - golden).abs().max()) < 4e-3


@pytest.mark.parametrize("paged", [False, True])
def test_deviation_keys_that_contradict_start_pos(tmp_path: Path, paged: bool) -> None:
    """The oracle raises, broadcasts, truncates or reads what is stale; we name the contradiction."""
    case = Case([(1, 0)], paged=paged)
    inputs = case.make()
    inputs |= {"kvstarts": torch.tensor([0, 2]), "max_kvlen": torch.tensor([2])}
    answer, ours = both(tmp_path, case, inputs)
    assert "outputs" in answer, "it was to be silent"
    assert isinstance(ours, ArgumentError)
    assert "kvstarts gives sequence 0 2 keys" in str(ours)


def test_deviation_a_query_that_sees_nothing(tmp_path: Path) -> None:
    """NaN in the oracle, zeros here."""
    case = Case([(2, 2)], causal=False, mask="2d", hidden=0.0)
    inputs = case.make()
    inputs["attn_mask"][0] = -math.inf
    answer, ours = both(tmp_path, case, inputs)
    assert answer["outputs"][0][0].isnan().all()
    assert torch.equal(ours[0], torch.zeros_like(ours[0]))
    torch.testing.assert_close(ours[1], answer["outputs"][0][1], atol=3e-6, rtol=3e-6)


def test_deviation_boolean_masks(tmp_path: Path) -> None:
    """The oracle adds 0 and 1; we refuse."""
    case = Case([(2, 2)], causal=False)
    inputs = case.make()
    mask = torch.tensor([[True, False, True, False], [False, True, True, True]])
    answer, ours = both(tmp_path, case, inputs | {"attn_mask": mask})
    numbers = multi_head_cache_attention(**clone(inputs) | {"attn_mask": mask.float()}, **case.attributes())
    torch.testing.assert_close(answer["outputs"][0], numbers, atol=3e-6, rtol=3e-6)
    assert isinstance(ours, ArgumentTypeError)


def test_deviation_rows_outside_the_cache(tmp_path: Path) -> None:
    """The oracle wraps negative rows around, or fails obscurely; we name the entry."""
    case = Case([(2, 4)], page=4)
    inputs = case.make()
    wrapped = clone(inputs)
    tokens = len(inputs["cache"])
    wrapped["cachestarts"][0, :2] -= tokens
    first, expected = ask([call_of(case, [wrapped]), call_of(case, [inputs])], tmp_path)
    assert torch.equal(first["outputs"][0], expected["outputs"][0])
    with pytest.raises(CacheRangeError, match="cachestarts"):
        multi_head_cache_attention(**wrapped, **case.attributes())
    beyond = clone(inputs)
    beyond["cachestarts"][0, 1] = tokens
    answer, ours = both(tmp_path, case, beyond)
    assert "error" in answer
    assert isinstance(ours, CacheRangeError)
