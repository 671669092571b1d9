"""Models whose blocks can be packed, batches for them, heads that read first rows, and what is compared."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from families import DECODER, FAMILIES, GEMMA, SIZES, VOCABULARY, _make
from torch import Tensor, nn

from attmemo import memoize
from attmemo.db import Provenance
from attmemo.forward.plan import Share
from attmemo.handle.description import describe
from attmemo.models import adapter_for
from attmemo.profiler.row_recorder import RowRecorder, RowWriter, row_form

Inputs = dict[str, Tensor]

NEAR = 1e-5
"""Greatest difference in float32, relative to the range: what the order of sums may change."""


def _deberta(*terms: str, **settings: Any) -> Callable[[], nn.Module]:
    return _make(
        "DebertaV2Model", "DebertaV2Config",
        **{**SIZES, "relative_attention": True, "pos_att_type": list(terms), "position_buckets": 16,
           "share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False,
           "type_vocab_size": 0} | settings,
    )  # fmt: skip


def _deberta_v1(*terms: str, **settings: Any) -> Callable[[], nn.Module]:
    return _make(
        "DebertaModel", "DebertaConfig",
        **{**SIZES, "relative_attention": True, "pos_att_type": list(terms), "type_vocab_size": 0,
           "position_biased_input": False} | settings,
    )  # fmt: skip


MODELS: dict[str, Callable[[], nn.Module]] = {
    name: FAMILIES[name].make
    for name in (
        "BERT", "BERT classifier", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA", "DistilBERT", "MPNet",
        "DeBERTa-v2", "DeBERTa-v3", "ModernBERT", "NomicBERT", "GTE", "Jina v3", "ALBERT", "ALBERT, groups",
    )
} | {
    "DeBERTa v1": FAMILIES["DeBERTa"].make,
    "DeBERTa v1, c2p": _deberta_v1("c2p", max_relative_positions=8),
    "DeBERTa v1, p2c": _deberta_v1("p2c", max_relative_positions=20, type_vocab_size=2, position_biased_input=True),
    "DeBERTa, c2p": _deberta("c2p"),
    "DeBERTa, p2c": _deberta("p2c"),
    "DeBERTa, no terms": _deberta(),
    "DeBERTa, terms without distances": _deberta("c2p", "p2c", relative_attention=False),
    "DeBERTa, keys of its own": _deberta("c2p", "p2c", share_att_key=False),
    "DeBERTa, no buckets": _deberta("c2p", "p2c", position_buckets=-1, type_vocab_size=2),
}  # fmt: skip
"""Every family with rows, and the forms of DeBERTa."""


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0,
                                "original_max_position_embeddings": 32} | settings}  # fmt: skip


def _privacy_filter() -> nn.Module:
    model: nn.Module = _make(
        "OpenAIPrivacyFilterModel", "OpenAIPrivacyFilterConfig",
        **DECODER | {"max_position_embeddings": 512}, head_dim=16, sliding_window=8, num_local_experts=8,
        num_experts_per_tok=4,
    )()  # fmt: skip
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("proj_bias"):  # of experts: they begin with zeros
                parameter.copy_(0.4 * torch.rand(parameter.shape, generator=generator) - 0.2)
    return model


GATED: dict[str, Callable[[], nn.Module]] = {
    "Llama": _make("LlamaModel", "LlamaConfig", **DECODER),
    "Llama 3": _make("LlamaModel", "LlamaConfig", **DECODER, mlp_bias=True,
                     **_rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)),
    "Mistral": _make("MistralModel", "MistralConfig", **DECODER, sliding_window=7),
    "Qwen2": _make("Qwen2Model", "Qwen2Config", **DECODER),
    "Qwen2 classifier": _make("Qwen2ForSequenceClassification", "Qwen2Config", **DECODER, num_labels=3,
                              use_sliding_window=True, sliding_window=6, max_window_layers=1),
    "Qwen3": _make("Qwen3Model", "Qwen3Config", **DECODER, head_dim=12),
    "Qwen3, scaled": _make("Qwen3Model", "Qwen3Config", **DECODER, head_dim=16, **_rope("yarn")),
    "EuroBERT": FAMILIES["EuroBERT"].make,
    "Gemma 3": _make("Gemma3TextModel", "Gemma3TextConfig", **GEMMA),
    "Gemma 3, bidirectional": FAMILIES["Gemma 3, bidirectional"].make,
    "Privacy Filter": _privacy_filter,
}  # fmt: skip
"""Families whose blocks run packed, and no record serves."""

def _encoder_of(name: str) -> Callable[[], nn.Module]:
    return lambda: FAMILIES[name].make().get_encoder()  # type: ignore[operator]


OF_PAIRS: dict[str, Callable[[], nn.Module]] = {
    f"{name} encoder": _encoder_of(name)
    for name in ("BART", "mBART", "Marian", "Pegasus", "M2M-100", "T5", "Flan-T5", "mT5")
} | {
    "UMT5 encoder": _make(
        "UMT5EncoderModel", "UMT5Config", vocab_size=VOCABULARY, d_model=32, d_kv=6, d_ff=48, num_layers=3,
        num_heads=4, relative_attention_num_buckets=8, initializer_factor=1.5,
    )
}  # fmt: skip
"""Encoders of models with a decoder; no record serves them."""

CLIP: dict[str, Callable[[], nn.Module]] = {
    "CLIP text": _make("CLIPTextModel", "CLIPTextConfig", **SIZES, initializer_factor=3.0),
    "CLIP text, end by id": _make("CLIPTextModelWithProjection", "CLIPTextConfig", **SIZES | {"eos_token_id": 9},
                                  initializer_factor=3.0, hidden_act="gelu", projection_dim=20),
}  # fmt: skip
"""Text towers that are causal; no record serves them. `eos_token_id` 2 is that of old configurations."""

SIGLIP: dict[str, Callable[[], nn.Module]] = {
    "SigLIP": _make("SiglipTextModel", "SiglipTextConfig", **SIZES),
    "SigLIP 2": _make("Siglip2TextModel", "Siglip2TextConfig", **SIZES),
}
"""Text towers that run packed where a batch has no padding."""

_IMAGES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
                           "intermediate_size": 48, "image_size": 16, "patch_size": 4}  # fmt: skip
UNPADDED: dict[str, Callable[[], nn.Module]] = {
    "ViT": FAMILIES["ViT"].make, "DeiT": FAMILIES["DeiT"].make,
    "CLIP images": _make("CLIPVisionModel", "CLIPVisionConfig", **_IMAGES, initializer_factor=3.0),
    "SigLIP images": _make("SiglipVisionModel", "SiglipVisionConfig", **_IMAGES),
    "Whisper encoder": _encoder_of("Whisper"),
}  # fmt: skip
"""Families whose inputs are images, or sounds, of one length; no record serves them."""

EXACT = MODELS | GATED | OF_PAIRS | CLIP
"""Every family with blocks whose inputs are texts."""

LEFT = ["ModernBERT", "NomicBERT", "GTE", "Jina v3", *GATED, *(name for name in OF_PAIRS if "T5" in name)]
"""Those that run packed with padding on the left too."""

REFUSED = ["GPT-2", "GPT-Neo", "OPT"]
"""Families without blocks."""

LONGEST = {"RoBERTa": 63, "XLM-RoBERTa": 63, "CamemBERT": 63, "MPNet": 62, "DistilBERT": 300}
"""Most tokens: some families count positions from 1 or 2 on."""


def longest(name: str) -> int:
    """Most tokens of this model."""
    return LONGEST.get(name, 64)


def batch(
    lengths: Sequence[int], seed: int = 0, *, padded: int = 0, left: bool = False, types: bool = False
) -> Inputs:
    """Random tokens of these lengths, padded to the longest or to `padded`."""
    generator = torch.Generator().manual_seed(seed)
    width = max(padded, *lengths)
    ids, mask = torch.zeros(2, len(lengths), width, dtype=torch.long)
    for row, n in enumerate(lengths):
        own = slice(width - n, width) if left else slice(n)
        ids[row, own] = torch.randint(5, VOCABULARY, (n,), generator=generator)
        mask[row, own] = 1
    found = {"input_ids": ids, "attention_mask": mask}
    if types:
        found["token_type_ids"] = torch.randint(0, 2, ids.shape, generator=generator) * mask
    return found


def has_types(model: Any) -> bool:
    """Whether tokens of this model have types."""
    return int(getattr(model.config, "type_vocab_size", 0) or 0) > 1


def host_of(model: nn.Module) -> Any:
    """The part of the model that calls the blocks."""
    return adapter_for(model)[0].host(model)


def last(model: nn.Module, inputs: Inputs, **more: Any) -> Tensor:
    """Last hidden states ``[B, L, H]``."""
    with torch.inference_mode():
        found: Tensor = host_of(model)(**inputs, **more)[0]
    return found


def of_padding(model: nn.Module) -> Tensor:
    """What rows of padding are in the last hidden states, ``[H]``: zeros, or what a norm behind the blocks makes."""
    host = host_of(model)
    norms = (getattr(host, name, None) for name in ("layer_norm", "final_layer_norm", "layernorm"))
    norm = next((norm for norm in norms if isinstance(norm, nn.LayerNorm)), None)
    zeros = torch.zeros(host.config.hidden_size, dtype=next(model.parameters()).dtype)
    with torch.inference_mode():
        return zeros if norm is None else norm(zeros)


def uncached(model: nn.Module) -> dict[str, Any]:
    """What a caller gives who wants no key-value cache, which some configurations ask for in every call."""
    takes_it = "use_cache" in inspect.signature(host_of(model).forward).parameters
    return {"use_cache": False} if takes_it and adapter_for(model)[0].family in ("llama", "rotary-encoder") else {}


def valid(inputs: Inputs) -> Tensor:
    """Which places hold tokens, ``[B, L]``."""
    return inputs["attention_mask"].bool()


def gap(seen: Tensor, expected: Tensor, where: Tensor | None = None) -> float:
    """Greatest difference, relative to the range; at these places."""
    if where is not None:
        seen, expected = seen[where], expected[where]
    return float((seen.double() - expected.double()).abs().max() / expected.double().abs().max())


def root_mean_square(seen: Tensor, expected: Tensor, where: Tensor | None = None) -> float:
    """Typical difference; at these places. The greatest one in few bits is the luck of one number."""
    if where is not None:
        seen, expected = seen[where], expected[where]
    return float((seen.double() - expected.double()).square().mean().sqrt())


def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The bare model, and the same with packed blocks."""
    bare = EXACT[name]().to(dtype)
    return bare, memoize(copy.deepcopy(bare), reuse="none")


