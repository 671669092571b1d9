"""Memoization of a whole stack of blocks: the handle, and what `memoize` checks and makes for `reuse="none"`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from attmemo.db.pools.history import Work
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import AdapterCheckError, UnsupportedModelError
from attmemo.forward.engine import Engine
from attmemo.forward.handle import Memoization
from attmemo.forward.hooks import Hook, ModelHook
from attmemo.forward.planning import Planner, Whole
from attmemo.forward.row_usage import Observed
from attmemo.forward.trial import enable_within
from attmemo.forward.watch import Watch
from attmemo.guard.answer_hook import AnswerHook
from attmemo.guard.answers import Answers
from attmemo.guard.deferred import Deferred, Model
from attmemo.guard.forward import Guarded
from attmemo.guard.guard import Guard
from attmemo.guard.keeper import Keeper
from attmemo.guard.linear_choice import FASTER, LinearChoice, speed_of
from attmemo.guard.planner import GuardedPlanner
from attmemo.kernels.linear8 import LinearName
from attmemo.models import Adapter, Site
from attmemo.models.blocks import Blocks, find_blocks
from attmemo.packed.check import check_blocks, check_layers, check_stack, check_whole
from attmemo.packed.head_check import reads_first_row
from attmemo.packed.head_hook import HeadHook
from attmemo.packed.prefix_check import check_prefixes
from attmemo.packed.reader_hook import ReaderHook, reader_of
from attmemo.packed.runner import TYPES, Called, Packed
from attmemo.packed.stack import Stack
from attmemo.packed.whole_model import Parts, WholeModel
from attmemo.prefix.serve import PrefixRows
from attmemo.rows.live_store import GrowingRows
from attmemo.rows.planner import TYPES_FROM, RowPlanner

_LOG = logging.getLogger("attmemo")


class StackMemoization(Memoization):
    """The handle of a model whose blocks run over packed rows.

    Attributes
    ----------
    packed : Packed
        The blocks, made ready.
    planner : Planner
    folder : path or None
        Of the database that fills itself.
    guarded : Guarded or None
        What runs the forwards of a model whose answers are guarded.
    first_row : bool
        Whether the model's head reads nothing of the last hidden states but their first row: then the last block
        computes little of the others. Takes effect with the next `enable`.
    parts : Parts or None
        What the model computes beside its blocks, so that a forward may be few calls. None: it always goes through the
        model's modules. Takes effect with the next `enable`.
    reader : nn.Module or None
        A module around the model that reads nothing but its last hidden states. Takes effect with the next `enable`.
    """

    def __init__(self, model: nn.Module, site: Site, engine: Engine, packed: Packed, planner: Planner) -> None:
        super().__init__(model, [site], engine, followers=packed.blocks.followers)
        self.packed, self.planner = packed, planner
        self.guarded: Guarded | None = None
        self.folder: Path | None = None
        self.first_row = False
        self.parts: Parts | None = None
        self.reader: nn.Module | None = None
        self.choice: LinearChoice | None = None
        self.deferred: Deferred | None = None
        self._head: HeadHook | None = None
        self._keeper: Keeper | None = None
        self._model = self._outer = model

    def guard(self, outer: nn.Module, guarded: Guarded, keeper: Keeper | None) -> None:
        """Guard the answers of a model, and keep what is learned; to be called before `enable`."""
        self._outer, self.guarded, self._keeper, self.deferred = outer, guarded, keeper, guarded.deferred
        if self._store is not None:
            self._store.watch(partial(_work_of, self.engine))

    def choose(self, outer: nn.Module, choice: LinearChoice) -> None:
        """Have the arithmetic of linear layers chosen while the model serves; to be called before `enable`."""
        self._outer, self.choice, self.deferred = outer, choice, choice.deferred
        choice.watch(outer)

    def guard_anew(self, guard: Guard) -> None:
        """Begin again with this guard. What it learns is not kept."""
        assert self.guarded is not None
        assert isinstance(self.planner, GuardedPlanner)
        if self.guarded.answers.are_vectors:
            guard.compare_vectors()
        self.guarded.begin_anew(guard)
        self.planner.begin_anew(guard)

    def disable(self, seconds: float = 60.0) -> None:
        if self.deferred is not None:
            self.deferred.forget()
        super().disable(seconds)

    def undo(self) -> None:
        """Disable for good, give windows back, and keep what the guard has learned."""
        if self.deferred is not None:
            self.deferred.close()
        if self.spaces is not None:
            self.spaces.close()
            self.spaces = None  # they lead here
        super().undo()
        if self._keeper is not None:
            self._keeper.close()

    def _whole(self, hook: ModelHook) -> WholeModel | None:
        if self.parts is None:
            return None
        own = [(inner.module, inner) for inner in self._hooks]
        site = self._sites[0] if isinstance(self.planner, RowPlanner) else None
        return WholeModel(self.host, self.parts, self.engine, hook.names, own, site)

    def _insert_outer(self) -> list[Hook]:
        hooks: list[Hook] = []
        if self.first_row:
            stack = self.engine.reuse
            assert isinstance(stack, Stack)
            self._head = HeadHook(self, self._model, stack, self.engine, self._hooks)
            self._head.insert()
            hooks.append(self._head)
        if self.reader is not None:
            hooks.append(ReaderHook(self, self.reader, self.engine, self._hooks[-1]))
            hooks[-1].insert()
        guard = None if self.guarded is None else self._run_guarded
        for run in (guard, self.choice):  # what chooses stands outside: it runs guarded forwards
            if run is not None:
                hooks.append(AnswerHook(self, self._outer, run))
                hooks[-1].insert()
        return hooks

    def _run_guarded(
        self, forward: Model, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One forward of the model, run by the guard of its namespace."""
        return self._here.guarded(forward, names, args, kwargs)  # type: ignore[misc]

    @property
    def _here(self) -> StackMemoization:
        """The handle of the namespace in which this thread runs."""
        running = self.engine.current.running.get()
        found: StackMemoization = self if running is None or running.space is None else running.space
        return found

    @property
    def linear(self) -> str:
        """Arithmetic of the linear layers that serve: ``"exact"`` or ``"int8"``."""
        stack = self.engine.reuse
        assert isinstance(stack, Stack)
        return stack.packed.linear

    @property
    def _rounded_bytes(self) -> int:
        return 0 if self.choice is None or self.choice.rounded is self.packed else self.choice.rounded.nbytes

    @property
    def threshold(self) -> float | None:
        """Share of its tokens that a record must supply; None if nothing is reused."""
        return self.planner.threshold if isinstance(self.planner, RowPlanner) else None

    @property
    def reuse(self) -> str:
        """``"rows"``, ``"prefix"``, ``"local"`` or ``"none"``."""
        return self.engine.reuse.name

    def stats(self) -> dict[str, Any]:
        """Counters since the last reset, JSON-able.

        Returns
        -------
        dict
            ``sequences`` (run over packed rows), ``reused`` (of these, answers that came from a record of another
            input; none that was computed exactly after all), ``repeated`` (answers that the input's own record gave
            again, as they were), ``served`` (the sum of both), ``tokens`` (valid ones), ``rows_computed`` (those of
            verifications too),
            ``share_computed`` (rows by tokens), milliseconds by part (``ms_lookup``, ``ms_plan``: alignment and the
            choice, ``ms_fetch``, ``ms_blocks``), ``not_looked_up``
            (sequences by reason, see docs/python.md), ``ineligible`` (sequences that the original code computed, by
            reason), ``failed`` (sequences that an error left exact, or without a check: 0 as long as all is well),
            ``failures`` (the same by the error's text), ``linear`` (arithmetic of the linear layers now),
            ``linear_choice`` (how it was chosen: see docs/python.md; None: it was given),
            ``weight_bytes`` (of weights made ready, beside the model's own),
            ``first_row`` (whether the head reads nothing of the last hidden states but their first row),
            ``database`` (the path of a prepared one), ``folder`` (of the database that fills itself), ``records`` and
            ``record_bytes`` (that came while models served), ``offered`` (sequences that could have become records, by
            what became of them, see docs/python.md),
            ``prefixes`` (of causal blocks, tokens whose rows were not computed: ``shared`` with another sequence of
            the batch, and ``stored``; ``tokens`` in the store, and those of them that several sequences began with,
            ``common``; its ``bytes`` and ``max_bytes``; None: the blocks are not causal),
            ``local`` (the same of local rows; None: there are none),
            ``rows_afterwards`` (rows computed to verify answers after they were given, never reset), ``guard`` (see
            docs/guard.md; None without a budget), ``shadow`` (in shadow mode what would have become of answers), and
            ``pays`` (whether guarded forwards take no longer with records than without; None: not known).
        """
        counters = self.engine.counters.copy()
        done = counters.done
        guard = None if self.guarded is None else self.guarded.guard.stats()
        if guard is not None and counters.failed:
            guard["says"] += f"; errors left {counters.failed} sequences exact or unchecked: see failures"
        shadow = None if self.guarded is None else self.guarded.shadow
        if guard is not None and shadow is not None:
            guard["says"] = f"{shadow.sentence}; the guard: {guard['says']}"
        return {
            "enabled": self.enabled,
            "reuse": self.reuse,
            "database": None if self.database is None else str(self.database.path),
            "folder": None if self.folder is None else str(self.folder),
            "threshold": self.threshold,
            "sequences": done.sequences,
            "reused": done.reused,
            "repeated": done.repeated,
            "served": done.reused + done.repeated,
            "tokens": done.tokens,
            "rows_computed": done.rows,
            "share_computed": done.rows / done.tokens if done.tokens else None,
            "ms_lookup": 1e3 * done.lookup_seconds,
            "ms_plan": 1e3 * done.plan_seconds,
            "ms_fetch": 1e3 * done.fetch_seconds,
            "ms_blocks": 1e3 * done.blocks_seconds,
            "not_looked_up": dict(counters.skipped),
            "ineligible": dict(counters.ineligible),
            "failed": counters.failed,
            "failures": dict(counters.failures),
            "linear": self.linear,
            "linear_choice": None if self.choice is None else self.choice.stats(),
            "weight_bytes": self.packed.nbytes + self._rounded_bytes,
            "first_row": self.first_row and not (self._head is not None and self._head.reads_more),
            **self._growth(),
            "prefixes": self._equal(done.shared, done.stored) if self.packed.blocks.causal else None,
            "local": self._equal(done.shared, done.stored) if self.reuse == "local" else None,
            "rows_afterwards": 0 if self.guarded is None else self.guarded.rows_afterwards,
            "guard": guard,
            "shadow": None if shadow is None else shadow.stats(),
            "pays": None if self.guarded is None else self.guarded.planner.times.pays,
        }

    @contextmanager
    def observe(self, *, reuse: bool = True) -> Iterator[Observed]:
        """While inside, see what this thread's forwards compute; with ``reuse=False`` no record serves them.

        Yields
        ------
        Observed
        """
        observed, running = Observed(), self.engine.current.running.get()
        whole = not reuse or (running is not None and running.whole)
        with self.engine.open(observed=observed, whole=whole):
            yield observed

    def rows_to_compute(
        self, sequences: Sequence[Sequence[int]], types: Sequence[Sequence[int]] | None = None
    ) -> list[int]:
        """Rows that each of these sequences would need now. Only asks: nothing is learned or kept.

        Parameters
        ----------
        sequences : sequence of sequences of int
            Token ids of each sequence, special tokens included.
        types : sequence of sequences of int, optional
            Token types, if the model takes some; by default 0.
        """
        if (own := self._here) is not self:
            return own.rows_to_compute(sequences, types)
        tokens = [np.asarray(sequence, np.int32) for sequence in sequences]
        if types is not None:
            more = [np.int32(TYPES_FROM) * np.asarray(kinds, np.int32) for kinds in types]
            tokens = [own + kinds for own, kinds in zip(tokens, more, strict=True)]
        in_shadow = self.guarded is not None and self.guarded.shadow is not None
        if not tokens or in_shadow or not isinstance(self.planner, RowPlanner):
            return [len(sequence) for sequence in tokens]
        try:
            return self.planner.rows_to_compute(tokens, self.engine.counters.copy().done.seconds_per_row)
        except Exception as error:  # an estimate must not cost a request
            self.engine.counters.failure("rows to compute are not known", error, len(tokens))
            return [len(sequence) for sequence in tokens]

    def flush(self, seconds: float = 60.0) -> bool:
        """Verify answers that are owed, and wait until what requests have handed over is stored, and can be found.

        False: it takes longer.
        """
        if self.deferred is not None:
            self.deferred.compare_all()
        spaces = [] if self.spaces is None else self.spaces.opened()
        stores: list[GrowingRows] = [one for one in (self._store, *(own._store for own in spaces)) if one is not None]
        return sum([store.flush(seconds) for store in stores]) == len(stores)

    @property
    def _store(self) -> GrowingRows | None:
        store = getattr(self.engine.reuse, "store", None)
        return store if isinstance(store, GrowingRows) and store.grows else None

    def _growth(self) -> dict[str, Any]:
        store = self._store
        if store is None:
            return {"records": 0, "record_bytes": 0, "offered": {}}
        return {"records": len(store), "record_bytes": store.nbytes, "offered": store.done}

    def _equal(self, shared: int, stored: int) -> dict[str, int]:
        reuse = self.engine.reuse
        none = {"tokens": 0, "common": 0, "bytes": 0, "max_bytes": 0}
        kept = reuse.store.counts(reuse.root) if isinstance(reuse, PrefixRows) else none
        return {"shared": shared, "stored": stored, **kept}

    def __repr__(self) -> str:
        state = "on" if self.enabled else "off"
        layers = "" if self.linear == "exact" else f", {self.linear} linear layers"
        if isinstance(self.engine.reuse, PrefixRows):
            kept = "prefixes" if self.reuse == "prefix" else "local rows"
            return f"<attmemo {state}: {kept} in memory{layers}>"
        if self.threshold is None:
            return f"<attmemo {state}: packed blocks, nothing reused{layers}>"
        where = self.database or self.folder or "memory"
        return f"<attmemo {state}: rows of {where}, threshold {self.threshold}{layers}>"


