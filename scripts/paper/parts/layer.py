"""A forward served from memory against the exact ones, everything included."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from itertools import chain, cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from attmemo.db import Database, DatabaseWriter
from attmemo.db.encodings import TYPES
from attmemo.embed.indexing import build_indexes
from attmemo.embed.lookup import LookupName
from attmemo.embed.training import TrainOptions, train
from attmemo.errors import AttmemoError
from attmemo.maps.handle import MapMemoization
from attmemo.memoization import memoize, unmemoize
from attmemo.models import Adapter, adapter_for
from attmemo.models.base import by_module
from attmemo.models.projections import share_heads
from attmemo.profiler.build import build_from_inputs
from attmemo.profiler.map_recorder import Capture, attention_seconds
from attmemo.profiler.turns import Job, interleave
from attmemo.system.machine import conditions
from attmemo.wording import percent
from paper.parts import limits
from paper.parts.shapes import random_inputs, random_model

_LEAST_RECORDS: Final = 8  # that an embedder can be trained on
_OF_SERVED: Final = (
    "hit_rate", "lookup_ms_per_layer", "serve_ms_per_layer", "share_of_ceiling", "overhead_of_attention"
)  # fmt: skip
_CEILING_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


class _Served:
    """A model whose attention comes from memory, and its counters in each turn."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self._handle = model, cast("MapMemoization", model.attmemo)
        self.seen: list[tuple[float, float, float]] = []  # ms of lookup and of serving, mean over layers; hit rate

    def note(self, turn: int) -> None:
        """Read the counters of a forward, and start anew; the first forward warms up and does not count."""
        stats = self._handle.stats()
        self._handle.reset_stats()
        if turn > 0:
            lookup, serve = (fmean(row[key] for row in stats["layers"]) for key in ("ms_lookup", "ms_serve"))
            self.seen.append((lookup, serve, stats["hit_rate"]))


class _Clock:
    """Milliseconds of a model's attention, mean over layers, in each turn; `spent` is that of `attention_seconds`."""

    def __init__(self, spent: list[float]) -> None:
        self._spent, self._seen = spent, list[float]()

    @property
    def ms(self) -> float:
        return median(self._seen)

    def note(self, turn: int) -> None:
        """Read the clock after a forward; the first warms up and does not count."""
        if turn > 0:
            self._seen.append(1e3 * fmean(self._spent))
        self._spent[:] = [0.0] * len(self._spent)


def bench_layer(
    *, family: str = "bert", hidden: int = 768, heads: int = 12, length: int = 256, batch: int = 8,
    dtype: str = "float32", layers: int = 2, repeats: int = 5, eager: bool = False,
    lookups: Sequence[LookupName] = ("sequence", "layer"),
) -> dict[str, Any]:  # fmt: skip
    """One forward of a random-initialised model: exact, and with every sequence served from a database.

    The model has the shape of its family's base model, few layers and a small vocabulary; the database is a real one,
    built, trained and published by the library's own code. Every sequence hits (threshold 0), so this is the most
    that memoization can save here, with lookup, fetch and the rest of the model included.

    Inputs are random tokens ``[batch, length]``, without padding, others in each turn. Variants: ``exact`` (the
    original model), ``exact-eager`` (attention without a fused kernel, as models had it in 2022; if asked, where
    ``exact`` is another), ``memoized-sequence``, ``memoized-layer`` (one lookup for all layers, or one in each), and
    ``ceiling`` (the hit path without lookup and fetch, on maps that are in contiguous memory already).

    Of the memoized, one lookup for all layers is divided among them; ``share_of_ceiling`` is the saving over ``exact``
    as a share of the ceiling's, None where that saves nothing; ``overhead_of_attention`` is lookup, and what serving
    takes longer than the ceiling's hit path, as a share of the exact attention module's time.

    StorageFullError, AttmemoError: there is no room; the ceiling, on the model's own maps, gives another output.
    """
    sizes = {"hidden": hidden, "heads": heads, "length": length, "batch": batch, "layers": layers}
    storage = "bfloat16" if dtype == "bfloat16" else "float16"  # as attmemo.profiler.build does
    where = conditions()
    notes = ["random weights and tokens: times only, nothing about quality; embeddings are part of the forward"]
    notes += limits.busy(where)
    records = max(batch, _LEAST_RECORDS)
    items = heads * length * length + length * hidden
    stored = records * layers * items * TYPES[storage].itemsize
    in_memory = stored + 3 * batch * layers * items * TYPES[dtype].itemsize
    limits.check_room(in_memory, stored)
    with tempfile.TemporaryDirectory(prefix=limits.PREFIX) as folder, torch.random.fork_rng(devices=[]):
        model = random_model(family, hidden, heads, length, layers, dtype)
        adapter = adapter_for(model)[0]
        implementation = str(getattr(adapter.host(model).config, "_attn_implementation", "eager"))
        generator = torch.Generator().manual_seed(limits.SEED)
        path = Path(folder) / "database"
        with limits.threads_kept(notes):
            _build_database(path, model, storage, random_inputs(family, generator, records, length, dtype), batch)
        inputs = [random_inputs(family, generator, batch, length, dtype) for _ in range(1 + repeats)]
        ceiling = _ceiling_model(model, inputs[0])
        with Database(path) as database, ExitStack() as stack:
            served: dict[str, _Served] = {}
            for lookup in lookups:
                twin = _twin(model)
                with limits.threads_kept():
                    memoize(twin, threshold=0.0, database=database, lookup=lookup, gate=False)
                stack.callback(unmemoize, twin)
                served[f"memoized-{lookup}"] = _Served(twin)
            timed = {"exact": model, "ceiling": ceiling}
            if eager and implementation != "eager":
                timed["exact-eager"] = _twin(model)
                timed["exact-eager"].set_attn_implementation("eager")  # type: ignore[operator]
            clocks = {name: _Clock(stack.enter_context(attention_seconds(one))) for name, one in timed.items()}
            watched: dict[str, _Clock | _Served] = {**clocks, **served}
            models = timed | {name: one.model for name, one in served.items()}
            names = [name for name in ("exact", "exact-eager", *served, "ceiling") if name in models]
            jobs = {name: _forward_job(adapter, adapter.host(models[name]), inputs) for name in names}
            with torch.inference_mode():
                found = interleave(jobs, repeats, after=lambda name, turn: watched[name].note(turn))
    stock, floor = found["exact"].ms, found["ceiling"].ms
    if stock <= floor:
        notes.append("the ceiling saves nothing over the exact model here: memoization cannot pay at this shape")
    rows = []
    for name, times in found.items():
        row: dict[str, Any] = {
            "variant": name, "family": family, **sizes, "dtype": dtype,
            "attention": ("eager" if name == "exact-eager" else implementation) if name.startswith("exact") else None,
            "ms": times.ms, "speedup": stock / times.ms,
            "attention_ms_per_layer": clocks[name].ms if name in clocks else None, **dict.fromkeys(_OF_SERVED),
        }  # fmt: skip
        if name in served:
            lookups_ms, serves_ms, hit_rates = zip(*served[name].seen, strict=True)
            lookup_ms, serve_ms, hit_rate = median(lookups_ms), median(serves_ms), min(hit_rates)
            share = (stock - times.ms) / (stock - floor) if stock > floor else None
            overhead = (lookup_ms + max(0.0, serve_ms - clocks["ceiling"].ms)) / clocks["exact"].ms
            row |= zip(_OF_SERVED, (hit_rate, lookup_ms, serve_ms, share, overhead), strict=True)
            if hit_rate < 1.0:
                notes.append(f"{name}: only {percent(hit_rate)} of the calls were served, so its times are mixed")
        rows.append(row)
    where |= {
        "dtype": dtype, "storage_dtype": storage, "batch_size": batch, "max_length": length, "records": records,
        "repeats": repeats, "attention": implementation,
    }  # fmt: skip
    return {"rows": rows, "conditions": where, "notes": notes}


