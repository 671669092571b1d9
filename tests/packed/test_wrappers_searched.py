"""Wrappers of any make: the one transformers model inside is served, and the wrapper gives what it gave."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from families import SIZES
from packed_models import NEAR, batch, gap
from torch import Tensor, nn

from attmemo import memoize, unmemoize
from attmemo.errors import AnswerError, UnsupportedModelError

INPUTS = batch([12, 7, 19, 12], 4)
LINES = ["the service has started", "it failed again", "restarted after 30 seconds", "no answer", "it is up"]


class ThreeHeads(nn.Module):
    """Dense, sparse and token vectors of one encoder, as those of bge-m3."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.model = hf.XLMRobertaModel(hf.XLMRobertaConfig(**SIZES | {"pad_token_id": 1, "bos_token_id": 0}))
        self.sparse_linear, self.colbert_linear = (nn.Linear(SIZES["hidden_size"], width) for width in (1, 8))

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = self.model(**inputs, return_dict=True).last_hidden_state
        mask = inputs["attention_mask"][..., None]
        return {
            "dense": nn.functional.normalize(hidden[:, 0], dim=-1), "sparse": self.sparse_linear(hidden).relu() * mask,
            "colbert": nn.functional.normalize(self.colbert_linear(hidden[:, 1:]) * mask[:, 1:], dim=-1),
        }  # fmt: skip


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.queries, self.documents = (hf.BertModel(hf.BertConfig(**SIZES)) for _ in range(2))


class Extractor(hf.PreTrainedModel):
    """A model of its own kind around one of a known family, as those of GLiNER2."""

    def __init__(self) -> None:
        super().__init__(hf.PretrainedConfig())
        torch.manual_seed(3)
        self.encoder, self.head = hf.BertModel(hf.BertConfig(**SIZES)), nn.Linear(SIZES["hidden_size"], 5)

    def forward(self, **inputs: Tensor) -> Tensor:
        return self.head(self.encoder(**inputs).last_hidden_state)  # type: ignore[no-any-return]


@pytest.mark.parametrize("wrapped", ["the module", "an object around it"])
@pytest.mark.parametrize(("linear", "near"), [("exact", NEAR), ("int8", 0.2)])
def test_three_heads_give_what_they_gave(wrapped: str, linear: Any, near: float) -> None:
    bare = ThreeHeads().eval()
    model = copy.deepcopy(bare)
    outer = model if wrapped == "the module" else SimpleNamespace(model=model)
    memoize(outer, linear=linear)
    with torch.inference_mode():
        seen, expected = model(INPUTS), bare(INPUTS)
    assert all(gap(seen[name], expected[name]) <= near for name in expected)
    assert (gap(seen["dense"], expected["dense"]) == 0.0) is False
    stats = outer.attmemo.stats()  # type: ignore[union-attr]
    assert stats["sequences"] == 4
    assert not stats["ineligible"]
    unmemoize(outer)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_answers_that_a_wrapper_makes_are_not_guarded_unless_a_function_says_what_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = memoize(ThreeHeads().eval(), budget=0.01)
    assert "ThreeHeads makes answers of what its XLMRobertaModel gives out: they are not known" in caplog.text
    assert (model.attmemo.reuse, model.attmemo.stats()["linear_choice"]) == ("none", None)
    with pytest.raises(AnswerError, match="not known"):
        memoize(ThreeHeads().eval(), budget=0.01, reuse="rows")
    other = memoize(ThreeHeads().eval(), budget=0.01, answer=lambda output: output.last_hidden_state[:, 0])
    assert other.attmemo.reuse == "rows"


def test_a_wrapper_of_several_models_is_refused_with_their_names() -> None:
    for model in (Two(), SimpleNamespace(model=Two())):
        with pytest.raises(UnsupportedModelError, match="holds 2 transformers models: queries, documents"):
            memoize(model)


