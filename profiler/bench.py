"""Micro-benchmarks of this machine, without the user's data: fetching maps, searching embeddings, one forward.

    bench_gather()                       # what fetching costs: copy, window, view; alone and with the A·V that follows
    bench_search()                       # index backends: time and recall
    bench_layer(family="deberta-v2")     # a forward served from memory against the exact ones, everything included

What is compared is measured in turns within one run, never one after the other: machines drift by more than the
differences looked for. Each turn has inputs of its own, so that no variant finds its data in the cache because it
was asked the same before. Numbers are medians over the turns, the first of which is not counted.

Nothing here sets a number of threads or seeds a generator of the caller's.
"""

from __future__ import annotations

import copy
import math
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.adapters import Adapter, Site, adapter_for
from attmemo.db import BACKENDS, KIND_MAP, Backend, Database, DatabaseWriter, FlatIndex, ModelInfo, Provenance
from attmemo.db.format import DTYPES, SlotClass
from attmemo.db.index import VectorIndex, build_index
from attmemo.embed.train import TrainOptions, build_indexes, train
from attmemo.engine import Lookup
from attmemo.errors import AttmemoError, DatabaseError, StorageFullError
from attmemo.fingerprint import fingerprint, model_fields
from attmemo.memoization import memoize, unmemoize
from attmemo.mmap import (
    Arena,
    Batch,
    CopyFetcher,
    Fetcher,
    FetcherName,
    MapFetcher,
    Residency,
    SlotLayout,
    ViewFetcher,
    choose_fetcher,
)
from attmemo.mmap.hugepages import available_memory
from attmemo.profiler.capture import Capture
from attmemo.profiler.conditions import conditions
from attmemo.profiler.models import quiet

Progress = Callable[[str, int, int], None]
Family = Literal["bert", "deberta-v2"]
Job = Callable[[int], object]

MAX_BYTES: Final = 8 << 30
"""Default limit on what a benchmark writes or allocates."""

_LEAST_RECORDS: Final = 8  # that an embedder can be trained on
_VOCABULARY: Final = 1000
_SEED: Final = 20240229
_PRODUCT_TOLERANCE: Final = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
_CEILING_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


# -- fetching maps


class _ReusedFetcher:
    """Copies into a buffer that is kept: what a careful program without mapping would do."""

    name = "copy_reused"

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer

    def fetch(self, arena: Arena, slots: npt.NDArray[np.int64]) -> Batch:
        return Batch(torch.stack([arena.slot(slot) for slot in slots.tolist()], out=self.buffer))

    def close(self) -> None:
        pass


class _ThereFetcher:
    """Hands out what was put there before: no fetch at all, the floor of the others."""

    name = "contiguous"

    def __init__(self, there: Tensor) -> None:
        self.there = there

    def fetch(self, _arena: Arena, _slots: npt.NDArray[np.int64]) -> Batch:
        return Batch(self.there)

    def close(self) -> None:
        pass


