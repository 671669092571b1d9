"""Loading a model that makes texts, with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from attmemo.errors import AttmemoError, UnsupportedModelError
from attmemo.loading import load_pretrained

_TASK_SETTINGS = (
    "early_stopping",
    "length_penalty",
    "max_length",
    "min_length",
    "no_repeat_ngram_size",
    "num_beams",
)


@dataclass(frozen=True)
class Generator:
    """A model ready to generate.

    Attributes
    ----------
    prefix : str
        What the model wants before every text for its task (T5).
    settings : mapping
        Arguments of ``generate`` that the model's configuration has for the task.
    """

    name: str
    model: Any
    tokenizer: Any
    prefix: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)


def load_generator(
    name: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    causal: bool = False,
    task: str = "summarization",
) -> Generator:
    """Load a model directory or hub name: an encoder-decoder or, if it has no encoder, a causal language model.

    Raises
    ------
    DataError
        There is no such directory, and the name cannot be loaded from the hub.
    UnsupportedModelError
        The model cannot generate; which it is stands in the message.
    AttmemoError
        There is no such device.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    _check_device(device)

    def auto_class(config: Any) -> Any:
        _check_generates(name, config)
        return AutoModelForCausalLM if causal or not config.is_encoder_decoder else AutoModelForSeq2SeqLM

    loaded = load_pretrained(name, auto_class, dtype, device)
    config, model, absent = loaded.config, loaded.model, loaded.absent
    if absent or not model.can_generate():
        why = f"it has no weights for {', '.join(absent[:3])}" if absent else "it has no generate"
        raise _not_generative(name, config, why)
    known = (getattr(config, "task_specific_params", None) or {}).get(task) or {}
    prefix = known.get("prefix") or getattr(config, "prefix", None) or ""
    settings = {key: known[key] for key in _TASK_SETTINGS if known.get(key) is not None}
    return Generator(name, model, loaded.tokenizer, prefix, settings)


def _check_generates(name: str, config: Any) -> None:
    """Refuse a model whose head is for something else, before its weights are read."""
    import transformers

    for architecture in config.architectures or []:
        kind = getattr(transformers, architecture, None)
        # A bare model without a head may do: it is loaded with one, and missing weights are seen then.
        if kind is not None and "For" in architecture and not kind.can_generate():
            raise _not_generative(name, config, f"it is a {architecture}")


def _not_generative(name: str, config: Any, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the model {name} ({config.model_type}) does not generate texts: {why}.",
        "give an encoder-decoder (BART, T5, Marian, …) or a causal language model (GPT-2, Llama, …)",
    )


def _check_device(device: str) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise AttmemoError(
            f"--device {device} cannot be used: {str(error).strip().splitlines()[0]}", "--device cpu"
        ) from error