def rows_database(model: nn.Module, batches: Sequence[Inputs], path: Path, storage: str = "float32") -> Path:
    """A database of the rows of all sequences of these batches, made by packed blocks."""
    adapter, sites = adapter_for(model)
    info = describe(model, adapter, sites, "test", 512, None)
    form = row_form(storage)
    with RowRecorder(copy.deepcopy(model), adapter, form) as recorder, RowWriter(path, info, form) as writer:
        for row, record in enumerate(record for inputs in batches for record in recorder.run(inputs)):
            writer.add(record, len(record.tokens), Provenance(0, row))
        writer.publish()
    return path


def changed(inputs: Inputs, seed: int, share: float = 0.1) -> Inputs:
    """The same batch with some tokens replaced, at least one in each sequence of more than two tokens."""
    rng = np.random.default_rng(seed)
    ids = inputs["input_ids"].clone()
    for row, n in enumerate(inputs["attention_mask"].sum(1).tolist()):
        count = max(1, round(share * n)) if n > 2 else 0
        places = 1 + rng.choice(max(1, n - 2), count, replace=False)
        ids[row, places] = 5 + (ids[row, places] - 5 + torch.from_numpy(rng.integers(1, 50, count))) % (VOCABULARY - 5)
    return inputs | {"input_ids": ids}


