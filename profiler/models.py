"""Loading the user's model and tokenizer, and running text through them in batches of similar length."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from attmemo.errors import AttmemoError, DataError, UnsupportedModelError

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class LoadedModel:
    """A model ready for inference with its tokenizer.

    Attributes
    ----------
    kind : str
        ``"classifier"`` (answers are labels) or ``"encoder"`` (answers are embeddings, mean-pooled).
    """

    name: str
    model: nn.Module
    tokenizer: Any
    kind: str
    dtype: str

    @property
    def labels(self) -> dict[str, int]:
        """Class numbers by label text; empty for an encoder."""
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


def load_model(name: str, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """Load a model directory or hub name: as a classifier if it is one, else as a bare encoder.

    Raises
    ------
    DataError
        There is no such directory, and the name cannot be loaded from the hub.
    UnsupportedModelError
        transformers cannot load it as an encoder.
    """
    from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

    if dtype not in DTYPES:
        raise AttmemoError(f"precision {dtype!r} is not supported.", f"one of {', '.join(DTYPES)}")
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    path = str(Path(name).expanduser()) if looks_local else name
    if looks_local and not (Path(path) / "config.json").is_file():
        raise DataError(
            f"no model in {name}: there is no config.json.", "give a model directory, or a name on the model hub"
        )
    try:
        with quiet():
            config = AutoConfig.from_pretrained(path)
            classifies = any("ForSequenceClassification" in a for a in config.architectures or [])
            loader = AutoModelForSequenceClassification if classifies else AutoModel
            model, report = loader.from_pretrained(path, dtype=DTYPES[dtype], output_loading_info=True)
            model = model.eval().to(device)
            tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        kind = DataError if isinstance(error, OSError) else UnsupportedModelError
        raise kind(
            f"cannot load the model {name}: {reason}", "check the path, or the name on the model hub"
        ) from error
    absent = sorted(report["missing_keys"])
    if classifies and any(not key.startswith(model.base_model_prefix + ".") for key in absent):
        raise UnsupportedModelError(
            f"the model {name} says it is a classifier, but has no weights for {', '.join(absent[:3])}: "
            "its answers would be random.",
            "give a model whose classifier was trained, or save the bare encoder without its head",
        )
    return LoadedModel(name, model, tokenizer, "classifier" if classifies else "encoder", dtype)


def tokenize(loaded: LoadedModel, texts: Sequence[str], max_length: int, first_row: int = 0) -> list[Tokens]:
    """Token ids of texts, cut to `max_length`, without padding."""
    if not texts:
        return []  # the tokenizer raises an IndexError
    encoded = loaded.tokenizer(list(texts), truncation=True, max_length=max_length)
    segments = encoded.get("token_type_ids")
    return [
        Tokens(first_row + i, ids, segments[i] if segments is not None else None)
        for i, ids in enumerate(encoded["input_ids"])
    ]


def greatest_length(loaded: LoadedModel, asked: int | None) -> int:
    """The length to cut texts to: what the user asked, within what the model and its tokenizer can take."""
    config: Any = loaded.model.config
    limits = [int(getattr(config, "max_position_embeddings", 512) or 512)]
    if config.model_type in ("roberta", "xlm-roberta", "camembert"):
        limits[0] -= 2  # positions start behind the padding index
    known = getattr(loaded.tokenizer, "model_max_length", None)
    if known is not None and known < 1_000_000:
        limits.append(int(known))
    most = min(limits)
    if asked is not None and asked > most and asked > limits[0]:
        raise AttmemoError(
            f"--max-length {asked} is more than the model's {limits[0]} positions.", f"--max-length {most}"
        )
    return min(asked or most, limits[0])


def batches(items: Sequence[Tokens], size: int, *, sort: bool = True) -> Iterator[list[Tokens]]:
    """Batches of similar length: sorted, so that little is padded, as every careful server does."""
    order = sorted(items, key=len) if sort else list(items)
    for start in range(0, len(order), size):
        yield order[start : start + size]


def collate(loaded: LoadedModel, batch: Sequence[Tokens]) -> dict[str, Tensor]:
    """Model inputs ``[B, L]`` with padding at the end."""
    pad = loaded.tokenizer.pad_token_id or 0
    length = max(len(item) for item in batch)
    ids = torch.full((len(batch), length), pad, dtype=torch.long)
    mask = torch.zeros((len(batch), length), dtype=torch.long)
    segments = torch.zeros((len(batch), length), dtype=torch.long)
    for row, item in enumerate(batch):
        n = len(item)
        ids[row, :n] = torch.tensor(item.ids)
        mask[row, :n] = 1
        if item.segments is not None:
            segments[row, :n] = torch.tensor(item.segments)
    inputs = {"input_ids": ids, "attention_mask": mask}
    if batch[0].segments is not None and "token_type_ids" in loaded.tokenizer.model_input_names:
        inputs["token_type_ids"] = segments
    return inputs


def answers(loaded: LoadedModel, inputs: dict[str, Tensor], model: nn.Module | None = None) -> Tensor:
    """What the user gets, float32: logits ``[B, C]``, or mean-pooled embeddings of unit length ``[B, H]``."""
    output = (loaded.model if model is None else model)(**inputs)
    if loaded.kind == "classifier":
        logits: Tensor = output.logits
        return logits.float()
    hidden: Tensor = output.last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    pooled = (hidden.float() * mask).sum(1) / mask.sum(1)
    return nn.functional.normalize(pooled, dim=-1)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' loading bars and notices for a while: one progress bar at a time, ours."""
    from transformers.utils import logging as hf

    level, bars = hf.get_verbosity(), hf.is_progress_bar_enabled()
    hf.set_verbosity_error()
    hf.disable_progress_bar()
    plain = logging.getLogger("transformers").level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        hf.set_verbosity(level)
        logging.getLogger("transformers").setLevel(plain)
        if bars:
            hf.enable_progress_bar()
