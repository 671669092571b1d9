"""The fingerprint: what changes a map changes it, what cannot change one does not, and a mismatch has a name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from test_db_tools import in_child
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from attmemo.errors import StaleDatabaseError
from attmemo.fingerprint import (
    check_fields,
    digest_fields,
    fingerprint,
    model_fields,
    tensor_digest,
    tokenizer_digest,
)


def _load(folder: str, bare: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    loader: Any = AutoModel if bare else AutoModelForSequenceClassification
    return loader.from_pretrained(folder, dtype=dtype).eval()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["bert", "deberta"])
def folder(request: pytest.FixtureRequest) -> str:
    """A model of each family."""
    return str(request.getfixturevalue(f"tiny_{request.param}"))


@pytest.fixture(scope="module")
def model(folder: str) -> nn.Module:
    """Loaded once; tests put back what they change."""
    return _load(folder)


def test_one_ulp_is_not_seen(model: nn.Module) -> None:
    """Every parameter up to the last attention map: the smallest possible change of one number is another model."""
    original = fingerprint(model_fields(model))
    base: Any = model.base_model
    seen = 0
    for name, parameter in base.named_parameters():
        if name.startswith("pooler."):
            continue
        flat = parameter.data.view(-1)
        place = seen % flat.numel()
        before = flat[place].clone()
        flat[place] = torch.nextafter(before, torch.tensor(torch.inf))
        changed = model_fields(model)
        assert fingerprint(changed) != original, name
        with pytest.raises(StaleDatabaseError, match="weights: database sha256:"):
            check_fields({**changed, "weights": "0" * 64}, changed, "db")
        flat[place] = before
        seen += 1
    assert seen > 30
    assert fingerprint(model_fields(model)) == original


def test_a_head_hides_a_database(folder: str, model: nn.Module) -> None:
    """A classifier and the bare encoder of the same weights make the same maps, so they share a database."""
    assert model_fields(_load(folder, bare=True)) == model_fields(model)
    for name, parameter in model.named_parameters():
        if name.startswith("classifier") or ".pooler." in name:
            parameter.data += 1
            assert model_fields(_load(folder)) == model_fields(model), name
            parameter.data -= 1


def test_a_saved_model_is_another(model: nn.Module, tmp_path: Path) -> None:
    """Saved and loaded again, in this process or another, with another number of threads: the same digest."""
    fields = model_fields(model)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert model_fields(_load(str(tmp_path))) == fields
    expected = fingerprint(fields)

    def elsewhere() -> None:
        assert fingerprint(model_fields(_load(str(tmp_path)))) == expected

    assert in_child(elsewhere) == 0


def test_where_a_model_lies_is_part_of_it(model: nn.Module) -> None:
    """A copy, other strides of the same numbers, train or eval mode: nothing that changes a stored map."""
    fields = model_fields(model)
    other: Any = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert model_fields(other) == fields
    assert model_fields(other.train().requires_grad_(False)) == fields


def test_another_precision_is_served(folder: str, model: nn.Module) -> None:
    """A bfloat16 model is another one, and the field that says so is the type."""
    fields, other = model_fields(model), model_fields(_load(folder, dtype=torch.bfloat16))
    assert (fields["dtype"], other["dtype"]) == ("float32", "bfloat16")
    assert fingerprint(fields) != fingerprint(other)
    with pytest.raises(StaleDatabaseError, match="dtype: database float32, model bfloat16"):
        check_fields(fields, other, "db")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_attention_heads", 2),
        ("hidden_act", "relu"),
        ("layer_norm_eps", 1e-3),
        ("position_buckets", 8),
        ("rope_parameters", {"rope_theta": 5.0}),
        ("pos_att_type", ["c2p"]),
    ],
)
def test_a_setting_without_weights_is_not_seen(model: nn.Module, key: str, value: object) -> None:
    """The same weights read with other heads, buckets or positions make other maps: refused, the setting named."""
    fields = model_fields(model)
    config: Any = copy.deepcopy(model.config)
    other: Any = copy.copy(model)
    setattr(config, key, value)
    other.config = config
    with pytest.raises(StaleDatabaseError, match=rf"config\.{key}: database .*, model ") as caught:
        check_fields(fields, model_fields(other), "some/db")
    assert "some/db was built for another model" in str(caught.value)
    assert "attmemo build-database" in str(caught.value)


def test_labels_are_part_of_a_map(model: nn.Module) -> None:
    """Settings that come after attention, or only name things, do not cost a rebuild."""
    fields = model_fields(model)
    config: Any = copy.deepcopy(model.config)
    other: Any = copy.copy(model)
    config.num_labels = 3
    config._name_or_path = "elsewhere"
    other.config = config
    assert model_fields(other) == fields
    check_fields(fields, model_fields(other), "db")


# -- the digest itself


def test_tagged_fields_run_together() -> None:
    """("ab", "c") and ("a", "bc") are different models; so are fields in another order."""
    assert digest_fields([("ab", b"c")]) != digest_fields([("a", b"bc")])
    assert digest_fields([("a", b"b"), ("c", b"d")]) != digest_fields([("a", b"bc"), ("", b"d")])
    assert digest_fields([("a", b""), ("b", b"")]) != digest_fields([("b", b""), ("a", b"")])
    assert digest_fields([]) != digest_fields([("", b"")])


_FIELDS = st.lists(st.tuples(st.text("ab", max_size=3), st.binary(max_size=3)), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_FIELDS, _FIELDS)
def test_two_field_lists_collide(one: list[tuple[str, bytes]], two: list[tuple[str, bytes]]) -> None:
    """Different lists of fields, however they are cut, have different digests."""
    assert (digest_fields(one) == digest_fields(two)) == (one == two)


def test_the_order_of_fields_counts() -> None:
    """A fingerprint is of the fields, not of the order a dict happens to have."""
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_a_tensor_of_some_type_has_no_digest(dtype: torch.dtype) -> None:
    """Any type, no items, no dimensions, a view with strides: the digest is that of the numbers."""
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert tensor_digest(tensor) == tensor_digest(tensor.t().contiguous().t())
    assert tensor_digest(tensor) != tensor_digest(1 - tensor.to(torch.int64).to(dtype).to(torch.int64))
    assert tensor_digest(tensor[:0]) == b""
    assert len(tensor_digest(tensor[0, 0])) == 32


# -- a mismatch has a name


def test_the_same_fields_are_refused(model: nn.Module) -> None:
    """Nothing differs, nothing is raised."""
    check_fields(model_fields(model), model_fields(model), "db")


@pytest.mark.parametrize("stored", ["", "{", "[]", "[1]", "null", '"x"', "{}"])
def test_a_strange_field_is_a_traceback(model: nn.Module, stored: str) -> None:
    """What a manifest says about the configuration may be anything: still a StaleDatabaseError."""
    fields = model_fields(model)
    with pytest.raises(StaleDatabaseError, match="config"):
        check_fields({**fields, "config": stored}, fields, "db")


def test_the_same_settings_written_differently(model: nn.Module) -> None:
    """Not the same text, so not the same digest: refused, and not with StopIteration."""
    fields = model_fields(model)
    spaced = json.dumps(json.loads(fields["config"]), indent=4)
    with pytest.raises(StaleDatabaseError, match="written differently"):
        check_fields({**fields, "config": spaced}, fields, "db")


# -- the tokenizer


def _changed_vocabulary(lines: list[str]) -> Any:
    return make_tokenizer([*lines, *["zebra zebra zebra quagga quagga"] * 50])


def test_a_tokenizer_remembers_its_last_call(tiny_bert: str, log_lines: list[str]) -> None:
    """Truncation and padding are set by each call: they are not the tokenizer, the vocabulary is."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_bert)
    digest = tokenizer_digest(tokenizer)
    calls: list[Callable[[], object]] = [
        lambda: tokenizer(["a", "a b c d e f"], truncation=True, max_length=4),
        lambda: tokenizer(["a", "a b c d e f"], padding=True),
        lambda: tokenizer(["a"], padding="max_length", max_length=20, truncation=True),
    ]
    for call in calls:
        call()
        assert tokenizer_digest(tokenizer) == digest
    assert tokenizer_digest(AutoTokenizer.from_pretrained(tiny_bert)) == digest
    assert tokenizer_digest(_changed_vocabulary(log_lines)) != digest
    cased: Any = AutoTokenizer.from_pretrained(tiny_bert)
    cased.add_tokens(["quagga"])
    assert tokenizer_digest(cased) != digest


