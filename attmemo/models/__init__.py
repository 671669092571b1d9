"""Model families: one small adapter each, recognised by the structure of the modules, not by class names."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from attmemo.errors import UnsupportedModelError
from attmemo.models.albert import AlbertAdapter
from attmemo.models.bart import BartAdapter
from attmemo.models.base import Adapter, Call, Rows, Site
from attmemo.models.bert import BertAdapter
from attmemo.models.check import check_adapter
from attmemo.models.clip_text import ClipTextAdapter
from attmemo.models.clip_vision import ClipVisionAdapter
from attmemo.models.deberta import DebertaAdapter
from attmemo.models.deberta_v2 import DebertaV2Adapter
from attmemo.models.distilbert import DistilBertAdapter
from attmemo.models.gpt2 import GPT2Adapter
from attmemo.models.gpt_neo import GPTNeoAdapter
from attmemo.models.llama import LlamaAdapter
from attmemo.models.masks import Spans
from attmemo.models.modernbert import ModernBertAdapter
from attmemo.models.mpnet import MPNetAdapter
from attmemo.models.opt import OPTAdapter
from attmemo.models.privacy_filter import PrivacyFilterAdapter
from attmemo.models.rotary_encoder import RotaryEncoderAdapter
from attmemo.models.t5 import T5Adapter
from attmemo.models.umt5 import UMT5Adapter
from attmemo.models.vit import ViTAdapter
from attmemo.models.whisper import WhisperAdapter

ADAPTERS: tuple[Adapter, ...] = (
    BertAdapter(), AlbertAdapter(), DistilBertAdapter(), MPNetAdapter(), DebertaAdapter(), DebertaV2Adapter(),
    ModernBertAdapter(), PrivacyFilterAdapter(), RotaryEncoderAdapter(), ViTAdapter(), ClipTextAdapter(),
    ClipVisionAdapter(), BartAdapter(), T5Adapter(), UMT5Adapter(), WhisperAdapter(), GPT2Adapter(), GPTNeoAdapter(),
    OPTAdapter(), LlamaAdapter(),
)  # fmt: skip

_REPLACED = "projections are not plain linear layers"

__all__ = [
    "ADAPTERS", "Adapter", "Call", "Rows", "Site", "Spans", "adapter_for", "check_adapter", "encoder_of",
    "makes_answers_outside", "register",
]  # fmt: skip


def register(adapter: Adapter) -> None:
    """Make a family known to this process; it is asked before those that attmemo knows.

    Parameters
    ----------
    adapter : Adapter
        docs/own-family.md shows how to write one.
    """
    global ADAPTERS
    ADAPTERS = (adapter, *ADAPTERS)


def encoder_of(model: Any) -> nn.Module:
    """The transformers model inside a model, pipeline or sentence-transformers wrapper, or UnsupportedModelError."""
    if isinstance(model, str | os.PathLike):
        hint = f"load it first: SentenceTransformer({str(model)!r}), or AutoModel.from_pretrained({str(model)!r})"
        raise UnsupportedModelError(f"{str(model)!r} is a name, not a model.", hint)
    if _is_transformer(model):
        return _held(model)
    parts = _parts(model)
    for part in parts:
        if hasattr(part, "config") and (_is_transformer(part) or not _inside(part)):
            return part
    if isinstance(model, nn.Sequential) and len(model) and model[0] is not model:
        return encoder_of(model[0])
    for part in (model, *parts):
        found = _inside(part) if isinstance(part, nn.Module) else {}
        if len(found) == 1:
            return next(iter(found.values()))
        if found:
            what = f"{type(model).__name__} holds {len(found)} transformers models: {', '.join(found)}."
            raise UnsupportedModelError(what, "memoize each of them by itself")
    kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise UnsupportedModelError(
        f"{kind} holds no transformers model (looked for .config and .base_model).",
        "pass a transformers model, such as AutoModel.from_pretrained(…)",
    )


def makes_answers_outside(model: Any, encoder: nn.Module) -> bool:
    """Whether a wrapper has modules of its own behind its transformers model: what they make of it is not known."""
    if model is encoder or isinstance(model, nn.Sequential):
        return False
    if not isinstance(model, nn.Module):
        return not any(part is encoder for part in _parts(model)) and any(
            makes_answers_outside(part, encoder) for part in _parts(model)
        )
    return not any(getattr(model, name, None) is encoder for name in ("auto_model", "_orig_mod"))


def _parts(model: Any) -> list[nn.Module]:
    """Modules that a wrapper may hold its model in."""
    found = [getattr(model, name, None) for name in ("auto_model", "model", "_orig_mod", "model_body")]
    return [part for part in found if isinstance(part, nn.Module) and part is not model]


def _is_transformer(model: Any) -> bool:
    return hasattr(model, "config") and hasattr(model, "base_model") and isinstance(model, nn.Module)


def _held(model: nn.Module) -> nn.Module:
    """A transformers model; or the one of another kind that it holds, where it is of no family itself (GLiNER2)."""
    kind = type(model.config)
    others = [part for part in model.modules() if _is_transformer(part) and type(part.config) is not kind]
    if others and set(others) <= set(others[0].modules()):
        try:
            adapter_for(model)
        except UnsupportedModelError:
            return others[0]
    return model


def _inside(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost transformers models inside of another module, by name."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if _is_transformer(module) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def adapter_for(model: nn.Module) -> tuple[Adapter, list[Site]]:
    """The adapter for this model and its attention layers; or UnsupportedModelError, which says why none fits."""
    seen = []
    for adapter in ADAPTERS:
        sites, replaced = adapter.sites(model), adapter.replaced(model)
        if not sites:
            if replaced is not None:
                seen.append(f"it looks like {adapter.family}, but {_REPLACED} ({replaced})")
            continue
        expected, reason = adapter.depth(model), adapter.refusal(model)
        if reason is None and expected is None:
            reason = "its configuration does not say how many layers there are"
        if reason is None and len(sites) != expected:
            reason = f"{len(sites)} of {expected} layers have the structure of this family"
            if replaced is not None:
                reason += f": {_REPLACED} ({replaced})"
        if reason is None:
            return adapter, sites
        seen.append(f"it looks like {adapter.family}, but {reason}")
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise UnsupportedModelError(
        f"no adapter knows the attention of {type(model).__name__} (model type {kind!r}); "
        + ("; ".join(seen) or "none of its modules has the projections of a known family")
        + ".",
        "list the supported families with: attmemo families; docs/own-family.md says how to add a family",
    )
