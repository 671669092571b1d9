"""`attmemo serve` with classifiers and rerankers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import Live, living, tiny
from shared_data import SHARED

from attmemo.errors import DataError, UnsupportedModelError
from attmemo.serve.model import load
from attmemo.serve.routes_classify import best_first
from attmemo.serve.settings import Settings

PAIRS = [["alpha beta", "gamma"], ["delta"], ["eta 7 8 9", "alpha beta gamma delta"]]


def logits_of(model: str, inputs: list[list[str]]) -> np.ndarray[Any, Any]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    bare = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(model)
    with torch.inference_mode():
        return np.stack([bare(**tokenizer(*own, return_tensors="pt")).logits[0].numpy() for own in inputs])


@pytest.fixture(scope="module", name="classifier")
def _classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with living(tiny(tmp_path_factory.mktemp("three"), 3)) as found:
        yield found


@pytest.fixture(scope="module", name="reranker")
def _reranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with living(tiny(tmp_path_factory.mktemp("one"), 1)) as found:
        yield found


def test_classes_of_texts_and_pairs(classifier: Live) -> None:
    exact = torch.tensor(logits_of(classifier.service.settings.model, PAIRS)).softmax(-1).numpy()
    found = classifier.post("/predict", {"inputs": PAIRS}).json
    for own, row in zip(found, exact, strict=True):
        assert [item["score"] for item in own] == sorted((item["score"] for item in own), reverse=True)
        by_label = {item["label"]: item["score"] for item in own}
        assert np.allclose([by_label[f"LABEL_{place}"] for place in range(3)], row, atol=1e-5)
    # A list of two strings is one pair.
    for path, alone, own in (
        ("/predict", PAIRS[0], found[0]),
        ("/predict", "delta", found[1]),
        ("/", "delta", found[1]),
    ):
        again = classifier.post(path, {"inputs": alone}).json
        assert [item["label"] for item in again] == [item["label"] for item in own]
        assert np.allclose([item["score"] for item in again], [item["score"] for item in own], atol=1e-5)


def test_raw_scores_are_logits(classifier: Live) -> None:
    exact = logits_of(classifier.service.settings.model, PAIRS)
    found = classifier.post("/predict", {"inputs": PAIRS, "raw_scores": True}).json
    assert np.allclose([[item["score"] for item in own] for own in found], -np.sort(-exact, 1), atol=1e-5)


def test_relevance_is_sorted_and_keeps_the_index(reranker: Live) -> None:
    texts = ["gamma", "alpha beta gamma", "7 8 9", "lamda mu"]
    exact = logits_of(reranker.service.settings.model, [["alpha beta", text] for text in texts])[:, 0]
    body = {"query": "alpha beta", "texts": texts, "return_text": True}
    found = reranker.post("/rerank", body).json
    assert [item["index"] for item in found] == np.argsort(-exact).tolist()
    assert [item["text"] for item in found] == [texts[item["index"]] for item in found]
    assert np.allclose([item["score"] for item in found], -np.sort(-1 / (1 + np.exp(-exact))), atol=1e-5)
    raw = reranker.post("/", {"query": "alpha beta", "texts": texts, "raw_scores": True}).json
    assert np.allclose([item["score"] for item in raw], -np.sort(-exact), atol=1e-5)
    assert "text" not in raw[0]
    assert reranker.get("/info").json["model_type"]["reranker"]["id2label"] == {"0": "LABEL_0"}


def test_of_equal_scores_the_last_text_comes_first_as_in_tei(reranker: Live) -> None:
    """TEI sorts by ascending score, keeping the order of equal ones, and turns the list around."""
    texts = ["alpha", "mu 7", "alpha", "lamda"]  # torch computes the head of a fifth row in another order of sums
    for body in ({}, {"raw_scores": True}, {"return_text": True}):
        found = reranker.post("/rerank", {"query": "beta", "texts": texts, "reuse": "off"} | body).json
        scores = {item["index"]: item["score"] for item in found}
        assert scores[0] == scores[2], "equal texts of one batch are equally relevant"
        expected = sorted(range(4), key=lambda place: scores[place])[::-1]
        assert [item["index"] for item in found] == expected
        assert [place for place in expected if texts[place] == "alpha"] == [2, 0]


@pytest.mark.parametrize(
    ("row", "places"), [([1, 1, 1], [2, 1, 0]), ([0, 2, 0, 2, 1], [3, 1, 4, 2, 0]), ([0.0, -0.0], [1, 0]), ([5], [0])]
)
def test_equal_scores_of_classes_come_in_the_order_of_tei(row: list[float], places: list[int]) -> None:
    assert best_first(np.array(row, np.float32)) == places


def test_what_a_model_cannot_do_is_refused_by_name(classifier: Live, reranker: Live) -> None:
    for live in (classifier, reranker):
        for path in ("/embed", "/v1/embeddings", "/embed_all"):
            reply = live.post(path, {"inputs": "a", "input": "a"})
            assert reply.status == 424
            assert "not an embedding model" in reply.body.decode()
    assert "re-ranker" in classifier.post("/rerank", {"query": "a", "texts": ["b"]}).json["error"]
    wrong: list[Any] = [[], [[]], ["a", "b", "c"], [["a", "b", "c"]], ["a", ["b"]], {"a": "b"}, [[1]]]
    assert [classifier.post("/predict", {"inputs": own}).status for own in wrong] == [422] * len(wrong)
    assert classifier.post("/predict", {"inputs": ["", ""]}).status == 400


def test_a_trained_classifier_answers_as_the_library_does() -> None:
    model = SHARED / "models" / "minilm-sst2"
    if not model.exists():
        pytest.skip("../shared/models is not there")
    texts = [["a great film"], ["dull, and far too long"], ["it is what it is"]]
    exact = torch.tensor(logits_of(str(model), texts)).softmax(-1).numpy()
    with living(str(model)) as live:
        found = live.post("/predict", {"inputs": texts}).json
    for own, row in zip(found, exact, strict=True):
        assert np.allclose([item["score"] for item in own], -np.sort(-row), atol=1e-5)


def test_a_model_without_weights_for_its_classes_is_refused(tmp_path: Path) -> None:
    import json

    folder = Path(tiny(tmp_path, None))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["BertForSequenceClassification"]}))
    with pytest.raises(UnsupportedModelError, match="no weights"):
        load(Settings(str(folder)))


def test_models_and_options_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="nothing is pooled"):
        load(Settings(tiny(tmp_path / "c", 3), pooling="cls"))
    with pytest.raises(DataError, match="no model"):
        load(Settings(str(tmp_path / "absent")))


@pytest.mark.parametrize("pooling", ["cls", "mean", "last-token"])
def test_an_encoder_is_pooled_as_asked(tmp_path: Path, pooling: Any) -> None:
    from transformers import AutoModel, AutoTokenizer

    model = tiny(tmp_path, None)
    with living(model, pooling=pooling) as live:
        found = np.array(live.post("/embed", {"inputs": ["alpha beta 3"], "normalize": False}).json[0])
        assert live.get("/info").json["model_type"]["embedding"]["pooling"] == pooling
    with torch.inference_mode():
        states = AutoModel.from_pretrained(model)(
            **AutoTokenizer.from_pretrained(model)("alpha beta 3", return_tensors="pt")
        ).last_hidden_state[0]
    exact = {"cls": states[0], "mean": states.mean(0), "last-token": states[-1]}[pooling]
    assert np.allclose(found, exact.numpy(), atol=1e-5)
