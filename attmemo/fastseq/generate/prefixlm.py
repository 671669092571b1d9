"""A UniLM-style prefix language model: a BERT body that generates, with the sequence-to-sequence mask.

The source sees itself in both directions, the target sees the source and what was generated. The next word is
predicted at a [MASK] behind the text, as UniLM does: each step reads two tokens, the last one and [MASK], and keeps
the keys and values of the first only. transformers has no such model; this one generates through its own
`generate`, and faster through `wrap`.

Source: UniLM as described in FastSeq (arXiv 2106.04718), section 4; the mask and the two-token step are UniLM's.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertModel, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.bert.modeling_bert import BertOnlyMLMHead

from attmemo.errors import UnsupportedModelError
from attmemo.models.cache_name import CACHE_NAME, cache_of


class PrefixLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """BERT with a masked-language-model head, generating a target behind a source.

    Parameters
    ----------
    config : transformers.BertConfig
        `mask_token_id` has to be set, by attribute. `source_type` and `target_type` are the token types of the two
        parts (0 and 1).
    bert, cls : nn.Module, optional
        Body and head to use, instead of new ones; see `from_bert`.

    Notes
    -----
    The parameters have BERT's names (`bert.*`, `cls.*`), so `from_pretrained` reads a UniLM checkpoint in that form.
    """

    config_class = BertConfig
    base_model_prefix = "bert"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_attention_backend = True
    _tied_weights_keys = {"cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight"}  # noqa: RUF012

    def __init__(self, config: BertConfig, bert: Any = None, cls: Any = None) -> None:
        config = copy.copy(config)
        config.is_decoder = True  # only then does the body fill a cache
        config.use_cache = True
        if getattr(config, "mask_token_id", None) is None:
            raise UnsupportedModelError(
                "a prefix language model predicts at a [MASK], and config.mask_token_id is not set.",
                "set it to tokenizer.mask_token_id",
            )
        super().__init__(config)
        self.bert = BertModel(config, add_pooling_layer=False) if bert is None else bert
        self.cls = BertOnlyMLMHead(config) if cls is None else cls
        if bert is None:
            self.post_init()
        self.generation_config.pad_token_id = config.pad_token_id

    @classmethod
    def from_bert(cls, model: Any, mask_token_id: int, eos_token_id: int | None = None) -> PrefixLM:
        """From a `BertForMaskedLM` (or another model with `bert` and `cls`), with the same weights.

        Raises
        ------
        UnsupportedModelError
            If the model has no such parts.
        """
        if not hasattr(model, "bert") or not hasattr(model, "cls"):
            raise UnsupportedModelError(
                f"{type(model).__name__} has no BERT body and masked-language-model head.",
                "load it with BertForMaskedLM",
            )
        config = copy.copy(model.config)
        config.mask_token_id = mask_token_id
        config.eos_token_id = eos_token_id
        fresh = cls(config)
        fresh.to(dtype=model.dtype, device=model.device)
        fresh.bert.load_state_dict(model.bert.state_dict(), strict=False)  # without the pooler, if it has one
        fresh.cls.load_state_dict(model.cls.state_dict())
        fresh.generation_config.eos_token_id = eos_token_id
        fresh.eval()
        return fresh

    def get_output_embeddings(self) -> Any:
        return self.cls.predictions.decoder

    def set_output_embeddings(self, new_embeddings: Any) -> None:
        self.cls.predictions.decoder = new_embeddings
        self.cls.predictions.bias = new_embeddings.bias

    @functools.wraps(GenerationMixin.prepare_inputs_for_generation)  # whose signature generate looks at
    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        if cache_of(kwargs) is None:
            raise UnsupportedModelError(
                "a prefix language model generates with a cache only: without one, nothing tells the source from what "
                "follows it.",
                "leave out use_cache=False",
            )
        return super().prepare_inputs_for_generation(*args, **kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits of the word that follows.

        Parameters
        ----------
        input_ids : Tensor [R, T] int64
            The source (when nothing is cached), or the last token.
        attention_mask : Tensor [R, P + T], optional
            0 for padding, which is on the left of the source.
        position_ids : Tensor [R, T], optional
        past_key_values, cache : transformers.Cache, optional
            Holds P positions. The second name is that of transformers 5.24 and later.

        Returns
        -------
        CausalLMOutputWithPast
            `logits` `[R, 1, V]`.
        """
        rows, new = input_ids.shape
        cache = past_key_values if cache is None else cache
        seen = cache.get_seq_length() if cache is not None else 0
        if seen and new != 1:
            raise UnsupportedModelError(
                f"after the source one token at a time can be read; got {new}.", "generate without a cache of your own"
            )
        device = input_ids.device
        valid = torch.ones(rows, seen + new, dtype=torch.bool, device=device)
        if attention_mask is not None:
            valid = attention_mask[:, : seen + new].bool()
        if position_ids is None:
            position_ids = (valid.long().cumsum(-1) - 1).clamp(min=0)[:, -new:]
        types = torch.full_like(input_ids, getattr(self.config, "target_type", 1) if seen else 0)
        if not seen:
            types.fill_(getattr(self.config, "source_type", 0))
        blank = input_ids.new_full((rows, 1), self.config.mask_token_id)
        blank_type = torch.full_like(blank, getattr(self.config, "target_type", 1))
        sees = torch.ones(rows, 1, new + 1, seen + new + 1, dtype=torch.bool, device=device)
        sees[..., : seen + new] = valid[:, None, None, :]
        sees[..., :new, -1] = False  # nothing but the blank itself sees the blank
        outputs = self.bert(
            input_ids=torch.cat([input_ids, blank], dim=1),
            attention_mask=sees,
            token_type_ids=torch.cat([types, blank_type], dim=1),
            position_ids=torch.cat([position_ids, position_ids[:, -1:] + 1], dim=1),
            use_cache=cache is not None,
            return_dict=True,
            **{CACHE_NAME: cache},
        )
        if cache is not None:
            cache.crop(-1)  # the blank is read anew at every step
        return CausalLMOutputWithPast(
            logits=self.cls(outputs.last_hidden_state[:, -1:]), **{CACHE_NAME: cache}
        )
