"""Shapes of models that are served today, texts for them, and the ways to their answers, for `bench_served_models.py`.

Each way is made ready in the process that answers, from a folder with the weights in bfloat16.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers as hf
from torch import Tensor, nn
from transformers.initialization import no_init_weights
from transformers.modeling_outputs import BaseModelOutput

from attmemo import memoize
from attmemo.guard.answers import Answers
from attmemo.profiler.models import LoadedModel, Tokens, padded, pool
from attmemo.profiler.peers import llama, runtimes

Texts = Sequence[Tokens]
Way = Callable[[Texts], Tensor]
VOCABULARY, LENGTHS, TEXTS = 32_000, (8, 120), 32
"""Words of all models with random weights, as embeddings take no time; tokens of a text; texts of mixed lengths."""
AT_ONCE = 8
"""Texts that are padded together where they are sorted by their lengths first."""


class Shape(NamedTuple):
    """A model: its name, how it is made with random weights, and how its rows become answers."""

    title: str
    make: Callable[[], nn.Module]
    pooling: str


def _qwen3() -> nn.Module:
    return hf.Qwen3Model(hf.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        use_cache=False, pad_token_id=0,
    ))  # fmt: skip


def _gemma() -> nn.Module:
    return hf.Gemma3TextModel(hf.Gemma3TextConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=1152, num_hidden_layers=24, num_attention_heads=3,
        num_key_value_heads=1, head_dim=256, sliding_window=512, max_position_embeddings=2048, use_cache=False,
        use_bidirectional_attention=True,
    ))  # fmt: skip


def _eurobert() -> nn.Module:
    config = hf.EuroBertConfig(vocab_size=VOCABULARY, pad_token_id=0, bos_token_id=1, eos_token_id=2, mask_token_id=3,
                               rope_parameters={"rope_type": "default", "rope_theta": 250_000.0})  # fmt: skip
    return hf.EuroBertModel(config)


def _jina() -> nn.Module:
    return hf.JinaEmbeddingsV3Model(hf.JinaEmbeddingsV3Config(vocab_size=VOCABULARY))


def _bart() -> nn.Module:
    config = hf.BartConfig(vocab_size=VOCABULARY, decoder_layers=1)
    return hf.BartModel(config).get_encoder()


SHAPES = {
    "qwen3": Shape("Qwen3-0.6B", _qwen3, "lasttoken"), "gemma": Shape("EmbeddingGemma-300M", _gemma, "mean"),
    "eurobert": Shape("EuroBERT-210M", _eurobert, "mean"), "jina": Shape("jina v3", _jina, "mean"),
    "bart": Shape("bart-large, encoder", _bart, "mean"), "tagger": Shape("minilm-pii", nn.Module, "tags"),
}  # fmt: skip


def random_texts(lengths: Sequence[int], seed: int = 1) -> list[Tokens]:
    """Texts of random tokens."""
    random = np.random.default_rng(seed)
    return [Tokens(row, random.integers(5, VOCABULARY, n).tolist(), None) for row, n in enumerate(lengths)]


def forms(shared: Path, count: int) -> list[Tokens]:
    """The first forms of a stream, as `minilm-pii` reads them."""
    tokenizer = hf.AutoTokenizer.from_pretrained(shared / "models" / "minilm-pii")
    with (shared / "data" / "pii_forms" / "stream.jsonl").open() as file:
        said = [json.loads(next(file))["text"] for _ in range(count)]
    return [Tokens(row, ids[:256], None) for row, ids in enumerate(tokenizer(said)["input_ids"])]


def cases_of(name: str, shared: Path) -> dict[str, list[list[Tokens]]]:
    """Requests of a model by what they are."""
    if name == "tagger":
        own = forms(shared, 640)
        return {"32 forms at once": [own[at : at + TEXTS] for at in range(0, len(own), TEXTS)]}
    mixed = random_texts(np.random.default_rng(0).integers(*LENGTHS, TEXTS).tolist())
    found = {f"{TEXTS} texts of {LENGTHS[0]} to {LENGTHS[1]} tokens": [mixed]}
    if name == "qwen3":
        found["8 texts of 512 tokens"] = [random_texts([512] * 8)]
    return found


class Bare(nn.Module):
    """A model of this list whose call gives what answers are made of."""

    def __init__(self, name: str, folder: Path, dtype: torch.dtype) -> None:
        super().__init__()
        self.tags = name == "tagger"
        if self.tags:
            self.model: Any = hf.AutoModelForTokenClassification.from_pretrained(folder, dtype=dtype)
        else:
            self.model = _filled(SHAPES[name].make, folder).to(dtype)
        self.config = self.model.config
        self.eval()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Any:
        found = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return BaseModelOutput(last_hidden_state=found.logits) if self.tags else found


class Field(nn.Module):
    """A model with one tensor as output."""

    def __init__(self, bare: Bare) -> None:
        super().__init__()
        self.bare = bare

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.bare(input_ids, attention_mask).last_hidden_state  # type: ignore[no-any-return]


def _filled(make: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """A model with the weights of a folder, made without drawing others first."""
    with no_init_weights():
        model = make()
    model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    return model


def write(name: str, folder: Path) -> None:
    """Draw the weights of a shape."""
    torch.manual_seed(0)
    torch.save(SHAPES[name].make().to(torch.bfloat16).state_dict(), folder / "weights.pt")


def asked(name: str, call: Callable[..., Any]) -> Way:
    """The answers of a model's call: embeddings of unit length, or a tag of each token and of no padding."""

    def way(texts: Texts) -> Tensor:
        inputs = padded([text.ids for text in texts])
        found, mask = call(**inputs).last_hidden_state, inputs["attention_mask"]
        if SHAPES[name].pooling == "tags":
            return torch.where(mask.bool(), found.argmax(-1), -1)
        return nn.functional.normalize(pool(found, mask, SHAPES[name].pooling), dim=-1)

    return way


