"""Ways to the same answers: the stock model, packed blocks, other runtimes that are installed, a cache of duplicates.

A way takes tokenized texts in the order of arrival and gives their answers, as `attmemo.profiler.models.answers` does.
The time of a way includes padding.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.profiler.models import LoadedModel, Tokens, answers, collate

Way = Callable[[Sequence[Tokens]], Tensor]
OPENVINO: Final = "OpenVINO, float32"
ONNX: Final = "ONNX Runtime, float32"
_SAMPLE: Final = 4  # texts that a model is traced with


def another(loaded: LoadedModel) -> LoadedModel:
    """The same model once more, with weights of its own."""
    fields = {name: getattr(loaded, name) for name in ("name", "tokenizer", "kind", "dtype", "pooling", "answer")}
    return LoadedModel(model=copy.deepcopy(loaded.model), **fields)


def way_of(loaded: LoadedModel, model: Any = None) -> Way:
    """Ask the model, or another one that takes the same inputs."""
    return lambda texts: answers(loaded, collate(loaded, texts), model)


class Duplicates:
    """A cache in front of a way: a text whose very tokens came before is not asked again.

    Attributes
    ----------
    texts, found : int
        Texts that came, and those of them that were known.
    """

    def __init__(self, way: Way) -> None:
        self._way = way
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.texts = self.found = 0

    def __call__(self, texts: Sequence[Tokens]) -> Tensor:
        new = list({tuple(text.ids): text for text in texts if tuple(text.ids) not in self._known}.values())
        if new:
            self._keep(new, self._way(new))
        self.texts, self.found = self.texts + len(texts), self.found + len(texts) - len(new)
        return torch.stack([self._known[tuple(text.ids)] for text in texts])

    def learn(self, texts: Sequence[Tokens], given: Tensor) -> None:
        """Texts that another way has answered."""
        new = {tuple(text.ids) for text in texts if tuple(text.ids) not in self._known}
        self.texts, self.found = self.texts + len(texts), self.found + len(texts) - len(new)
        self._keep(texts, given)

    def _keep(self, texts: Sequence[Tokens], given: Tensor) -> None:
        self._known.update(zip((tuple(text.ids) for text in texts), given.clone(), strict=True))


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
                way = way_of(loaded, make(_Plain(loaded), collate(loaded, texts[:_SAMPLE]), folder))
            way(texts[:_SAMPLE])
        except Exception as error:  # whatever another library raises: the others go on without it
            text = str(error).strip().splitlines()
            notes.append(f"{name} takes no part: {type(error).__name__}: {text[0][:120] if text else 'no message'}")
        else:
            found[name] = way
    return found, notes


class _Plain(nn.Module):
    """A model with its inputs by position and one tensor as output, as converters want it."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self.model, self.field = loaded.model, "logits" if loaded.kind == "classifier" else "last_hidden_state"

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:  # fmt: skip
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **types)
        return getattr(output, self.field)  # type: ignore[no-any-return]


def _openvino(plain: _Plain, inputs: dict[str, Tensor], folder: Path) -> Any:
    openvino: Any = import_module("openvino")
    converted = openvino.convert_model(plain, example_input=dict(inputs))
    options = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "f32",
    }  # fmt: skip
    compiled = openvino.Core().compile_model(converted, "CPU", options)

    def run(**given: Tensor) -> Any:
        output = compiled({name: value.numpy() for name, value in given.items()})[0]
        return SimpleNamespace(**{plain.field: torch.from_numpy(output)})

    return run


def _onnxruntime(plain: _Plain, inputs: dict[str, Tensor], folder: Path) -> Any:
    onnxruntime: Any = import_module("onnxruntime")
    file, names = folder / "model.onnx", list(inputs)
    sizes = {0: torch.export.Dim("texts"), 1: torch.export.Dim("tokens")}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # else a line for each package that is not here
    torch.onnx.export(
        plain, tuple(inputs.values()), file, input_names=names, dynamo=True, verbose=False,
        dynamic_shapes=tuple(sizes for _ in names),
    )  # fmt: skip
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    # Waiting threads would take the cores of the ways that are timed in between.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def run(**given: Tensor) -> Any:
        output = session.run(None, {name: value.numpy() for name, value in given.items()})[0]
        return SimpleNamespace(**{plain.field: torch.from_numpy(output)})

    return run
