"""Loading the user's model and tokenizer, and running text through them in batches of similar length."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from attmemo.errors import AttmemoError, DataError, UnsupportedModelError
from attmemo.guard.answers import Answers
from attmemo.loading import load_pretrained

# What an application makes of a model's output and the attention mask [B, L]: embeddings [B, D] or classes [B].
Answer = Callable[[Any, Tensor], Tensor]
CHARACTERS: Final = 32  # for each token that is wanted, before a text is cut: no text of words has so long ones
_PAIR: Final = ("encoder", "decoder")  # not by the configuration: that of T5's encoder, saved alone, denies both
GIVES: Final = {
    "classifier": "classes", "language-model": "next tokens", "encoder": "embeddings", "tagger": "spans"
}  # fmt: skip
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Pooling = Literal["mean", "cls"]  # what a user may ask for
POOLINGS: Final = ("mean", "cls", "max", "lasttoken")
_MODE: Final = "pooling_mode_"
# Scaled by the square root of the length, a mean has the same direction: no cosine sees the difference.
_NAMES: Final = {"mean_tokens": "mean", "mean_sqrt_len_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
_HINT: Final = "say how with --pooling mean or --pooling cls, or in Python give answer=, a function"


@dataclass
class LoadedModel:
    """A model ready for inference with its tokenizer."""

    name: str
    model: nn.Module
    tokenizer: Any
    kind: str  # one of `GIVES`; of an encoder-decoder without a classifier, `model` is the encoder alone
    dtype: str
    pooling: str | None = None  # of an encoder's hidden states; None: as its own configuration says (`own_pooling`)
    answer: Answer | None = None  # makes the answers; then the kind is "encoder" and the pooling "function"

    @property
    def labels(self) -> dict[str, int]:
        """Class numbers by label text; empty for a model that has no classes."""
        config: Any = self.model.config
        return {str(k): int(v) for k, v in (config.label2id or {}).items()} if self.kind == "classifier" else {}


@dataclass(frozen=True, slots=True)
class Tokens:
    """One tokenized text: ids and segment ids without padding, and which row of the data it was."""

    row: int
    ids: list[int]
    segments: list[int] | None

    def __len__(self) -> int:
        return len(self.ids)


def load_model(
    name: str, dtype: str = "float32", *, pooling: str | None = None, answer: Answer | None = None, tags: bool = False
) -> LoadedModel:  # fmt: skip
    """Load a model directory or hub name: as the classifier or language model that it is, else as a bare encoder.

    `tags`: as the tagger that it is, too. Of a model with a decoder beside its encoder the latter is loaded: its
    database serves both. A name that leads to no model is a `DataError`; one without weights for its encoder or head
    is an `UnsupportedModelError`.
    """
    import transformers as hf

    if dtype not in DTYPES:
        raise AttmemoError(f"precision {dtype!r} is not supported.", f"one of {', '.join(DTYPES)}")
    heads: dict[str, Any] = {
        "classifier": hf.AutoModelForSequenceClassification, "language-model": hf.AutoModelForCausalLM,
        "tagger": hf.AutoModelForTokenClassification,
    }  # fmt: skip
    own = hf.AutoModel
    loaded = load_pretrained(name, lambda config: heads.get(kind_of(config, tags), own), DTYPES[dtype])
    kind, model, absent = kind_of(loaded.config, tags), loaded.model, loaded.absent
    pair = kind == "encoder" and all(isinstance(getattr(model, part, None), nn.Module) for part in _PAIR)
    if pair:
        model = model.encoder  # the decoder would want inputs of its own, and its maps are never stored
    # Of layers only: positions that are computed are missing too.
    random = [key for key in absent if pair and key.startswith(("encoder.layers.", "encoder.block."))]
    if random:
        raise UnsupportedModelError(
            f"the model {name} has no weights for {', '.join(random[:3])}: its maps would be random.",
            "save the whole model: the class of an encoder saved alone may be one that transformers cannot load",
        )
    if kind != "encoder" and any(not key.startswith(model.base_model_prefix + ".") for key in absent):
        head = "classifier" if kind in ("classifier", "tagger") else "head"
        raise UnsupportedModelError(
            f"the model {name} says it is a {kind.replace('-', ' ')}, but has no weights for "
            f"{', '.join(absent[:3])}: its answers would be random.",
            f"give a model whose {head} was trained, or save the bare encoder without its head",
        )
    if kind == "language-model" and model.get_output_embeddings() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not say which module its head is (get_output_embeddings is None).",
            "save the bare decoder without its head: its answers are then embeddings",
        )
    if answer is not None:
        kind, pooling = "encoder", "function"
    return LoadedModel(name, model, loaded.tokenizer, kind, dtype, pooling, answer)


def kind_of(config: Any, tags: bool = False) -> str:
    """What a model's configuration says it is: see `LoadedModel`; `tags`: whether it may be a tagger."""
    names = config.architectures or []
    if tags and any("ForTokenClassification" in name for name in names):
        return "tagger"
    if any("ForSequenceClassification" in name for name in names):
        return "classifier"
    if any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):  # the latter: GPT-2
        return "language-model"
    return "encoder"


