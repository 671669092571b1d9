"""Other runtimes that are installed, ready to be asked in this process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from torch import Tensor

from attmemo.profiler.models import LoadedModel, Tokens, collate
from attmemo.profiler.peers import onnx, openvino
from attmemo.profiler.peers.plain import Asked, output_name
from attmemo.profiler.peers.ways import Way, another, way_of

OPENVINO: Final = "OpenVINO"
ONNX: Final = "ONNX Runtime, float32"
_PRECISIONS: Final = {"float32": "f32", "bfloat16": "bf16"}  # as OpenVINO calls them
_SAMPLE: Final = 4  # texts that a model is traced with


def installed_peers(loaded: LoadedModel, texts: Sequence[Tokens], folder: Path) -> tuple[dict[str, Way], list[str]]:
    """Other runtimes that can be imported, ready to be asked, and why one of them takes no part.

    `texts` show the model's inputs, `folder` takes what a runtime wants as a file. OpenVINO computes in the model's
    precision, ONNX Runtime in float32.
    """
    found, notes = {}, []
    whole = another(loaded)
    whole.model.float()  # what runtimes convert; OpenVINO rounds it itself
    for name, package, make in ((OPENVINO, "openvino", _openvino), (ONNX, "onnxruntime", _onnxruntime)):
        if find_spec(package) is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of tracing
                way = way_of(loaded, make(whole, collate(loaded, texts[:_SAMPLE]), folder))
            way(texts[:_SAMPLE])
        except Exception as error:  # whatever another library raises: the others go on without it
            notes.append(f"{name} takes no part: {reason_of(error)}")
        else:
            found[name] = way
    return found, notes


def reason_of(error: BaseException) -> str:
    """An error in one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120] if text else 'no message'}"


def _openvino(loaded: LoadedModel, inputs: Mapping[str, Tensor], folder: Path) -> Asked:
    converted = openvino.convert(loaded, inputs)
    return openvino.compiled(converted, output_name(loaded), _PRECISIONS[loaded.dtype])


def _onnxruntime(loaded: LoadedModel, inputs: Mapping[str, Tensor], folder: Path) -> Asked:
    onnx.export(loaded, inputs, folder / "model.onnx")
    return onnx.session(folder / "model.onnx", output_name(loaded))
