"""`attmemo serve` with taggers: spans of texts with the characters that they hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from services import WORDS, Live, living, tiny
from shared_data import SHARED

from attmemo.errors import UnsupportedModelError
from attmemo.serve.model import load
from attmemo.serve.settings import Settings

TAGS = "O", "B-PER", "I-PER", "B-LOC", "I-LOC"
TEXTS = [" ".join([*WORDS[start:], *map(str, range(3 * start)), *WORDS[:start]]) for start in range(6)]


@pytest.fixture(scope="module", name="tagger")
def _tagger(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with living(tiny(tmp_path_factory.mktemp("tagger"), None, TAGS)) as found:
        yield found


def expected(model: str, texts: list[str]) -> list[list[dict[str, Any]]]:
    """What transformers makes of the same model."""
    from transformers import AutoModelForTokenClassification, AutoTokenizer, pipeline

    bare = AutoModelForTokenClassification.from_pretrained(model, dtype=torch.float32).eval()
    reads = pipeline(
        "token-classification", bare, tokenizer=AutoTokenizer.from_pretrained(model), aggregation_strategy="simple"
    )  # fmt: skip
    return [reads(text) for text in texts]


def compare(found: list[list[dict[str, Any]]], texts: list[str], true: list[list[dict[str, Any]]]) -> None:
    names = ("entity_group", "start", "end")
    for own, text, other in zip(found, texts, true, strict=True):
        assert [[one[name] for name in names] for one in own] == [[one[name] for name in names] for one in other]
        assert np.allclose([one["score"] for one in own], [one["score"] for one in other], atol=1e-4)
        assert [one["word"] for one in own] == [text[one["start"] : one["end"]] for one in own]


def test_spans_are_those_of_the_library_with_the_characters_of_the_text(tagger: Live) -> None:
    true = expected(tagger.service.settings.model, TEXTS)
    assert sum(map(len, true)) > len(TEXTS)
    assert {one["entity_group"] for own in true for one in own} == {"PER", "LOC"}
    for path in ("/spans", "/"):
        compare(tagger.post(path, {"inputs": TEXTS}).json, TEXTS, true)
        compare([tagger.post(path, {"inputs": TEXTS[1]}).json], TEXTS[1:2], true[1:2])


def test_of_a_text_that_is_cut_places_are_those_in_all_of_it(tagger: Live) -> None:
    text = "\u00e9\u00e8 " + " ".join(WORDS[number * number % 12] for number in range(90))
    for side, tokens in (("left", text.split()[-62:]), ("right", text.split()[:62])):
        part = " ".join(tokens)
        shift = len(text) - len(part) if side == "left" else 0
        alone = tagger.post("/spans", {"inputs": part, "reuse": "off"}).json
        found = tagger.post("/spans", {"inputs": text, "truncation_direction": side, "reuse": "off"}).json
        assert [(one["start"] - shift, one["end"] - shift) for one in found] == [
            (one["start"], one["end"]) for one in alone
        ]
        assert [one["word"] for one in found] == [text[one["start"] : one["end"]] for one in found]
    assert tagger.post("/spans", {"inputs": text, "truncate": False}).status == 422


def test_a_budget_guards_the_spans_and_an_equal_text_gets_them_again(tagger: Live) -> None:
    first, again = (tagger.post("/spans", {"inputs": TEXTS}).json for _ in range(2))
    assert first == again
    handle = tagger.service.model.handle
    assert handle.reuse == "rows"
    assert (handle.guarded.answers.name, handle.guarded.answers.spans is not None) == ("spans", True)
    assert handle.flush()
    assert handle.stats()["failed"] == 0
    assert tagger.get("/info").json["model_type"] == {"tagger": {
        "id2label": {str(place): name for place, name in enumerate(TAGS)},
        "label2id": {name: place for place, name in enumerate(TAGS)},
    }}  # fmt: skip


def test_what_a_tagger_cannot_do_and_what_cannot_be_tagged_is_refused(tagger: Live, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"inputs": "a", "query": "a", "texts": ["b"]}
    for path, body in (("/embed", asked), ("/predict", asked), ("/rerank", asked)):
        assert tagger.post(path, body).status == 424
    wrong: list[tuple[Any, int]] = [
        ({"inputs": ""}, 400), ({"inputs": []}, 400), ({"inputs": [4, 5]}, 422), ({"inputs": [["a", "b"]]}, 422),
        ({"inputs": "a", "parameters": {"aggregation_strategy": "max"}}, 422),
    ]  # fmt: skip
    for body, status in wrong:
        assert tagger.post("/spans", body).status == status
    with living(tiny(tmp_path, 3)) as classifier:
        reply = classifier.post("/spans", {"inputs": "a"})
        assert (reply.status, "not a token classification model" in reply.body.decode()) == (424, True)
    with pytest.raises(UnsupportedModelError, match="characters are counted in the text alone"):
        load(Settings(tagger.service.settings.model, default_prompt="query: "))


def test_the_hub_client_tags_with_a_trained_model() -> None:
    hub = pytest.importorskip("huggingface_hub")
    model, data = SHARED / "models" / "minilm-pii", SHARED / "data" / "pii_forms" / "stream.jsonl"
    if not (model.exists() and data.exists()):
        pytest.skip("../shared/models/minilm-pii or ../shared/data/pii_forms is not there")
    with data.open(encoding="utf-8") as file:
        texts = [json.loads(next(file))["text"] for _ in range(8)]
    with living(str(model), budget=0, database=None) as live:
        compare(live.post("/spans", {"inputs": texts}).json, texts, expected(str(model), texts))
        found = hub.InferenceClient(model=live.url).token_classification("My name is Ann Lee, born in 1970.")
    assert [(one.entity_group, one.word) for one in found][:1] == [("PERSON", "Ann Lee")]
