"""OpenVINO, and its 8-bit form by NNCF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attmemo.profiler.models import LoadedModel
from attmemo.profiler.peers.plain import Asked, Plain, asked


def convert(loaded: LoadedModel, inputs: Mapping[str, Tensor]) -> Any:
    """OpenVINO's form of a float32 model, traced with these inputs."""
    openvino: Any = import_module("openvino")
    return openvino.convert_model(Plain(loaded), example_input=dict(inputs))


def save(converted: Any, file: Path) -> None:
    """Write a model, weights as they are."""
    import_module("openvino").save_model(converted, file, compress_to_fp16=False)


def quantize(file: Path, batches: Sequence[Mapping[str, Tensor]]) -> Any:
    """A saved model with weights and activations in 8 bits, their ranges taken from these inputs."""
    openvino, nncf = import_module("openvino"), import_module("nncf")
    data = nncf.Dataset(batches, lambda inputs: {name: value.numpy() for name, value in inputs.items()})
    return nncf.quantize(
        openvino.Core().read_model(file), data, model_type=nncf.ModelType.TRANSFORMER, subset_size=len(batches)
    )


def compiled(model: Any, field: str, precision: str) -> Asked:
    """A model, or a file of one, ready to be asked; `precision` is ``"f32"`` or ``"bf16"``."""
    openvino: Any = import_module("openvino")
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }  # fmt: skip
    ready = openvino.Core().compile_model(model, "CPU", options)
    return asked(lambda arrays: ready(arrays)[0], field)
