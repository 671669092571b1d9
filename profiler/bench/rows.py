"""Blocks over packed rows: the time that is left when records supply a share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attmemo import models
from attmemo.db.encodings import ROW_STORAGE, TYPES, row_types
from attmemo.handle.stack import blocks_of
from attmemo.kernels.row_attention import Layout, attend
from attmemo.kernels.row_sinks import Copies, Copy
from attmemo.models import adapter_for
from attmemo.packed.runner import Packed
from attmemo.profiler.bench import limits
from attmemo.profiler.bench.shapes import random_inputs, random_model
from attmemo.profiler.turns import Job, Progress, interleave, silent
from attmemo.rows.serve import layout_of
from attmemo.rows.store import HeldRows, records_of
from attmemo.system.machine import conditions

SHARES: Final = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_SETS: Final = 2  # of inputs and records: a turn does not find those of the turn before in the caches
_TOKENS: Final = 16  # that are computed one behind the other: changed tokens stand together


def bench_rows(
    *, family: str = "bert", hidden: int = 768, heads: int = 12, length: int = 128, batch: int = 8,
    dtype: str = "bfloat16", layers: int = 2, storage: str = "int8", shares: Sequence[float] = SHARES,
    repeats: int = 5, max_bytes: int = limits.MAX_BYTES, progress: Progress = silent,
) -> dict[str, Any]:  # fmt: skip
    """All blocks of a random model over packed rows, of which a share is computed and records supply the others.

    Parameters
    ----------
    family, hidden, heads, layers : str and int
        Shape of the model: a family with blocks.
    length, batch : int
        Sequences of `length` tokens each.
    dtype, storage : str
        What the model computes in, and how rows are stored.
    shares : sequence of float
        Shares of rows that are computed, above 0 and at most 1.
    repeats, max_bytes, progress : int and callable
        As for the other benchmarks.

    Returns
    -------
    dict
        ``rows``: ``stock`` (a forward of the original code, with its embeddings), and one for each share with ``ms``
        and ``ms_min`` of all blocks, ``attention_ms_per_layer``, ``rows``, ``speedup`` (against all rows, so 1 for
        share 1) and ``limit`` (one over the share). ``conditions`` and ``notes``.

    Raises
    ------
    ValueError, StorageFullError, UnsupportedModelError
        A size or name is none; there is no room; the family has no blocks.
    """
    sizes = {"hidden": hidden, "heads": heads, "length": length, "batch": batch, "layers": layers}
    limits.check_sizes(**sizes, repeats=repeats, max_bytes=max_bytes)
    limits.check_choice("family", family, tuple(adapter.family for adapter in models.ADAPTERS))
    limits.check_choice("dtype", dtype, ("float32", "bfloat16"))
    limits.check_choice("storage", storage, tuple(ROW_STORAGE))
    if not all(0.0 < share <= 1.0 for share in shares):
        raise ValueError(f"shares are above 0 and at most 1, got {tuple(shares)}")
    limits.check_memory(_SETS * 2 * batch * length * hidden * (layers + 1) * 4 + 48 * layers * hidden**2, max_bytes)
    where = conditions() | sizes | {"family": family, "dtype": dtype, "storage": storage}
    with torch.random.fork_rng(devices=[]), limits.threads_kept(), torch.inference_mode():
        parts = _Parts(family, hidden, heads, length, batch, dtype, layers, storage)
        jobs: dict[str, Job] = {"stock": parts.stock}
        for share in dict.fromkeys((*shares, 1.0)):
            layout, source = parts.layout(share)
            jobs[f"blocks {share:g}"] = parts.blocks(layout, source)
            jobs[f"attention {share:g}"] = parts.attention(layout, source)
        times = interleave(jobs, repeats, tell=progress)
    whole = times["blocks 1"].ms
    stock = times["stock"]
    rows: list[dict[str, Any]] = [{"name": "stock", "ms": stock.ms, "ms_min": min(stock.milliseconds)}]
    for share in shares:
        found = times[f"blocks {share:g}"]
        rows.append({
            "name": f"{share:.0%}", "ms": found.ms, "ms_min": min(found.milliseconds),
            "attention_ms_per_layer": times[f"attention {share:g}"].ms, "rows": int(parts.layout(share)[0].starts[-1]),
            "speedup": whole / found.ms, "limit": 1.0 / share,
        })  # fmt: skip
    return {"rows": rows, "conditions": where, "notes": limits.busy(where)}


class _Parts:
    """The model, inputs, and records of inputs of the same length."""

    def __init__(
        self, family: str, hidden: int, heads: int, length: int, batch: int, dtype: str, layers: int, storage: str
    ) -> None:
        self._model = random_model(family, hidden, heads, length, layers, dtype)
        adapter, _ = adapter_for(self._model)
        blocks = blocks_of(self._model, adapter, "rows")
        self._packed = Packed(blocks, TYPES[dtype])
        self._lengths, self._length = [length] * batch, length
        generator = torch.Generator().manual_seed(limits.SEED)
        self._inputs = [random_inputs(family, generator, batch, length, dtype) for _ in range(_SETS)]
        self._hidden = [
            torch.randn(batch * length, hidden, generator=generator).to(TYPES[dtype]) for _ in range(_SETS)
        ]
        self._positions = torch.arange(length).repeat(batch)
        self._stored = []
        starts = np.arange(batch + 1) * length
        for rows in self._hidden:
            kept = rows.new_empty(layers, 2, len(rows), hidden)
            last = self._packed.run(
                rows, Layout(starts, starts), length, self._positions,
                keep=Copies([Copy(0, len(rows), kept)]),
            )  # fmt: skip
            records = records_of(self._lengths, kept, last, row_types(storage), blocks.heads)
            self._stored.append(HeldRows(records).fetch(np.arange(batch)))

    def layout(self, share: float) -> tuple[Layout, Any]:
        """Where rows lie when this share of them is computed: groups of tokens, spread over each sequence."""
        place = np.arange(self._length, dtype=np.int32)
        group = place // _TOKENS
        # Multiples of the golden ratio: the first few groups, however many, are spread evenly.
        order = np.argsort((group * 0.6180339887) % 1.0, kind="stable")
        fresh = np.zeros(self._length, bool)
        fresh[order[: max(1, round(share * self._length))]] = True
        source = np.tile(np.where(fresh, np.int32(-1), place), len(self._lengths)).astype(np.int32)
        return layout_of(np.asarray(self._lengths), source), torch.from_numpy(np.flatnonzero(source < 0))

    def stock(self, turn: int) -> Any:
        return self._model(**self._inputs[turn % _SETS])

    def blocks(self, layout: Layout, fresh: Tensor) -> Job:
        positions, fetched = self._positions[fresh], self._stored

        def job(turn: int) -> Tensor:
            rows = self._hidden[(turn + 1) % _SETS].index_select(0, fresh)
            stored = None if len(fresh) == len(self._positions) else fetched[turn % _SETS].layer
            return self._packed.run(rows, layout, self._length, positions, stored)

        return job

    def attention(self, layout: Layout, fresh: Tensor) -> Job:
        """Attention of the first block alone, of keys and values that are hidden states."""
        blocks, known = self._packed.blocks, self._packed.positions(self._length)
        block = blocks.blocks[0]

        def job(turn: int) -> Tensor:
            rows = self._hidden[(turn + 1) % _SETS].index_select(0, fresh)
            stored = None if len(fresh) == len(self._positions) else self._stored[turn % _SETS].layer(0)
            turns = None if stored is None else known.turn(block.kind)
            return attend(
                rows, rows, rows, blocks.heads, layout, scale=blocks.scale, stored=stored, turn=turns,
                table=known.table, window=block.window, disentangled=known.disentangled(0),
            )  # fmt: skip

        return job