def _build_database(path: Path, model: nn.Module, storage: str, inputs: Mapping[str, Tensor], batch: int) -> None:
    """Capture, store, train without gradients, index and publish, as the command line does."""
    rows = len(next(iter(inputs.values())))
    starts = range(0, rows, batch)
    parts = ({name: tensor[start : start + batch] for name, tensor in inputs.items()} for start in starts)
    build_from_inputs(model, parts, path, storage=storage, inputs="all", name="random inputs")
    with Database(path) as database, DatabaseWriter.reopen(path) as writer:
        # Where the sequences go is all the same here; that something is embedded and searched is not.
        trained = train(database, TrainOptions(steps=0))
        writer.publish(embedder=build_indexes(database, trained), profile=None, tuning=None)


def _twin(model: nn.Module) -> nn.Module:
    """A second model over the same weights: a variant must not be faster because its weights are in the cache."""
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    return copy.deepcopy(model, shared)  # a memo by id, as deepcopy keeps it


def _ceiling_model(model: nn.Module, inputs: dict[str, Tensor]) -> nn.Module:
    """A twin whose attention is V and A·V on maps held in memory, checked against the model itself."""
    twin = _twin(model)
    adapter, sites = adapter_for(twin)
    with Capture(twin, adapter, sites) as capture:
        maps = [apm.contiguous() for apm in capture.run(inputs).maps]
    for group in by_module(sites):
        module = group[0].module
        module.forward = _hit_only(adapter, module, [maps[site.layer] for site in group])
    with torch.inference_mode():
        expected = _forward(adapter, adapter.host(model), inputs).last_hidden_state.float()
        seen = _forward(adapter, adapter.host(twin), inputs).last_hidden_state.float()
    difference = float((seen - expected).norm() / expected.norm())
    allowed = _CEILING_TOLERANCE[maps[0].dtype]
    if not difference <= allowed:
        raise AttmemoError(
            f"with its own maps the model gives another output: relative difference {difference:.2e}, "
            f"allowed {allowed:.0e}; the ceiling would not be one."
        )
    return twin


def _hit_only(adapter: Adapter, module: nn.Module, maps: Sequence[Tensor]) -> Callable[..., Any]:
    """`forward` of an attention module on a hit, with the maps ``[B, h, L, L]`` of its layers, called in turn."""
    turn = cycle(maps)
    heads, width = adapter.shape(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = adapter.read(module, args, kwargs)
        if isinstance(call, str):
            raise AttmemoError(f"the ceiling cannot be measured: {call}.")
        batch, length, size = call.hidden.shape
        values = share_heads(adapter.value(module, call.hidden.reshape(batch * length, size)), heads, width)
        products = torch.matmul(next(turn), values.view(batch, length, heads, width).transpose(1, 2))  # [B, h, L, d]
        context = products.transpose(1, 2).reshape(batch, length, heads * width)
        return adapter.pack(module, adapter.finish(module, context, call.hidden), call)

    return forward


def _forward(adapter: Adapter, host: Callable[..., Any], inputs: Mapping[str, Tensor]) -> Any:
    return host(**inputs, **({"use_cache": False} if adapter.causal else {}))


def _forward_job(adapter: Adapter, host: Callable[..., Any], inputs: Sequence[Mapping[str, Tensor]]) -> Job:
    return lambda turn: _forward(adapter, host, inputs[turn])
