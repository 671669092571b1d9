"""The fingerprint of a model: one digest of its exact weights, precision and attention arithmetic.

The fields are stored beside the digest, so an error can name the field that differs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.errors import StaleDatabaseError
from attmemo.loading import tokenizer_digest as tokenizer_digest

# Settings that change attention maps without changing a weight. Absent keys count as None.
CONFIG_KEYS = (
    "model_type", "hidden_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim",
    "embedding_size", "hidden_act", "layer_norm_eps", "rms_norm_eps", "max_position_embeddings",
    "position_embedding_type", "relative_attention", "position_buckets", "max_relative_positions", "pos_att_type",
    "share_att_key", "norm_rel_ebd", "position_biased_input", "conv_kernel_size", "conv_act", "conv_groups",
    "is_decoder", "type_vocab_size", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "pad_token_id",
)  # fmt: skip
# Every other setting counts too except these, which cannot change a map. So an unknown setting is safe.
HARMLESS_KEYS = frozenset({
    "_name_or_path", "architectures", "transformers_version", "dtype", "torch_dtype", "id2label", "label2id",
    "num_labels", "problem_type", "use_cache", "output_hidden_states", "output_attentions", "return_dict",
    "finetuning_task", "task_specific_params", "tie_word_embeddings", "gradient_checkpointing", "pruned_heads",
    "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "use_return_dict", "classifier_pooling",
    "classifier_bias", "classifier_activation", "summary_type", "summary_activation", "summary_use_proj",
    "summary_proj_to_labels", "summary_first_dropout", "initializer_range", "init_std", "initializer_factor",
    "decoder_layers", "decoder_ffn_dim", "decoder_attention_heads", "decoder_layerdrop", "num_decoder_layers",
    "is_encoder_decoder", "pooler_act", "pooler_output_size", "pretraining_tp", "tie_encoder_decoder",
})  # fmt: skip
# Weights after the last attention map cannot change a map. So a classifier and a bare encoder share a database.
AFTER_ATTENTION = ("pooler.",)


_WITH = " with "  # between a dtype and the arithmetic of linear layers


def digest_fields(fields: Iterable[tuple[str, bytes]]) -> str:
    """SHA-256 (hex) over fields. Lengths stand in front, so ``("ab", "c")`` and ``("a", "bc")`` differ."""
    total = hashlib.sha256()
    for name, value in fields:
        for part in (name.encode(), value):
            total.update(len(part).to_bytes(8, "little"))
            total.update(part)
    return total.hexdigest()


def tensor_digest(tensor: Tensor) -> bytes:
    """SHA-256 of a tensor's bytes, row-major; for a quantized tensor, of its integers and their scales."""
    if tensor.is_quantized:
        if tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
            scales: object = (tensor.q_scale(), tensor.q_zero_point())
        else:
            scales = (tensor.q_per_channel_scales().tolist(), tensor.q_per_channel_zero_points().tolist())
        return hashlib.sha256(repr(scales).encode() + tensor_digest(tensor.int_repr())).digest()
    if hasattr(tensor, "__tensor_flatten__"):  # a tensor made of other tensors, as in torchao
        names, rest = tensor.__tensor_flatten__()
        parts = b"".join(name.encode() + tensor_digest(getattr(tensor, name)) for name in names)
        return hashlib.sha256(parts + repr(rest).encode()).digest()
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).digest() if flat.numel() else b""


def arithmetic(dtype: str, linear: str) -> str:
    """What `dtype` says of a model whose linear layers compute in this arithmetic: their records are others."""
    return dtype if linear == "exact" else f"{dtype}{_WITH}{linear} linear layers"


def model_fields(model: nn.Module, linear: str = "exact") -> dict[str, str]:
    """The fields ``config``, ``dtype`` and ``weights`` of a model's fingerprint. Only its base model counts.

    ``dtype`` also says which arithmetic the linear layers have, if that is not the model's own.
    ``weights`` covers names, types, shapes and bytes of every parameter and buffer up to the last attention layer.
    """
    base, config = getattr(model, "base_model", model), getattr(model, "config", None)
    settings = {key: getattr(config, key, None) for key in CONFIG_KEYS}
    if config is not None:
        others = {key: value for key, value in config.to_dict().items() if value is not None}
        settings |= {key: others[key] for key in others if key not in HARMLESS_KEYS and "dropout" not in key}
    weights: list[tuple[str, bytes]] = []
    dtypes = set()
    for name, tensor in sorted(_tensors(base.state_dict())):
        if name.startswith(AFTER_ATTENTION):
            continue
        if tensor.is_floating_point():
            dtypes.add(str(tensor.dtype).removeprefix("torch."))
        weights.append((f"{name}|{tensor.dtype}|{tuple(tensor.shape)}", tensor_digest(tensor)))
    text = json.dumps(settings, sort_keys=True, default=str)
    return {
        "config": text, "dtype": arithmetic("+".join(sorted(dtypes)), linear), "weights": digest_fields(weights)
    }  # fmt: skip


def _tensors(state: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Tensors of a state by name, also those in tuples: quantized layers keep their weights in tuples."""
    found: list[tuple[str, Tensor]] = []
    for name, value in state.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, tuple):
            found += _tensors({f"{name}.{place}": part for place, part in enumerate(value)})
    return found


def fingerprint(fields: Mapping[str, str]) -> str:
    """The digest of `model_fields`, in hexadecimal."""
    return digest_fields((name, fields[name].encode()) for name in sorted(fields))


def check_fields(stored: Mapping[str, str], seen: Mapping[str, str], path: Path | str) -> None:
    """Refuse a database of another model: StaleDatabaseError names the first field that differs."""
    for name in ("config", "dtype", "weights"):
        old, new = stored.get(name, ""), seen.get(name, "")
        if old == new:
            continue
        details = {"dtype": f"database {old}, model {new}"}
        details["weights"] = f"database sha256:{old[:12]}…, model sha256:{new[:12]}…"
        detail = _config_difference(old, new) if name == "config" else f"{name}: {details[name]}"
        hint = "load the model of this database, or build another one: attmemo build-database --model … --data …"
        if name == "dtype" and old.partition(_WITH)[0] == new.partition(_WITH)[0]:
            hint = f"memoize(…, linear={(old.partition(_WITH)[2] or 'exact').split()[0]!r}), or another database"
        raise StaleDatabaseError(f"{path} was built for another model; {detail}.", hint)


def _config_difference(old: str, new: str) -> str:
    try:
        a, b = dict(json.loads(old or "{}")), dict(json.loads(new or "{}"))
    except (ValueError, TypeError):
        return f"config: database {old[:40]!r}, model {new[:40]!r}"
    for key in sorted(set(a) | set(b)):
        if a.get(key) != b.get(key):
            return f"config.{key}: database {a.get(key)!r}, model {b.get(key)!r}"
    return "config: the same settings, written differently"
