"""What a model says of itself, whether it is wrapped or not."""

from __future__ import annotations

import hashlib
from typing import Any

from attmemo.loading import tokenizer_digest

_POSITIONS = ("max_encoder_position_embeddings", "max_position_embeddings")


def attribute(model: Any, name: str) -> Any:
    """An attribute of the model, or of the model inside a wrapper."""
    value = getattr(model, name, None)
    return value if value is not None else getattr(getattr(model, "model", None), name, None)


def positions(config: Any) -> int | None:
    """Tokens for which the model has positions; None if it only has relative ones."""
    for name in _POSITIONS:
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def digest(model: Any, config: Any) -> str:
    """A short name of the model: its class, its configuration, and a few numbers of each of its weights."""
    inner = model if hasattr(model, "named_parameters") else getattr(model, "model", None)
    hashed = hashlib.blake2b(digest_size=12)
    settings = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    hashed.update(repr(sorted(settings.items(), key=lambda item: item[0])).encode())
    defaults = attribute(model, "generation_config")
    if defaults is not None:
        hashed.update(repr(sorted(defaults.to_dict().items(), key=lambda item: str(item[0]))).encode())
    if inner is not None and hasattr(inner, "named_parameters"):
        for name, weight in inner.named_parameters():
            some = weight.detach().flatten()[:: max(1, weight.numel() // 16)][:16].float().cpu()
            hashed.update(f"{name} {weight.dtype} {list(weight.shape)} {some.tolist()}".encode())
    return hashed.hexdigest()


def tokenizer_name(tokenizer: Any) -> str:
    """A short name of the tokenizer: its class, its vocabulary, its rules, and its special tokens."""
    special = sorted((name, str(token)) for name, token in tokenizer.special_tokens_map.items())
    text = f"{type(tokenizer).__name__} {special} {tokenizer_digest(tokenizer)}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
