"""Pool the hidden states of a text into one embedding, as the application that reads it does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor

from attmemo.errors import DataError

Pooling = Literal["mean", "cls"]  # what a user may ask for
POOLINGS: Final = ("mean", "cls", "max", "lasttoken")
_MODE: Final = "pooling_mode_"
# Scaled by the square root of the length, a mean has the same direction: no cosine sees the difference.
_NAMES: Final = {"mean_tokens": "mean", "mean_sqrt_len_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
_HINT: Final = "say how with --pooling mean or --pooling cls, or in Python give answer=, a function"


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
