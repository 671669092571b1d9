"""llama.cpp: a model written as GGUF; an embedder asked by token ids. Its pooling is llama.cpp's own.

A family takes part if `gguf` names its tensors as llama.cpp reads them, and the keys below say all of its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.errors import UnsupportedModelError
from attmemo.profiler.models import LoadedModel, Tokens

FAMILIES: Final = {
    "bert": "BERT", "modernbert": "MODERN_BERT", "qwen3": "QWEN3", "eurobert": "EUROBERT",
    "gemma3_text": "GEMMA_EMBEDDING",
}  # fmt: skip
"""Model types of transformers, and the names that gguf has for them."""
_LEAST: Final = 128  # tokens that are computed at once: each attends to all of them, masked, so 512 take longer
_BLOCK: Final = 32  # numbers that have one scale in Q8_0


def write_gguf(loaded: LoadedModel, file: Path, kind: str) -> None:
    """Write an embedder or a language model in float32 as GGUF; its matrices are ``"F16"``, ``"BF16"`` or ``"Q8_0"``.

    UnsupportedModelError: llama.cpp, or this file, does not know the family.
    """
    gguf: Any = import_module("gguf")
    config: Any = loaded.model.config
    if config.model_type not in FAMILIES:
        what = f"models of type {config.model_type} are not written as GGUF here."
        raise UnsupportedModelError(what, f"one of {', '.join(FAMILIES)}")
    arch = gguf.MODEL_ARCH[FAMILIES[config.model_type]]
    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[arch])
    _shape(writer, gguf, loaded)
    names, chosen = gguf.get_tensor_name_map(arch, config.num_hidden_layers), gguf.GGMLQuantizationType[kind]
    plain = gguf.GGMLQuantizationType.F32
    for key, weight in loaded.model.state_dict().items():
        name = names.get_name(key, try_suffixes=(".weight", ".bias"))
        if name is None or (name == "output.weight" and config.tie_word_embeddings):
            continue  # a pooler, which no embedding is made of; a head that is the embedding
        matrix = weight.ndim == 2 and weight.shape[1] % _BLOCK == 0 and "position" not in key and "type" not in key
        one = float(config.model_type == "gemma3_text" and "norm" in key)  # its norms multiply by 1 + w
        numbers, form = (weight.float() + one).numpy(), chosen if matrix else plain
        writer.add_tensor(name, gguf.quants.quantize(numbers, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _shape(writer: Any, gguf: Any, loaded: LoadedModel) -> None:
    """Keys of the file; without a vocabulary, as only token ids are asked."""
    config: Any = loaded.model.config
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if loaded.kind != "language-model":
        poolings = {"mean": "MEAN", "cls": "CLS", "lasttoken": "LAST"}
        writer.add_pooling_type(gguf.PoolingType[poolings[str(loaded.pooling)]])
    if config.model_type != "qwen3":
        writer.add_causal_attention(False)
    if hasattr(config, "rms_norm_eps"):
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
        if "sliding_attention" in rope:
            writer.add_sliding_window(config.sliding_window)
            writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        return
    if config.model_type == "bert":
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_token_type_count(config.type_vocab_size)
        return
    writer.add_layer_norm_eps(config.norm_eps)
    writer.add_sliding_window(config.local_attention)
    writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(config.rope_parameters["sliding_attention"]["rope_theta"])


def llama(file: Path, longest: int) -> Callable[[Sequence[Tokens]], Tensor]:
    """A written model ready to be asked for embeddings of up to `longest` tokens; they have unit length."""
    base: Any = import_module("llama_cpp").Llama

    class ById(base):  # type: ignore[misc]
        """Its texts are places in a list of token ids: batching stays the library's own."""

        asked: Sequence[Tokens] = ()

        def tokenize(self, text: bytes, *_: Any, **__: Any) -> list[int]:
            return self.asked[int(text)].ids

    size, threads = max(_LEAST, longest), torch.get_num_threads()

    @cache
    def opened(flash: bool) -> Any:
        return ById(
            str(file), embedding=True, n_ctx=size, n_batch=size, n_ubatch=size, n_threads=threads,
            n_threads_batch=threads, flash_attn=flash, verbose=False,
        )  # fmt: skip

    def way(texts: Sequence[Tokens]) -> Tensor:
        model = opened(len(texts) > 1)  # flash attention takes a fifth of the time of many texts, and more of one
        model.asked = texts
        found = model.embed([str(place) for place in range(len(texts))])
        return nn.functional.normalize(torch.tensor(found), dim=-1)

    return way
