"""Tiny random models that generate, with a tokenizer, and the plain loop that the pipeline is compared with."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from tiny_models import make_tokenizer
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from attmemo.profiler.logs import generate_log

POSITIONS = 64
LINES = [" ".join(line.split()[: 2 + 5 * (number % 4)]) for number, line in enumerate(generate_log(60, seed=4))]


def tokenizer() -> Any:
    """WordPiece over `LINES`; pads at the right."""
    made = make_tokenizer(LINES)
    made.model_max_length = POSITIONS
    return made


def make_model(family: str) -> Any:
    """A random model whose outputs vary; 2 layers of width 32."""
    torch.manual_seed(0)
    size = len(tokenizer())
    ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    if family == "bart":
        config = BartConfig(
            vocab_size=size, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=POSITIONS,
            init_std=0.4, decoder_start_token_id=2, forced_eos_token_id=None, **ids,
        )  # fmt: skip
        return BartForConditionalGeneration(config).eval()
    if family == "t5":
        config = T5Config(
            vocab_size=size, d_model=32, d_kv=12, d_ff=64, num_layers=2, num_heads=4, initializer_factor=3.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=3,
        )  # fmt: skip
        return T5ForConditionalGeneration(config).eval()
    config = GPT2Config(
        vocab_size=size, n_positions=POSITIONS, n_embd=32, n_layer=2, n_head=4, initializer_range=0.4, **ids
    )
    return GPT2LMHeadModel(config).eval()


def save(family: str, folder: Path) -> str:
    """A directory with the model and its tokenizer."""
    make_model(family).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


_TEXTS: WeakKeyDictionary[Any, dict[str, list[Any]]] = WeakKeyDictionary()
"""What models generated."""


def plain_loop(
    model: Any, lines: Sequence[str], batch: int = 4, *, prefix: str = "", limit: int = POSITIONS, **generation: Any
) -> list[Any]:
    """What a user would write: batches of neighbours, blank lines left out; a list of texts for each if several.

    A model is asked for the same once.
    """
    key = repr((lines, batch, prefix, limit, sorted(generation.items())))
    known = _TEXTS.setdefault(model, {})
    if key not in known:
        known[key] = _plain_loop(model, lines, batch, prefix, limit, generation)
    return copy.deepcopy(known[key])


def _plain_loop(
    model: Any, lines: Sequence[str], batch: int, prefix: str, limit: int, generation: dict[str, Any]
) -> list[Any]:
    own, causal = tokenizer(), not model.config.is_encoder_decoder
    own.padding_side = "left" if causal else "right"
    many = generation.get("num_return_sequences", 1)
    outputs: list[Any] = ["" if many == 1 else [""] * many for _ in lines]
    kept = [place for place, line in enumerate(lines) if line.strip()]
    for start in range(0, len(kept), batch):
        places = kept[start : start + batch]
        encoded = own(
            [prefix + lines[p] for p in places], padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        sequences = model.generate(
            input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"], pad_token_id=0, **generation
        )
        if causal:
            sequences = sequences[:, encoded["input_ids"].shape[1] :]
        texts = own.batch_decode(sequences, skip_special_tokens=True)
        for number, place in enumerate(places):
            outputs[place] = texts[number] if many == 1 else texts[number * many : (number + 1) * many]
    return outputs
