"""What a database says about the model that it belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from attmemo.db import ModelInfo
from attmemo.fingerprint import fingerprint, model_fields
from attmemo.models import Adapter, Site


def describe(
    model: nn.Module, adapter: Adapter, sites: Sequence[Site], name: str, max_length: int, tokenizer: str | None,
    fields: Mapping[str, str] | None = None,
) -> ModelInfo:  # fmt: skip
    """What a database says about the model it belongs to; `fields` are those of its fingerprint, if they are known."""
    host = adapter.host(model)
    fields = dict(fields or model_fields(host))  # all weights are read for them
    return ModelInfo(
        name=name, family=adapter.family, mask_kind=adapter.mask_kind, layers=len(sites),
        heads=adapter.shape(sites[0].module)[0],
        hidden=int(host.config.hidden_size),  # type: ignore[union-attr,arg-type]
        dtype=str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch."),
        max_length=max_length, fingerprint=fingerprint(fields), fields=fields, tokenizer=tokenizer,
    )  # fmt: skip
