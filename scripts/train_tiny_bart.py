"""Train a small BART to restore sentences with words left out, on the WMT16 sample: for tests that need real weights.

python scripts/train_tiny_bart.py ../shared/data/wmt16_enro /tmp/tiny-bart --steps 600

A minute on two cores. This is BART's own way of learning: some words of a sentence become <mask>, the target is
the sentence. (Translation needs more than two thousand pairs: such a model gives nearly one output to all.) Its
output depends on the source, ends by itself, and differs between beams, unlike that of random weights.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BartConfig, BartForConditionalGeneration, PreTrainedTokenizerFast

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def make_tokenizer(lines: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding with BART's special tokens."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        lines,
        trainers.BpeTrainer(
            vocab_size=vocabulary, special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        mask_token="<mask>",
    )  # fmt: skip


def train(
    data: Path,
    steps: int,
    *,
    vocabulary: int = 1000,
    width: int = 96,
    batch: int = 16,
    masked: float = 0.15,
    seed: int = 0,
    held_out: int = 100,
) -> tuple[BartForConditionalGeneration, PreTrainedTokenizerFast, list[str]]:
    """Train on all but the last sentences; returns the held-out English ones behind model and tokenizer.

    `data` has newsdev2016.en, newsdev2016.ro and newstest2013.de; the learning rate of Adam rises over the first tenth
    of the steps and then falls to zero; `masked` is how many of the words' pieces are hidden.
    """
    english = (data / "newsdev2016.en").read_text().splitlines()
    others = (data / "newsdev2016.ro").read_text().splitlines() + (data / "newstest2013.de").read_text().splitlines()
    tokenizer = make_tokenizer(english + others, vocabulary)
    torch.manual_seed(seed)
    model = BartForConditionalGeneration(
        BartConfig(
            vocab_size=vocabulary,
            d_model=width,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=4 * width,
            decoder_ffn_dim=4 * width,
            max_position_embeddings=128,
            # So it learns to look at the source in 200 steps; with dropout and small weights not in 1500.
            dropout=0.0,
            init_std=0.1,
            bos_token_id=0,
            pad_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=None,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rise = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / rise, (steps - step) / max(1, steps - rise))
    )
    sentences = english[:-held_out] + others
    generator = torch.Generator().manual_seed(seed)
    model.train()
    start = time.perf_counter()
    for step in range(steps):
        chosen = torch.randint(len(sentences), (batch,), generator=generator).tolist()
        options = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": 48}
        inputs = tokenizer([sentences[i] for i in chosen], return_token_type_ids=False, **options)
        labels = inputs["input_ids"]
        hidden = (torch.rand(labels.shape, generator=generator) < masked) & (labels > tokenizer.unk_token_id)
        inputs["input_ids"] = labels.masked_fill(hidden, tokenizer.mask_token_id)
        loss = model(**inputs, labels=labels.masked_fill(labels == tokenizer.pad_token_id, -100)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)
    return model.eval(), tokenizer, english[-held_out:]


def main() -> None:
    """Train and save a folder that `from_pretrained` reads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    options = parser.parse_args()
    model, tokenizer, sentences = train(options.data, options.steps)
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    inputs = tokenizer(
        sentences[:4], return_tensors="pt", padding=True, truncation=True, max_length=100, return_token_type_ids=False
    )
    for line in tokenizer.batch_decode(
        model.generate(**inputs, num_beams=4, max_new_tokens=40), skip_special_tokens=True
    ):
        print(line)


if __name__ == "__main__":
    main()