def spans(folder: Path, **options: Any) -> tuple[Callable[[Texts], list[int]], Any]:
    """Numbers that stand for the spans of texts, of the memoized tagger, and its handle."""
    model = hf.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.bfloat16).eval()
    reader = Answers("spans", 1.0)
    reader.meet(model, hf.AutoTokenizer.from_pretrained(folder))
    memoize(model, **options)

    def way(texts: Texts) -> list[int]:
        inputs = padded([text.ids for text in texts])
        return reader.read(model(**inputs), reader.mask_in(inputs)).values.tolist()  # type: ignore[no-any-return]

    return way, model.attmemo


def linear_layers(name: str, folder: Path, tokens: int) -> float:
    """Processor seconds of the bare products of so many tokens with every linear layer, by torch in bfloat16."""
    model, rows, found = Bare(name, folder, torch.bfloat16), dict[int, Tensor](), 0.0
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        given = rows.setdefault(layer.in_features, torch.randn(tokens, layer.in_features).bfloat16())
        start = time.process_time()
        layer(given)
        found += time.process_time() - start
    return found


def by_length(way: Way) -> Way:
    """Ask a few texts at once, sorted by their lengths: what a peer that pads is best asked."""

    def sorted_way(texts: Texts) -> Tensor:
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        parts = [order[at : at + AT_ONCE] for at in range(0, len(order), AT_ONCE)]
        given = [one for part in parts for one in way([texts[place] for place in part])]
        longest = max(map(len, given))
        found = torch.stack([nn.functional.pad(one, (0, longest - len(one)), value=-1) for one in given])
        return found[torch.tensor(order).argsort()]

    return sorted_way


# -- what is converted once


def _loaded(name: str, folder: Path, pooling: str) -> LoadedModel:
    bare = Bare(name, folder, torch.float32)
    return LoadedModel(name, bare if pooling == "" else bare.model, None, "encoder", "float32", pooling or None)


