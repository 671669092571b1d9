"""The paths of a table: how each is made ready, and why one cannot take part."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from attmemo.errors import AttmemoError
from attmemo.kernels.linear8 import LinearName
from attmemo.memoization import memoize
from attmemo.precision import has_native_bfloat16
from attmemo.profiler.models import LoadedModel, Tokens, collate, load_model
from attmemo.profiler.peers import Way, onnx, openvino, way_of
from attmemo.profiler.peers.plain import Asked, output_name
from attmemo.profiler.row_live import ANSWERS

CACHE: Final = "cache"
STOCK: Final = "stock"
REUSE: Final = ("none", "maps", "rows", "none-int8", "rows-int8")
"""The paths of attmemo itself; all others are peers."""
MIN_COSINE: Final = 0.98
_SAMPLE: Final = 4  # texts that a model is traced with


@dataclass(frozen=True, slots=True)
class Order:
    """What the process of a path is told.

    Parameters
    ----------
    model, dtype, pooling : str
        As `load_model` takes them.
    threads : int
    folder : path
        Where converted models lie.
    first : list of Tokens
        Texts that prepare.
    batch : tuple of int
        Sizes that will be asked.
    budget : float
        Of rows.
    database : path or None
        Of maps.
    modules : tuple of str
        What every process imports before it is timed.
    """

    model: str
    dtype: str
    pooling: str | None
    threads: int
    folder: Path
    first: list[Tokens]
    batch: tuple[int, ...]
    budget: float
    database: Path | None
    modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ready:
    """A path that can be asked; `handle` is that of a memoized model."""

    way: Way
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Route:
    """How a path is made ready.

    Parameters
    ----------
    title : str
        For readers.
    ready : callable
        Loads it, in the process that answers. That process imports it by its name.
    file : str or None
        The converted model that it reads (of `FILES`).
    needs : tuple of str
        Packages.
    exact : tuple of str
        Number types of the model in which it computes the model's own numbers, but for rounding.
    by_length : bool
        Also asked with the texts of a window in the order of their lengths: padding costs it time.
    every : bool
        Asked for every text of the stream, not only for those that all paths answer.
    anew : bool
        Begins with nothing at each batch size.
    """

    title: str
    ready: Callable[[Order], Ready]
    file: str | None = None
    needs: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    by_length: bool = True
    every: bool = False
    anew: bool = False


def why_not(name: str, order: Order) -> str | None:
    """Why a path cannot take part, in a few words; None: it can."""
    absent = [package for package in PATHS[name].needs if find_spec(package) is None]
    if absent:
        return f"not installed: pip install {' '.join(absent)}"
    if name == "openvino-bf16" and not has_native_bfloat16():
        return "the processor has no bfloat16"
    if name == "openvino-f32" and order.dtype == "bfloat16":
        return "the model is measured in bfloat16"
    if name == "maps" and order.database is None:
        return "no database of maps was given: --database DB"
    return None


def _stock(order: Order) -> Ready:
    return Ready(way_of(_load(order)))


def _compiled(order: Order) -> Ready:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(order.folder / "inductor")  # nothing is there: all of it is timed
    loaded = _load(order)
    model: Any = torch.compile(loaded.model, dynamic=True)
    way = way_of(loaded, model)
    with torch.inference_mode():
        for size in order.batch:
            for text in (min(order.first, key=len), max(order.first, key=len)):
                way([text] * size)
    return Ready(way)


def _none(linear: LinearName, order: Order) -> Ready:
    loaded = _load(order)
    memoize(loaded.model, reuse="none", linear=linear)
    return Ready(way_of(loaded), _handle(loaded))


def _maps(order: Order) -> Ready:
    loaded = _load(order)
    memoize(loaded.model, database=order.database, reuse="maps")
    return Ready(way_of(loaded), _handle(loaded))


def _rows(linear: LinearName, order: Order) -> Ready:
    loaded = _load(order)
    rule = ANSWERS.get("class" if loaded.kind == "classifier" else str(loaded.pooling))
    if rule is None:
        raise AttmemoError(f"answers pooled by {loaded.pooling} cannot be guarded.", "give a model pooled by mean")
    with torch.inference_mode():
        way_of(loaded)(order.first[:_SAMPLE])  # warm, but nothing learned
    memoize(
        loaded.model, database=":memory:", reuse="rows", budget=order.budget, answer=rule, min_cosine=MIN_COSINE,
        tokenizer=loaded.tokenizer, linear=linear,
    )  # fmt: skip
    _handle(loaded).guarded.idle.close()  # else it would verify while other paths are timed
    return Ready(way_of(loaded), _handle(loaded))


def _openvino(precision: str | None, file: str, order: Order) -> Ready:
    """Precision None: bfloat16 where the processor has it, for what is not in 8 bits."""
    chosen = precision or ("bf16" if has_native_bfloat16() else "f32")
    return _runtime(order, lambda field: openvino.compiled(order.folder / file, field, chosen))


def _onnx(file: str, order: Order) -> Ready:
    return _runtime(order, lambda field: onnx.session(order.folder / file, field))


def _runtime(order: Order, read: Callable[[str], Asked]) -> Ready:
    loaded = _load(order)
    loaded.model = loaded.model.to("meta")  # a runtime has weights of its own
    return Ready(way_of(loaded, read(output_name(loaded))))


def _load(order: Order, dtype: str | None = None) -> LoadedModel:
    return load_model(order.model, dtype or order.dtype, pooling=order.pooling)


def _handle(loaded: LoadedModel) -> Any:
    return loaded.model.attmemo


BOTH: Final = ("float32", "bfloat16")
_XML, _XML_INT8, _ONNX, _ONNX_INT8 = "openvino.xml", "openvino-int8.xml", "model.onnx", "model-int8.onnx"
_RUNTIME: Final = ("onnxruntime", "onnx", "onnxscript")
PATHS: Final[dict[str, Route]] = {
    STOCK: Route("stock", _stock, exact=BOTH),
    "compile": Route("torch.compile", _compiled, exact=BOTH),
    "openvino-f32": Route("OpenVINO f32", partial(_openvino, "f32", _XML), _XML, ("openvino",), BOTH),
    "openvino-bf16": Route("OpenVINO bf16", partial(_openvino, "bf16", _XML), _XML, ("openvino",), ("bfloat16",)),
    "openvino-int8": Route("OpenVINO int8", partial(_openvino, None, _XML_INT8), _XML_INT8, ("openvino", "nncf")),
    "onnx": Route("ONNX Runtime f32", partial(_onnx, _ONNX), _ONNX, _RUNTIME, BOTH),
    "onnx-int8": Route("ONNX Runtime int8", partial(_onnx, _ONNX_INT8), _ONNX_INT8, _RUNTIME),
    "none": Route("attmemo none", partial(_none, "exact"), exact=BOTH, by_length=False),
    "maps": Route("attmemo maps", _maps, by_length=False),
    "rows": Route("attmemo rows", partial(_rows, "exact"), by_length=False, every=True, anew=True),
    "none-int8": Route("attmemo none, int8", partial(_none, "int8"), by_length=False),
    "rows-int8": Route("attmemo rows, int8", partial(_rows, "int8"), by_length=False, every=True, anew=True),
}
"""Paths that have a process of their own, by name. `CACHE` stands in front of one of them."""


def _convert_openvino(order: Order) -> None:
    loaded = _load(order, "float32")
    openvino.save(openvino.convert(loaded, collate(loaded, order.first[:_SAMPLE])), order.folder / _XML)


def _quantize_openvino(order: Order) -> None:
    loaded = _load(order)
    batches = [collate(loaded, [text]) for text in order.first]
    openvino.save(openvino.quantize(order.folder / _XML, batches), order.folder / _XML_INT8)


def _convert_onnx(order: Order) -> None:
    loaded = _load(order, "float32")
    onnx.export(loaded, collate(loaded, order.first[:_SAMPLE]), order.folder / _ONNX)


def _quantize_onnx(order: Order) -> None:
    onnx.quantize(order.folder / _ONNX, order.folder / _ONNX_INT8)


FILES: Final[dict[str, tuple[str | None, Callable[[Order], None]]]] = {
    _XML: (None, _convert_openvino),
    _XML_INT8: (_XML, _quantize_openvino),
    _ONNX: (None, _convert_onnx),
    _ONNX_INT8: (_ONNX, _quantize_onnx),
}
"""Converted models: the one that each is made of, and how."""
