"""The attention operator as torch's: registered, faked, compiled, exported, and what it promises there."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from ops_cases import Case, clone, octets

from attmemo.errors import ArgumentError
from attmemo.fastseq.ops import multi_head_cache_attention

CASES = [
    Case([(1, 5), (3, 2)], mask="2d", decoding=1),
    Case([(1, 5), (3, 2)], bits=8, paged=False, layout=3),
    Case([(4, 0)], bits=4, alibi=True, dtype=torch.bfloat16),
]


class Attention(torch.nn.Module):
    """A layer that has nothing but the operator between two sums, so that something is traced around it."""

    def __init__(self, case: Case, **options: Any) -> None:
        super().__init__()
        self.options = case.attributes() | options

    def forward(self, **inputs: Any) -> torch.Tensor:
        query = inputs.pop("query")
        return multi_head_cache_attention(query + 1, **inputs, **self.options) * 2


def as_positional(case: Case, inputs: dict[str, Any], implementation: str) -> tuple[Any, ...]:
    """Arguments of the registered operator."""
    return (*inputs.values(), *case.attributes().values(), implementation, True)


@pytest.mark.parametrize("case", CASES, ids=["mask", "int8", "int4"])
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_opcheck(case: Case, implementation: str) -> None:
    arguments = as_positional(case, case.make(), implementation)
    torch.library.opcheck(torch.ops.attmemo.multi_head_cache_attention.default, arguments)


@pytest.mark.parametrize("case", CASES, ids=["mask", "int8", "int4"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_in_one_graph(case: Case, backend: str) -> None:
    inputs = case.make()
    layer = Attention(case)
    expected = clone(inputs)
    with torch.inference_mode():
        output = layer(**expected)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs), output)
    assert torch.equal(octets(inputs["cache"]), octets(expected["cache"])), "the update of the cache was lost"
    assert case.bits == 0 or torch.equal(octets(inputs["scale"]), octets(expected["scale"]))


def test_compile_once_for_all_sizes() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = torch.compile(Attention(Case([])), backend=counter, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for sequences in (
            [(1, 5), (6, 20), (3, 0), (2, 1), (1, 1)],  # no two sizes alike, or they would be taken for one
            [(2, 4), (5, 6), (4, 0)],
            [(7, 0), (2, 2), (3, 9), (2, 1)],
        ):
            case = Case(sequences)
            inputs = case.make()
            expected = Attention(case)(**clone(inputs))
            assert torch.equal(layer(**inputs), expected)
    assert counter.frame_count == 1, "compiled anew for other lengths"


def test_compile_with_numbers_as_integers() -> None:
    case = CASES[0]
    inputs = case.make() | {"decoding_batches": 1, "max_seqlen": 9, "max_kvlen": None}
    expected = Attention(case)(**clone(inputs))
    compiled = torch.compile(Attention(case), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(**inputs), expected)


@pytest.mark.parametrize("case", CASES, ids=["mask", "int8", "int4"])
@pytest.mark.parametrize("strict", [False, True])
def test_export(case: Case, strict: bool) -> None:
    inputs = {name: value for name, value in case.make().items() if value is not None}
    fixed = {name: None for name in ("scale", "attn_mask") if name not in inputs}
    layer = Attention(case, **fixed)
    with torch.no_grad():
        program = torch.export.export(layer, (), clone(inputs), strict=strict)
        assert "attmemo.multi_head_cache_attention" in str(program.graph)
        expected = clone(inputs)
        output = layer(**expected)
        assert torch.equal(program.module()(**inputs), output)
    assert torch.equal(octets(inputs["cache"]), octets(expected["cache"]))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_modes(mode: Any) -> None:
    case = CASES[0]
    inputs = case.make()
    expected = multi_head_cache_attention(**clone(inputs), **case.attributes())
    with mode():
        assert torch.equal(multi_head_cache_attention(**inputs, **case.attributes()), expected)


def test_the_output_shares_no_memory_with_inputs() -> None:
    for implementation in ("reference", "cpu"):
        inputs = CASES[0].make()
        output = multi_head_cache_attention(**inputs, **CASES[0].attributes(), implementation=implementation)
        homes = {value.untyped_storage().data_ptr() for value in inputs.values() if isinstance(value, torch.Tensor)}
        assert output.untyped_storage().data_ptr() not in homes


def test_the_same_twice() -> None:
    case = Case([(1, 700), (30, 4)], bits=8)
    inputs = case.make()
    torch.manual_seed(1)
    first = multi_head_cache_attention(**clone(inputs), **case.attributes())
    torch.manual_seed(2)
    assert torch.equal(multi_head_cache_attention(**inputs, **case.attributes()), first)


def test_meta_tensors_have_a_shape_only() -> None:
    inputs = {name: value.to("meta") if value is not None else None for name, value in CASES[0].make().items()}
    output = multi_head_cache_attention(**inputs, **CASES[0].attributes())
    assert output.is_meta
    assert output.shape == inputs["query"].shape
    with pytest.raises(ArgumentError, match="on cpu"):
        multi_head_cache_attention(**inputs | {"cache": CASES[0].make()["cache"]}, **CASES[0].attributes())


def test_copies_of_a_cache_go_their_own_ways() -> None:
    case = replace(CASES[0], mask="none")
    inputs = case.make()
    for other in (copy.deepcopy(inputs), pickle.loads(pickle.dumps(inputs))):
        before = octets(inputs["cache"]).clone()
        multi_head_cache_attention(**other, **case.attributes())
        assert torch.equal(octets(inputs["cache"]), before)