def _work_of(engine: Engine) -> Work:
    done = engine.counters.copy().done
    return Work(done.sequences, done.tokens, done.rows)


def prepare_stack(encoder: nn.Module, adapter: Adapter, linear: LinearName, outer: Any) -> StackMemoization:
    """Check everything and make the handle for packed blocks; the model is not changed yet."""
    packed = packed_of(encoder, adapter, "none", linear)
    handle = handle_of(encoder, adapter, packed, Stack(packed.blocks, packed), Whole())
    handle.parts = check_whole(handle, adapter, encoder, packed.dtype)
    check_stack(handle, adapter, encoder, packed)
    if packed.blocks.has_prefixes and packed.keeps_bits:
        check_prefixes(handle, adapter, encoder, packed)
    handle.first_row = reads_first_row(handle, adapter, encoder)
    if handle.parts is not None and handle.parts.pooler is not None:
        handle.reader = reader_of(outer, handle.host)
    return handle


def choose_linear(
    handle: StackMemoization, encoder: nn.Module, adapter: Adapter, outer: nn.Module, answers: Answers, budget: float,
    confidence: float, *, gate: bool, served: Callable[[], AbstractContextManager[None]] | None = None,
    rows: GuardedPlanner | None = None,
) -> None:  # fmt: skip
    """Have 8-bit layers proven within a budget, where they are faster; else nothing is changed.

    `answers` have read an answer of `outer` before.
    """
    exact = handle.packed
    if any(isinstance(layer, Called) for _, layer, _ in exact.linears):
        return
    rounded = Packed(exact.blocks, exact.dtype, "int8")
    try:
        check_layers(rounded)
    except AdapterCheckError as error:
        _LOG.warning("attmemo: linear layers stay exact: %s", error)
        return
    with ExitStack() as undo:
        enable_within(handle, undo)
        speed = speed_of(handle.engine, adapter.host(encoder), exact, rounded)
    if speed < FASTER:
        _LOG.info("attmemo: linear layers stay exact: 8-bit ones are %.2f times as fast here", speed)
        return
    deferred = handle.deferred  # that of rows beside; it is false while nothing waits
    deferred = Deferred(outer, handle.engine.watch) if deferred is None else deferred
    choice = LinearChoice(
        budget, confidence, answers, handle.engine, rounded, speed, deferred, served=served, rows=rows, always=not gate
    )
    handle.choose(outer, choice)


