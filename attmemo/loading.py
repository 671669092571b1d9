"""Loading a model and its tokenizer from a directory or the hub, with errors that say what to do."""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from attmemo.errors import DataError, UnsupportedModelError


@dataclass(frozen=True)
class Pretrained:
    """A model as transformers loads it."""

    config: Any
    model: Any
    tokenizer: Any
    absent: list[str]  # names of weights that the files do not have: transformers filled them at random


def load_pretrained(
    name: str, auto_class: Callable[[Any], Any], dtype: torch.dtype, device: str = "cpu"
) -> Pretrained:
    """Load a model directory or hub name, in evaluation mode.

    `auto_class` chooses the class to load with (``AutoModel``, …), given the configuration; it may refuse the model.
    DataError if there is no such directory or name, UnsupportedModelError if transformers cannot load the model.
    """
    from transformers import AutoTokenizer

    with _explained(f"cannot load the model {name}"):
        config = _read_config(name)
        loader, path = auto_class(config), _path(name)
        with quiet():
            model, report = loader.from_pretrained(path, dtype=dtype, output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(path)
            model = model.eval().to(device)
    return Pretrained(config, model, tokenizer, sorted(report["missing_keys"]))


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a model directory or hub name; the errors are those of `load_pretrained`."""
    from transformers import AutoTokenizer

    with _explained(f"cannot load the tokenizer of {name}"), quiet():
        return AutoTokenizer.from_pretrained(_path(name))


def load_config(name: str) -> Any:
    """The configuration of a model directory or hub name; the errors are those of `load_pretrained`."""
    with _explained(f"cannot read the configuration of {name}"):
        return _read_config(name)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence loading bars and notices of transformers and its hub for a while: one progress bar at a time, ours."""
    from huggingface_hub.utils import logging as hub
    from transformers.utils import logging as hf

    level, bars, notices = hf.get_verbosity(), hf.is_progress_bar_enabled(), hub.get_verbosity()
    hf.set_verbosity_error()
    hf.disable_progress_bar()
    hub.set_verbosity(logging.ERROR)  # else each try to reach the hub, of six, has two lines
    plain = logging.getLogger("transformers").level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        hub.set_verbosity(notices)
        hf.set_verbosity(level)
        logging.getLogger("transformers").setLevel(plain)
        if bars:
            hf.enable_progress_bar()


def tokenizer_digest(tokenizer: Any) -> str:
    """Digest of a tokenizer's vocabulary and rules, hex. Databases store the digest: it must not change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    body = tokenizer.get_vocab() if backend is None else json.loads(backend.to_str())
    if backend is not None:
        # Each call sets truncation and padding on the backend; the vocabulary does not depend on them.
        body = {key: value for key, value in body.items() if key not in ("truncation", "padding")}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _path(name: str) -> str:
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).exists()
    path = str(Path(name).expanduser()) if looks_local else name
    if looks_local and not (Path(path) / "config.json").is_file():
        raise DataError(
            f"no model in {name}: there is no config.json.", "give a model directory, or a name on the model hub"
        )
    return path


def _read_config(name: str) -> Any:
    from transformers import AutoConfig

    with quiet():
        return AutoConfig.from_pretrained(_path(name))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of transformers as ours: files that cannot be read are a DataError, all else an UnsupportedModelError."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = "check the path, or the name on the model hub"
        if _not_reached(error):
            reason, hint = _unreached()
        raised = DataError if isinstance(error, OSError) else UnsupportedModelError
        raise raised(f"{what}: {reason}", hint) from error


def _not_reached(error: BaseException | None) -> bool:
    """Whether the hub's cache lacks the file, and the hub could not be asked."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    return error is not None and (isinstance(error, LocalEntryNotFoundError) or _not_reached(error.__cause__))


def _unreached() -> tuple[str, str]:
    """Why, and what to do next."""
    from huggingface_hub import constants

    absent = "there is no such directory, and the model hub's cache has no such model"
    if constants.HF_HUB_OFFLINE:
        return f"{absent}; HF_HUB_OFFLINE is set.", "give a model directory, or unset HF_HUB_OFFLINE to ask the hub"
    return (
        f"{absent}; the hub cannot be reached.",
        "give a model directory, or check the network (with HF_HUB_OFFLINE=1 the cache alone is asked, at once)",
    )
