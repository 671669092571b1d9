"""Embedders with a tokenizer and a pooling of their own: they take texts, and tokenizing is in their time.

OpenVINO GenAI and fastembed read models that were converted before. model2vec gives other answers: a table of vectors
of tokens, made from the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.profiler.models import LoadedModel, Tokens

Way = Callable[[Sequence[Tokens]], Tensor]
POOLED_BY_FASTEMBED = ("mean", "cls")


def _said(texts: Sequence[Tokens]) -> list[str]:
    """The texts themselves (of `stream.Text`)."""
    return [text.text for text in texts]  # type: ignore[attr-defined]


def _way(embed: Callable[[list[str]], Any]) -> Way:
    return lambda texts: nn.functional.normalize(torch.as_tensor(embed(_said(texts))).float(), dim=-1)


def write_genai(loaded: LoadedModel, xml: Path, folder: Path, longest: int) -> None:
    """Write the folder of a pipeline around an OpenVINO model."""
    openvino, tokenizers = import_module("openvino"), import_module("openvino_tokenizers")
    model = openvino.Core().read_model(xml)
    model.outputs[0].set_names({"last_hidden_state"})
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    loaded.tokenizer.model_max_length = longest
    openvino.save_model(tokenizers.convert_tokenizer(loaded.tokenizer), folder / "openvino_tokenizer.xml")
    config: Any = loaded.model.config
    config.save_pretrained(folder)


def genai(folder: Path, pooling: str, longest: int, precision: str) -> Way:
    """OpenVINO GenAI's text-embedding pipeline."""
    pipeline: Any = import_module("openvino_genai").TextEmbeddingPipeline
    config = pipeline.Config()
    config.pooling_type = getattr(pipeline.PoolingType, {"lasttoken": "LAST_TOKEN"}.get(pooling, pooling.upper()))
    config.max_length = longest
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }  # fmt: skip
    return _way(pipeline(str(folder), "CPU", config, **options).embed_documents)


def write_fastembed(loaded: LoadedModel, onnx: Path, folder: Path, longest: int) -> None:
    """Write the folder of a custom model around a model in ONNX."""
    for file in onnx.parent.glob(f"{onnx.name}*"):  # its weights may lie beside it
        (folder / file.name).hardlink_to(file)  # ONNX Runtime reads no weights behind a symbolic link
    loaded.tokenizer.model_max_length = longest
    loaded.tokenizer.save_pretrained(folder)
    settings = folder / "tokenizer_config.json"
    told = json.loads(settings.read_text(encoding="utf-8"))
    # fastembed cuts texts at the smaller one; tokenizers of sentence-transformers name another one than the model's.
    told |= {"max_length": longest, "model_max_length": longest}
    settings.write_text(json.dumps(told), encoding="utf-8")
    config: Any = loaded.model.config
    config.save_pretrained(folder)
    special = folder / "special_tokens_map.json"  # fastembed wants it; its tokens are in tokenizer.json too
    if not special.exists():
        special.write_text("{}", encoding="utf-8")


def fastembed(folder: Path, pooling: str, width: int) -> Way:
    """fastembed with a custom model."""
    # Its threads would spin after an answer, and take the cores of the methods that are timed next; no option stops
    # them, and this process has no other session.
    onnxruntime: Any = import_module("onnxruntime")

    class Quiet(onnxruntime.SessionOptions):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_session_config_entry("session.force_spinning_stop", "1")

    onnxruntime.SessionOptions = Quiet
    library: Any = import_module("fastembed")
    described: Any = import_module("fastembed.common.model_description")
    library.TextEmbedding.add_custom_model(
        model="custom", pooling=described.PoolingType[pooling.upper()], normalization=True, dim=width,
        sources=described.ModelSource(hf="custom"), model_file="model.onnx",
    )  # fmt: skip
    model = library.TextEmbedding("custom", threads=torch.get_num_threads(), specific_model_path=str(folder))
    return _way(lambda texts: torch.stack([torch.from_numpy(one) for one in model.embed(texts, len(texts))]))


def model2vec(loaded: LoadedModel) -> Way:
    """Static vectors of tokens, of the model's own width: without it there would be no cosine to the model."""
    distill: Any = import_module("model2vec.distill").distill_from_model
    model = distill(loaded.model, loaded.tokenizer, device="cpu", pca_dims=None, quantize_to="float32")
    return _way(model.encode)
