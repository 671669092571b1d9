"""Bodies of requests: fields and defaults of text-embeddings-inference (TEI), and `reuse`. Unknown fields are ignored.

Inputs have many forms, told apart by hand: a message of a union of types names every form that it was not.
"""

from __future__ import annotations

import codecs
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from attmemo.serve.refusal import Refusal
from attmemo.serve.texts import Input, Side

MOST_ID: Final = (1 << 32) - 1
_TEXT: Final = {"type": "string"}
_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST_ID}}


class Inputs(NamedTuple):
    """Inputs of a request, and whether there was one that was in no list."""

    items: list[Input]
    single: bool

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


def _pair(given: list[str]) -> Input:
    return given[0] if len(given) == 1 else (given[0], given[1])


def _texts(value: Any) -> Inputs:
    if isinstance(value, str):
        return Inputs([value], True)
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        return Inputs(list(value), False)
    raise ValueError("expected a string, or a list of strings")


def _main(value: Any) -> Inputs | Compared:
    if isinstance(value, dict):
        try:
            return Compared.model_validate(value)
        except ValidationError:
            raise ValueError("expected a string `source_sentence` and a list of strings `sentences`") from None
    return _inputs(value)


def _ids(value: Any) -> Inputs:
    if _is_ids(value):
        return Inputs([value], True)
    if isinstance(value, list) and all(_is_ids(one) for one in value):
        return Inputs(value, False)
    raise ValueError("expected a list of token ids, or a list of such lists")


def _list(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def _schema(*forms: dict[str, Any]) -> WithJsonSchema:
    return WithJsonSchema({"oneOf": list(forms)})


_PAIR: Final = _list(_TEXT, minItems=1, maxItems=2)
EmbedInputs = Annotated[Inputs, PlainValidator(_inputs), _schema(_TEXT, _IDS, _list({"oneOf": [_TEXT, _IDS]}))]
PredictInputs = Annotated[Inputs, PlainValidator(_pairs), _schema(_TEXT, _PAIR, _list(_PAIR, minItems=1))]
TokenizeInputs = Annotated[Inputs, PlainValidator(_texts), _schema(_TEXT, _list(_TEXT))]
DecodeInputs = Annotated[Inputs, PlainValidator(_ids), _schema(_IDS, _list(_IDS))]


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
    truncation_direction: Literal["left", "right", "Left", "Right"] = "right"

    @property
    def side(self) -> Side:
        """Where to cut."""
        return "left" if self.truncation_direction.lower() == "left" else "right"


class EmbedAll(Truncating):
    """Of ``/embed_all`` and ``/embed_sparse``."""

    inputs: EmbedInputs
    prompt_name: str | None = None


class Embedding(Truncating):
    """How an embedding is made."""

    prompt_name: str | None = None
    normalize: bool = True
    dimensions: int | None = Field(None, ge=0)


class Embed(Embedding):
    """Of ``/embed``."""

    inputs: EmbedInputs


class Predict(Truncating):
    """Of ``/predict``."""

    inputs: PredictInputs
    raw_scores: bool = False


class Rerank(Truncating):
    """Of ``/rerank``."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False


class Compared(Body):
    """Texts of ``/similarity``."""

    source_sentence: str
    sentences: list[str]


class Comparing(Truncating):
    """Parameters of ``/similarity``."""

    prompt_name: str | None = None


class Similarity(Reusing):
    """Of ``/similarity``."""

    inputs: Compared
    parameters: Comparing | None = None


class Main(Embedding):
    """At ``/`` of a model that embeds: clients of the hub ask there for embeddings and for cosines."""

    inputs: Annotated[Inputs | Compared, PlainValidator(_main), WithJsonSchema({})]
    parameters: Comparing | None = None


class Tokenize(Body):
    """Of ``/tokenize``."""

    inputs: TokenizeInputs
    add_special_tokens: bool = True
    prompt_name: str | None = None


class Decode(Body):
    """Of ``/decode``."""

    ids: DecodeInputs
    skip_special_tokens: bool = True


class OpenAI(Reusing):
    """Of ``/v1/embeddings``."""

    input: EmbedInputs
    model: str | None = None
    user: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
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


def schema_of(kind: type[Body]) -> dict[str, Any]:
    """The JSON schema of a kind of body, whole in itself."""
    found = kind.model_json_schema()
    parts = found.pop("$defs", {})

    def whole(value: Any) -> Any:
        if isinstance(value, dict):
            name = str(value.get("$ref", "")).removeprefix("#/$defs/")
            return whole(parts[name]) if name in parts else {key: whole(item) for key, item in value.items()}
        return [whole(item) for item in value] if isinstance(value, list) else value

    return dict(whole(found))
