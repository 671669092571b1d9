"""What converters of other runtimes take, and what they give, in the shape of the model's own call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.profiler.models import LoadedModel

Asked = Callable[..., Any]  # takes inputs by name as the model does, gives an object with its output


def output_name(loaded: LoadedModel) -> str:
    """The field of the model's output that answers are made of."""
    return "logits" if loaded.kind == "classifier" else "last_hidden_state"


class Plain(nn.Module):
    """A model with its inputs by position and one tensor as output, as converters want it."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model, self.field = loaded.model, output_name(loaded)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return getattr(output, self.field)  # type: ignore[no-any-return]


def asked(run: Callable[[Mapping[str, Any]], Any], field: str) -> Asked:
    """The model's own call around `run`, which takes arrays by name and gives an array ``[B, …]``."""

    def call(**given: Tensor) -> Any:
        output = run({name: value.numpy() for name, value in given.items()})
        return SimpleNamespace(**{field: torch.from_numpy(output)})

    return call
