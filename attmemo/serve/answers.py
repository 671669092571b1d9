"""Answers as the OpenAPI document describes them: names and fields of text-embeddings-inference (TEI), and ours.

Routes make answers of arrays, without these classes: a validation of every number would take longer than the model.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, RootModel
from typing_extensions import TypeAliasType

ErrorType = TypeAliasType(
    "ErrorType", Literal["Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"]
)
Embedding = TypeAliasType("Embedding", list[float] | str)  # a string: base64 of float32, little-endian


class Answer(BaseModel):
    """Base of all answers: no field is left out of the document."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class EmbedResponse(RootModel[list[list[float]]]):
    """An embedding for each input."""


class EmbedAllResponse(RootModel[list[list[list[float]]]]):
    """For each input the last hidden states of its tokens."""


class SimilarityResponse(RootModel[list[float]]):
    """A cosine for each sentence."""


class MainResponse(RootModel[list[list[float]] | list[float]]):
    """Embeddings, or cosines."""


class Prediction(Answer):
    """A class and its score."""

    score: float
    label: str


class PredictResponse(RootModel[list[Prediction] | list[list[Prediction]]]):
    """Classes of one input, or of each, the likeliest first."""


class Rank(Answer):
    """A text by its place in the request; `text` is there only where it was asked for."""

    index: int
    score: float
    text: str | None = None


class RerankResponse(RootModel[list[Rank]]):
    """The most relevant text first."""


class Span(Answer):
    """A span of a text: its type, the mean score of its tokens, and its characters, from `start` to before `end`."""

    entity_group: str
    score: float
    word: str
    start: int
    end: int


class SpansResponse(RootModel[list[Span] | list[list[Span]]]):
    """Spans of one text, or of each, in their order."""


class SimpleToken(Answer):
    """A token, and the characters that it stands for; a special one stands for none."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenizeResponse(RootModel[list[list[SimpleToken]]]):
    """Tokens of each text."""


class DecodeResponse(RootModel[list[str]]):
    """A text for each list of token ids."""


class OpenAICompatEmbedding(Answer):
    """An embedding in OpenAI's form."""

    object: Literal["embedding"]
    embedding: Embedding
    index: int


class OpenAICompatUsage(Answer):
    """Tokens of the request."""

    prompt_tokens: int
    total_tokens: int


class OpenAICompatResponse(Answer):
    """Embeddings in OpenAI's form."""

    object: Literal["list"]
    data: list[OpenAICompatEmbedding]
    model: str
    usage: OpenAICompatUsage


class ErrorResponse(Answer):
    """Why a request is refused."""

    error: str
    error_type: ErrorType


class OpenAICompatErrorResponse(Answer):
    """The same in OpenAI's form."""

    message: str
    code: int
    type: ErrorType


class EmbeddingModel(Answer):
    """How a model that embeds pools."""

    pooling: str


class ClassifierModel(Answer):
    """Names of a model's classes."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(Answer):
    """What a model does: the one field that is there."""

    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    reranker: ClassifierModel | None = None
    tagger: ClassifierModel | None = None


class Info(Answer):
    """The model and the settings."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None
    reuse: Literal["rows", "maps", "prefix", "local", "none"]
    budget: float | None
