"""OpenVINO and ONNX Runtime, and their 8-bit forms: converted from a model, asked as the model itself is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from attmemo.profiler.models import LoadedModel

Asked = Callable[..., Any]  # takes inputs by name as the model does, gives an object with its output
Inputs = Mapping[str, Tensor]


def output_name(loaded: LoadedModel) -> str:
    """The field of the model's output that answers are made of."""
    return "logits" if loaded.kind == "classifier" else "last_hidden_state"


class _Plain(nn.Module):
    """A model with its inputs by position and one tensor as output, as converters want it."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model, self.field = loaded.model, output_name(loaded)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return getattr(output, self.field)  # type: ignore[no-any-return]


def _asked(run: Callable[[Mapping[str, Any]], Any], field: str) -> Asked:
    """The model's own call around `run`, which takes arrays by name and gives an array ``[B, …]``."""

    def call(**given: Tensor) -> Any:
        output = run({name: value.numpy() for name, value in given.items()})
        return SimpleNamespace(**{field: torch.from_numpy(output)})

    return call


def convert_openvino(loaded: LoadedModel, inputs: Inputs, file: Path) -> None:
    """Write OpenVINO's form of a float32 model, traced with these inputs, weights as they are."""
    openvino: Any = import_module("openvino")
    _save(openvino.convert_model(_Plain(loaded), example_input=dict(inputs)), file)


def quantize_openvino(file: Path, batches: Sequence[Inputs], smaller: Path) -> None:
    """Write a saved model with weights and activations in 8 bits, their ranges taken from these inputs, by NNCF."""
    openvino, nncf = import_module("openvino"), import_module("nncf")
    data = nncf.Dataset(batches, lambda inputs: {name: value.numpy() for name, value in inputs.items()})
    transformer, model = nncf.ModelType.TRANSFORMER, openvino.Core().read_model(file)
    _save(nncf.quantize(model, data, model_type=transformer, subset_size=len(batches)), smaller)


def _save(model: Any, file: Path) -> None:
    import_module("openvino").save_model(model, file, compress_to_fp16=False)


def openvino(file: Path, field: str, precision: str) -> Asked:
    """A saved model ready to be asked; `precision` is ``"f32"`` or ``"bf16"``."""
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": precision,
    }  # fmt: skip
    ready = import_module("openvino").Core().compile_model(file, "CPU", options)
    return _asked(lambda arrays: ready(arrays)[0], field)


def convert_onnx(loaded: LoadedModel, inputs: Inputs, file: Path) -> None:
    """Write a float32 model as ONNX, traced with these inputs."""
    sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # else a line for each package that is not here
    torch.onnx.export(
        _Plain(loaded), tuple(inputs.values()), file, input_names=list(inputs), dynamo=True, verbose=False,
        dynamic_shapes=tuple(sizes for _ in inputs),
    )  # fmt: skip


def quantize_onnx(file: Path, smaller: Path) -> None:
    """Write a saved model with its weights in 8 bits; activations are rounded to 8 bits as they come."""
    quantization: Any = import_module("onnxruntime.quantization")
    quantization.quantize_dynamic(file, smaller, weight_type=quantization.QuantType.QInt8)


def onnx(file: Path, field: str) -> Asked:
    """A saved model ready to be asked."""
    onnxruntime: Any = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Threads that wait after an answer would take the cores of the ways that are timed next.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    ready = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    return _asked(lambda arrays: ready.run(None, dict(arrays))[0], field)
