"""Bodies made at random: refused or answered, never an error of the server, never a hang."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from services import Live

from attmemo.serve.bodies import MOST_ID

PATHS = [
    "/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity", "/tokenize", "/decode",
    "/v1/embeddings", "/", "/invocations",
]  # fmt: skip
FIELDS = [
    "inputs", "input", "texts", "query", "ids", "parameters", "truncate", "truncation_direction", "prompt_name",
    "normalize", "dimensions", "raw_scores", "return_text", "reuse", "encoding_format", "add_special_tokens",
    "skip_special_tokens", "source_sentence", "sentences", "model", "user",
]  # fmt: skip
ANSWERS = {200, 400, 413, 415, 422, 424, 429}

texts = st.text(max_size=40) | st.sampled_from(["alpha beta 7", "off", "left", "float", "base64"])
ids = st.integers(-1, MOST_ID + 1) | st.integers(0, 120)
scalars = st.none() | st.booleans() | ids | st.floats(allow_nan=False) | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4)
)
right = {
    "inputs": texts | st.lists(texts, max_size=4) | st.lists(ids, max_size=6) | st.lists(st.lists(texts, max_size=3)),
    "input": texts | st.lists(texts | st.lists(ids, max_size=6), max_size=4),
    "texts": st.lists(texts, max_size=4),
    "query": texts,
    "ids": st.lists(ids, max_size=6) | st.lists(st.lists(ids, max_size=6), max_size=3),
    "truncate": st.none() | st.booleans(),
    "dimensions": st.none() | st.integers(-1, 70),
    "reuse": st.sampled_from(["on", "off", "maybe"]),
}
servers = st.sampled_from(["embeds", "ranks"])
bodies = st.fixed_dictionaries({}, optional={name: right.get(name, values) | values for name in FIELDS}) | values
raw = st.one_of(bodies.map(lambda body: json.dumps(body).encode()), st.binary(max_size=60))


def check(lives: dict[str, Live], which: str, path: str, body: bytes) -> None:
    reply = lives[which].post(path, body)
    assert reply.status in ANSWERS, (path, body)
    found: Any = json.loads(reply.body)
    if reply.status != 200:
        assert set(found) in ({"error", "error_type"}, {"message", "code", "type"})


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(servers, st.sampled_from(PATHS), raw)
def test_bodies_at_random_are_answered_or_refused(lives: dict[str, Live], which: str, path: str, body: bytes) -> None:
    check(lives, which, path, body)


@pytest.mark.slow
@settings(
    max_examples=int(os.environ.get("ATTMEMO_FUZZ", "100000")), deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(servers, st.sampled_from(PATHS), raw)
def test_a_hundred_thousand_bodies_at_random(lives: dict[str, Live], which: str, path: str, body: bytes) -> None:
    check(lives, which, path, body)
    assert lives[which].service.inside == 0