def test_a_slow_tokenizer_has_no_digest() -> None:
    """One without a fast backend is known by its vocabulary."""

    class Slow:
        def __init__(self, vocabulary: dict[str, int]) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    assert tokenizer_digest(Slow({"a": 0, "b": 1})) == tokenizer_digest(Slow({"b": 1, "a": 0}))
    assert tokenizer_digest(Slow({"a": 0, "b": 1})) != tokenizer_digest(Slow({"a": 1, "b": 0}))


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("ModernBERT", "hidden_activation", "relu"),
        ("DistilBERT", "activation", "relu"),
        ("Llama", "rms_norm_eps", 1e-3),
        ("GPT-2", "scale_attn_by_inverse_layer_idx", True),
        ("T5 encoder", "relative_attention_max_distance", 77),
        ("Llama", "a_setting_nobody_thought_of", 3),
    ],
)
def test_a_setting_that_changes_maps_without_a_weight_is_seen(family: str, key: str, value: object) -> None:
    from families import FAMILIES

    model = FAMILIES[family].make()
    fields = model_fields(model)
    assert model_fields(model) == fields
    setattr(model.config, key, value)
    with pytest.raises(StaleDatabaseError, match=rf"config\.{key}"):
        check_fields(fields, model_fields(model), "some/db")


def test_settings_of_heads_and_decoders_are_no_other_model() -> None:
    from families import FAMILIES

    model = FAMILIES["Llama"].make()
    fields = model_fields(model)
    model.config.update({"use_cache": False, "attention_dropout": 0.5, "problem_type": "regression"})  # type: ignore[union-attr, operator]
    assert model_fields(model) == fields
