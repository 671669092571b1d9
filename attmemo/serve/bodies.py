"""Bodies of requests: names, fields and defaults of text-embeddings-inference (TEI), and `reuse`.

Unknown fields are ignored. Inputs have many forms, told apart by hand: a message of a union of types names every form
that it was not.
"""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from typing_extensions import TypeAliasType

from attmemo.serve.refusal import Refusal
from attmemo.serve.texts import Input as One
from attmemo.serve.texts import Side

MOST_ID: Final = (1 << 32) - 1
_TEXT: Final = "What is Deep Learning?"
_OTHER: Final = "Deep Learning is a part of machine learning."


class Inputs:
    """Inputs of a request, and whether there was one that was in no list.

    A plain class: one that pydantic knows would be a component of the OpenAPI document.
    """

    __slots__ = "items", "single"

    def __init__(self, items: list[One], single: bool) -> None:
        self.items, self.single = items, single

    @property
    def method(self) -> Literal["single", "batch"]:
        """The word that metrics count it by."""
        return "single" if self.single else "batch"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and 0 <= one <= MOST_ID for one in value)


def _inputs(value: Any) -> Inputs:
    if isinstance(value, str) or _is_ids(value):  # an empty list is one input, and refused as empty
        return Inputs([value], True)
    if isinstance(value, list) and all(isinstance(one, str) or _is_ids(one) for one in value):
        return Inputs(value, False)
    raise ValueError("expected a string, a list of token ids, or a list of strings and lists of token ids")


def _pairs(value: Any) -> Inputs:
    if isinstance(value, str):
        return Inputs([value], True)
    if isinstance(value, list) and value:
        if all(isinstance(one, str) for one in value) and len(value) <= 2:
            return Inputs([_pair(value)], True)
        if all(isinstance(one, list) and 1 <= len(one) <= 2 and all(isinstance(s, str) for s in one) for one in value):
            return Inputs([_pair(one) for one in value], False)
    raise ValueError("expected a string, a pair of strings, or a list of lists of one or two strings")


def _pair(given: list[str]) -> One:
    return given[0] if len(given) == 1 else (given[0], given[1])


def _texts(value: Any) -> Inputs:
    if isinstance(value, str):
        return Inputs([value], True)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return Inputs(list(value), False)
    raise ValueError("expected a string, or a list of strings")


def _main(value: Any) -> Inputs | SimilarityInput:
    if isinstance(value, dict):
        try:
            return SimilarityInput.model_validate(value)
        except ValidationError:
            raise ValueError("expected a string `source_sentence` and a list of strings `sentences`") from None
    return _inputs(value)


def _ids(value: Any) -> Inputs:
    if _is_ids(value):
        return Inputs([value], True)
    if isinstance(value, list) and all(_is_ids(one) for one in value):
        return Inputs(value, False)
    raise ValueError("expected a list of token ids, or a list of such lists")


Id = Annotated[int, Field(ge=0, le=MOST_ID)]
Pair = Annotated[list[str], Field(min_length=1, max_length=2)]
# Aliases with names are components of the OpenAPI document.
InputType = TypeAliasType("InputType", str | list[Id])
Input = TypeAliasType(
    "Input", Annotated[Inputs, PlainValidator(_inputs, json_schema_input_type=InputType | list[InputType])]
)
PredictInput = TypeAliasType(
    "PredictInput", Annotated[Inputs, PlainValidator(_pairs, json_schema_input_type=str | Pair | list[Pair])]
)
TokenizeInput = TypeAliasType(
    "TokenizeInput", Annotated[Inputs, PlainValidator(_texts, json_schema_input_type=str | list[str])]
)
InputIds = TypeAliasType(
    "InputIds", Annotated[Inputs, PlainValidator(_ids, json_schema_input_type=list[Id] | list[list[Id]])]
)
TruncationDirection = TypeAliasType("TruncationDirection", Literal["left", "right", "Left", "Right"])
EncodingFormat = TypeAliasType("EncodingFormat", Literal["float", "base64"])


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Reusing(Body):
    """`reuse`: ``"off"`` has the answer computed whole."""

    reuse: Literal["on", "off"] | None = None

    @property
    def reuses(self) -> bool:
        """Whether records may serve."""
        return self.reuse != "off"


