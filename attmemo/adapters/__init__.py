"""Model families: one small adapter each, found by the structure of the modules rather than by class name.

To add a family, write one file with an `Adapter` and list it in `ADAPTERS`; `check` proves it on the model itself.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from attmemo.adapters.base import Adapter, Call, Rows, Site
from attmemo.adapters.bert import BertAdapter
from attmemo.adapters.check import check_adapter
from attmemo.adapters.deberta_v2 import DebertaV2Adapter
from attmemo.errors import UnsupportedModelError

ADAPTERS: tuple[Adapter, ...] = (BertAdapter(), DebertaV2Adapter())

__all__ = ["ADAPTERS", "Adapter", "Call", "Rows", "Site", "adapter_for", "check_adapter", "encoder_of"]


def encoder_of(model: Any) -> nn.Module:
    """The transformers model inside what the user holds (a model, or a sentence-transformers wrapper).

    Raises
    ------
    UnsupportedModelError
        If there is no transformers model inside.
    """
    if hasattr(model, "config") and hasattr(model, "base_model") and isinstance(model, nn.Module):
        return model
    for name in ("auto_model", "model"):
        inner = getattr(model, name, None)
        if inner is not None and inner is not model and isinstance(inner, nn.Module) and hasattr(inner, "config"):
            return inner
    if isinstance(model, nn.Sequential) and len(model) and model[0] is not model:
        return encoder_of(model[0])
    raise UnsupportedModelError(
        f"{type(model).__name__} holds no transformers model (looked for .config and .base_model).",
        "pass a transformers model, such as AutoModel.from_pretrained(…)",
    )


def adapter_for(model: nn.Module) -> tuple[Adapter, list[Site]]:
    """The adapter that knows this model, and its attention layers.

    Raises
    ------
    UnsupportedModelError
        Names what was looked for. Nothing has been changed.
    """
    expected = getattr(getattr(model, "config", None), "num_hidden_layers", None)
    seen = []
    for adapter in ADAPTERS:
        sites = adapter.sites(model)
        if sites and (expected is None or len(sites) == expected):
            return adapter, sites
        seen.append(f"{adapter.family}: {len(sites)} of {expected} layers")
    kind = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    raise UnsupportedModelError(
        f"no adapter knows the attention of {type(model).__name__} (model type {kind!r}); found {'; '.join(seen)}.",
        "supported families are " + ", ".join(a.family for a in ADAPTERS) + "; see attmemo/adapters to add one",
    )