def test_a_transformers_model_of_its_own_kind_is_searched_as_any_wrapper_is(caplog: pytest.LogCaptureFixture) -> None:
    bare = Extractor().eval()
    model = memoize(copy.deepcopy(bare), budget=0.01)
    with torch.inference_mode():
        seen, expected = (one(**INPUTS)[INPUTS["attention_mask"].bool()] for one in (model, bare))
    assert gap(seen, expected) <= NEAR
    assert model.attmemo.stats()["sequences"] == 4
    assert "Extractor makes answers of what its BertModel gives out: they are not known" in caplog.text
    unmemoize(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.fixture(name="setfit", scope="module")
def _setfit(tiny_bert: str) -> Any:
    library = pytest.importorskip("setfit", reason="setfit is not installed")
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from sklearn.linear_model import LogisticRegression

    body = SentenceTransformer(modules=[Transformer(tiny_bert, max_seq_length=48), Pooling(32)], device="cpu").eval()
    head = LogisticRegression(C=1e4).fit(body.encode(LINES), [0, 1, 0, 1, 0])
    return library.SetFitModel(model_body=body, model_head=head, labels=["good", "bad"])


@pytest.mark.parametrize("options", [{}, {"linear": "int8"}, {"budget": 0.01, "gate": False}],
                         ids=["exact", "int8", "budget"])  # fmt: skip
def test_setfit_predicts_what_it_predicted(setfit: Any, options: dict[str, Any]) -> None:
    model = memoize(copy.deepcopy(setfit), **options)
    for _ in range(2):
        assert list(model.predict(LINES)) == list(setfit.predict(LINES))
        if "linear" not in options:
            assert np.allclose(model.predict_proba(LINES), setfit.predict_proba(LINES), atol=1e-3)
    assert model.attmemo.stats()["sequences"] >= 2 * len(LINES)
    if "budget" in options:
        assert model.attmemo.guarded.answers.name == "LogisticRegression"


@pytest.mark.parametrize("mode", ["markerV0", "token_level"])
def test_gliner_finds_the_entities_that_it_found(
    mode: str, tiny_deberta: str, caplog: pytest.LogCaptureFixture
) -> None:
    library = pytest.importorskip("gliner", reason="gliner is not installed")
    torch.manual_seed(0)
    settings = {"hidden_size": 32, "max_len": 48, "max_width": 4, "vocab_size": -1, "name": "tiny"}
    config = library.GLiNERConfig(model_name=tiny_deberta, span_mode=mode, **settings)
    bare = library.GLiNER.from_config(config, backbone_from_pretrained=True).eval()
    names, bound = ["person", "place"], 0.5
    expected = bare.inference(LINES, names, threshold=bound)
    assert any(expected)

    def found(own: Any) -> list[Any]:
        return [[(one["start"], one["end"], one["label"]) for one in text] for text in own]

    for options in ({}, {"budget": 0.01}):
        model = memoize(copy.deepcopy(bare), **options)
        seen = model.inference(LINES, names, threshold=bound)
        assert found(seen) == found(expected)
        assert found([model.predict_entities(LINES[0], names, threshold=bound)]) == found(expected[:1])
        assert not model.attmemo.stats()["ineligible"]
        assert model.attmemo.stats()["sequences"] == len(LINES) + 1
    assert "makes answers of what its DebertaV2Model gives out" in caplog.text
    rounded = memoize(copy.deepcopy(bare), linear="int8")
    with torch.inference_mode(), caplog.at_level(logging.ERROR):
        rounded.inference(LINES, names, threshold=bound)
    assert rounded.attmemo.stats()["sequences"] == len(LINES)
    assert rounded.attmemo.stats()["linear"] == "int8"


@pytest.mark.parametrize("architecture", ["span", "boundary"])
def test_gliner2_finds_the_entities_that_it_found(architecture: str, tiny_deberta: str) -> None:
    library = pytest.importorskip("gliner2", reason="gliner2 is not installed")
    torch.manual_seed(0)
    kind = {"span": library.GLiNER2, "boundary": library.BoundaryExtractor}[architecture]
    bare = kind(library.ExtractorConfig(model_name=tiny_deberta, architecture=architecture)).eval()
    settings = {"threshold": 0.3, "include_confidence": True, "include_spans": True}

    def found(model: Any) -> list[tuple[int, int, str, float]]:
        texts = model.batch_extract_entities(LINES, ["person", "place"], **settings)
        return [(one["start"], one["end"], label, pytest.approx(one["confidence"], abs=1e-4))
                for text in texts for label, own in text["entities"].items() for one in own]  # fmt: skip

    expected = found(bare)
    assert expected
    model = memoize(copy.deepcopy(bare))
    assert found(model) == expected
    assert model.attmemo.stats()["sequences"] == len(LINES)
    assert not model.attmemo.stats()["ineligible"]
    rounded = memoize(copy.deepcopy(bare), linear="int8")
    assert found(rounded)
    assert rounded.attmemo.stats()["sequences"] == len(LINES)