def tokenize(loaded: LoadedModel, texts: Sequence[str], max_length: int) -> list[Tokens]:
    """Token ids of texts, cut to `max_length`, without padding."""
    ids, segments = _encode(loaded, texts, max_length, CHARACTERS * max_length)
    # A tokenizer that adds no special tokens makes nothing of some texts, and a model cannot be asked nothing.
    empty = [next((n for n in (loaded.tokenizer.bos_token_id, loaded.tokenizer.eos_token_id) if n is not None), 0)]
    pairs = zip(ids, segments, strict=True)
    return [Tokens(row, own or empty, parts if own else None) for row, (own, parts) in enumerate(pairs)]


def _encode(
    loaded: LoadedModel, texts: Sequence[str], max_length: int, most: int | None
) -> tuple[list[list[int]], list[list[int] | None]]:
    """Ids and segments of texts, of which at first no more than `most` characters are read."""
    if not texts:
        return [], []  # the tokenizer raises an IndexError
    if loaded.tokenizer.truncation_side != "right":
        most = None
    encoded = loaded.tokenizer([text[:most] for text in texts], truncation=True, max_length=max_length)
    ids = list(encoded["input_ids"])
    segments = list(encoded.get("token_type_ids") or [None] * len(ids))
    if most is not None:
        # Too few tokens from so many characters (blanks, or one endless word): then the whole text counts.
        for place, text in enumerate(texts):
            if len(text) > most and len(ids[place]) < max_length:
                (ids[place],), (segments[place],) = _encode(loaded, [text], max_length, None)
    return ids, segments


def greatest_length(loaded: LoadedModel, asked: int | None) -> int:
    """The length to cut texts to: what the user asked, within what the model and its tokenizer can take."""
    config: Any = loaded.model.config
    limits = [int(getattr(config, "max_position_embeddings", 512) or 512)]
    embeddings = getattr(loaded.model.base_model, "embeddings", None)
    padding = getattr(getattr(embeddings, "position_embeddings", None), "padding_idx", None)
    if padding is not None:  # RoBERTa, MPNet: positions begin behind it
        limits[0] -= padding + 1
    known = getattr(loaded.tokenizer, "model_max_length", None)
    if known is not None and known < 1_000_000:
        limits.append(int(known))
    most = min(limits)
    if asked is not None and asked > limits[0]:
        what = f"--max-length {asked} is more than the model's {limits[0]} positions."
        raise AttmemoError(what, f"--max-length {most}")
    return min(asked or most, limits[0])


def batches(items: Sequence[Tokens], size: int) -> Iterator[list[Tokens]]:
    """Batches of similar length: sorted, so that little is padded, as every careful server does."""
    order = sorted(items, key=len)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def padded(rows: Sequence[Sequence[int]], fill: int = 0) -> dict[str, Tensor]:
    """Token ids of texts and their mask, ``[B, L]``, with padding at the end."""
    return {"input_ids": _padded(rows, fill), "attention_mask": _padded([[1] * len(row) for row in rows])}


def _padded(rows: Sequence[Sequence[int]], fill: int = 0) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=fill)


def collate(loaded: LoadedModel, batch: Sequence[Tokens]) -> dict[str, Tensor]:
    """Model inputs ``[B, L]`` with padding at the end."""
    inputs = padded([item.ids for item in batch], loaded.tokenizer.pad_token_id or 0)
    # A plain fast tokenizer gives segments to any model; a decoder without them would hand them on to its attention.
    takers = loaded.tokenizer.model_input_names, inspect.signature(loaded.model.forward).parameters
    if all("token_type_ids" in names for names in takers) and any(item.segments is not None for item in batch):
        inputs["token_type_ids"] = _padded([item.segments or [0] * len(item) for item in batch])
    return inputs


