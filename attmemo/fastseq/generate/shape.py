"""What of a model decides how much memory and work its generation takes, read from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from attmemo.errors import AttmemoError

Mode = Literal["stock", "shared", "el"]


@dataclass(frozen=True)
class ModelShape:
    """What of a model decides how much memory its generation takes.

    Attributes
    ----------
    layers : int
        Decoder layers, L.
    keys : int
        Numbers in the keys of a token, W: key/value heads times their width.
    width : int
        D.
    inner : int
        Width of the feed-forward layer.
    heads : int
        Query heads.
    vocabulary : int
        V.
    item : int
        Bytes a number, s.
    encoder : bool
        Whether the source goes through an encoder; else it is a prompt.
    eager : bool
        Whether attention maps are made ``[B, h, N, N]``.
    head_width : int
        Of one head; 0: the heads share the width.
    """

    layers: int
    keys: int
    width: int
    inner: int
    heads: int
    vocabulary: int
    item: int = 4
    encoder: bool = True
    eager: bool = False
    head_width: int = 0

    @classmethod
    def of(cls, config: Any, dtype: torch.dtype = torch.float32) -> ModelShape:
        """From the configuration of a transformers model.

        Raises
        ------
        AttmemoError
            It does not say how large the model is.
        """
        encoder = bool(getattr(config, "is_encoder_decoder", False))
        # Of an encoder-decoder it would give the decoder's under other names, and defaults under these.
        text = config.get_text_config() if hasattr(config, "get_text_config") and not encoder else config

        def first(*names: str) -> int:
            for name in names:
                value = getattr(text, name, None)
                if isinstance(value, int) and value > 0:
                    return value
            raise AttmemoError(
                f"the configuration of {type(config).__name__} has none of {', '.join(names)}: the batch cannot be "
                "planned.",
                "give a batch size, --batch-size 8",
            )

        width = first("d_model", "hidden_size", "n_embd")
        heads = first("decoder_attention_heads", "num_decoder_attention_heads", "num_attention_heads", "num_heads")
        head = int(getattr(text, "d_kv", None) or getattr(text, "head_dim", None) or width // heads)
        return cls(
            layers=decoder_layers(config) or first("num_layers", "num_hidden_layers", "n_layer"),
            keys=int(getattr(text, "num_key_value_heads", None) or heads) * head,
            width=width,
            inner=int(
                getattr(text, "d_ff", None)
                or getattr(text, "encoder_ffn_dim", None)
                or getattr(text, "intermediate_size", None)
                or 4 * width
            ),
            heads=heads,
            vocabulary=first("vocab_size"),
            item=dtype.itemsize,
            encoder=encoder,
            eager=getattr(config, "_attn_implementation", None) == "eager",
            head_width=head,
        )

    @property
    def queries(self) -> int:
        """Numbers in the queries of a token."""
        return self.heads * (self.head_width or self.width // self.heads)

    def cache_bytes(self, batch: int, beams: int, source: int, new: int, mode: Mode = "stock") -> int:
        """Bytes of all cached states for B texts of `source` tokens when `new` tokens were generated.

        Exact where attention sees everything: a model with sliding windows holds less.
        """
        if mode == "el" and not self.encoder:
            return self.layers * self.width * self.item * batch * (source + beams * new)
        pair = 2 * self.layers * self.keys * self.item
        suffix = pair * batch * beams * new
        if mode == "el":
            return batch * source * self.width * self.item + suffix
        return pair * (batch * beams if mode == "stock" else batch) * source + suffix


def decoder_layers(config: Any) -> int:
    """Number of decoder layers; 0 if the config does not say."""
    # The text config of an encoder-decoder may count the encoder's: its own names come first.
    if config.is_encoder_decoder:
        for name in ("decoder_layers", "num_decoder_layers"):
            if isinstance(getattr(config, name, None), int):
                return int(getattr(config, name))
    return int(getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0))
