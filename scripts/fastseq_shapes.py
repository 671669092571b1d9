"""Models that generate, of published shapes and random weights, and texts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]


SPECIAL_IDS: Final = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
"""Tokens of all shapes."""


def sizes_of(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> dict[str, int]:
    """Of BART and what is built like it: encoder and decoder are alike."""
    return {
        "vocab_size": vocabulary, "d_model": width, "max_position_embeddings": positions,
        **{f"{part}_{what}": size for part in ("encoder", "decoder")
           for what, size in (("layers", layers), ("attention_heads", heads), ("ffn_dim", 4 * width))},
    }  # fmt: skip


def bart(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> Any:
    return BartForConditionalGeneration(
        BartConfig(
            **sizes_of(width, layers, heads, vocabulary, positions),
            **SPECIAL_IDS,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
            normalize_before=False,  # in published checkpoints; CTranslate2 asks for it
        )
    )


def marian(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> Any:
    """As published ones: the last word is for padding, and begins each text."""
    last = vocabulary - 1
    model = MarianMTModel(
        MarianConfig(
            **sizes_of(width, layers, heads, vocabulary, positions),
            activation_function="swish",
            scale_embedding=True,
            bos_token_id=0,
            eos_token_id=2,
            pad_token_id=last,
            decoder_start_token_id=last,
            forced_eos_token_id=None,
            normalize_before=False,
            normalize_embedding=False,
        )
    )
    model.generation_config.bad_words_ids = [[last]]
    return model


def t5(width: int, layers: int, heads: int, vocabulary: int) -> Any:
    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=vocabulary,
            d_model=width,
            d_kv=64 if width >= 64 else 8,
            num_heads=heads,
            num_layers=layers,
            d_ff=4 * width,
            pad_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        )
    )


def gpt2(width: int, layers: int, heads: int, vocabulary: int, positions: int) -> Any:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            n_positions=positions,
            **SPECIAL_IDS,
        )
    )


def qwen3(width: int, layers: int, heads: int, key_heads: int, head: int, middle: int, vocabulary: int) -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=key_heads,
            head_dim=head,
            intermediate_size=middle,
            tie_word_embeddings=True,
            **SPECIAL_IDS,
        )
    )


SHAPES: dict[str, Callable[[], Any]] = {
    "bart-large": lambda: bart(1024, 12, 16, 50265, 1026),
    "t5-base": lambda: t5(768, 12, 12, 32128),
    "marian-base": lambda: marian(512, 6, 8, 58101, 1100),
    "gpt2-medium": lambda: gpt2(1024, 24, 16, 50257, 1280),
    "qwen3-0.6b": lambda: qwen3(1024, 28, 16, 8, 128, 3072, 151936),
    "tiny": lambda: bart(32, 2, 4, 200, 130),
    "tiny-marian": lambda: marian(32, 2, 4, 200, 130),
    "tiny-t5": lambda: t5(32, 2, 4, 200),
    "tiny-gpt2": lambda: gpt2(32, 2, 4, 200, 256),
    "tiny-qwen3": lambda: qwen3(32, 2, 4, 2, 16, 64, 200),
}


def make_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """One word for each id: texts of a wished length, and something to decode."""
    begin = getattr(config, "bos_token_id", None)
    places = dict(zip(SPECIAL, (begin or 0, config.pad_token_id, config.eos_token_id, 3), strict=True))
    free = [number for number in range(config.vocab_size) if number not in places.values()]
    places |= {f"w{name}": number for name, number in enumerate(free)}
    tokenizer = Tokenizer(models.WordLevel(places, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", bos_token="<s>", unk_token="<unk>",
        padding_side="right" if config.is_encoder_decoder else "left",
    )  # fmt: skip


def lines_of(vocabulary: int, count: int, length: int) -> list[str]:
    """Texts of words at random, the same every time."""
    numbers = torch.randint(0, vocabulary - len(SPECIAL), (count, length), generator=torch.Generator().manual_seed(0))
    return [" ".join(f"w{number}" for number in row) for row in numbers.tolist()]
