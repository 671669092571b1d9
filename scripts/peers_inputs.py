"""The models and streams of docs/peers.md, and how much of each pair is asked."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from loghub_windows import windows
from workloads import lines_of

from attmemo.profiler.data import read_texts
from attmemo.profiler.demo import model_path

LOGS = ("OpenSSH", "HDFS", "BGL", "Apache")
STREAMS = (*LOGS, "windows", "banking77", "IMDB")
SHAPES = ("bert-base", "deberta-v3-base", "bge-small", "modernbert-base", "qwen3-embedding")
MODELS = {
    "minilm": "MiniLM, a sentence embedder", "deberta-loghub": "deberta-loghub, a classifier of log lines",
    "minilm-sst2": "minilm-sst2, a classifier of sentiment",
    "bert-base": "BERT-base shape, random weights", "deberta-v3-base": "DeBERTa-v3-base shape, random weights",
    "bge-small": "BGE-small shape, random weights", "modernbert-base": "ModernBERT-base shape, random weights",
    "qwen3-embedding": "Qwen3-Embedding-0.6B shape, 6 of 28 layers, random weights",
}  # fmt: skip
FIRST = ("deberta-loghub", "OpenSSH", "bfloat16")
"""The pair and the float type of README.md."""
PAGES = {
    "minilm": ("OpenSSH", "banking77", "IMDB"), "deberta-loghub": ("OpenSSH", "IMDB"),
    "minilm-sst2": ("OpenSSH", "IMDB"), "bert-base": ("OpenSSH", "banking77"),
    "deberta-v3-base": ("OpenSSH",), "bge-small": ("banking77",),
    "modernbert-base": ("banking77",), "qwen3-embedding": ("banking77",),
}  # fmt: skip
"""The pairs of docs/measured.md and docs/peers.md, which take an hour and a half on two cores, with all runtimes."""
_SIZES = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_BEHIND = 0.7  # of a log: deberta-loghub was trained on the part before


class Plan(NamedTuple):
    """Texts that are read, texts that every path answers, tokens of a text at most, texts behind a database of maps.

    A smaller plan for long texts and large models keeps one pair to minutes. Trained models read logs to their end:
    a guard of rows has its certificate after some hundred lines, and what it serves then is to be seen.
    """

    lines: int
    sample: int
    max_length: int
    stored: int


def plan_of(model: str, stream: str) -> Plan:
    """The plan of a pair."""
    if model in SHAPES:
        return {"windows": Plan(200, 32, 128, 0), "IMDB": Plan(120, 32, 128, 0)}.get(stream, Plan(400, 64, 128, 0))
    small = {"windows": Plan(1000, 96, 128, 150), "IMDB": Plan(500, 96, 256, 75)}
    return small.get(stream, Plan(2000 if stream in LOGS else 1200, 192, 256, 180))


def texts_of(shared: Path, stream: str) -> Iterator[str]:
    """The texts of a stream in their order."""
    data = shared / "data"
    if stream in LOGS:
        yield from lines_of(data, stream)
    elif stream == "windows":
        yield from (window["text"] for window in merged(windows(data / "loghub_2k", _BEHIND, 1.0)))
    else:
        file = data / {"banking77": "banking77/test.csv", "IMDB": "imdb/test_subset.jsonl"}[stream]
        yield from (row.text for row in read_texts([file], text_column="text"))


def merged(found: Iterable[dict[str, str]]) -> Iterator[dict[str, str]]:
    """Windows of all systems as one stream: each system in its own order, one window of each in turn."""
    systems: dict[str, list[dict[str, str]]] = {}
    for window in found:
        systems.setdefault(window["label"].split(":")[0], []).append(window)
    for turn in itertools.zip_longest(*systems.values()):
        yield from (window for window in turn if window is not None)


def write_stream(shared: Path, stream: str, lines: int, file: Path) -> list[str]:
    """The first texts of a stream, written as JSON lines."""
    texts = list(itertools.islice(texts_of(shared, stream), lines))
    write_texts(texts, file)
    return texts


def write_texts(texts: Iterable[str], file: Path) -> None:
    """Texts as JSON lines."""
    file.write_text("".join(f"{json.dumps({'text': text})}\n" for text in texts), encoding="utf-8")


def place_of(model: str, shared: Path, work: Path) -> Path:
    """Where a model lies; a shape is made in the work folder."""
    if model == "minilm":
        return Path(model_path())
    if model not in SHAPES:
        place = shared / "models" / model
        if not place.is_dir():
            raise FileNotFoundError(f"models/{model} is not in the shared folder")
        return place
    place = work / model
    if not place.exists():
        _make_shape(model, place)
    return place


def shape_of(name: str, vocabulary: int) -> Any:
    """The configuration of a shape, with so many words."""
    import transformers as hf

    sizes: dict[str, Any] = _SIZES | {"vocab_size": vocabulary}
    if name == "deberta-v3-base":
        return hf.DebertaV2Config(
            **sizes, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=256, share_att_key=True,
            norm_rel_ebd="layer_norm", position_biased_input=False, type_vocab_size=0, max_position_embeddings=512,
        )  # fmt: skip
    if name == "modernbert-base":
        special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
        return hf.ModernBertConfig(
            **sizes | special | {"num_hidden_layers": 22, "intermediate_size": 1152}, max_position_embeddings=8192
        )
    if name == "qwen3-embedding":
        return hf.Qwen3Config(
            vocab_size=vocabulary, hidden_size=1024, num_hidden_layers=6, num_attention_heads=16,
            num_key_value_heads=8, head_dim=128, intermediate_size=3072, max_position_embeddings=512, use_cache=False,
        )  # fmt: skip
    return hf.BertConfig(**sizes | ({"hidden_size": 384, "intermediate_size": 1536} if name == "bge-small" else {}))


def _make_shape(name: str, place: Path) -> None:
    import transformers as hf

    tokenizer = hf.AutoTokenizer.from_pretrained(model_path())
    torch.manual_seed(0)
    hf.AutoModel.from_config(shape_of(name, len(tokenizer))).eval().save_pretrained(place)
    tokenizer.save_pretrained(place)
    pooling = {"bge-small": "cls", "modernbert-base": "cls", "qwen3-embedding": "lasttoken"}.get(name, "mean")
    (place / "1_Pooling").mkdir()
    (place / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}), encoding="utf-8")
