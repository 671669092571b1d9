"""Tiny real models with real tokenizers, and a small trained database of one."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    PreTrainedTokenizerFast,
)

from attmemo.embed.training import TrainOptions
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model
from attmemo.profiler.train import train_database

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TINY: dict[str, Any] = {
    "vocab_size": 600,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 96,
    "num_labels": 5,
    "initializer_range": 0.3,  # large enough that attention is not uniform
}


def make_tokenizer(lines: list[str]) -> PreTrainedTokenizerFast:
    """A small WordPiece tokenizer with BERT's special tokens: the lines' characters and most frequent words.

    Made without the trainer, which gives another vocabulary in every process.
    """
    normalizer, cutter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = Counter(word for line in lines for word, _ in cutter.pre_tokenize_str(normalizer.normalize_str(line)))
    characters = sorted({character for word in words for character in word})
    frequent = sorted((word for word in words if len(word) > 1), key=lambda word: (-words[word], word))
    pieces = [*SPECIAL, *characters, *(f"##{character}" for character in characters), *frequent]
    vocabulary = {piece: number for number, piece in enumerate(pieces[: TINY["vocab_size"]])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, cutter
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", vocabulary["[SEP]"]), ("[CLS]", vocabulary["[CLS]"])
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=TINY["max_position_embeddings"],
    )


def make_database(model: str, log: Path, output: Path, **options: object) -> Path:
    """Build and train (a few steps, no profile) a database; about two seconds."""
    loaded = load_model(model)
    build_database(loaded, [log], output, BuildOptions(max_length=48, **options))  # type: ignore[arg-type]
    train_database(output, TrainOptions(steps=20), profile=False)
    return output
