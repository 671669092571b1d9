"""What the attention operator refuses: each rule of the specification, broken alone, with the cache untouched."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from ops_cases import Case, clone, octets

from attmemo.errors import (
    ArgumentError,
    ArgumentTypeError,
    AttmemoError,
    CacheOverlapError,
    CacheRangeError,
    ImplementationError,
)
from attmemo.fastseq.ops import check_arguments, choose_implementation, multi_head_cache_attention, page_offsets
from attmemo.fastseq.serving.ops.arguments import _check_contents, _is_sound

PAGED = Case([(2, 3), (1, 6)], layers=2, layer=1)
OFFSET = Case([(2, 3), (1, 6)], paged=False)
INT8 = Case([(2, 3), (1, 6)], bits=8)
INT4 = Case([(2, 3), (1, 6)], bits=4)


def refused(case: Case, **changes: Any) -> str:
    """Why a call with these changes was refused; nothing may have been written."""
    inputs, attributes = case.make(), case.attributes()
    for name, value in changes.items():
        (attributes if name in attributes else inputs)[name] = value(inputs[name]) if callable(value) else value
    before = clone(inputs)
    with pytest.raises(ArgumentError) as caught, torch.inference_mode():
        multi_head_cache_attention(**inputs, **attributes)
    for name in ("cache", "scale"):
        if isinstance(before[name], torch.Tensor) and isinstance(inputs[name], torch.Tensor):
            assert torch.equal(octets(before[name]), octets(inputs[name])), "refused, but something was written"
    assert isinstance(caught.value, AttmemoError)
    assert isinstance(caught.value, ValueError)
    refused.kind = type(caught.value)  # type: ignore[attr-defined]
    return str(caught.value)


def test_what_is_changed_below_is_valid_as_it_is() -> None:
    for case in (PAGED, OFFSET, INT8, INT4):
        with torch.inference_mode():
            multi_head_cache_attention(**case.make(), **case.attributes())


def _name(value: Any) -> str:
    """What a case is called: the same in each process that runs a share of the tests, so no address of a function."""
    return ",".join(value) if isinstance(value, dict) else str(value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_heads": 3}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"num_heads": 0}, "num_heads is 0"),
        ({"head_dim": 0}, "head_dim is 0"),
        ({"head_dim": 8}, "query has shape"),
        ({"num_heads": 8}, "query has shape"),
        ({"num_kv_heads": 0}, "current_key has shape"),
        ({"num_kv_heads": 4}, "current_key has shape"),
        ({"num_layer": 3}, "cache has shape"),
        ({"layer_idx": 2}, "layer_idx is 2"),
        ({"layer_idx": -1}, "layer_idx is -1"),
        ({"quant_bit": 3}, "quant_bit is 3"),
        ({"quant_bit": 8}, "cache is float32, expected int8"),
        ({"cache_mode": 2}, "cache_mode is 2"),
        ({"cache_mode": 0}, "cachestarts has shape"),
        ({"cache_layout": 4}, "cache_layout is 4"),
        ({"cache_layout": 1}, "cache has shape"),
        ({"page_size": 0}, "page_size is 0"),
        ({"quant_group": 0}, "quant_group is 0"),
        ({"query": lambda t: t.flatten(1)}, "query has shape"),
        ({"query": lambda t: t[:2]}, "current_key has shape"),
        ({"query": lambda t: t.double()}, "query is float64"),
        ({"current_key": lambda t: t.half()}, "current_key is float16, expected float32"),
        ({"current_value": lambda t: t[:, :1]}, "current_value has shape"),
        ({"seqstarts": torch.tensor([0, 2])}, "seqstarts has shape [2], expected [3]"),
        ({"seqstarts": torch.tensor([0.0, 2, 3])}, "seqstarts is float32"),
        ({"seqstarts": torch.tensor([1, 2, 3])}, "seqstarts must begin with 0"),
        ({"seqstarts": torch.tensor([0, 4, 3])}, "seqstarts must begin with 0 and never decrease"),
        ({"seqstarts": torch.tensor([0, 2, 4])}, "seqstarts ends with 4, but query has 3"),
        ({"kvstarts": torch.tensor([0, 5, 13])}, "kvstarts gives sequence 1 8 keys"),
        ({"kvstarts": torch.tensor([0, 4, 12])}, "kvstarts gives sequence 0 4 keys"),
        ({"kvstarts": torch.tensor([0, 2**62, 2**62 + 1])}, "kvstarts gives sequence 0"),
        ({"start_pos": torch.tensor([3, -6])}, "start_pos of sequence 1 is -6"),
        ({"start_pos": torch.tensor([3])}, "seqstarts has shape"),
        ({"start_pos": torch.tensor([[3, 6]])}, "start_pos has shape"),
        ({"cachestarts": lambda t: t[:1]}, "cachestarts has 1 sequences"),
        ({"cachestarts": lambda t: t[:, :1]}, "pages of 4 hold 4"),
        ({"cachestarts": lambda t: t.index_fill(1, torch.tensor([1]), -1)}, "cachestarts[0, 1] is -1"),
        ({"cachestarts": lambda t: t.index_fill(1, torch.tensor([0]), 10**6)}, "cachestarts[0, 0] is 1000000"),
        ({"cachestarts": lambda t: t.index_fill(1, torch.tensor([1]), 2**63 - 1)}, "cachestarts[0, 1] is"),
        ({"decoding_batches": 3}, "decoding_batches is 3, expected 0 to 2"),
        ({"decoding_batches": -1}, "decoding_batches is -1"),
        ({"decoding_batches": torch.tensor([0, 1])}, "decoding_batches is a tensor [2]"),
        ({"decoding_batches": torch.tensor(0.5)}, "decoding_batches is a tensor"),
        ({"decoding_batches": torch.tensor(1 + 0j, dtype=torch.complex128)}, "decoding_batches is a tensor"),
        ({"max_seqlen": 1}, "max_seqlen is 1, but a sequence has 2"),
        ({"max_kvlen": torch.tensor(6)}, "max_kvlen is 6, but a sequence has 7"),
        ({"max_kvlen": -5}, "max_kvlen is -5"),
        ({"cache": lambda t: t[:, :1]}, "cache has shape"),
        ({"cache": lambda t: t[..., :8]}, "cache has shape"),
        ({"cache": lambda t: t[0]}, "cache has shape"),
        ({"cache": lambda t: t.to(torch.int8)}, "cache is int8, expected float32"),
        ({"cache": lambda t: t[:1].expand(t.shape)}, "cache is expanded"),
        ({"scale": torch.ones(3)}, "scale is given with quant_bit 0"),
        ({"attn_mask": torch.ones(3, 12, dtype=torch.bool)}, "attn_mask is bool"),
        ({"attn_mask": torch.ones(0, dtype=torch.bool)}, "attn_mask is bool"),
        ({"attn_mask": torch.ones(3, 12, dtype=torch.int64)}, "attn_mask is int64"),
        ({"attn_mask": torch.zeros(3, 11)}, "attn_mask has 11 columns, but all sequences together have 12 keys"),
        ({"attn_mask": torch.zeros(2, 12)}, "attn_mask has shape"),
        ({"attn_mask": torch.zeros(2, 3, 12)}, "attn_mask has shape"),
        ({"attn_mask": torch.zeros(36)}, "attn_mask has shape"),
        ({"attn_mask": [[0.0]]}, "attn_mask"),
    ],
    ids=_name,
)
def test_a_broken_rule_is_named(changes: dict[str, Any], words: str) -> None:
    if changes.get("attn_mask") == [[0.0]]:  # torch's dispatcher is before us, and raises an error of its own
        with pytest.raises(RuntimeError, match="attn_mask"):
            refused(PAGED, **changes)
        return
    assert words in refused(PAGED, **changes)


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        (INT8, {"quant_group": 5}, "head_dim 16 is not a multiple of quant_group 5"),
        (INT8, {"quant_group": 4}, "scale has shape"),
        (INT8, {"scale": None}, "scale is missing"),
        (INT8, {"scale": torch.empty(0)}, "scale has shape"),
        (INT8, {"scale": lambda t: t.double()}, "scale is float64"),
        (INT8, {"cache": lambda t: t.view(torch.uint8)}, "cache is uint8, expected int8"),
        (INT8, {"scale": lambda t: t[:1].expand(t.shape)}, "scale is expanded"),
        (INT4, {"quant_group": 1}, "must be even"),
        (INT4, {"cache": lambda t: t.float()}, "cache is float32, expected uint8, int8"),
        (INT4, {"quant_bit": 8, "cache": lambda t: t.view(torch.int8)}, "cache has shape"),
        (
            Case([(1, 1)], width=9),
            {"quant_bit": 4, "quant_group": 9, "cache": lambda t: t.to(torch.uint8)},
            "must be even",
        ),
        (OFFSET, {"cache_mode": 1}, "cachestarts has shape"),
        (OFFSET, {"cachestarts": lambda t: t - 100}, "cachestarts[0] is"),
        (OFFSET, {"cachestarts": lambda t: t + 100}, "cachestarts[0] is"),
    ],
    ids=_name,
)
def test_a_broken_rule_of_other_caches_is_named(case: Case, changes: dict[str, Any], words: str) -> None:
    assert words in refused(case, **changes)


def test_errors_have_names() -> None:
    refused(PAGED, cachestarts=lambda t: t + 1000)
    assert refused.kind is CacheRangeError  # type: ignore[attr-defined]
    assert "not page numbers" in refused(PAGED, cachestarts=lambda t: t + 1000)
    refused(PAGED, attn_mask=torch.ones(3, 12, dtype=torch.bool))
    assert refused.kind is ArgumentTypeError  # type: ignore[attr-defined]
    assert "masked_fill" in refused(PAGED, attn_mask=torch.ones(3, 12, dtype=torch.bool))


# 15, 16: who may write where


def starts(case: Case, table: list[Any]) -> dict[str, Any]:
    return case.make() | {"cachestarts": torch.tensor(table), "max_seqlen": None, "max_kvlen": None}


@pytest.mark.parametrize(
    ("table", "error"),
    [
        ([[3, 8, -1], [12, 16, -1]], None),
        # The first reads rows 0-3 and writes 3 and 4 of its pages; the second reads 0-6 and writes 6.
        ([[3, 8, -1], [12, 6, -1]], CacheOverlapError),  # both write row 8
        ([[3, 8, -1], [12, 4, -1]], CacheOverlapError),  # the second writes row 6, so does the first
        ([[3, 8, -1], [12, 3, -1]], CacheOverlapError),  # the second writes row 5, which the first has read
        ([[3, 8, -1], [3, 16, -1]], None),  # a prefix of four rows, the last of which the first one writes
        ([[3, 8, -1], [12, 8, -1]], None),  # the same, in a later page
        ([[3, 4, -1], [12, 16, -1]], None),  # within one sequence: odd, but the rows written are different
    ],
)
def test_pages_that_overlap(table: list[Any], error: type[Exception] | None) -> None:
    case = PAGED
    inputs = starts(case, table)
    inputs["cache"] = torch.zeros(32, *inputs["cache"].shape[1:])
    arguments = {**inputs, **case.attributes()}
    sound = _is_sound(check_arguments(**arguments, validate=False))
    if error is None:
        assert sound
        check_arguments(**arguments)
    else:
        assert not sound
        with pytest.raises(error):
            check_arguments(**arguments)
        assert not inputs["cache"].any()


def test_a_page_twice_where_it_is_written() -> None:
    case = Case([(6, 0)])
    inputs = starts(case, [[4, 6]])
    with pytest.raises(CacheOverlapError, match="both write row 6"):
        check_arguments(**inputs, **case.attributes())


def test_two_new_requests_may_share_a_prefix_that_the_first_writes() -> None:
    """Rows are read when all are written: the second sees them, as in the specification, which goes in order."""
    case = Case([(4, 0), (1, 4)])
    inputs = starts(case, [[4, -1], [4, 8]])
    multi_head_cache_attention(**inputs, **case.attributes())
    turned = Case([(1, 4), (4, 0)])
    with pytest.raises(CacheOverlapError, match="sequence 1 writes rows of the cache that sequence 0"):
        check_arguments(**starts(turned, [[4, 8], [4, -1]]), **turned.attributes())


def test_native_and_python_checks_agree() -> None:
    """On thousands of small calls, most of them broken in one way or another."""
    generator = np.random.default_rng(0)
    seen = {True: 0, False: 0}
    for _ in range(3000):
        batch = int(generator.integers(0, 4))
        length, before = (
            generator.integers(0, 3, batch),
            generator.integers(-1 if generator.random() < 0.1 else 0, 4, batch),
        )
        total = length + before
        if generator.random() < 0.1 and batch:
            total[generator.integers(batch)] += generator.integers(-1, 2)
        paged = bool(generator.random() < 0.7)
        page = int(generator.integers(1, 4))
        table = generator.integers(-1 if generator.random() < 0.2 else 0, 24, (batch, 4) if paged else batch)
        if generator.random() < 0.6:
            table = np.arange(batch * 4).reshape(batch, 4) * page if paged else np.arange(batch) * 7
            if batch and generator.random() < 0.5:
                table[int(generator.integers(batch))] = table[int(generator.integers(batch))]
        case = Case([], paged=paged, page=page, width=2, heads=2, kv_heads=1)
        inputs = case.make() | {
            "query": torch.zeros(int(length.sum()), 2, 2),
            "current_key": torch.zeros(int(length.sum()), 1, 2),
            "current_value": torch.zeros(int(length.sum()), 1, 2),
            "seqstarts": torch.tensor([0, *np.cumsum(length)]),
            "kvstarts": torch.tensor([0, *np.cumsum(total)]),
            "cachestarts": torch.from_numpy(table.astype(np.int64)),
            "start_pos": torch.from_numpy(before.astype(np.int64)),
            "max_seqlen": int(generator.integers(1, 4)),
            "max_kvlen": None,
            "cache": torch.zeros(40, 1, 2, 1, 2),
        }
        arguments = check_arguments(**inputs, **case.attributes(), validate=False)
        try:
            _check_contents(arguments)
            fine = True
        except ArgumentError:
            fine = False
        assert _is_sound(arguments) == fine, inputs
        seen[fine] += 1
    assert min(seen.values()) > 500, seen


def test_unused_entries_may_be_anything() -> None:
    inputs = PAGED.make()
    expected = multi_head_cache_attention(**clone(inputs), **PAGED.attributes())
    inputs["cachestarts"][inputs["cachestarts"] < 0] = 2**63 - 1
    assert torch.equal(multi_head_cache_attention(**inputs, **PAGED.attributes()), expected)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize(
    "kind", [int, torch.tensor, lambda n: torch.tensor([n]), lambda n: torch.tensor(n, dtype=torch.int32)]
)
def test_numbers_may_be_integers_or_tensors(implementation: str, kind: Any) -> None:
    inputs = PAGED.make()
    expected = multi_head_cache_attention(**clone(inputs), **PAGED.attributes(), implementation=implementation)
    inputs |= {"decoding_batches": kind(0), "max_seqlen": kind(100), "max_kvlen": kind(100)}
    output = multi_head_cache_attention(**inputs, **PAGED.attributes(), implementation=implementation)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_index_inputs_may_be_int32_or_strided(implementation: str) -> None:
    inputs = PAGED.make()
    expected = multi_head_cache_attention(**clone(inputs), **PAGED.attributes(), implementation=implementation)
    names = ("seqstarts", "kvstarts", "cachestarts", "start_pos")
    short = clone(inputs) | {name: inputs[name].int() for name in names}
    assert torch.equal(
        multi_head_cache_attention(**short, **PAGED.attributes(), implementation=implementation), expected
    )
    strided = inputs | {name: torch.stack((inputs[name], inputs[name]), -1)[..., 0] for name in names}
    assert torch.equal(
        multi_head_cache_attention(**strided, **PAGED.attributes(), implementation=implementation), expected
    )


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_without_validation_the_same(implementation: str) -> None:
    inputs = PAGED.make()
    outputs = [
        multi_head_cache_attention(
            **clone(inputs), **PAGED.attributes(), implementation=implementation, validate=validate
        )
        for validate in (True, False)
    ]
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    "changes",
    [
        {"cachestarts": lambda t: t + 1000},
        {"cachestarts": lambda t: t - 1000},
        {"kvstarts": lambda t: t * 1000},
        {"start_pos": lambda t: -t},
        {"seqstarts": lambda t: t + 1},
        {"seqstarts": lambda t: t.flip(0)},
        {"cachestarts": lambda t: t[:, :1]},
        {"attn_mask": lambda _: torch.zeros(3, 11)},
    ],
)
def test_native_code_never_leaves_the_cache(changes: dict[str, Any]) -> None:
    """Even where validation is switched off."""
    inputs = PAGED.make()
    before = clone(inputs)
    inputs |= {name: change(inputs[name]) for name, change in changes.items()}
    with pytest.raises(ValueError):
        multi_head_cache_attention(**inputs, **PAGED.attributes(), implementation="cpu", validate=False)
    assert torch.equal(octets(before["cache"]), octets(inputs["cache"]))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", False),
        ("is_alibi", True),
        ("layer_idx", 1),
        ("page_size", 5),
        ("decoding_batches", 1),
        ("cache_layout", 1),
    ],
)
def test_nothing_is_silently_ignored(name: str, value: Any) -> None:
    """What the tests above do not show to be refused changes the result."""
    case = Case([(2, 3), (1, 6)], layers=9 if name == "cache_layout" else 2)
    inputs = case.make()
    inputs["cache"] = torch.randn(9 if name == "cache_layout" else 40, case.layers, 2, 2, 16)
    table = torch.tensor([[0], [0]]) if name == "cache_layout" else torch.tensor([[0, 8], [20, 30]])
    inputs["cachestarts"] = table
    if name == "cache_layout":  # a cache that is a square: either layout fits
        case.sequences, case.page = [(1, 3)], 9
        inputs |= {key: inputs[key][:1] for key in ("query", "current_key", "current_value", "cachestarts")}
        inputs |= {"seqstarts": torch.tensor([0, 1]), "kvstarts": torch.tensor([0, 4]), "start_pos": torch.tensor([3])}
    attributes = case.attributes()
    outputs = []
    for changes in ({}, {name: value}):
        own = clone(inputs) | {k: v for k, v in changes.items() if k in inputs}
        given = attributes | {k: v for k, v in changes.items() if k in attributes}
        outputs.append(multi_head_cache_attention(**own, **given))
    assert not torch.allclose(*outputs)


def test_inputs_that_require_grad_are_refused() -> None:
    case = replace(PAGED, mask="2d")
    for name in ("query", "current_key", "current_value", "cache", "attn_mask"):
        inputs = case.make()
        inputs[name].requires_grad_()
        with pytest.raises(ArgumentError, match=rf"(?s){name} requires grad.*inference_mode"):
            multi_head_cache_attention(**inputs, **case.attributes())
        with torch.no_grad():
            assert not multi_head_cache_attention(**inputs, **case.attributes()).requires_grad


def test_the_signature_is_the_specifications() -> None:
    parameters = inspect.signature(multi_head_cache_attention).parameters
    assert [*parameters] == [
        "query", "current_key", "current_value", "seqstarts", "kvstarts", "cachestarts", "start_pos",
        "decoding_batches", "max_seqlen", "max_kvlen", "cache", "scale", "attn_mask",
        "num_heads", "head_dim", "is_causal", "is_alibi", "num_kv_heads", "num_layer", "layer_idx",
        "quant_bit", "quant_group", "cache_mode", "cache_layout", "page_size", "implementation", "validate",
    ]  # fmt: skip
    defaults = {name: p.default for name, p in parameters.items() if p.default is not inspect.Parameter.empty}
    expected = {"is_causal": True, "is_alibi": False, "num_kv_heads": 0, "num_layer": 1, "layer_idx": 0}
    expected |= {"quant_bit": 0, "quant_group": 8, "cache_mode": 0, "cache_layout": 0, "page_size": 128}
    assert {name: defaults[name] for name in expected} == expected


def test_a_default_device_does_not_move_numbers() -> None:
    inputs = PAGED.make() | {"decoding_batches": 0, "max_seqlen": None, "max_kvlen": None}
    with torch.device("meta"):  # where, as on "cuda", new tensors land without a device of their own
        output = multi_head_cache_attention(**inputs, **PAGED.attributes())
    assert output.device.type == "cpu"


def test_what_was_checked_is_what_is_used() -> None:
    """A thread that writes the next step's indices into the same tensors must not move this one's rows."""
    inputs = PAGED.make()
    arguments = check_arguments(**inputs, **PAGED.attributes())
    before = arguments.indices.cachestarts.copy()
    inputs["cachestarts"].fill_(2**40)
    assert np.array_equal(arguments.indices.cachestarts, before)


def test_tensors_on_two_devices_are_refused() -> None:
    inputs = PAGED.make()
    with pytest.raises(ArgumentError, match="query is on cpu, others on meta"):
        multi_head_cache_attention(**inputs | {"cache": inputs["cache"].to("meta")}, **PAGED.attributes())
    with pytest.raises(ArgumentError, match="cache is on meta, query on cpu"):
        check_arguments(**inputs | {"cache": inputs["cache"].to("meta")}, **PAGED.attributes())


def test_an_implementation_that_cannot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = PAGED.make()
    with pytest.raises(ImplementationError, match="there is no implementation 'fast'"):
        multi_head_cache_attention(**inputs, **PAGED.attributes(), implementation="fast")
    wide = torch.zeros(*inputs["cache"].shape, 2)[..., 0]
    arguments = check_arguments(**inputs | {"cache": wide}, **PAGED.attributes())
    assert choose_implementation(arguments) == "reference"
    with pytest.raises(ImplementationError, match="not neighbours in cache"):
        choose_implementation(arguments, "cpu")
    arguments = check_arguments(**inputs, **PAGED.attributes())
    assert choose_implementation(arguments) == "cpu"
    monkeypatch.setenv("ATTMEMO_ATTENTION", "reference")
    assert choose_implementation(arguments) == "reference"
    assert choose_implementation(arguments, "cpu") == "cpu"
    monkeypatch.setenv("ATTMEMO_ATTENTION", "nonsense")
    with pytest.raises(ImplementationError, match="nonsense"):
        choose_implementation(arguments)


def test_page_numbers_become_offsets() -> None:
    table = torch.tensor([[2, 0, -1], [1, -1, -1]], dtype=torch.int32)
    assert page_offsets(table, 16).tolist() == [[32, 0, -1], [16, -1, -1]]
