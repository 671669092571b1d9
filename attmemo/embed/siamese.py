"""The embedder: three linear layers from a layer's hidden states to 128 numbers.

AttMEMO (arXiv 2301.09262, the section on embedding) trains two MLPs with shared weights and linear neurons, so that
the distance of two embeddings approaches one minus the similarity of their attention maps. Here the first layer
projects each *token* with the same weights at every position (the paper flattens the whole input): any length will do,
at a cost linear in the length. The second layer has its own weights for every position, up to the longest record.
Without non-linearities the last two layers fold into one matrix for serving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attmemo.errors import DatabaseCorruptError

DIMENSION = 128
CHANNELS = 16


class SiameseEmbedder:
    """Three linear layers; one instance for each attention layer, and one for the once-per-sequence lookup.

    `token` ``[H, p]`` and `bias` ``[p]`` take hidden states to channels, `position` ``[N * p, m]`` all channels of up
    to N tokens to m numbers, and `output` ``[m, d]`` these to the embedding. The bias cancels in distances: centred
    inputs keep distances accurate in float32.
    """

    def __init__(self, token: Tensor, bias: Tensor, position: Tensor, output: Tensor) -> None:
        self.token, self.bias, self.position, self.output = token, bias, position, output
        with torch.autocast("cpu", enabled=False):
            self._folded = (position @ output).contiguous()  # [N * p, d]

    @property
    def channels(self) -> int:
        """Numbers per token after the first layer, p."""
        return self.token.shape[1]

    @property
    def longest(self) -> int:
        """Greatest number of tokens, N."""
        return self.position.shape[0] // self.channels

    @property
    def dimension(self) -> int:
        """Numbers in an embedding, d."""
        return self.output.shape[1]

    def embed(self, hidden: Tensor, lengths: Sequence[int]) -> Tensor:
        """Embeddings ``[B, d]``, float32, of hidden states ``[B, L, H]`` that enter an attention layer.

        `lengths` are the valid tokens, at most `longest`. Positions behind them are ignored.
        """
        batch, length, _ = hidden.shape
        # Only sequences within reach are asked for, so positions beyond the longest record are padding.
        length = min(length, self.longest)
        with torch.autocast("cpu", enabled=False):  # the model's precision is not the distances'
            channels = hidden[:, :length].to(torch.float32) @ self.token + self.bias  # [B, L, p]
            if min(lengths) < length:
                kept = torch.arange(length) < torch.tensor(lengths)[:, None]
                channels = channels * kept[..., None]
            return channels.reshape(batch, -1) @ self._folded[: length * self.channels]

    def tensors(self) -> dict[str, Tensor]:
        """The weights by name."""
        return {"token": self.token, "bias": self.bias, "position": self.position, "output": self.output}


def save_embedders(embedders: dict[int, SiameseEmbedder], file: Path, owner: Mapping[str, str] | None = None) -> None:
    """Write all embedders of a database to one safetensors file, keyed by layer (-1: once per sequence)."""
    flat = {f"{layer}.{name}": t.contiguous() for layer, e in embedders.items() for name, t in e.tensors().items()}
    save_file(flat, str(file), dict(owner or {}))


def load_embedders(file: Path, hidden: int) -> dict[int, SiameseEmbedder]:
    """Read what `save_embedders` wrote; DatabaseCorruptError if a tensor is missing, misshapen or not finite."""
    hint = f"attmemo train-embedder {file.parent}"
    try:
        flat = load_file(str(file))
    except (SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatabaseCorruptError(f"{file}: not an embedder file: {error}", hint) from error
    embedders = {}
    for key in sorted({name.partition(".")[0] for name in flat}):
        try:
            parts = [flat[f"{key}.{name}"] for name in ("token", "bias", "position", "output")]
            layer = int(key)
        except (KeyError, ValueError) as error:
            raise DatabaseCorruptError(f"{file}: embedder {key!r} is incomplete", hint) from error
        token, bias, position, output = parts
        fits = (
            token.dim() == position.dim() == output.dim() == 2
            and token.shape[0] == hidden
            and bias.shape == token.shape[1:]
            and token.shape[1] > 0
            and position.shape[0] % token.shape[1] == 0
            and position.shape[1] == output.shape[0]
            and all(p.dtype == torch.float32 and bool(torch.isfinite(p).all()) for p in parts)
        )
        if not fits:
            shapes = [tuple(p.shape) for p in parts]
            raise DatabaseCorruptError(
                f"{file}: embedder {layer} has shapes {shapes} for hidden size {hidden}, or infinite values",
                hint,
            )
        embedders[layer] = SiameseEmbedder(token, bias, position, output)
    return embedders
