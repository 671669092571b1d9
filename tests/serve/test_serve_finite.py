"""An answer with NaN or an infinite number is refused on every route, and seen by `/health`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from services import Live, living, tiny
from torch import nn

from attmemo import AdapterCheckError, memoize
from attmemo.errors import UnsupportedModelError
from attmemo.forward.finite_weights import weight_not_finite
from attmemo.serve.model import ServedModel
from attmemo.serve.service import Service
from attmemo.serve.settings import Settings

WORDS = "embeddings.word_embeddings.weight"
WORD = 4  # "alpha" in the vocabulary of tiny models
ROUTES: list[tuple[str, str, Any]] = [
    ("embeds", "/embed", {"inputs": "alpha"}),
    ("embeds", "/embed", {"inputs": ["beta", "alpha"], "normalize": False}),
    ("embeds", "/embed", {"inputs": "alpha", "reuse": "off"}),
    ("embeds", "/embed_all", {"inputs": "alpha"}),
    ("embeds", "/embed_sparse", {"inputs": "alpha"}),
    ("embeds", "/similarity", {"inputs": {"source_sentence": "beta", "sentences": ["gamma", "alpha"]}}),
    ("embeds", "/v1/embeddings", {"input": "alpha"}),
    ("embeds", "/v1/embeddings", {"input": "alpha", "encoding_format": "base64"}),
    ("embeds", "/embeddings", {"input": "alpha"}),
    ("embeds", "/", {"inputs": "alpha"}),
    ("embeds", "/", {"inputs": {"source_sentence": "alpha", "sentences": ["gamma"]}}),
    ("classifies", "/predict", {"inputs": "alpha"}),
    ("classifies", "/predict", {"inputs": [["beta"], ["gamma", "alpha"]], "raw_scores": True}),
    ("classifies", "/", {"inputs": "alpha"}),
    ("ranks", "/predict", {"inputs": "alpha"}),
    ("ranks", "/rerank", {"query": "beta", "texts": ["gamma", "alpha"]}),
    ("ranks", "/rerank", {"query": "beta", "texts": ["gamma", "alpha"], "raw_scores": True}),
    ("ranks", "/invocations", {"query": "alpha", "texts": ["gamma"]}),
]


@contextmanager
def broken(live: Live, value: float) -> Iterator[None]:
    """A running service whose weights of the word "alpha" hold this number, and of the head where it is infinite."""
    module: Any = live.service.model.module
    weight = next(own for name, own in module.named_parameters() if name.endswith(WORDS))
    head = dict(module.named_parameters()).get("classifier.bias", weight[0]) if math.isinf(value) else weight[WORD]
    with torch.no_grad():
        before = head.clone(), weight[WORD].clone()
        weight[WORD], head[:] = value, value
        try:
            yield
        finally:
            head[:], weight[WORD] = before


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("who", "path", "body"), ROUTES, ids=lambda value: str(value)[:40])
def test_what_is_not_finite_is_refused(lives: dict[str, Live], who: str, path: str, body: Any, value: float) -> None:
    with broken(lives[who], value):
        reply = lives[who].post(path, body)
    assert (reply.status, b"null" in reply.body) == (424, False)
    assert "Backend" in (reply.json.get("error_type"), reply.json.get("type"))


def test_other_sequences_of_a_batch_are_answered(lives: dict[str, Live]) -> None:
    live = lives["embeds"]
    exact = live.post("/embed", {"inputs": "beta"}).json
    with broken(live, math.nan):
        assert live.post("/embed", {"inputs": ["beta", "alpha"]}).status == 424
        assert live.post("/embed", {"inputs": "beta"}).json == [pytest.approx(exact[0], abs=1e-5)]
        assert live.get("/health").status == 200


@pytest.mark.parametrize(("who", "path", "body"), [ROUTES[0], ROUTES[11], ROUTES[17]], ids=["embed", "class", "rank"])
def test_repeated_answers_that_are_not_finite_are_unhealthy_until_one_is(
    lives: dict[str, Live], who: str, path: str, body: Any
) -> None:
    live = lives[who]
    well = {name: "beta" if name != "texts" else ["beta"] for name in body}
    assert live.post(path, well).status == 200
    with broken(live, math.nan):
        assert live.post(path, body).status == 424
        assert live.get("/health").status == 200, "one answer may be an odd text's"
        assert live.post(path, body).status == 424
        assert live.get("/health").json == {"error": "unhealthy", "error_type": "Unhealthy"}
        assert live.post(path, well).status == 200
        assert live.get("/health").status == 200
        for _ in range(2):
            live.post(path, body)
        assert live.get("/health").status == 503
    assert live.get("/health").status == 200, "the same text is asked for again"


def test_an_answer_that_is_not_finite_is_no_recovery_from_a_failure(
    lives: dict[str, Live], monkeypatch: pytest.MonkeyPatch
) -> None:
    live = lives["embeds"]
    with broken(live, math.nan):
        with monkeypatch.context() as patch:
            patch.setattr(ServedModel, "run", lambda *_, **__: 1 / 0)
            live.post("/embed", {"inputs": "beta"})
        live.post("/embed", {"inputs": "alpha"})
        assert live.get("/health").status == 503
    assert live.get("/health").status == 200


def poisoned(folder: Path, classes: int | None, end: str, value: float = math.nan, place: int | None = None) -> str:
    """A saved model with numbers that are not finite in the weight whose name has this end."""
    from transformers import AutoModel, AutoModelForSequenceClassification

    model = tiny(folder, classes)
    bare = (AutoModel if classes is None else AutoModelForSequenceClassification).from_pretrained(model)
    weight = next(own for name, own in bare.named_parameters() if name.endswith(end))
    with torch.no_grad():
        weight[... if place is None else place] = value
    bare.save_pretrained(model)
    return model


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize(
    ("classes", "end"), [(None, "layer.1.attention.self.query.weight"), (3, "classifier.bias"), (1, WORDS)]
)
def test_a_service_of_weights_that_are_not_finite_does_not_start(
    tmp_path: Path, classes: int | None, end: str, value: float
) -> None:
    model = poisoned(tmp_path, classes, end, value)
    with pytest.raises(AdapterCheckError, match=rf"weight \S*{end} is not finite"):
        Service(Settings(model, database=":memory:", budget=0.01)).start()


def test_a_service_starts_with_a_bad_weight_that_most_texts_do_not_reach_and_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with living(poisoned(tmp_path, None, WORDS, place=WORD)) as live:
        assert [live.post("/embed", {"inputs": word}).status for word in ("alpha", "beta")] == [424, 200]
    assert f"{WORDS} is not finite: answers that depend on it are refused" in caplog.text


def test_a_model_that_overflows_with_finite_weights_is_not_served(tmp_path: Path) -> None:
    model = poisoned(tmp_path, 3, "classifier.weight", 3e38)
    with pytest.raises(UnsupportedModelError, match="answer that is not finite"):
        Service(Settings(model, database=":memory:", budget=0.01)).start()


@pytest.mark.parametrize(
    "options",
    [{"reuse": "none"}, {"reuse": "rows", "database": ":memory:", "budget": 0.01}, {}, {"budget": 0.01}],
    ids=["none", "rows", "auto", "budget"],
)
def test_memoize_names_the_weight_that_is_not_finite(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    from transformers import AutoModel

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    end = "layer.1.output.LayerNorm.bias"
    model = AutoModel.from_pretrained(poisoned(tmp_path, None, end, place=3))
    with pytest.raises(AdapterCheckError, match=rf"^weight \S*{end} is not finite\.\n  Next: "):
        memoize(model, **options)


def test_the_first_weight_that_is_not_finite_is_found_in_every_type() -> None:
    model = nn.ModuleDict({name: nn.Linear(3, 2) for name in ("a", "b")})
    assert weight_not_finite(model) is None
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        for value in (math.nan, math.inf, -math.inf):
            if dtype == torch.float8_e4m3fn and math.isinf(value):
                continue  # it has none
            weight = torch.zeros(2, 3)
            weight[1, 2] = value
            own: Any = model["b"]
            own.weight = nn.Parameter(weight.to(dtype), requires_grad=False)
            assert weight_not_finite(model) == "b.weight", (dtype, value)
    own.weight = nn.Parameter(torch.zeros(0, 3), requires_grad=False)
    assert weight_not_finite(model) is None
