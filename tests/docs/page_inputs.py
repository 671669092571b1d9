"""What pages name and tests make: small models of each kind, and files with lines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import SIZES
from generators import LINES, POSITIONS, save, tokenizer
from transformers import (
    AutoModel,
    AutoTokenizer,
    M2M100Config,
    M2M100ForConditionalGeneration,
    ModernBertConfig,
    ModernBertModel,
    NllbTokenizer,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from attmemo.profiler.logs import generate_log

MORE = list(generate_log(800, seed=5))[300:]
"""Lines of the same services that come later."""

FILES: dict[str, list[str] | None] = {
    "FILE": None, "my.log": None, "today.log": None, "lines.log": None, "year.log": None, "sshd.log": None,
    "recent.log": MORE[:450], "newest.log": MORE[450:490],
    "INPUT": LINES[:6], "en.txt": LINES[:6], "prompts.txt": LINES[:6], "ro.ref": LINES[:6],
    "articles.txt": LINES[:6], "highlights.txt": LINES[:6],
}  # fmt: skip
"""The lines of each file that a page reads; None: the 300 of the fixture."""

KINDS = {"generate": "bart", "prefix": "causal", "local": "narrow"}
"""Words of a command that say which kind of model its MODEL is; no page names these models."""


def many_languages(folder: Path) -> str:
    """A model that translates between two languages, as NLLB does; random weights."""
    letters = sorted({letter for line in LINES for letter in line if letter != " "})
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *letters]
    own = NllbTokenizer(
        vocab={piece: number for number, piece in enumerate(pieces)}, merges=[],
        extra_special_tokens=["eng_Latn", "ron_Latn"], model_max_length=POSITIONS,
    )  # fmt: skip
    own.save_pretrained(folder)
    torch.manual_seed(0)
    config = M2M100Config(
        vocab_size=len(own) + 2, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=POSITIONS,
        init_std=0.4, bos_token_id=0, pad_token_id=1, eos_token_id=2, decoder_start_token_id=2,
    )  # fmt: skip
    M2M100ForConditionalGeneration(config).eval().save_pretrained(folder)
    return str(folder)


def tokenizer_without_types(folder: Path) -> int:
    """Save a tokenizer that gives ids and a mask alone; how many tokens it has."""
    own = tokenizer()
    own.save_pretrained(folder)
    names = ["input_ids", "attention_mask"]
    type(own).from_pretrained(folder, model_input_names=names).save_pretrained(folder)
    return len(own)


def causal(folder: Path) -> str:
    """A decoder that gives one of three classes."""
    config = Qwen3Config(
        vocab_size=tokenizer_without_types(folder), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForSequenceClassification(config).eval().save_pretrained(folder)
    return str(folder)


def narrow(folder: Path) -> str:
    """An encoder each token of which sees its neighbours alone, in every layer."""
    sizes = SIZES | {"vocab_size": tokenizer_without_types(folder), "max_position_embeddings": 512}
    config = ModernBertConfig(
        **sizes, local_attention=16, layer_types=["sliding_attention"] * SIZES["num_hidden_layers"], cls_token_id=2,
        sep_token_id=3,
    )  # fmt: skip
    torch.manual_seed(0)
    ModernBertModel(config).eval().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str) -> dict[str, str]:
    """Directories of tiny models, by the names that pages have for them, and by kind."""
    make = tmp_path_factory.mktemp
    encoder = str(make("encoder"))
    AutoModel.from_pretrained(tiny_bert).save_pretrained(encoder)
    AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(encoder)
    gpt2 = save("gpt2", make("gpt2"))
    return {
        "MODEL": tiny_bert, "$MODEL": tiny_bert, "sentence-transformers/all-MiniLM-L6-v2": encoder,
        "/models/minilm": encoder, "./t5": save("t5", make("t5")), "gpt2": gpt2, "LLAMA-65B": gpt2,
        "facebook/nllb-200-distilled-600M": many_languages(make("nllb")), "bart": save("bart", make("bart")),
        "causal": causal(make("causal")), "narrow": narrow(make("narrow")),
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]) -> Path:
    """The working directory, with the files that pages read."""
    monkeypatch.chdir(tmp_path)
    for name, lines in FILES.items():
        place = tmp_path / ("FILE.log" if name == "FILE" else name)
        place.write_text("".join(f"{line}\n" for line in lines or log_lines), encoding="utf-8")
    return tmp_path