def packed_of(encoder: nn.Module, adapter: Adapter, reuse: str, linear: LinearName) -> Packed:
    """The model's blocks, made ready and compared with the model's own; AdapterCheckError if they differ."""
    packed = Packed(blocks_of(encoder, adapter, reuse), _dtype(encoder), linear)
    if linear == "int8" and any(isinstance(layer, Called) for _, layer, _ in packed.linears):
        raise UnsupportedModelError(
            f"linear='int8' cannot round the layers of {type(encoder).__name__}: some are quantized or adapted.",
            "leave out linear, or load the model in float32",
        )
    packed.blocks.output = check_blocks(adapter, encoder, packed)
    return packed


def handle_of(
    encoder: nn.Module, adapter: Adapter, packed: Packed, reuse: Stack, planner: Planner,
    database: SharedPool | None = None,
) -> StackMemoization:  # fmt: skip
    """The handle of a model whose packed blocks this planner serves with this kind of reuse."""
    watch = Watch(adapter.host(encoder), [packed.blocks.modules])
    engine = Engine(adapter, watch, 1, database, reuse, planner)
    site = Site(0, "blocks", packed.blocks.module)
    return StackMemoization(encoder, site, engine, packed, planner)


def _dtype(encoder: nn.Module) -> torch.dtype:
    return next(p for p in encoder.parameters() if p.is_floating_point()).dtype