def convert(name: str, file: str, folder: Path) -> None:
    """Write one of the files that ways read."""
    inputs = {"input_ids": torch.randint(5, VOCABULARY // 8, (2, 24)), "attention_mask": torch.ones(2, 24).long()}
    inputs["attention_mask"][0, 17:] = 0
    if file == "openvino.xml" and name == "gemma":  # its masks cannot be traced
        import openvino

        sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
        bare = Field(Bare(name, folder, torch.float32))
        program = torch.export.export(bare, tuple(inputs.values()), dynamic_shapes=(sizes, sizes))
        openvino.save_model(openvino.convert_model(program), folder / file, compress_to_fp16=False)
    elif file == "openvino.xml":
        runtimes.convert_openvino(_loaded(name, folder, ""), inputs, folder / file)
    elif file == "openvino-int8.xml":
        import nncf
        import openvino

        model = openvino.Core().read_model(folder / "openvino.xml")
        openvino.save_model(nncf.compress_weights(model), folder / file, compress_to_fp16=False)
    elif file == "model.onnx":
        runtimes.convert_onnx(_loaded(name, folder, ""), inputs, folder / file)
    elif file == "model-int8.onnx":
        runtimes.quantize_onnx(folder / "model.onnx", folder / file)
    else:
        llama.write_gguf(_loaded(name, folder, SHAPES[name].pooling), folder / file, file.split(".")[0])


# -- ways


def _memoized(name: str, folder: Path, **options: Any) -> Way:
    bare = Bare(name, folder, torch.bfloat16)
    memoize(bare.model, **options)
    return asked(name, bare)


def _original(name: str, folder: Path) -> Way:
    return asked(name, Bare(name, folder, torch.bfloat16))


def _openvino(file: str, precision: str, name: str, folder: Path) -> Way:
    return asked(name, runtimes.openvino(folder / file, "last_hidden_state", precision))


def _onnx(file: str, name: str, folder: Path) -> Way:
    return asked(name, runtimes.onnx(folder / file, "last_hidden_state"))


def _llama(file: str, name: str, folder: Path) -> Way:
    return llama.llama(folder / file, 512)


class Route(NamedTuple):
    """How a way is made ready, the converted files that it reads, the last of them itself, and its side."""

    title: str
    ready: Callable[[str, Path], Way]
    files: tuple[str, ...] = ()
    side: str = "peer"
    bits8: bool = False
    padded: bool = False


_XML, _XML8, _ONNX, _ONNX8 = "openvino.xml", "openvino-int8.xml", "model.onnx", "model-int8.onnx"
ROUTES = {
    "original": Route("original", _original, side="original"),
    "attmemo": Route("attmemo", _memoized, side="own"),
    "openvino": Route("OpenVINO bf16", partial(_openvino, _XML, "bf16"), (_XML,), padded=True),
    "onnx": Route("ONNX Runtime f32", partial(_onnx, _ONNX), (_ONNX,), padded=True),
    "llama-bf16": Route("llama.cpp bf16", partial(_llama, "BF16.gguf"), ("BF16.gguf",)),
    "llama-f16": Route("llama.cpp f16", partial(_llama, "F16.gguf"), ("F16.gguf",)),
    "attmemo-8": Route("attmemo int8", partial(_memoized, linear="int8"), side="own", bits8=True),
    "openvino-8": Route(
        "OpenVINO int8 weights", partial(_openvino, _XML8, "bf16"), (_XML, _XML8), bits8=True, padded=True
    ),
    "onnx-8": Route("ONNX Runtime int8", partial(_onnx, _ONNX8), (_ONNX, _ONNX8), bits8=True, padded=True),
    "llama-8": Route("llama.cpp Q8_0", partial(_llama, "Q8_0.gguf"), ("Q8_0.gguf",), bits8=True),
}
