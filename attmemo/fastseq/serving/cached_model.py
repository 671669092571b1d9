"""A causal language model of transformers that keeps its keys and values in a `KeyValueCache`.

The model is as it was but for its attention function: all sequences of a step go through it as one row of tokens, and
each layer calls the ragged operator. Whatever reaches transformers' attention interface works: Llama, Mistral, Qwen.
"""

from __future__ import annotations

import math
from types import TracebackType
from typing import Any

import torch
from transformers import AttentionInterface

from attmemo.errors import ArgumentError, UnsupportedModelError
from attmemo.fastseq.serving.ops.cache_step import CacheStep
from attmemo.fastseq.serving.ops.kv_cache import KeyValueCache

NAME = "attmemo_cache"


def _attend(
    module: Any,
    query: torch.Tensor,  # [1, H, N, D]
    key: torch.Tensor,  # [1, Hk, N, D]
    value: torch.Tensor,  # [1, Hk, N, D]
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attmemo_call: tuple[KeyValueCache, CacheStep, str] | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, as transformers calls it."""
    if attmemo_call is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} was called without a cache step while its model serves from a KeyValueCache",
            "call CachedModel.forward, or close() it to have the plain model back",
        )
    unknown = [name for name in ("sliding_window", "softcap", "s_aux") if options.get(name) is not None]
    if unknown or attention_mask is not None:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for {', '.join(unknown) or 'a mask'}, which the cache operator has not"
        )
    cache, step, implementation = attmemo_call
    width = query.shape[-1]
    if scaling is not None and not math.isclose(scaling, width**-0.5):
        query = query * (scaling * math.sqrt(width))  # the operator's own factor is fixed
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [N, heads, D]
    output = cache.attend(step, query, key, value, module.layer_idx, implementation=implementation)
    return output[None], None


AttentionInterface.register(NAME, _attend)


def _sees_the_future(model: Any) -> str | None:
    """The first module that says of itself that it is not causal."""
    return next((name for name, module in model.named_modules() if getattr(module, "is_causal", None) is False), None)


def make_cache(model: Any, *, pages: int, page_size: int = 16, **kind: Any) -> KeyValueCache:
    """A cache for this model's layers, heads, type and device.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model.
    pages, page_size : int
        How many pages, and tokens of each.
    **kind
        `quant_bit`, `quant_group`, `scale_dtype`, `cache_mode`, `cache_layout` of `KeyValueCache`.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return KeyValueCache(
        pages=pages,
        page_size=page_size,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        num_layer=config.num_hidden_layers,
        dtype=model.dtype,
        device=model.device,
        **kind,
    )


class CachedModel:
    """A model and the cache it reads and writes.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model in evaluation mode; until `close` it serves from the cache only.
    cache : KeyValueCache
        See `make_cache`.
    implementation : str
        Of the operator: ``auto``, ``reference``, ``cpu`` or ``triton``.

    Raises
    ------
    UnsupportedModelError
        If the model's attention is not plain causal attention behind transformers' attention interface.
    """

    def __init__(self, model: Any, cache: KeyValueCache, implementation: str = "auto") -> None:
        name = type(model).__name__
        if not getattr(model, "_supports_attention_backend", False) or model.config.is_encoder_decoder:
            raise UnsupportedModelError(f"{name} is not a decoder behind transformers' attention interface")
        config = model.config.get_text_config()
        layers = getattr(config, "layer_types", None) or ["full_attention"]
        if set(layers) != {"full_attention"} or (
            getattr(config, "layer_types", None) is None and getattr(config, "sliding_window", None) is not None
        ):
            raise UnsupportedModelError(f"{name} has layers that see only a part of the text; the cache keeps all")
        if (place := _sees_the_future(model)) is not None:
            raise UnsupportedModelError(f"{name} is not causal: {place} sees later tokens, which come in later steps")
        if model.training:
            raise UnsupportedModelError(f"{name} is in training mode, and serving has no backward", "model.eval()")
        if model.config._attn_implementation == NAME:
            raise UnsupportedModelError(f"this {name} serves from a cache already", "close() that CachedModel first")
        self.model, self.cache, self.implementation = model, cache, implementation
        self._before = model.config._attn_implementation
        model.set_attn_implementation(NAME)

    @property
    def vocabulary(self) -> int:
        """Tokens that the model knows: 0 to one less."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def close(self) -> None:
        """Give the model its own attention back."""
        if self._before is not None:
            self.model.set_attn_implementation(self._before)
            self._before = None

    def __enter__(self) -> CachedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @torch.inference_mode()
    def forward(self, step: CacheStep, tokens: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
        """One pass over the new tokens of a step; keys and values go to the cache.

        Parameters
        ----------
        step : CacheStep
            From ``cache.advance``.
        tokens : Tensor, shape [N], int64
            The sequences' new tokens, one behind the other.
        keep : Tensor, shape [K], int64, optional
            Whose logits are wanted; those of each sequence's last token if not given.

        Returns
        -------
        Tensor, shape [K, vocabulary]

        Raises
        ------
        ArgumentError
            If there are not as many tokens as the step has.
        """
        if tokens.shape != (step.tokens,):
            raise ArgumentError(f"forward: tokens have shape {list(tokens.shape)}, expected [{step.tokens}]")
        output = self.model(
            input_ids=tokens[None],
            position_ids=step.positions[None],
            use_cache=False,
            logits_to_keep=step.last if keep is None else keep,
            attmemo_call=(self.cache, step, self.implementation),
        )
        logits: torch.Tensor = output.logits[0]
        if len(logits) != len(step.last if keep is None else keep):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} gives {len(logits)} rows of logits: it does not know logits_to_keep"
            )
        return logits

    def score(self, tokens: list[int], chunk: int = 128) -> torch.Tensor:
        """Log-probability of each token but the first, given those before it; ``[len(tokens) - 1]``, float32.

        `chunk` tokens go through the model at once. With a quantised cache all of them see quantised keys and values,
        as they do when a text is generated token by token.
        """
        found = []
        sequence = self.cache.open()
        try:
            for begin in range(0, len(tokens), chunk):
                part = torch.tensor(tokens[begin : begin + chunk], device=self.cache.cache.device)
                step = self.cache.advance([(sequence, len(part))])
                keep = torch.arange(len(part), device=part.device)
                logits = self.forward(step, part, keep).float().log_softmax(-1)
                following = torch.tensor(tokens[begin + 1 : begin + chunk + 1], device=part.device)
                found.append(logits[: len(following)].gather(1, following[:, None])[:, 0])
        finally:
            self.cache.free(sequence)
        return torch.cat(found) if found else torch.zeros(0)
