"""llama.cpp on the weights of a Qwen3 of transformers, linear layers in Q8_0: for `bench_fastseq.py --types`.

It wants the packages `gguf` and `llama-cpp-python`. Tokens go in and come out: its own tokenizer is not asked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp as llama
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, quants
from transformers import AutoModelForCausalLM, AutoTokenizer

_NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def write_gguf(folder: Path, place: Path) -> None:
    """The model in a folder, which is a Qwen3, as a file of llama.cpp."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config: Any = model.config
    assert config.model_type == "qwen3"
    writer = GGUFWriter(str(place), "qwen3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, weight in model.state_dict().items():
        inner = name.removeprefix("model.").removesuffix(".weight")
        if inner.startswith("layers."):
            _, layer, part = inner.split(".", 2)
            known = f"blk.{layer}.{_NAMES[part]}"
        elif inner in ("embed_tokens", "norm"):
            known = {"embed_tokens": "token_embd", "norm": "output_norm"}[inner]
        else:  # the head is the embedding
            continue
        numbers = weight.float().numpy()
        if numbers.ndim == 1:
            writer.add_tensor(f"{known}.weight", numbers)
            continue
        kind = GGMLQuantizationType.Q8_0
        writer.add_tensor(f"{known}.weight", quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class LlamaPeer:
    """Greedy search of some texts of one length, in one batch."""

    def __init__(self, folder: Path, new: int, length: int, batch: int, threads: int) -> None:
        place = folder / "model.gguf"
        if not place.exists():
            write_gguf(folder, place)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = llama.llama_model_load_from_file(str(place).encode(), llama.llama_model_default_params())
        given = llama.llama_context_default_params()
        given.n_ctx = batch * (length + new + 8)
        given.n_batch = given.n_ubatch = batch * length
        given.n_seq_max = batch
        given.n_threads = given.n_threads_batch = threads
        self.context = llama.llama_init_from_model(self.model, given)
        self.vocabulary = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.room = llama.llama_batch_init(batch * length, 0, 1)

    def __call__(self, lines: list[str], new: int) -> list[str]:
        """Text to text."""
        rows = self.tokenizer(lines)["input_ids"]
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)
        found: list[list[int]] = [[] for _ in rows]
        place = 0
        while True:
            last = [(sum(map(len, rows[: row + 1])) - 1) for row in range(len(rows))]
            self._run(rows, place)
            place += len(rows[0])
            for row, at in enumerate(last):
                logits = llama.llama_get_logits_ith(self.context, at)
                found[row].append(int(np.ctypeslib.as_array(logits, (self.vocabulary,)).argmax()))
            if len(found[0]) == new:
                break
            rows = [row[-1:] for row in found]
        return list(self.tokenizer.batch_decode(found, skip_special_tokens=True))

    def _run(self, rows: list[list[int]], place: int) -> None:
        """Read so many more tokens of each text; logits are kept behind the last ones."""
        count = 0
        for number, row in enumerate(rows):
            for i, token in enumerate(row):
                self.room.token[count] = token
                self.room.pos[count] = place + i
                self.room.n_seq_id[count] = 1
                self.room.seq_id[count][0] = number
                self.room.logits[count] = i == len(row) - 1
                count += 1
        self.room.n_tokens = count
        if llama.llama_decode(self.context, self.room) != 0:
            raise RuntimeError("llama.cpp did not decode")
