"""OpenVINO on the weights of a decoder of transformers, in 8 bits: for `bench_fastseq.py --types`.

It wants the package `openvino`, and on the PATH `optimum-cli` of optimum-intel, which may lie in an environment of its
own. Numbers are computed in what OpenVINO takes by itself on the processor: bfloat16 where it can, keys and values in
8 bits.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops
from transformers import AutoTokenizer


def export(folder: Path, place: Path) -> None:
    """Write the model in a folder as OpenVINO's, linear layers and embedding in 8 bits."""
    command = ["optimum-cli", "export", "openvino", "--task", "text-generation-with-past", "--weight-format", "int8"]
    subprocess.run([*command, "--model", str(folder), str(place)], check=True)


def keep_last(model: ov.Model) -> None:
    """Give logits behind the last tokens alone, as OpenVINO's own pipeline for generation does."""
    product = model.output("logits").get_node().input_value(0).get_node()
    while product.get_type_name() != "MatMul":
        product = product.input_value(0).get_node()
    last = ops.gather(product.input_value(0), ops.constant(np.array([-1])), ops.constant(np.array(1)))
    product.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()


class OpenVINOPeer:
    """Greedy search of some texts of one length, in one batch."""

    def __init__(self, folder: Path, threads: int) -> None:
        place = folder / "openvino"
        if not (place / "openvino_model.xml").exists():
            export(folder, place)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        core = ov.Core()
        model = core.read_model(place / "openvino_model.xml")
        keep_last(model)
        compiled = core.compile_model(model, "CPU", {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"})
        self.names = {name for port in compiled.inputs for name in port.get_names()}
        self.request = compiled.create_infer_request()

    def __call__(self, lines: list[str], new: int) -> list[str]:
        """Text to text."""
        tokens = np.array(self.tokenizer(lines)["input_ids"], np.int64)
        rows, length = tokens.shape
        self.request.reset_state()
        found = []
        for place in range(length, length + new):
            given = {
                "input_ids": tokens,
                "attention_mask": np.ones((rows, place), np.int64),
                "position_ids": np.tile(np.arange(place - tokens.shape[1], place), (rows, 1)),
                "beam_idx": np.arange(rows, dtype=np.int32),
            }
            self.request.infer({name: value for name, value in given.items() if name in self.names})
            tokens = self.request.get_tensor("logits").data[:, -1].argmax(-1)[:, None]
            found.append(tokens)
        return list(self.tokenizer.batch_decode(np.concatenate(found, 1), skip_special_tokens=True))
