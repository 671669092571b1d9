"""Records of attention maps: what every layer saw and produced, and which texts get a record: none whose maps one
nearly has.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final

import torch
from torch import Tensor, nn

from attmemo.db import KIND_INPUT, KIND_MAP, DatabaseWriter, ModelInfo
from attmemo.db.encodings import STORAGE
from attmemo.embed.similarity import similarity_score
from attmemo.errors import AttmemoError, UnsupportedModelError
from attmemo.maps.serve import Maps
from attmemo.models import Adapter, Site, Spans, adapter_for
from attmemo.models.base import by_module
from attmemo.models.check import UNKNOWN
from attmemo.models.masks import consecutive
from attmemo.profiler.models import Tokens
from attmemo.profiler.recorder import Admission, Form, Place, Slots

CANDIDATES: Final = 4  # records compared in full
LEFT_OUT: Final = "left-out.json"  # what a builder notes beside the database; no reader asks for it
_DIMENSIONS: Final = 64
_CHANNELS: Final = 8
_SEED: Final = 20240229


@dataclass
class Captured:
    """One forward: hidden states ``[B, L, H]`` and maps ``[B, h, L, L]`` per layer, and where valid tokens lie."""

    inputs: list[Tensor]
    maps: list[Tensor]
    spans: Spans

    def sequence(self, row: int) -> tuple[list[Tensor], list[Tensor]]:
        """Maps ``[h, n, n]`` and inputs ``[n, H]`` of one sequence, every layer, cut to its valid tokens."""
        length, n = self.inputs[0].shape[1], self.spans.lengths[row]
        own = slice(length - n, length) if self.spans.left else slice(n)
        return [m[row, :, own, own] for m in self.maps], [x[row, own] for x in self.inputs]

    def __iter__(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        return (self.sequence(row) for row in range(len(self.spans.lengths)))


class Capture:
    """Runs a model so that it gives its maps; a context manager around many `run` calls, which leaves it as it was."""

    def __init__(self, model: nn.Module, adapter: Adapter, sites: Sequence[Site]) -> None:
        self._model, self._adapter, self._sites = model, adapter, list(sites)
        self._host = adapter.host(model)
        self._calls: dict[int, list[tuple[Any, Any, Any]]] = {}
        self._stack = ExitStack()
        self._extra: dict[str, Any] = {}

    def __enter__(self) -> Capture:
        for sites in by_module(self._sites):
            handle = sites[0].module.register_forward_hook(self._keep, with_kwargs=True)
            self._stack.callback(handle.remove)
        self._extra = self._stack.enter_context(self._adapter.capturing(self._model))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._calls.clear()

    def run(self, inputs: dict[str, Tensor]) -> Captured:
        """One forward of the layers (an encoder without the decoder behind it, no head), exact, with maps."""
        self._calls.clear()
        with torch.inference_mode():
            self._host(**inputs, **self._extra)
        turns = {key: iter(calls) for key, calls in self._calls.items()}
        maps, states, found = [], [], Spans([])
        for site in self._sites:
            args, kwargs, output = next(turns[id(site.module)])
            call = self._adapter.read_captured(site.module, args, kwargs)
            if isinstance(call, str):
                raise UnsupportedModelError(f"layer {site.layer} cannot be captured: {call}.", UNKNOWN)
            spans = self._adapter.spans(site.module, call.mask, *call.hidden.shape[:2])
            if spans is None:
                why = "the mask is not plain padding on one side"
                raise UnsupportedModelError(f"layer {site.layer} cannot be captured: {why}.", UNKNOWN)
            positions = inputs.get("position_ids")
            if self._adapter.rotary and not consecutive(positions, spans, call.hidden.shape[1]):
                raise UnsupportedModelError(
                    f"layer {site.layer} cannot be captured: positions are not consecutive.", "leave position_ids out"
                )
            found = spans
            states.append(call.hidden)
            maps.append(self._adapter.map_of(output))
        self._calls.clear()
        return Captured(states, maps, found)

    def _keep(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._calls.setdefault(id(module), []).append((args, kwargs, output))


@contextmanager
def attention_seconds(model: nn.Module) -> Iterator[list[float]]:
    """Seconds that each layer's attention takes, added up while inside."""
    sites = adapter_for(model)[1]
    spent, begun = [0.0] * len(sites), 0.0

    def begin(*_: Any) -> None:
        nonlocal begun
        begun = time.perf_counter()

    def end(turn: Iterator[Site]) -> Any:
        def add(*_: Any) -> None:
            spent[next(turn).layer] += time.perf_counter() - begun

        return add

    with ExitStack() as stack:
        for group in by_module(sites):  # a module that several layers share is called once for each, in their order
            stack.callback(group[0].module.register_forward_pre_hook(begin).remove)
            stack.callback(group[0].module.register_forward_hook(end(cycle(group))).remove)
        yield spent


class MapRecorder:
    """Records of a model's attention maps, and of the hidden states that entered the layers; `form`: `map_form`."""

    def __init__(self, model: nn.Module, adapter: Adapter, sites: Sequence[Site], form: Form) -> None:
        self.form = form
        self._capture = Capture(model, adapter, sites)

    def __enter__(self) -> MapRecorder:
        self._capture.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.__exit__()

    def run(self, inputs: Mapping[str, Tensor]) -> list[Slots]:
        return [Maps.slots(hidden, maps) for maps, hidden in self._capture.run(dict(inputs))]

    def admission(self, admit: float | None, writer: DatabaseWriter) -> Admission:
        return Admission() if admit is None else ByMaps(admit, writer)