def blocks_of(encoder: nn.Module, adapter: Adapter, reuse: str) -> Blocks:
    """The model's blocks, or UnsupportedModelError."""
    found, dtype = find_blocks(adapter, encoder), _dtype(encoder)
    reason = found if isinstance(found, str) else None
    if reason is None and dtype not in TYPES:
        reason = f"its weights are {dtype}; blocks are packed in {' and '.join(str(kind)[6:] for kind in TYPES)}"
    if reason is not None:
        raise UnsupportedModelError(
            f"reuse={reuse!r} cannot run the blocks of {type(encoder).__name__}: {reason}.",
            "reuse='maps' with a database of maps; attmemo families lists what each family can do",
        )
    assert not isinstance(found, str)
    if reuse == "rows" and found.no_rows is not None:
        raise UnsupportedModelError(
            f"reuse='rows' is not for {type(encoder).__name__}: {found.no_rows}.",
            "reuse='none': its blocks run without padding, exactly",
        )
    width = found.heads * found.width
    size = getattr(adapter.host(encoder).config, "hidden_size", width)
    if reuse == "rows" and width != size:  # heads were taken out of every layer
        raise UnsupportedModelError(
            f"reuse='rows' keeps K and hidden states of one width; {type(encoder).__name__} has {width} and {size}.",
            "reuse='none'",
        )
    return found
