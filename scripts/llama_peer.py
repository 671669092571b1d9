"""llama.cpp on the weights of a Qwen3 of transformers, linear layers in Q8_0: for `bench_fastseq.py --types`.

It wants the packages `gguf` and `llama-cpp-python`. Tokens go in and come out: its own tokenizer is not asked.
"""

from __future__ import annotations

from pathlib import Path

import llama_cpp as llama
import numpy as np
from transformers import AutoTokenizer

from attmemo.profiler.models import load_model
from attmemo.profiler.peers.llama import write_gguf


class LlamaPeer:
    """Greedy search of some texts of one length, in one batch."""

    def __init__(self, folder: Path, new: int, length: int, batch: int, threads: int) -> None:
        place = folder / "model.gguf"
        if not place.exists():
            write_gguf(load_model(str(folder)), place, "Q8_0")
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
