"""Loading a model that makes texts, with its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from attmemo.errors import AttmemoError, DataError, UnsupportedModelError

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
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    path = str(Path(name).expanduser()) if looks_local else name
    if looks_local and not (Path(path) / "config.json").is_file():
        raise DataError(
            f"no model in {name}: there is no config.json.", "give a model directory, or a name on the model hub"
        )
    _check_device(device)
    try:
        config = AutoConfig.from_pretrained(path)
        _check_generates(name, config)
        loader = AutoModelForCausalLM if causal or not config.is_encoder_decoder else AutoModelForSeq2SeqLM
        model, report = loader.from_pretrained(path, dtype=dtype, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        kind = DataError if isinstance(error, OSError) else UnsupportedModelError
        raise kind(
            f"cannot load the model {name}: {reason}", "check the path, or the name on the model hub"
        ) from error
    absent = sorted(report["missing_keys"])
    if absent or not model.can_generate():
        why = f"it has no weights for {', '.join(absent[:3])}" if absent else "it has no generate"
        raise _not_generative(name, config, why)
    known = (getattr(config, "task_specific_params", None) or {}).get(task) or {}
    prefix = known.get("prefix") or getattr(config, "prefix", None) or ""
    settings = {key: known[key] for key in _TASK_SETTINGS if known.get(key) is not None}
    return Generator(name, model.eval().to(device), tokenizer, prefix, settings)


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
