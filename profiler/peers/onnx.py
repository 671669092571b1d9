"""ONNX Runtime, and its 8-bit form."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attmemo.profiler.models import LoadedModel
from attmemo.profiler.peers.plain import Asked, Plain, asked


def export(loaded: LoadedModel, inputs: Mapping[str, Tensor], file: Path) -> None:
    """Write a float32 model as ONNX, traced with these inputs."""
    sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # else a line for each package that is not here
    torch.onnx.export(
        Plain(loaded), tuple(inputs.values()), file, input_names=list(inputs), dynamo=True, verbose=False,
        dynamic_shapes=tuple(sizes for _ in inputs),
    )  # fmt: skip


def quantize(file: Path, smaller: Path) -> None:
    """Write a saved model with its weights in 8 bits; activations are rounded to 8 bits as they come."""
    quantization: Any = import_module("onnxruntime.quantization")
    quantization.quantize_dynamic(file, smaller, weight_type=quantization.QuantType.QInt8)


def session(file: Path, field: str) -> Asked:
    """A saved model ready to be asked."""
    onnxruntime: Any = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that wait after an answer would take the cores of the ways that are timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    ready = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return asked(lambda arrays: ready.run(None, dict(arrays))[0], field)