class Truncating(Reusing):
    """What to do with inputs that are too long."""

    truncate: bool | None = None
    truncation_direction: TruncationDirection = "right"

    @property
    def side(self) -> Side:
        """Where to cut."""
        return "left" if self.truncation_direction.lower() == "left" else "right"


class EmbedAllRequest(Truncating):
    """Of ``/embed_all``."""

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": _TEXT}})

    inputs: Input
    prompt_name: str | None = None


class EmbedSparseRequest(EmbedAllRequest):
    """Of ``/embed_sparse``."""


class Normalizing(Truncating):
    """How an embedding is made."""

    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = Field(None, ge=0)


class EmbedRequest(Normalizing):
    """Of ``/embed``."""

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": [_TEXT], "normalize": True}})

    inputs: Input


class PredictRequest(Truncating):
    """Of ``/predict``."""

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": _TEXT}})

    inputs: PredictInput
    raw_scores: bool = False


class RerankRequest(Truncating):
    """Of ``/rerank``."""

    model_config = ConfigDict(json_schema_extra={"example": {"query": _TEXT, "texts": [_OTHER]}})

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class SpansParameters(Body):
    """Parameters of ``/spans``, as clients of the hub send them."""

    aggregation_strategy: Literal["simple"] | None = None


class SpansRequest(Truncating):
    """Of ``/spans``."""

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": "Ann lives in Paris."}})

    inputs: TokenizeInput
    parameters: SpansParameters | None = None


class SimilarityInput(Body):
    """Texts of ``/similarity``."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Truncating):
    """Parameters of ``/similarity``."""

    prompt_name: str | None = None


class SimilarityRequest(Reusing):
    """Of ``/similarity``."""

    model_config = ConfigDict(
        json_schema_extra={"example": {"inputs": {"source_sentence": _TEXT, "sentences": [_OTHER]}}}
    )

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None


class MainRequest(Normalizing):
    """At ``/`` of a model that embeds: clients of the hub ask there for embeddings and for cosines."""

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": _TEXT}})

    inputs: Annotated[Inputs | SimilarityInput, PlainValidator(_main, json_schema_input_type=Input | SimilarityInput)]
    parameters: SimilarityParameters | None = None


class TokenizeRequest(Body):
    """Of ``/tokenize``."""

    model_config = ConfigDict(json_schema_extra={"example": {"inputs": _TEXT}})

    inputs: TokenizeInput
    add_special_tokens: bool = True
    prompt_name: str | None = None


class DecodeRequest(Body):
    """Of ``/decode``."""

    model_config = ConfigDict(json_schema_extra={"example": {"ids": [7, 8, 9]}})

    ids: InputIds
    skip_special_tokens: bool = True


class OpenAICompatRequest(Reusing):
    """Of ``/v1/embeddings``."""

    model_config = ConfigDict(json_schema_extra={"example": {"input": [_TEXT]}})

    input: Input
    model: str | None = None
    user: str | None = None
    encoding_format: EncodingFormat = "float"
    dimensions: int | None = Field(None, ge=0)


def read(kind: type[Body], raw: bytes) -> Any:
    """A body of this kind; a `Refusal` says which field is wrong, and shows nothing of its value."""
    try:
        return kind.model_validate_json(raw.removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        if first["type"] == "json_invalid":
            raise Refusal("validation", "the body is not JSON", 400) from None
        where = ".".join(str(part) for part in first["loc"]) or "the body"
        what = first["msg"].removeprefix("Value error, ")
        raise Refusal("validation", f"{where}: {what}") from None
