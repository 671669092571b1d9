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
from attmemo.profiler.peers.ways import Way, way_of

OPENVINO: Final = "OpenVINO, float32"
ONNX: Final = "ONNX Runtime, float32"
_SAMPLE: Final = 4  # texts that a model is traced with


def installed_peers(loaded: LoadedModel, texts: Sequence[Tokens], folder: Path) -> tuple[dict[str, Way], list[str]]:
    """Other runtimes that can be imported, ready to be asked, and why one of them takes no part.

    `texts` show the model's inputs, `folder` takes what a runtime wants as a file.
    """
    found, notes = {}, []
    for name, package, make in ((OPENVINO, "openvino", _openvino), (ONNX, "onnxruntime", _onnxruntime)):
        if find_spec(package) is None:
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of tracing
                way = way_of(loaded, make(loaded, collate(loaded, texts[:_SAMPLE]), folder))
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
    return openvino.compiled(openvino.convert(loaded, inputs), output_name(loaded), "f32")


def _onnxruntime(loaded: LoadedModel, inputs: Mapping[str, Tensor], folder: Path) -> Asked:
    onnx.export(loaded, inputs, folder / "model.onnx")
    return onnx.session(folder / "model.onnx", output_name(loaded))