def map_form(info: ModelInfo, storage: str, inputs: str) -> Form:
    """How maps of a model are stored, of what was asked for ("auto": what suits it).

    Probabilities lie in [0, 1], where float16 has eight times the resolution of bfloat16; but a bfloat16 model
    multiplies bfloat16 maps as they lie, on the matrix unit.
    """
    if storage == "auto":
        storage = "bfloat16" if info.dtype == "bfloat16" else "float16"
    if storage not in STORAGE:
        raise AttmemoError(f"maps are not stored as {storage}.", f"--dtype {', '.join(STORAGE)}")
    if inputs == "auto":
        inputs = "first" if storage == "uint8" else "all"
    settings = {} if inputs == "all" else {"inputs": inputs}
    return Form(storage, settings)


class ByMaps(Admission):
    """Leaves out texts of which a record has every layer's map, with this similarity score (Eq. 1) or a higher one.

    Comparing with every record would read the whole database for each text. Candidates are the records of the same
    length whose first hidden states lie nearest, in a random projection. An overlooked record costs bytes, never
    answers. Held-out texts all stay: without near ones predictions would look too bad.

    The rows left out are noted beside the database, so that a resumed build need not ask the model again. Where the
    note is missing, torn or another database's, the rows are asked anew. It is saved after a publication, since before
    it the record that stands for a row may yet be lost.
    """

    def __init__(self, threshold: float, writer: DatabaseWriter) -> None:
        self._threshold, self._writer = threshold, writer
        size = writer.manifest.model.hidden
        self._narrow = torch.randn(size, _CHANNELS, generator=torch.Generator().manual_seed(_SEED))  # [H, p]
        self._mix: dict[int, Tensor] = {}  # length -> [d, n p]
        self._vectors: dict[int, Tensor] = {}  # length -> [room, d]
        self._records: dict[int, list[int]] = defaultdict(list)
        for record in range(writer.records):
            self._remember(record, writer.first_input(record))
        self._note = writer.path / LEFT_OUT
        self._left_out: dict[tuple[str, float], set[int]] = defaultdict(set)  # (digest of the file, threshold) -> rows
        with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
            found = json.loads(self._note.read_text(encoding="utf-8"))
            if found["database"] == writer.manifest.uuid:
                self._left_out |= {
                    (str(e["source"]), float(e["admit"])): {int(row) for row in e["rows"]} for e in found["left_out"]
                }

    def before(self, place: Place, tokens: Tokens) -> bool:
        noted = self._left_out.items()
        return place.held_out or not any(
            place.row in rows for (of, admit), rows in noted if of == place.source and admit >= self._threshold
        )

    def after(self, place: Place, slots: Slots) -> bool:
        if place.held_out or not self._is_known(slots[KIND_MAP], slots[KIND_INPUT][0]):
            return True
        self._left_out[place.source, self._threshold].add(place.row)
        return False

    def stored(self, record: int, slots: Slots) -> None:
        self._remember(record, slots[KIND_INPUT][0])

    def save(self) -> None:
        """Write the note; an error of the disk only costs the next build some time."""
        if not self._left_out:
            return
        noted = self._left_out.items()
        entries = [{"source": source, "admit": admit, "rows": sorted(rows)} for (source, admit), rows in noted]
        fresh = self._note.with_suffix(".tmp")
        with suppress(OSError):
            fresh.write_text(json.dumps({"database": self._writer.manifest.uuid, "left_out": entries}), "utf-8")
            os.replace(fresh, self._note)

    def _is_known(self, maps: Sequence[Tensor], hidden: Tensor) -> bool:
        """Whether a record has nearly these maps: ``[h, n, n]`` by layer, hidden states ``[n, H]``."""
        records = self._records[len(hidden)]
        if not records:
            return False
        distances = (self._vectors[len(hidden)][: len(records)] - self._project(hidden)).norm(dim=1)
        for place in distances.topk(min(CANDIDATES, len(records)), largest=False).indices.tolist():
            pairs = zip(maps, self._writer.maps(records[place]), strict=True)
            if all(float(similarity_score(new, old)) >= self._threshold for new, old in pairs):
                return True
        return False

    def _remember(self, record: int, hidden: Tensor) -> None:
        length = len(hidden)
        records = self._records[length]
        vectors = self._vectors.get(length, torch.empty(0, _DIMENSIONS))
        if len(vectors) == len(records):
            vectors = self._vectors[length] = torch.cat([vectors, torch.empty(max(64, len(records)), _DIMENSIONS)])
        vectors[len(records)] = self._project(hidden)
        records.append(record)

    def _project(self, hidden: Tensor) -> Tensor:
        """Hidden states ``[n, H]`` in ``[d]`` numbers that keep distances, roughly: first channels, then positions."""
        # One matrix for both would have n times H times d numbers.
        length = len(hidden)
        if length not in self._mix:
            generator = torch.Generator().manual_seed(_SEED + length)
            self._mix[length] = torch.randn(_DIMENSIONS, length * _CHANNELS, generator=generator)
        return self._mix[length] @ (hidden.float() @ self._narrow).flatten()