def bench_gather(
    *,
    heads: int = 12,
    length: int = 512,
    batch: int = 32,
    dtype: str = "bfloat16",
    residency: Residency = "page-cache",
    width: int = 64,
    repeats: int = 9,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Cost of fetching a batch of maps scattered in an arena, alone and with the A·V that follows.

    Both together are what counts: mapping small pages only moves the cost into the product, where they are faulted in.

    Parameters
    ----------
    heads, length, batch, width : int
        Maps are ``[batch, heads, length, length]``, V is ``[batch, heads, length, width]``.
    dtype : {"float32", "bfloat16", "float16"}
        Of maps and V.
    residency : {"page-cache", "hugepages"}
        Where the arena is served from.
    repeats : int
        Turns counted; each fetches other slots.
    max_bytes : int
        Most bytes for the temporary arena, which holds twice the batch, and again for the copies in memory.
    progress : callable, optional
        Called with (what, done, total).

    Returns
    -------
    dict
        ``rows``: for each variant (``copy``: into a fresh tensor; ``copy_reused``: into a kept one; ``map``: a window
        remapped, which takes down what the last fetch mapped; ``view``: no gathering; ``contiguous``: maps that are
        there already) ``fetch_ms``, ``fetch_matmul_ms``, ``gb_per_s`` and ``gb_per_s_matmul`` (bytes of the maps by
        those times; None without a fetch), ``faults`` and ``faults_matmul`` (minor page faults in a batch).
        The same at the top level as ``<variant>_ms``, ``<variant>_matmul_ms``, ``<variant>_gb_per_s``,
        ``<variant>_faults``, ``<variant>_matmul_faults``. There too: ``fetcher``, the default one here; ``faults``,
        those of the default one with its A·V; ``page_bytes``, the pages of the arena; ``window_page_bytes``, those of
        a window over it; ``residency``, where the arena really was, and ``notice``, what it said about that, or None;
        ``bytes``, those of a batch. ``conditions`` and ``notes``.

    Raises
    ------
    ValueError
        A size is not a positive integer, or a name is not one of those listed.
    StorageFullError
        The limit, the disk or the memory has no room for it.
    AttmemoError
        The variants did not give the same maps; no number would mean anything.
    """
    _check_sizes(heads=heads, length=length, batch=batch, width=width, repeats=repeats, max_bytes=max_bytes)
    _check_choice("dtype", dtype, tuple(DTYPES))
    _check_choice("residency", residency, get_args(Residency))
    tell = progress or _silent
    where = conditions()
    shape, kind = (heads, length, length), DTYPES[dtype]
    # As in a database: where slots begin decides which pages a window over them can have.
    layout = SlotClass.make(KIND_MAP, length, shape, dtype).layout.with_slots(2 * batch)
    nbytes = batch * layout.nbytes
    generator = torch.Generator().manual_seed(_SEED)
    # A fresh copy, a kept one and the maps that are there already; huge pages hold the arena a second time.
    in_memory = 3 * nbytes + (2 if residency == "hugepages" else 1) * layout.file_bytes
    with _folder(layout.file_bytes, in_memory, max_bytes) as folder:
        scattered = np.random.default_rng(_SEED)
        slots = [scattered.permutation(layout.slots)[:batch] for _ in range(1 + repeats)]
        file = folder / "bench.slots"
        _write_maps(file, layout, generator, tell)
        values = torch.randn(batch, heads, length, width, generator=generator).to(kind)
        out = torch.empty_like(values)
        there = _ThereFetcher(torch.empty(batch, *shape, dtype=kind))
        mapped = MapFetcher()
        fetchers: dict[str, Any] = {
            "copy": CopyFetcher(),
            "copy_reused": _ReusedFetcher(torch.empty(batch, *shape, dtype=kind)),
            "map": mapped,
            "view": ViewFetcher(),
            "contiguous": there,
        }
        with Arena(file, layout, residency) as arena:
            try:
                there.there.copy_(_stacked(arena, slots[0]))
                _check_twins(fetchers, arena, slots[0], values, out)
                jobs: dict[str, Job] = {}
                for name, fetcher in fetchers.items():
                    if fetcher is not there:
                        jobs[name] = _fetch_job(fetcher, arena, slots)
                    jobs[f"{name}_matmul"] = _product_job(fetcher, arena, slots, values, out)

                def put_there(turn: int) -> None:
                    there.there.copy_(_stacked(arena, slots[turn]))

                found = _interleave(jobs, repeats, before=put_there, tell=tell)
                notice = None if arena.notice is None else arena.notice.replace(str(file), "the arena")
                notes = _busy(where) + ([] if notice is None else [notice])
                if mapped.fallbacks:
                    notes.append(f"{mapped.fallbacks} batches of 'map' were copied instead: {mapped.fallback_reason}")
                if not arena.mapping.layout.dense:
                    notes.append("slots are padded to pages: 'map' is multiplied one record at a time, as 'view' is")
                default = choose_fetcher("auto", arena.window_page_bytes)
                default.close()
                facts = {
                    "fetcher": default.name,
                    "page_bytes": arena.page_bytes,
                    "window_page_bytes": arena.window_page_bytes,
                    "bytes": nbytes,
                    "residency": arena.residency,
                    "notice": notice,
                }
            finally:
                for fetcher in fetchers.values():
                    fetcher.close()
    settings = {"heads": heads, "length": length, "batch": batch, "dtype": dtype, "width": width}
    flat: dict[str, Any] = {}
    rows = []
    for name in fetchers:
        alone, product = found.get(name), found[f"{name}_matmul"]
        if alone is not None:
            flat[f"{name}_ms"] = alone.ms
            flat[f"{name}_gb_per_s"] = nbytes / alone.ms / 1e6
            flat[f"{name}_faults"] = alone.faults_median
        flat[f"{name}_matmul_ms"] = product.ms
        flat[f"{name}_matmul_faults"] = product.faults_median
        rows.append(
            {
                "variant": name,
                **settings,
                "fetch_ms": None if alone is None else alone.ms,
                "fetch_matmul_ms": product.ms,
                "gb_per_s": None if alone is None else nbytes / alone.ms / 1e6,
                "gb_per_s_matmul": nbytes / product.ms / 1e6,
                "faults": None if alone is None else alone.faults_median,
                "faults_matmul": product.faults_median,
            }
        )
    flat["faults"] = flat[f"{facts['fetcher']}_matmul_faults"]
    where |= settings | {"repeats": repeats, "residency": facts["residency"], "notice": facts["notice"]}
    return {"rows": rows, **flat, **facts, "conditions": where, "notes": notes}


def _write_maps(file: Path, layout: SlotLayout, generator: torch.Generator, tell: Progress) -> None:
    """Random probability maps, one in each slot."""
    with file.open("wb") as stream:
        stream.write(bytes(layout.header))
        for slot in range(layout.slots):
            tell("records", slot, layout.slots)
            apm = torch.randn(layout.shape, generator=generator).mul_(2.0).softmax(-1).to(layout.dtype)
            stream.write(apm.view(torch.uint8).numpy().tobytes())
            stream.write(bytes(layout.stride - layout.nbytes))
        stream.flush()
        os.fsync(stream.fileno())  # or the kernel writes them out while we measure
    tell("records", layout.slots, layout.slots)


def _stacked(arena: Arena, slots: npt.NDArray[np.int64]) -> Tensor:
    return torch.stack([arena.slot(slot) for slot in slots.tolist()])


def _multiply(maps: Batch, values: Tensor, out: Tensor) -> None:
    """A·V as the engine does it: at once if the batch is one dense tensor, else one record at a time."""
    stacked = maps.stacked
    if stacked is not None and stacked.is_contiguous():
        torch.matmul(stacked, values, out=out)
        return
    for place in range(len(maps)):
        torch.matmul(maps[place], values[place], out=out[place])


def _fetch_job(fetcher: Fetcher, arena: Arena, slots: Sequence[npt.NDArray[np.int64]]) -> Job:
    def job(turn: int) -> None:
        with fetcher.fetch(arena, slots[turn]):
            pass

    return job


def _product_job(
    fetcher: Fetcher, arena: Arena, slots: Sequence[npt.NDArray[np.int64]], values: Tensor, out: Tensor
) -> Job:
    def job(turn: int) -> None:
        with fetcher.fetch(arena, slots[turn]) as maps:
            _multiply(maps, values, out)

    return job


def _check_twins(
    fetchers: Mapping[str, Fetcher], arena: Arena, slots: npt.NDArray[np.int64], values: Tensor, out: Tensor
) -> None:
    """Every variant must give the same bytes, and the same product but for the order of its sums."""
    expected = _stacked(arena, slots)
    products = torch.matmul(expected, values)
    tolerance = _PRODUCT_TOLERANCE[values.dtype]
    for name, fetcher in fetchers.items():
        with fetcher.fetch(arena, slots) as maps:
            equal = len(maps) == len(slots) and all(torch.equal(maps[i], expected[i]) for i in range(len(slots)))
            _multiply(maps, values, out)
        if not equal or not torch.allclose(out, products, rtol=tolerance, atol=tolerance):
            raise AttmemoError(
                f"fetching with {name!r} gave other {'products' if equal else 'maps'} than stacking the slots.",
                "report this with the output of uname -a; use fetch='copy' until then",
            )


# -- searching embeddings


def bench_search(
    *,
    records: int = 10000,
    dimension: int = 128,
    queries: int = 64,
    backends: Sequence[str] = BACKENDS,
    repeats: int = 9,
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Cost and recall of the index backends on clustered random vectors, as template-heavy data gives.

    Parameters
    ----------
    records, dimension : int
        Vectors ``[records, dimension]``, in about ``sqrt(records)`` clusters.
    queries : int
        Vectors searched at once, each near a stored one.
    backends : sequence of {"faiss", "hnswlib", "flat"}
        What to measure; one that is not installed is left out with a note.
    repeats : int
        Turns counted; each searches other queries.
    max_bytes : int
        Most bytes for vectors and distances in memory.
    progress : callable, optional
        Called with (what, done, total).

    Returns
    -------
    dict
        ``rows``: for each backend ``build_seconds``, ``search_ms`` (a batch of queries), ``us_per_query``,
        ``recall_at_1`` (share of queries whose nearest vector, by exact search, was found first) and ``bytes`` (of
        the index as stored). ``conditions`` and ``notes``.

    Raises
    ------
    ValueError
        A size is not a positive integer, or a backend is unknown.
    StorageFullError
        The limit or the memory has no room for it.
    """
    _check_sizes(records=records, dimension=dimension, queries=queries, repeats=repeats, max_bytes=max_bytes)
    if isinstance(backends, str) or not backends:
        raise ValueError(f"backends must be a sequence of names, at least one, got {backends!r}")
    for backend in backends:
        _check_choice("backends", backend, BACKENDS)
    tell = progress or _silent
    # Vectors here and in each index with its links, queries of all turns, distances and order of a flat search.
    vectors_bytes, asked_bytes = 4 * records * dimension, 4 * (1 + repeats) * queries * dimension
    _check_memory((2 + 2 * len(backends)) * vectors_bytes + asked_bytes + 16 * records * queries, max_bytes)
    where = conditions()
    generator = np.random.default_rng(_SEED)
    centres = generator.standard_normal((math.isqrt(records - 1) + 1, dimension), np.float32)
    vectors = centres[generator.integers(len(centres), size=records)]
    vectors += 0.1 * generator.standard_normal((records, dimension), np.float32)
    asked = []
    for _ in range(1 + repeats):
        chosen = vectors[generator.integers(records, size=queries)]
        asked.append(chosen + 0.05 * generator.standard_normal((queries, dimension), np.float32))

    notes = _busy(where)
    indexes: dict[str, VectorIndex] = {}
    build_seconds: dict[str, float] = {}
    wanted = list(dict.fromkeys(backends))
    with _threads_kept():  # one thread for faiss is one for torch: the two may share an OpenMP runtime
        for step, backend in enumerate(wanted):
            tell("indexes", step, len(wanted))
            try:
                _build(vectors[:1], backend)  # imports the library, or says that it is not there
            except (DatabaseError, ImportError) as error:
                notes.append(f"{backend} is left out: {error.what if isinstance(error, AttmemoError) else error}")
                continue
            start = time.perf_counter()
            indexes[backend] = _build(vectors, backend)
            build_seconds[backend] = time.perf_counter() - start
        tell("indexes", len(wanted), len(wanted))
        jobs = {name: _search_job(index, asked) for name, index in indexes.items()}
        found = _interleave(jobs, repeats, tell=tell)
        exact = FlatIndex(vectors)
        truth = [exact.search(batch, 1)[1][:, 0] for batch in asked]
        rows = []
        for name, index in indexes.items():
            # By distance: of two records at the same place either is right.
            near = [index.search(batch, 1)[1][:, 0] <= best * 1.0001 for batch, best in zip(asked, truth, strict=True)]
            rows.append(
                {
                    "backend": name,
                    "records": records,
                    "dimension": dimension,
                    "queries": queries,
                    "build_seconds": build_seconds[name],
                    "search_ms": found[name].ms,
                    "us_per_query": 1e3 * found[name].ms / queries,
                    "recall_at_1": float(np.mean(near)),
                    "bytes": index.dump().nbytes,
                }
            )
    where |= {"records": records, "dimension": dimension, "queries": queries, "repeats": repeats}
    return {"rows": rows, "conditions": where, "notes": notes}


def _build(vectors: npt.NDArray[np.float32], backend: str) -> VectorIndex:
    name: Backend = backend  # type: ignore[assignment]  # checked against BACKENDS
    return build_index(vectors, name)


def _search_job(index: VectorIndex, asked: Sequence[npt.NDArray[np.float32]]) -> Job:
    return lambda turn: index.search(asked[turn], 1)


# -- one forward


@dataclass
class _Served:
    """A model whose attention comes from memory, and what its counters said in each turn."""

    model: nn.Module
    lookup_ms: list[float] = field(default_factory=list)
    serve_ms: list[float] = field(default_factory=list)
    hit_rates: list[float] = field(default_factory=list)

    def note(self) -> None:
        """Read the counters of the last forward, and start counting anew."""
        handle: Any = self.model.attmemo
        stats = handle.stats()
        handle.reset_stats()
        layers = stats["layers"]
        self.lookup_ms.append(sum(row["ms_lookup"] for row in layers) / len(layers))
        self.serve_ms.append(sum(row["ms_serve"] for row in layers) / len(layers))
        self.hit_rates.append(stats["hit_rate"])


def bench_layer(
    *,
    family: Family = "bert",
    hidden: int = 768,
    heads: int = 12,
    length: int = 256,
    batch: int = 8,
    dtype: str = "float32",
    layers: int = 2,
    repeats: int = 5,
    compile: bool = False,
    storage: str = "auto",
    fetch: FetcherName = "auto",
    residency: Residency = "page-cache",
    max_bytes: int = MAX_BYTES,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """One forward of a random-initialised model: exact, and with every sequence served from a database.

    The model has the shape of its family's base model, few layers and a small vocabulary; the database is a real one,
    built, trained and published by the library's own code. Every row hits (threshold 0), so this is the most that
    memoization can save here, with lookup, fetch and all of the rest of the model included.

    Parameters
    ----------
    family : {"bert", "deberta-v2"}
    hidden, heads, layers : int
        Shape of the model; `hidden` is a multiple of `heads`.
    length, batch : int
        Inputs are random tokens ``[batch, length]``, without padding; others in each turn.
    dtype : {"float32", "bfloat16"}
        What the model computes in.
    repeats : int
        Turns counted.
    compile : bool
        Measure `torch.compile` of the exact model too; compiling takes up to minutes.
    storage : {"auto", "float32", "bfloat16", "float16"}
        How maps are stored; "auto" is what `attmemo build-database` takes.
    fetch, residency : str
        As for `attmemo.memoize`.
    max_bytes : int
        Most bytes for the temporary database.
    progress : callable, optional
        Called with (what, done, total).

    Returns
    -------
    dict
        ``rows``, one for each variant:

        * ``exact``: the stock model, with fused attention (SDPA) where the family has it
        * ``exact-compiled``: the same through `torch.compile`, if asked
        * ``memoized-sequence``, ``memoized-layer``: one lookup for all layers, or one in each
        * ``ceiling``: the hit path without lookup and fetch, on maps that are in contiguous memory already

        with ``ms``, ``ms_min``, ``speedup`` (against ``exact``), ``speedup_best`` (against the fastest exact one); for
        the memoized also ``hit_rate``, ``lookup_ms_per_layer``, ``serve_ms_per_layer`` (in the mean over layers; one
        lookup for all is divided among them) and ``share_of_ceiling`` (saving over ``exact``, as a share of what the
        ceiling saves; None where that saves nothing). ``conditions`` and ``notes``.

    Raises
    ------
    ValueError
        A size is not a positive integer or does not fit the others, or a name is not one of those listed.
    StorageFullError
        The limit, the disk or the memory has no room for it.
    AttmemoError
        The ceiling, given the model's own maps, does not give the model's own output.
    """
    sizes = {"hidden": hidden, "heads": heads, "length": length, "batch": batch, "layers": layers}
    _check_sizes(**sizes, repeats=repeats, max_bytes=max_bytes)
    _check_choice("family", family, get_args(Family))
    _check_choice("dtype", dtype, tuple(name for name in DTYPES if DTYPES[name] in _CEILING_TOLERANCE))
    _check_choice("storage", storage, ("auto", *DTYPES))
    _check_choice("fetch", fetch, get_args(FetcherName))
    _check_choice("residency", residency, get_args(Residency))
    if hidden % heads:
        raise ValueError(f"hidden ({hidden}) must be a multiple of heads ({heads})")
    if storage == "auto":  # as attmemo.profiler.build does
        storage = "bfloat16" if dtype == "bfloat16" else "float16"
    tell = progress or _silent
    where = conditions()
    notes = ["random weights and tokens: times only, nothing about quality; embeddings are part of the forward"]
    notes += _busy(where)
    records = max(2 * batch, _LEAST_RECORDS)
    items = heads * length * length + length * hidden
    stored = records * layers * items * DTYPES[storage].itemsize
    in_memory = (2 if residency == "hugepages" else 1) * stored + 3 * batch * layers * items * DTYPES[dtype].itemsize
    with _folder(stored, in_memory, max_bytes) as folder, torch.random.fork_rng(devices=[]):
        model = _random_model(family, hidden, heads, length, layers, dtype)
        implementation = str(getattr(model.config, "_attn_implementation", "eager"))
        adapter, sites = adapter_for(model)
        generator = torch.Generator().manual_seed(_SEED)
        tell("database", 0, 1)
        path = folder / "database"
        with _threads_kept(notes):
            _build_database(path, model, adapter, sites, storage, _inputs(generator, records, length), batch)
        tell("database", 1, 1)
        inputs = [_inputs(generator, batch, length) for _ in range(1 + repeats)]
        ceiling = _ceiling_model(model, inputs[0])
        with Database(path, residency) as database:
            served: dict[str, _Served] = {}
            lookups: tuple[Lookup, ...] = ("sequence", "layer")
            for lookup in lookups:
                twin = _twin(model)
                with _threads_kept():
                    memoize(twin, threshold=0.0, database=database, lookup=lookup, gate=False, fetch=fetch)
                served[f"memoized-{lookup}"] = _Served(twin)
            try:
                models: dict[str, Any] = {"exact": model}
                if compile:
                    tell("compile", 0, 1)
                    compiled, why = _compiled(model, inputs[0])
                    tell("compile", 1, 1)
                    if compiled is None:
                        notes.append(f"exact-compiled is left out: {why}")
                    else:
                        models["exact-compiled"] = compiled
                models |= {name: one.model for name, one in served.items()} | {"ceiling": ceiling}

                def read_counters(name: str, turn: int) -> None:
                    if name in served and turn > 0:
                        served[name].note()
                    elif name in served:
                        served[name].model.attmemo.reset_stats()  # type: ignore[operator,union-attr]

                with torch.inference_mode():
                    jobs = {name: _forward_job(one, inputs) for name, one in models.items()}
                    found = _interleave(jobs, repeats, after=read_counters, tell=tell)
            finally:
                for one in served.values():
                    unmemoize(one.model)
            arena = database.arena(KIND_MAP, length)
            if arena.notice is not None:
                notes.append(arena.notice.replace(str(path), "the database"))
            fetcher = choose_fetcher(fetch, arena.window_page_bytes)
            fetcher.close()
            facts = {"fetch": fetcher.name, "page_bytes": arena.page_bytes, "residency": arena.residency}

    stock, floor = found["exact"].ms, found["ceiling"].ms
    best = min(times.ms for name, times in found.items() if name.startswith("exact"))
    if stock <= floor:
        notes.append("the ceiling saves nothing over the exact model here: memoization cannot pay at this shape")
    rows = []
    for name, times in found.items():
        row: dict[str, Any] = {
            "variant": name,
            "family": family,
            **sizes,
            "dtype": dtype,
            "attention": implementation if name.startswith("exact") else None,
            "ms": times.ms,
            "ms_min": min(times.milliseconds),
            "speedup": stock / times.ms,
            "speedup_best": best / times.ms,
            "hit_rate": None,
            "lookup_ms_per_layer": None,
            "serve_ms_per_layer": None,
            "share_of_ceiling": None,
        }
        if name in served:
            one = served[name]
            row["hit_rate"] = min(one.hit_rates)
            row["lookup_ms_per_layer"] = median(one.lookup_ms)
            row["serve_ms_per_layer"] = median(one.serve_ms)
            row["share_of_ceiling"] = (stock - times.ms) / (stock - floor) if stock > floor else None
            if row["hit_rate"] < 1.0:
                notes.append(f"{name}: only {row['hit_rate']:.0%} of the calls were served, so its times are mixed")
        rows.append(row)
    where |= {
        "dtype": dtype,
        "storage_dtype": storage,
        "batch_size": batch,
        "max_length": length,
        "records": records,
        "repeats": repeats,
        "attention": implementation,
        **facts,
    }
    return {"rows": rows, "conditions": where, "notes": notes}


def _random_model(family: Family, hidden: int, heads: int, length: int, layers: int, dtype: str) -> nn.Module:
    """A model of the family's base shape, made under a seed of its own; call it inside `fork_rng`."""
    from transformers import AutoModel, BertConfig, DebertaV2Config

    shape = {
        "vocab_size": _VOCABULARY,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": max(512, length),
        # Q and K then have a variance of 2, and scores a standard deviation of 2: maps that are neither flat nor
        # one-hot. The usual 0.02 gives flat ones.
        "initializer_range": math.sqrt(2.0 / hidden),
    }
    config: Any
    if family == "bert":
        config = BertConfig(**shape)
    else:
        config = DebertaV2Config(
            **shape,
            relative_attention=True,
            position_buckets=256,
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
            type_vocab_size=0,
            layer_norm_eps=1e-7,
        )
    torch.manual_seed(_SEED)
    with quiet():
        model: nn.Module = AutoModel.from_config(config)
    return model.to(DTYPES[dtype]).eval()


def _inputs(generator: torch.Generator, rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.randint(10, _VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _build_database(
    path: Path,
    model: nn.Module,
    adapter: Adapter,
    sites: Sequence[Site],
    storage: str,
    inputs: Mapping[str, Tensor],
    batch: int,
) -> None:
    """Capture, store, train without gradients, index and publish, as the command line does."""
    fields = model_fields(model)
    length = int(inputs["input_ids"].shape[1])
    info = ModelInfo(
        name="random weights",
        family=adapter.family,
        mask_kind=adapter.mask_kind,
        layers=len(sites),
        heads=adapter.shape(sites[0].module)[0],
        hidden=int(model.config.hidden_size),  # type: ignore[union-attr,arg-type]
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        max_length=length,
        fingerprint=fingerprint(fields),
        fields=fields,
        tokenizer=None,
    )
    with DatabaseWriter(path, info, storage) as writer:
        source = writer.add_source("random tokens", f"seed {_SEED}")
        with Capture(model, adapter, sites) as capture:
            for start in range(0, len(inputs["input_ids"]), batch):
                part = {name: tensor[start : start + batch] for name, tensor in inputs.items()}
                for row, (maps, states) in enumerate(capture.run(part)):
                    writer.add(maps, states, Provenance(source, start + row))
        writer.publish()
    with Database(path) as database, DatabaseWriter(path, info, storage) as writer:
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
    for site, apm in zip(sites, maps, strict=True):
        site.module.forward = _hit_only(adapter, site.module, apm)
    with torch.inference_mode():
        expected = model(**inputs).last_hidden_state.float()
        seen = twin(**inputs).last_hidden_state.float()
    difference = float((seen - expected).norm() / expected.norm())
    allowed = _CEILING_TOLERANCE[maps[0].dtype]
    if not difference <= allowed:
        raise AttmemoError(
            f"with its own maps the model gives another output: relative difference {difference:.2e}, "
            f"allowed {allowed:.0e}; the ceiling would not be one."
        )
    return twin


def _hit_only(adapter: Adapter, module: nn.Module, apm: Tensor) -> Callable[..., Any]:
    """`forward` of an attention module as a hit has it, with a map ``[B, h, L, L]`` that is already there."""
    heads, width = adapter.shape(module)

    def forward(*args: Any, **kwargs: Any) -> Any:
        call = adapter.read(module, args, kwargs)
        if isinstance(call, str):
            raise AttmemoError(f"the ceiling cannot be measured: {call}.")
        batch, length, size = call.hidden.shape
        values = adapter.value(module, call.hidden.reshape(batch * length, size)).view(batch, length, heads, width)
        products = torch.matmul(apm, values.transpose(1, 2))  # [B, h, L, d]
        return adapter.finish(module, products.transpose(1, 2).reshape(batch, length, heads * width))

    return forward


def _compiled(model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Any | None, str]:
    """The model through torch.compile, compiled now; or None and why not."""
    try:
        compiled = torch.compile(_twin(model))
        with torch.inference_mode():
            compiled(**inputs)
    except Exception as error:  # compilers fail in many ways, all of which leave the other variants to be measured
        return None, (str(error).strip() or type(error).__name__).splitlines()[0]
    return compiled, ""


def _forward_job(model: Callable[..., Any], inputs: Sequence[dict[str, Tensor]]) -> Job:
    return lambda turn: model(**inputs[turn])


# -- measuring


@dataclass
class _Times:
    """One variant: milliseconds and minor page faults, turn by turn."""

    milliseconds: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)

    @property
    def ms(self) -> float:
        """Median of the milliseconds."""
        return median(self.milliseconds)

    @property
    def faults_median(self) -> int:
        """Median of the faults, of the whole process."""
        return int(median(self.faults))


def _interleave(
    jobs: Mapping[str, Job],
    repeats: int,
    *,
    before: Callable[[int], None] | None = None,
    after: Callable[[str, int], None] | None = None,
    tell: Progress,
) -> dict[str, _Times]:
    """Time jobs in turns: ``1 + repeats`` turns of all of them, the first not counted.

    Parameters
    ----------
    jobs : mapping of name to callable
        Called with the number of the turn.
    before : callable, optional
        Called before each turn with its number, not timed.
    after : callable, optional
        Called after each job with its name and the turn, not timed.
    """
    names = list(jobs)
    times = {name: _Times() for name in names}
    for turn in range(1 + repeats):
        tell("measure", turn, 1 + repeats)
        if before is not None:
            before(turn)
        # Rotated and turned round: who ran before leaves the caches in a state that nobody should always get.
        first = turn % max(1, len(names))
        order = names[first:] + names[:first]
        for name in reversed(order) if turn % 2 else order:
            job = jobs[name]
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            start = time.perf_counter()
            result = job(turn)
            spent = time.perf_counter() - start
            faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
            del result
            if after is not None:
                after(name, turn)
            if turn > 0:
                times[name].milliseconds.append(1e3 * spent)
                times[name].faults.append(faults)
    tell("measure", 1 + repeats, 1 + repeats)
    return times


def _busy(where: Mapping[str, Any]) -> list[str]:
    """A note if the machine had other work: variants that wait for all threads often then lose most."""
    if where["load"] < where["cores"]:
        return []
    return [f"the machine was busy when this began (load {where['load']:g} on {where['cores']} cores): repeat it idle"]


@contextmanager
def _threads_kept(notes: list[str] | None = None) -> Iterator[None]:
    """Put torch's number of threads back if something inside changed it, as loading an index may."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        after = torch.get_num_threads()
        if after != before:
            torch.set_num_threads(before)
            if notes is not None:
                notes.append(f"loading an index changed torch from {before} to {after} threads; {before} are measured")


def _silent(_what: str, _done: int, _total: int) -> None:
    pass


def _check_sizes(**sizes: int) -> None:
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")


def _check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}: {value!r} is not one of {', '.join(allowed)}")


@contextmanager
def _folder(on_disk: int, in_memory: int, max_bytes: int) -> Iterator[Path]:
    """A temporary folder with room for what is to come, or a StorageFullError that says what is missing."""
    if on_disk > max_bytes:
        raise _too_large(on_disk, f"the limit is {_mib(max_bytes)}")
    _check_memory(in_memory, None)
    with tempfile.TemporaryDirectory(prefix="attmemo-bench-") as name:
        free = shutil.disk_usage(name).free
        if on_disk > free:
            raise _too_large(on_disk, f"{_mib(free)} are free in the folder for temporary files")
        yield Path(name)


def _check_memory(nbytes: int, max_bytes: int | None) -> None:
    if max_bytes is not None and nbytes > max_bytes:
        raise _too_large(nbytes, f"the limit is {_mib(max_bytes)}")
    room = available_memory()
    if room is not None and nbytes > room:
        raise _too_large(nbytes, f"{_mib(room)} of memory are available")


def _too_large(nbytes: int, why: str) -> StorageFullError:
    return StorageFullError(f"the benchmark needs {_mib(nbytes)}; {why}.", "ask for smaller sizes, or more max_bytes")


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB"
