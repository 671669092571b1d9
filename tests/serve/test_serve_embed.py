"""`attmemo serve` with a model that embeds: the routes give what the library gives, and refuse as TEI does."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from services import Live, living, minilm

from attmemo.serve.app import make_app

TEXTS = [
    "Failed password for root from 10.0.0.7 port 22 ssh2",
    "a short one",
    "Receiving block blk_-1608999687919862906 src: /10.250.19.102:54106 dest: /10.250.19.102:50010",
]
CLOSE = 2e-6


@pytest.fixture(scope="module", name="live")
def _live() -> Iterator[Live]:
    own = {"max_client_batch_size": 200, "payload_limit": 100_000, "row_headers": True}
    with living(minilm(), served_model_name="minilm", **own) as found:
        yield found


@pytest.fixture(scope="module", name="library")
def _library() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(minilm(), device="cpu")


def test_embeddings_are_those_of_the_library_in_the_order_of_the_request(live: Live, library: Any) -> None:
    texts = [f"{text} {number}" for number in range(40) for text in TEXTS]
    found = np.array(live.post("/embed", {"inputs": texts}).json, np.float32)
    assert np.abs(found - library.encode(texts)).max() < CLOSE
    one = live.post("/embed", {"inputs": TEXTS[0], "truncate": True, "reuse": "off"})
    assert np.abs(np.array(one.json[0], np.float32) - library.encode(TEXTS[0])).max() < CLOSE


def test_normalize_and_dimensions(live: Live, library: Any) -> None:
    raw = np.array(live.post("/embed", {"inputs": TEXTS, "normalize": False, "reuse": "off"}).json)
    exact = library[1](library[0](library.preprocess(TEXTS)))["sentence_embedding"].detach().numpy()
    assert np.abs(raw - exact).max() < 2e-5
    cut = np.array(live.post("/embed", {"inputs": TEXTS, "dimensions": 16, "reuse": "off"}).json)
    assert cut.shape == (3, 16)
    assert np.allclose(cut, raw[:, :16] / np.linalg.norm(raw[:, :16], axis=1, keepdims=True), atol=1e-5)


def test_all_hidden_states_of_every_token(live: Live, library: Any) -> None:
    found = live.post("/embed_all", {"inputs": TEXTS, "reuse": "off"}).json
    states = library.encode(TEXTS, output_value="token_embeddings")
    for own, exact in zip(found, states, strict=True):
        assert np.abs(np.array(own) - exact.numpy()).max() < 2e-5


def test_similarity_is_the_cosine(live: Live, library: Any) -> None:
    body = {"inputs": {"source_sentence": TEXTS[0], "sentences": TEXTS}, "reuse": "off"}
    vectors = library.encode(TEXTS)
    assert np.allclose(live.post("/similarity", body).json, vectors @ vectors[0], atol=1e-5)
    assert np.allclose(live.post("/", body).json, vectors @ vectors[0], atol=1e-5), "clients of the hub ask at /"


def test_openai_as_numbers_and_as_bytes(live: Live, library: Any) -> None:
    body = {"input": TEXTS, "model": "any", "user": "u"}
    plain = live.post("/v1/embeddings", body).json
    assert (plain["object"], plain["model"]) == ("list", "minilm")
    assert [item["index"] for item in plain["data"]] == [0, 1, 2]
    count = sum(map(len, library.tokenizer(TEXTS)["input_ids"]))
    assert plain["usage"] == {"prompt_tokens": count, "total_tokens": count}
    packed = live.post("/embeddings", body | {"encoding_format": "base64", "dimensions": 8}).json["data"]
    vector = np.frombuffer(base64.b64decode(packed[1]["embedding"]), "<f4")
    whole = np.array(plain["data"][1]["embedding"][:8])
    assert np.allclose(vector, whole / np.linalg.norm(whole), atol=1e-5)
    assert np.allclose(whole, library.encode(TEXTS[1])[:8], atol=1e-5)


def test_token_ids_are_taken_as_they_are(live: Live, library: Any) -> None:
    ids = library.tokenizer(TEXTS)["input_ids"]
    text = live.post("/embed", {"inputs": TEXTS, "reuse": "off"}).json
    assert np.allclose(live.post("/embed", {"inputs": ids, "reuse": "off"}).json, text, atol=1e-5)
    assert np.allclose(live.post("/embed", {"inputs": ids[0], "reuse": "off"}).json, text[:1], atol=1e-5)
    assert np.allclose(live.post("/embed", {"inputs": [ids[0], TEXTS[1]], "reuse": "off"}).json, text[:2], atol=1e-5)
    assert live.post("/embed", {"inputs": [[1, 40_000]]}).json["error_type"] == "Tokenizer"


@pytest.mark.parametrize("side", ["left", "right"])
def test_long_texts_are_cut_on_the_side_that_is_asked(live: Live, library: Any, side: str) -> None:
    text = " ".join(f"word {number}" for number in range(300))
    reply = live.post("/embed", {"inputs": text, "truncate": True, "truncation_direction": side, "reuse": "off"})
    library.tokenizer.truncation_side = side
    exact = library.encode(text)
    library.tokenizer.truncation_side = "right"
    assert np.allclose(reply.json[0], exact, atol=1e-5)
    assert reply.headers["x-compute-tokens"] == "256"
    refused = live.post("/embed", {"inputs": text, "truncate": False})
    assert (refused.status, refused.json["error_type"]) == (422, "Validation")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "a line that a header asks for"}),
        ("/v1/embeddings", {"input": "a line that a header asks for"}),
        ("/similarity", {"inputs": {"source_sentence": "a line that a header asks for", "sentences": ["beta"]},
                         "parameters": {"reuse": "on"}}),
    ],
)  # fmt: skip
def test_a_header_asks_for_an_exact_answer_as_a_field_does(live: Live, path: str, body: dict[str, Any]) -> None:
    live.post(path, body)
    assert live.service.model.handle.flush()
    assert live.post(path, body, x_attmemo_reuse="ON").headers["x-attmemo-reuse"] == "rows"
    off = live.post(path, body, x_attmemo_reuse="off").headers
    assert off["x-attmemo-reuse"] == "off"
    assert off["x-attmemo-rows-computed"] == off["x-attmemo-rows-total"]
    refused = live.post(path, body, x_attmemo_reuse="maybe")
    assert refused.status == 422
    assert "x-attmemo-reuse must be on or off; got 'maybe'" in str(refused.json)


def test_headers_say_what_was_computed(live: Live) -> None:
    text = "a line that comes twice and is stored in between"
    first = live.post("/embed", {"inputs": text}).headers
    assert first["x-attmemo-rows-computed"] == first["x-attmemo-rows-total"] == first["x-compute-tokens"]
    assert live.service.model.handle.flush()
    again = live.post("/embed", {"inputs": text}).headers
    assert int(again["x-attmemo-rows-computed"]) < int(again["x-attmemo-rows-total"])
    assert again["x-attmemo-reuse"] == "rows"
    off = live.post("/embed", {"inputs": text, "reuse": "off"}).headers
    assert off["x-attmemo-rows-computed"] == off["x-attmemo-rows-total"]
    assert off["x-attmemo-reuse"] == "off"
    assert off["x-compute-characters"] == str(len(text))
    for name in ("x-compute-time", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"):
        assert int(off[name]) >= 0


def test_tokens_of_a_text_and_back(live: Live, library: Any) -> None:
    (tokens,) = live.post("/tokenize", {"inputs": "Hällo wörld"}).json
    assert [token["id"] for token in tokens] == library.tokenizer("Hällo wörld")["input_ids"]
    assert tokens[0] == {"id": 101, "text": "[CLS]", "special": True, "start": None, "stop": None}
    inside = [token for token in tokens if not token["special"]]
    assert all(token["text"] == "Hällo wörld"[token["start"] : token["stop"]] for token in inside)
    bare = live.post("/tokenize", {"inputs": ["one", "two"], "add_special_tokens": False}).json
    assert [[token["text"] for token in own] for own in bare] == [["one"], ["two"]]
    ids = [[token["id"] for token in own] for own in bare]
    assert live.post("/decode", {"ids": ids}).json == ["one", "two"]
    assert live.post("/decode", {"ids": [101, *ids[0]], "skip_special_tokens": False}).json == ["[CLS] one"]


def test_info_names_the_model_and_the_limits(live: Live) -> None:
    info = live.get("/info").json
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["max_input_length"], info["max_client_batch_size"], info["model_dtype"]) == (256, 200, "float32")
    assert info["served_model_name"] == "minilm"


def test_answers_from_records_have_one_number_on_the_page_in_metrics_and_in_stats(live: Live) -> None:
    texts = [f"disk {number} of host {number % 3} is full" for number in range(12)]
    handle = live.service.model.handle
    assert handle is not None
    for _ in range(3):
        assert live.post("/embed", {"inputs": texts}).status == 200
        assert handle.flush()
    stats, shown = handle.stats(), live.get("/live").json
    told = dict(re.findall(r"^attmemo_(\w+)_total (\d+)", live.get("/metrics").body.decode(), re.MULTILINE))
    for name in ("reused", "repeated"):
        assert stats[name] == shown[name] == int(told[name])
    assert f"{stats['repeated']} (" in stats["guard"]["says"] or not stats["repeated"]
    assert shown["sequences"] >= stats["reused"] + stats["repeated"]


def test_state_is_open_and_well(live: Live) -> None:
    live.post("/embed", {"inputs": TEXTS[0]})
    for path in ("/health", "/ping", "/", "/metrics", "/live"):
        assert live.get(path).status == 200
    metrics = live.get("/metrics").body.decode()
    assert 'te_request_count{method="single"}' in metrics
    assert "attmemo_rows_computed_total" in metrics
    assert "attmemo_failed 0.0" in metrics
    shown = live.get("/live").json
    assert shown["tokens"] >= shown["rows"] > 0
    assert shown["guard"]["state"] == "learning"


BAD: list[tuple[str, Any, int, str]] = [
    ("/embed", b"{", 400, "Validation"),
    ("/embed", b"\xff\xfe", 400, "Validation"),
    ("/embed", b'{"inputs": "\\ud800"}', 400, "Validation"),
    ("/embed", b"[" * 100_001, 413, "Validation"),
    ("/embed", b"[" * 90_000, 400, "Validation"),
    ("/embed", {}, 422, "Validation"),
    ("/embed", [], 422, "Validation"),
    ("/embed", {"inputs": 3}, 422, "Validation"),
    ("/embed", {"inputs": None}, 422, "Validation"),
    ("/embed", {"inputs": [True]}, 422, "Validation"),
    ("/embed", {"inputs": [-1]}, 422, "Validation"),
    ("/embed", {"inputs": [1 << 40]}, 422, "Validation"),
    ("/embed", {"inputs": ["a"], "normalize": "yes"}, 422, "Validation"),
    ("/embed", {"inputs": "a", "dimensions": 0}, 422, "Validation"),
    ("/embed", {"inputs": "a", "dimensions": 385}, 422, "Validation"),
    ("/embed", {"inputs": "a", "prompt_name": "query"}, 422, "Validation"),
    ("/embed", {"inputs": "a", "reuse": "sometimes"}, 422, "Validation"),
    ("/embed", {"inputs": ["a"] * 201}, 422, "Validation"),
    ("/embed", {"inputs": "x" * 101_000}, 413, "Validation"),
    ("/embed", {"inputs": ""}, 400, "Empty"),
    ("/embed", {"inputs": []}, 400, "Empty"),
    ("/embed", {"inputs": ["a", ""]}, 400, "Empty"),
    ("/embed", {"inputs": [99_999]}, 422, "Tokenizer"),
    ("/embed_sparse", {"inputs": "a"}, 424, "Backend"),
    ("/predict", {"inputs": "a"}, 424, "Backend"),
    ("/rerank", {"query": "a", "texts": ["b"]}, 424, "Backend"),
    ("/rerank", {"query": "a", "texts": []}, 400, "Empty"),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, 400, "Empty"),
    ("/similarity", {"inputs": {"source_sentence": "a"}}, 422, "Validation"),
    ("/tokenize", {"inputs": []}, 400, "Empty"),
    ("/decode", {"ids": []}, 400, "Empty"),
    ("/decode", {"ids": [40_000]}, 422, "Tokenizer"),
    ("/nowhere", {}, 404, "Validation"),
    ("/health", {}, 405, "Validation"),
]


@pytest.mark.parametrize(("path", "body", "status", "kind"), BAD, ids=[f"{p} {str(b)[:30]}" for p, b, _, _ in BAD])
def test_bad_requests_are_refused_as_tei_does(live: Live, path: str, body: Any, status: int, kind: str) -> None:
    reply = live.post(path, body)
    assert (reply.status, reply.json["error_type"]) == (status, kind)
    assert set(reply.json) == {"error", "error_type"}


def test_openai_errors_have_their_own_form(live: Live) -> None:
    reply = live.post("/v1/embeddings", {"input": []})
    assert (reply.status, reply.json["code"], reply.json["type"]) == (400, 400, "Empty")
    assert set(reply.json) == {"message", "code", "type"}


@pytest.mark.parametrize("path", ["/embed", "/tokenize"])
def test_a_byte_order_mark_before_json_is_taken(live: Live, path: str) -> None:
    body = b'{"inputs": "alpha", "reuse": "off"}'
    plain, marked = (live.post(path, mark + body) for mark in (b"", b"\xef\xbb\xbf"))
    assert (plain.status, marked.status) == (200, 200)
    assert marked.json == plain.json
    assert live.post(path, 2 * b"\xef\xbb\xbf" + body).status == 400, "one mark, not more"


def test_a_body_that_is_not_json_by_its_type_is_refused(live: Live) -> None:
    assert live.post("/embed", b"{}", content_type="text/plain").status == 415


def test_prompts_and_keys(live: Live, library: Any) -> None:
    key = {"authorization": "Bearer secret"}
    with living(minilm(), default_prompt="query: ", api_key="secret") as guarded:
        for wrong in ({}, {"authorization": "Bearer other"}, {"authorization": "secret"}):
            assert guarded.post("/embed", {"inputs": "a"}, **wrong).status == 401
            assert guarded.get("/info", **wrong).status == 401
        assert guarded.get("/info", **key).status == 200
        assert [guarded.get(path).status for path in ("/health", "/metrics", "/", "/live")] == [200] * 4
        found = guarded.post("/embed", {"inputs": TEXTS}, **key).json
    assert np.abs(np.array(found) - library.encode([f"query: {text}" for text in TEXTS])).max() < CLOSE


def _ask(app: Any, inputs: Any, path: str = "/embed", root: str = "") -> tuple[int, Any]:
    """Status and answer of an application that a server of another kind calls."""
    sent: list[dict[str, Any]] = []
    body = json.dumps({"inputs": inputs, "reuse": "off"}).encode()
    scope = {
        "type": "http", "method": "POST", "path": root + path, "root_path": root, "query_string": b"",
        "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http",
        "server": ("x", 80), "client": ("x", 1),
    }  # fmt: skip

    arriving = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        for message in arriving:
            return message
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # the client waits

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return sent[0]["status"], json.loads(b"".join(message.get("body", b"") for message in sent))


def test_the_application_answers_the_same_under_a_prefix_and_behind_middleware(live: Live) -> None:
    app = make_app(live.service, direct=True)
    status, wanted = _ask(app, TEXTS[0])
    assert status == 200
    status, found = _ask(app, TEXTS[0], root="/under")
    assert status == 200
    assert np.abs(np.array(found) - wanted).max() < CLOSE
    seen: list[str] = []

    class Middleware:
        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            seen.append(scope["path"])
            await self.app(scope, receive, send)

    app = make_app(live.service, direct=True)
    app.add_middleware(Middleware)
    status, found = _ask(app, TEXTS[0])
    assert status == 200
    assert np.abs(np.array(found) - wanted).max() < CLOSE
    assert seen == ["/embed"], "no request passes middleware by"
    assert _ask(app, "")[0] == 400


def test_a_long_text_is_answered_as_a_short_one_is(live: Live, library: Any) -> None:
    """Short texts are tokenized where they are read, others in threads."""
    text = " ".join(TEXTS * 8)
    assert len(text) > 1000
    for one in (text[:1000], text[:1001]):
        (found,) = live.post("/embed", {"inputs": one}).json
        assert np.abs(np.array(found, np.float32) - library.encode(one)).max() < CLOSE