@contextmanager
def shares(model: Any) -> Iterator[list[Share]]:
    """Collects what each forward is served."""
    planner, found = model.attmemo.engine.planner, list[Share]()
    own = planner.plan

    def plan(layer: int, *arguments: Any) -> Any:
        made = own(layer, *arguments)
        found.extend(made.layers.values())
        return made

    planner.plan = plan
    try:
        yield found
    finally:
        del planner.plan


HEADS = {
    "BertForSequenceClassification": "BERT", "RobertaForSequenceClassification": "RoBERTa",
    "XLMRobertaForSequenceClassification": "XLM-RoBERTa", "CamembertForSequenceClassification": "CamemBERT",
    "ElectraForSequenceClassification": "ELECTRA", "DistilBertForSequenceClassification": "DistilBERT",
    "MPNetForSequenceClassification": "MPNet", "DebertaV2ForSequenceClassification": "DeBERTa-v3",
    "ModernBertForSequenceClassification": "ModernBERT", "AlbertForSequenceClassification": "ALBERT",
    "DebertaForSequenceClassification": "DeBERTa",
}  # fmt: skip


def head(kind: str = "BertForSequenceClassification", family: str = "BERT", **settings: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    config = FAMILIES[family].make().config
    labels = 2 if kind.endswith("QuestionAnswering") else 5
    config.update({"num_labels": labels, "classifier_pooling": "cls"} | settings)
    return getattr(transformers, kind)(config).eval()


def firsts(model: Any) -> int:
    """Calls of the blocks that gave first rows alone."""
    return int(model.attmemo.engine.counters.done.firsts)