class NextToken(nn.Module):
    """A language model asked for the token behind each row's last valid one, as a prefill is: no cache is kept.

    Its head is computed for these rows alone. They are taken out right before the head, inside the model's own
    `forward`, so that whatever a family does to its logits afterwards (scaling, capping) is done.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.last = torch.zeros(0, dtype=torch.long)  # the place of each row's last valid token
        head: nn.Module = model.get_output_embeddings()  # type: ignore[operator]
        self._hook = head.register_forward_pre_hook(self._take)

    def forward(self, **inputs: Tensor) -> Any:
        """Logits are ``[B, 1, V]``."""
        self.last = inputs["attention_mask"].sum(1) - 1
        return self.model(**inputs, use_cache=False)

    def remove(self) -> None:
        """Leave the model as it was."""
        self._hook.remove()

    def _take(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        hidden: Tensor = args[0]  # [B, L, H], padded at the end
        return (hidden[torch.arange(len(hidden)), self.last].unsqueeze(1),)


def answers(loaded: LoadedModel, inputs: dict[str, Tensor], model: nn.Module | None = None) -> Tensor:
    """What the application reads, float32, asked of `model` instead where it is given (or of a `NextToken`).

    Logits ``[B, C]`` of classes; numbers ``[B]`` that stand for spans; logits ``[B, V]`` of the token behind the last
    valid one; embeddings of unit length ``[B, H]``; or what `loaded.answer` gives, classes ``[B]`` or embeddings
    ``[B, D]``. If `loaded.answer` gives something else, an `AttmemoError` says what.
    """
    mask, asked = inputs["attention_mask"], loaded.model if model is None else model
    if loaded.answer is not None:
        given = loaded.answer(asked(**inputs), mask)
        if not isinstance(given, Tensor) or given.ndim not in (1, 2) or len(given) != len(mask):
            seen = tuple(given.shape) if isinstance(given, Tensor) else type(given).__name__
            what = f"answer= gave {seen} for a batch of {len(mask)} texts."
            raise AttmemoError(what, "give a tensor of embeddings [B, D] or of classes [B]")
        return given if given.ndim == 1 else given.float()
    if loaded.kind == "language-model":
        own = NextToken(loaded.model) if model is None else None
        try:
            return (own or asked)(**inputs).logits[:, 0].float()  # type: ignore[no-any-return]
        finally:
            if own is not None:
                own.remove()
    output = asked(**inputs)
    if loaded.kind == "classifier":
        return output.logits.float()  # type: ignore[no-any-return]
    if loaded.kind == "tagger":
        reader = Answers("spans", 1.0)
        reader.meet(loaded.model, loaded.tokenizer)
        return reader.read(output, reader.mask_in(inputs)).values
    loaded.pooling = loaded.pooling or own_pooling(loaded.name)
    return nn.functional.normalize(pool(output.last_hidden_state, mask, loaded.pooling), dim=-1)


def pool(hidden: Tensor, mask: Tensor, pooling: str) -> Tensor:
    """Embeddings ``[B, H]``, float32, of hidden states ``[B, L, H]`` padded at the end, by a mask ``[B, L]``."""
    hidden, valid = hidden.float(), mask.bool().unsqueeze(-1)
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "lasttoken":
        return hidden[torch.arange(len(hidden)), mask.sum(1) - 1]
    if pooling == "max":
        return hidden.masked_fill(~valid, -torch.inf).amax(1)
    return (hidden * valid).sum(1) / valid.sum(1)


def own_pooling(name: str) -> str:
    """The pooling (of `POOLINGS`) that sentence-transformers saved beside a model's weights; else ``"mean"``.

    A last step that only scales the embedding to unit length is not told: no cosine sees it. A pooling, or a layer
    behind it, that is not computed here is a `DataError`.
    """
    parts = _read(name, "modules.json") or []
    kinds = {str(part["type"]).rsplit(".", 1)[-1]: str(part["path"]) for part in parts}
    further = kinds.keys() - {"Transformer", "Pooling", "Normalize"}
    config = _read(name, f"{kinds.get('Pooling', '1_Pooling')}/config.json") or {}
    asked = [key.removeprefix(_MODE) for key, on in config.items() if key.startswith(_MODE) and on is True]
    if "pooling_mode" in config:  # the newer spelling
        modes = config["pooling_mode"]
        asked = [modes] if isinstance(modes, str) else list(modes)
    found = {_NAMES.get(mode, mode) for mode in asked} or {"mean"}
    if further or len(found) > 1 or not found <= set(POOLINGS):
        what = f"the layers {', '.join(sorted(further))}" if further else f"pooling by {', '.join(sorted(asked))}"
        raise DataError(f"the embeddings of {name} need {what}, which is not computed here.", _HINT)
    return str(found.pop())


def _read(name: str, file: str) -> Any:
    """A JSON file of a model, or None if there is none."""
    folder = Path(name).expanduser()
    place: Any = folder / file
    if not folder.is_dir():
        from transformers.utils import cached_file

        reasons = "gated_repo", "missing_entries", "connection_errors"
        place = cached_file(name, file, **{f"_raise_exceptions_for_{reason}": False for reason in reasons})
    try:
        return None if place is None else json.loads(Path(place).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise DataError(f"{place} cannot be read: {error}", _HINT) from error
