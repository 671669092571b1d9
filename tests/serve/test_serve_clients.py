"""Clients that know nothing of attmemo, as they are, against a server that listens on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from services import Live, living, minilm
from shared_data import SHARED

TEXTS = ["a first text", "another one", "Failed password for root from 10.0.0.7"]
KEY = "a-key"


@pytest.fixture(scope="module", name="live")
def _live() -> Iterator[Live]:
    with living(minilm(), api_key=KEY) as found:
        yield found


@pytest.fixture(scope="module", name="exact")
def _exact() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(minilm(), device="cpu").encode(TEXTS)


def near(found: Any, exact: Any) -> bool:
    return bool(np.abs(np.asarray(found, np.float32) - exact).max() < 1e-5)


def test_openai(live: Live, exact: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=KEY, max_retries=0)
    found = client.embeddings.create(model="minilm", input=TEXTS)  # the client asks for base64
    assert near([item.embedding for item in found.data], exact)
    assert found.usage.total_tokens > 0
    short = client.embeddings.create(model="minilm", input=TEXTS[0], dimensions=10, encoding_format="float")
    assert len(short.data[0].embedding) == 10
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.embeddings.create(model="minilm", input="")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong").embeddings.create(model="minilm", input="a")


def test_the_hub_client_embeds_and_compares(live: Live, exact: Any) -> None:
    hub = pytest.importorskip("huggingface_hub")
    client = hub.InferenceClient(model=live.url, token=KEY)
    assert near(client.feature_extraction(TEXTS), exact)
    raw = client.feature_extraction(TEXTS[0], normalize=False, truncate=True, truncation_direction="left")
    assert near(raw[0] / np.linalg.norm(raw), exact[0])
    cosines = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:])
    assert near(cosines, exact[1:] @ exact[0])


def test_the_hub_client_classifies() -> None:
    hub = pytest.importorskip("huggingface_hub")
    model = SHARED / "models" / "minilm-sst2"
    if not model.exists():
        pytest.skip("../shared/models is not there")
    with living(str(model)) as live:
        found = hub.InferenceClient(model=live.url).text_classification("a great film")
        best = found[0] if isinstance(found, list) else found  # the client takes the first of the list that TEI sends
        assert (best.label, best.score > 0.9) == ("LABEL_1", True)


def test_langchain(live: Live, exact: Any) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    client = langchain.OpenAIEmbeddings(
        base_url=f"{live.url}/v1", api_key=KEY, model="minilm", check_embedding_ctx_length=False
    )  # fmt: skip
    assert near(client.embed_documents(TEXTS), exact)
    assert near(client.embed_query(TEXTS[1]), exact[1])


def test_llama_index(live: Live, exact: Any) -> None:
    llama = pytest.importorskip(
        "llama_index.embeddings.text_embeddings_inference",
        reason="pip install llama-index-embeddings-text-embeddings-inference",
    )
    client = llama.TextEmbeddingsInference(model_name="minilm", base_url=live.url, auth_token=KEY)
    assert near(client.get_text_embedding_batch(TEXTS), exact)
    assert near(client.get_query_embedding(TEXTS[1]), exact[1])
