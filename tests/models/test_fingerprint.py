"""The fingerprint changes with everything that changes a map, and with nothing else; a mismatch has a name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from children import in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import make_tokenizer
from torch import nn
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from attmemo.errors import StaleDatabaseError
from attmemo.fingerprint import check_fields, digest_fields, fingerprint, model_fields, tensor_digest, tokenizer_digest


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


def test_one_ulp_in_any_weight_is_seen(model: nn.Module) -> None:
    """The smallest possible change of one number gives another fingerprint, in every parameter before the last map."""
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


def test_a_head_does_not_change_the_fingerprint(folder: str, model: nn.Module) -> None:
    """A classifier and the bare encoder of the same weights make the same maps, so they share a database."""
    assert model_fields(_load(folder, bare=True)) == model_fields(model)
    for name, parameter in model.named_parameters():
        if name.startswith("classifier") or ".pooler." in name:
            parameter.data += 1
            assert model_fields(_load(folder)) == model_fields(model), name
            parameter.data -= 1


def test_a_saved_model_keeps_its_fingerprint(model: nn.Module, tmp_path: Path) -> None:
    """Saved and loaded again, in this process or another, with another number of threads: the same digest."""
    fields = model_fields(model)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert model_fields(_load(str(tmp_path))) == fields
    expected = fingerprint(fields)

    def elsewhere() -> None:
        assert fingerprint(model_fields(_load(str(tmp_path)))) == expected

    assert in_child(elsewhere) == 0


def test_memory_layout_and_mode_do_not_change_the_fingerprint(model: nn.Module) -> None:
    """A copy, other strides, train or eval mode: these change no stored map."""
    fields = model_fields(model)
    other: Any = copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.t().contiguous().t()
    assert model_fields(other) == fields
    assert model_fields(other.train().requires_grad_(False)) == fields


def test_another_precision_is_refused(folder: str, model: nn.Module) -> None:
    """A bfloat16 model is another model; the error names the field `dtype`."""
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
def test_a_changed_setting_is_refused_by_name(model: nn.Module, key: str, value: object) -> None:
    """The same weights with other heads, buckets or positions make other maps."""
    fields = model_fields(model)
    config: Any = copy.deepcopy(model.config)
    other: Any = copy.copy(model)
    setattr(config, key, value)
    other.config = config
    with pytest.raises(StaleDatabaseError, match=rf"config\.{key}: database .*, model ") as caught:
        check_fields(fields, model_fields(other), "some/db")
    assert "some/db was built for another model" in str(caught.value)
    assert "attmemo build-database" in str(caught.value)


def test_labels_do_not_change_the_fingerprint(model: nn.Module) -> None:
    """Settings that only name things, or act after attention, need no new database."""
    fields = model_fields(model)
    config: Any = copy.deepcopy(model.config)
    other: Any = copy.copy(model)
    config.num_labels = 3
    config._name_or_path = "elsewhere"
    other.config = config
    assert model_fields(other) == fields
    check_fields(fields, model_fields(other), "db")


# -- the digest itself


def test_fields_do_not_run_together() -> None:
    """("ab", "c") and ("a", "bc") are different models; so are fields in another order."""
    assert digest_fields([("ab", b"c")]) != digest_fields([("a", b"bc")])
    assert digest_fields([("a", b"b"), ("c", b"d")]) != digest_fields([("a", b"bc"), ("", b"d")])
    assert digest_fields([("a", b""), ("b", b"")]) != digest_fields([("b", b""), ("a", b"")])
    assert digest_fields([]) != digest_fields([("", b"")])


_FIELDS = st.lists(st.tuples(st.text("ab", max_size=3), st.binary(max_size=3)), max_size=3)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(_FIELDS, _FIELDS)
def test_no_two_field_lists_collide(one: list[tuple[str, bytes]], two: list[tuple[str, bytes]]) -> None:
    """Different lists of fields have different digests."""
    assert (digest_fields(one) == digest_fields(two)) == (one == two)


def test_the_order_of_fields_does_not_matter() -> None:
    """A fingerprint does not depend on the order of a dict."""
    assert fingerprint({"a": "1", "b": "2"}) == fingerprint({"b": "2", "a": "1"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_tensors_of_every_type_have_a_digest(dtype: torch.dtype) -> None:
    """The digest depends on the numbers, not on strides; empty tensors and scalars have one too."""
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    assert tensor_digest(tensor) == tensor_digest(tensor.t().contiguous().t())
    assert tensor_digest(tensor) != tensor_digest(1 - tensor.to(torch.int64).to(dtype).to(torch.int64))
    assert tensor_digest(tensor[:0]) == b""
    assert len(tensor_digest(tensor[0, 0])) == 32


# -- a mismatch has a name


def test_the_same_fields_are_accepted(model: nn.Module) -> None:
    """Nothing differs, nothing is raised."""
    check_fields(model_fields(model), model_fields(model), "db")


@pytest.mark.parametrize("stored", ["", "{", "[]", "[1]", "null", '"x"', "{}"])
def test_a_strange_configuration_is_refused_by_name(model: nn.Module, stored: str) -> None:
    """A manifest may hold any text as configuration: the result is still a StaleDatabaseError."""
    fields = model_fields(model)
    with pytest.raises(StaleDatabaseError, match="config"):
        check_fields({**fields, "config": stored}, fields, "db")


def test_the_same_settings_written_differently_are_refused(model: nn.Module) -> None:
    """Another text has another digest. The refusal is a StaleDatabaseError, not a StopIteration."""
    fields = model_fields(model)
    spaced = json.dumps(json.loads(fields["config"]), indent=4)
    with pytest.raises(StaleDatabaseError, match="written differently"):
        check_fields({**fields, "config": spaced}, fields, "db")


# -- the tokenizer


def _changed_vocabulary(lines: list[str]) -> Any:
    return make_tokenizer([*lines, *["zebra zebra zebra quagga quagga"] * 50])


def test_a_call_does_not_change_the_tokenizer_digest(tiny_bert: str, log_lines: list[str]) -> None:
    """Each call sets truncation and padding on the backend. The digest covers the vocabulary instead."""
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


def test_a_slow_tokenizer_has_a_digest() -> None:
    """The digest of a tokenizer without a fast backend is that of its vocabulary."""

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
        ("Llama", "an_unknown_setting", 3),
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


def test_settings_of_heads_and_decoders_do_not_change_the_fingerprint() -> None:
    from families import FAMILIES

    model = FAMILIES["Llama"].make()
    fields = model_fields(model)
    model.config.update({"use_cache": False, "attention_dropout": 0.5, "problem_type": "regression"})  # type: ignore[union-attr, operator]
    assert model_fields(model) == fields
