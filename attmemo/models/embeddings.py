"""What a model computes around its blocks: embeddings before them, the pooler behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Embeddings that are a norm of the sum of a token's row, its type's and its position's.

    Attributes
    ----------
    words, types, positions : nn.Embedding
        `types` and `positions` may be missing.
    norm : nn.LayerNorm
    padding : int
        The token that does not count as a position; -1: positions count from 0.
    """

    words: nn.Embedding
    types: nn.Embedding | None
    positions: nn.Embedding | None
    norm: nn.LayerNorm
    padding: int = -1

    @property
    def are_plain(self) -> bool:
        """Whether they are tables that only look up, and a norm with weights."""
        tables = [table for table in (self.words, self.types, self.positions) if table is not None]
        plain = all(type(table) is nn.Embedding and table.max_norm is None for table in tables)
        return plain and type(self.norm) is nn.LayerNorm and self.norm.elementwise_affine


@dataclass(frozen=True, slots=True)
class Pooler:
    """A linear layer on the first row of the last hidden states, and its activation."""

    module: nn.Module
    dense: nn.Linear
    activation: nn.Module

    @property
    def is_in_place(self) -> bool:
        """Whether the module still consists of these."""
        parts = self.module._modules
        return parts.get("dense") is self.dense and parts.get("activation") is self.activation


def embeddings_named(host: Any) -> Embeddings | None:
    """The embeddings of a model that names them as BERT does; None: it has others. A self-check says whether they are
    summed in this order.
    """
    module: Any = getattr(host, "embeddings", None)
    names = "word_embeddings", "position_embeddings", "LayerNorm"
    if not all(hasattr(module, name) for name in names) or hasattr(host, "embeddings_project"):
        return None
    if getattr(module, "embed_proj", None) is not None:
        return None
    counts_tokens = hasattr(module, "create_position_ids_from_inputs_embeds")
    found = Embeddings(
        module.word_embeddings, getattr(module, "token_type_embeddings", None), module.position_embeddings,
        module.LayerNorm, int(module.padding_idx) if counts_tokens else -1,
    )  # fmt: skip
    return found if found.are_plain else None


def pooler_named(host: Any) -> Pooler | None:
    """The pooler of a model that names it as BERT does; None: it has none, or another."""
    module = getattr(host, "pooler", None)
    dense, activation = getattr(module, "dense", None), getattr(module, "activation", None)
    if not isinstance(module, nn.Module) or type(dense) is not nn.Linear or not isinstance(activation, nn.Module):
        return None
    return Pooler(module, dense, activation)
