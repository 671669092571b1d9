"""`memoize` and `unmemoize`: put the engine into a model, in place, and take it out again."""

from __future__ import annotations

import inspect
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from torch import nn

from attmemo.adapters import Site, adapter_for, check_adapter, encoder_of
from attmemo.adapters.base import by_module
from attmemo.db import Database, find_database
from attmemo.engine import Engine, Lookup
from attmemo.errors import AttmemoError, DatabaseCorruptError, DatabaseError, StaleDatabaseError, UnsupportedModelError
from attmemo.fingerprint import check_fields, fingerprint, model_fields
from attmemo.mmap import FetcherName, Residency
from attmemo.perfmodel import SEQUENCE
from attmemo.precision import slow
from attmemo.watch import Watch

_LOG = logging.getLogger("attmemo")

Model = TypeVar("Model")
Threshold = float | Sequence[float] | Literal["auto"]


class Memoization:
    """The handle at ``model.attmemo``: counters and the switch.

    Attributes
    ----------
    threshold : list of float
        Similarity score that a hit needs, one per layer.
    lookup : str
        ``"layer"`` or ``"sequence"``.
    database : Database
    host : nn.Module
        The part of the model that is served.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], engine: Engine, source: str, owned: bool) -> None:
        self.engine = engine
        self._owned = owned  # whether the database was opened for this memoization alone
        self.database = engine.database
        self.lookup: Lookup = engine.lookup
        self.threshold_source = source
        self.host = engine.adapter.host(model)
        self._sites = list(sites)
        self._served: list[_Served] = []
        self._undone = False

    @property
    def threshold(self) -> list[float]:
        """Similarity score that a hit needs, one per layer."""
        return self.engine.thresholds

    @property
    def enabled(self) -> bool:
        """Whether the model is being served."""
        return bool(self._served)

    def enable(self) -> None:
        """Serve from the database."""
        if self.enabled:
            return
        if self._undone:
            raise AttmemoError("this memoization was undone or replaced.", "call memoize(model, …) again")
        layers = [(sites[0].module, _ServedLayer(self, sites)) for sites in by_module(self._sites)]
        for module, served in [*layers, (self.host, _ServedModel(self, self.host))]:
            module.forward = served
            self._served.append(served)

    def disable(self) -> None:
        """Put the original `forward` of every layer back; nothing of the engine is left in the way."""
        while self._served:
            self._served.pop().remove()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.engine.reset_stats()

    def stats(self) -> dict[str, Any]:
        """What was served since the counters were last reset, JSON-able.

        Returns
        -------
        dict
            ``hit_rate``: share of attention calls served, Eq. 2 (sequences times layers, ineligible ones included).
            ``layers``: per layer ``rows`` (sequences seen), ``queries`` (looked up), ``hits``, ``declined`` (near
            enough, but too few in their batch to pay),
            ``mean_predicted_similarity`` of the hits, ``ms_spent`` (lookup, fetch and A·V), ``ms_saved`` (exact cost
            by the profile less what serving took; None without a profile), and what the gate says.
            ``ineligible``: sequences-times-layers by the reason why they stayed exact.
        """
        engine = self.engine
        gates = {row["layer"]: row for row in engine.gate.state()}
        layers = []
        for layer, s in enumerate(engine.stats):
            spent = 1e3 * (s.lookup_seconds + s.serve_seconds)
            saved = None if engine.profile is None else s.saved_ms - 1e3 * s.lookup_seconds
            gate = gates.get(layer, {})
            layers.append(
                {
                    "layer": layer,
                    "threshold": self.threshold[layer],
                    "rows": s.rows,
                    "queries": s.queries,
                    "hits": s.hits,
                    "declined": s.declined,
                    "hit_rate": s.hits / s.rows if s.rows else 0.0,
                    "mean_predicted_similarity": s.predicted / s.hits if s.hits else None,
                    "ms_spent": spent,
                    "ms_saved": saved,
                    "ms_lookup": 1e3 * s.lookup_seconds,
                    "ms_serve": 1e3 * s.serve_seconds,
                    "ms_misses": 1e3 * s.exact_seconds,
                    "gate": "on" if gate.get("on", True) else "off",
                    "why": gate.get("why", ""),
                }
            )
        ineligible = dict(engine.ineligible)
        calls = sum(s.rows for s in engine.stats) + sum(ineligible.values())
        return {
            "enabled": self.enabled,
            "database": str(self.database.path),
            "threshold": list(self.threshold),
            "threshold_source": self.threshold_source,
            "lookup": self.lookup,
            "hit_rate": sum(s.hits for s in engine.stats) / calls if calls else 0.0,
            "calls": calls,
            "hits": sum(s.hits for s in engine.stats),
            "ineligible": ineligible,
            "failures": dict(engine.failures),
            "gate": gates.get(SEQUENCE, {}),
            "layers": layers,
        }

    def undo(self) -> None:
        """Disable for good, and give windows back; what `unmemoize` does."""
        self.disable()
        self._undone = True
        self.engine.close()
        if self._owned:
            self.database.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # a copied or pickled model is a bare one

    def __repr__(self) -> str:
        state = "on" if self.enabled else "off"
        return f"<attmemo {state}: {self.database}, lookup per {self.lookup}, threshold {self.threshold}>"


def memoize(
    model: Model,
    threshold: Threshold = "auto",
    database: str | os.PathLike[str] | Database | None = None,
    *,
    lookup: Lookup | None = None,
    gate: bool = True,
    fetch: FetcherName = "auto",
    residency: Residency = "page-cache",
) -> Model:
    """Serve a transformers model's attention maps from a database, in place.

    Parameters
    ----------
    model : transformers model
        On the CPU. A wrapper that holds one (sentence-transformers) is accepted.
    threshold : float, sequence of float, or "auto"
        Similarity score (Eq. 1, in [0, 1]) that a record is predicted to have at least, for all layers or one for
        each. ``"auto"`` takes what ``attmemo tune`` chose for this database.
    database : path-like or Database, optional
        Default: the one in the user's cache directory with the model's fingerprint.
    lookup : {"layer", "sequence"}, optional
        A lookup in every layer, or one per sequence whose record serves all layers. Default: the tuned one, else
        ``"sequence"``.
    gate : bool
        Ask the performance model (Eq. 3) before every lookup; False tries always.
    fetch : {"auto", "direct", "map", "view", "copy"}
        How maps are read from the arena; the results are the same but for the order of sums.
    residency : {"page-cache", "hugepages"}
        Where the arena is served from.

    Returns
    -------
    The same model; ``model.attmemo`` is its `Memoization`.

    Notes
    -----
    While it is checked the model is in evaluation mode and computes attention without fused kernels: let no other
    thread use it meanwhile.

    When its weights change afterwards, or adapters are attached to it, it stays exact until it is memoized anew.

    Raises
    ------
    UnsupportedModelError
        No adapter knows the model, or it is not on the CPU. Nothing was changed.
    AdapterCheckError
        The hit path does not reproduce this model's own output. Nothing was changed.
    DatabaseError
        There is no usable database: missing, damaged, of another model, untrained, or never tuned (``"auto"``).
    """
    encoder = encoder_of(model)
    serving = [handle for handle in _handles(encoder) if handle.enabled]
    for earlier in serving:
        earlier.disable()  # the checks look at the bare model
    try:
        handle = _prepare(encoder, threshold, database, lookup, gate, fetch, residency)
    except BaseException:
        for earlier in serving:
            earlier.enable()
        raise
    if any(earlier.host is not handle.host for earlier in serving):
        _LOG.warning("attmemo: another memoized model shares layers with this one, and is no longer memoized")
    unmemoize(model)
    handle.enable()
    # A plain attribute, not a module: state_dict and save_pretrained do not see it.
    object.__setattr__(encoder, "attmemo", handle)
    if model is not encoder:
        object.__setattr__(model, "attmemo", handle)
    return model


def _prepare(
    encoder: nn.Module,
    threshold: Threshold,
    database: str | os.PathLike[str] | Database | None,
    lookup: Lookup | None,
    gate: bool,
    fetch: FetcherName,
    residency: Residency,
) -> Memoization:
    """Check everything that can be wrong and make the handle; the model is not changed yet."""
    adapter, sites = adapter_for(encoder)
    device = next(encoder.parameters()).device
    if device.type != "cpu":
        raise UnsupportedModelError(f"the model is on {device}; attmemo serves models on the CPU.", "model.to('cpu')")
    fields = model_fields(adapter.host(encoder))
    opened = _open(database, fields, residency)
    check_fields(opened.manifest.model.fields, fields, opened.path)
    _check_kind(opened, adapter.family, adapter.mask_kind, len(sites))
    check_adapter(adapter, encoder, sites)
    warning = slow(next(p.dtype for p in encoder.parameters() if p.is_floating_point()))
    if warning is not None:
        _LOG.warning("attmemo: %s", warning)
    values, chosen, source = _resolve(threshold, lookup, opened, len(sites))
    watch = Watch(adapter.host(encoder), sites)
    engine = Engine(adapter, watch, len(sites), opened, values, chosen, gated=gate, fetch=fetch)
    return Memoization(encoder, sites, engine, source, owned=opened is not database)


def _handles(encoder: nn.Module) -> list[Memoization]:
    """Whatever serves this model or layers in it, also if it was put in through a model around or inside this one."""
    found = {encoder.__dict__.get("attmemo")}
    for module in encoder.modules():
        forward = module.__dict__.get("forward")
        found.add(forward.handle if isinstance(forward, _Served) else None)
    return [handle for handle in found if isinstance(handle, Memoization)]


def unmemoize(model: Model) -> Model:
    """Undo `memoize`; a model that is not memoized is left as it is."""
    encoder = encoder_of(model)
    for handle in _handles(encoder):
        handle.undo()
    for holder in (encoder, model):
        holder.__dict__.pop("attmemo", None)
    return model


class _Served(ABC):
    """A `forward` that is in the way of a module's own.

    Copying or pickling a model must not take the engine along: the copy would go on serving the weights of the
    modules it was copied from. So what is copied is the `forward` that was there before.
    """

    def __init__(self, handle: Memoization, module: nn.Module) -> None:
        self.handle = handle
        self.__wrapped__: Callable[..., Any] = module.forward  # where `inspect.signature` looks
        self._module = module
        self._before = module.__dict__.get("forward")

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `forward`, served."""

    def remove(self) -> None:
        """Put back what was there before.

        Somebody who has put a `forward` around ours since keeps theirs: ours lets through from now on.
        """
        self._let_through()
        if self._module.__dict__.get("forward") is not self:
            _LOG.warning("attmemo: the forward of %s was replaced since memoize: left", type(self._module).__name__)
        elif self._before is None:
            del self._module.forward  # the class's own method shows through again
        else:
            self._module.forward = self._before

    @abstractmethod
    def _let_through(self) -> None:
        """Do nothing from now on but what the module's own `forward` does."""

    def __reduce__(self) -> tuple[Any, ...]:
        if self._before is not None:
            return _same, (self._before,)
        # The module is being copied: here it stands for its copy, whose state does not hold a `forward` yet.
        return getattr, (self._module, "forward")


class _ServedModel(_Served):
    """Tells the engine where a forward of the model begins and ends; callers of `model.forward` run no hooks."""

    def __init__(self, handle: Memoization, model: nn.Module) -> None:
        super().__init__(handle, model)
        self._names = tuple(inspect.signature(self.__wrapped__).parameters)
        self._begin, self._end = handle.engine.begin_forward, handle.engine.end_forward
        self._begin_untraced, self._end_untraced = _untraced(self._begin), _untraced(self._end)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        traced = torch.compiler.is_compiling()
        given = dict(zip(self._names, args, strict=False)) | kwargs
        (self._begin_untraced if traced else self._begin)(self._module, given)
        try:
            return self.__wrapped__(*args, **kwargs)
        finally:
            (self._end_untraced if traced else self._end)()

    def _let_through(self) -> None:
        self._begin = self._begin_untraced = lambda model, given: None
        self._end = self._end_untraced = lambda: None


class _ServedLayer(_Served):
    """One attention layer, or several that share a module."""

    def __init__(self, handle: Memoization, sites: Sequence[Site]) -> None:
        super().__init__(handle, sites[0].module)
        engine, exact = handle.engine, self.__wrapped__

        def forward(*args: Any, **kwargs: Any) -> Any:
            return engine.attend(sites, exact, args, kwargs)

        self._forward, self._forward_untraced = forward, _untraced(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._forward_untraced(*args, **kwargs)
        return self._forward(*args, **kwargs)

    def _let_through(self) -> None:
        self._forward = self._forward_untraced = self.__wrapped__


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile calls without looking inside: a lookup cannot be traced, so this is a graph break.

    It costs microseconds at each call, hence only where something is being compiled.
    """
    hidden: Callable[..., Any] = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return hidden


def _same(value: Any) -> Any:
    return value


def _open(
    database: str | os.PathLike[str] | Database | None, fields: dict[str, str], residency: Residency
) -> Database:
    if isinstance(database, Database):
        return database
    path = Path(database) if database is not None else find_database(fingerprint(fields))
    if residency == "page-cache":
        return Database(path, residency)
    from tqdm.auto import tqdm

    with tqdm(unit="B", unit_scale=True, desc="loading maps", leave=False, disable=None) as bar:

        def tell(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return Database(path, residency, tell)


def _check_kind(database: Database, family: str, mask_kind: str, layers: int) -> None:
    model = database.manifest.model
    for what, stored, seen in (
        ("family", model.family, family),
        ("mask kind", model.mask_kind, mask_kind),
        ("layers", model.layers, layers),
    ):
        if stored != seen:
            raise StaleDatabaseError(
                f"{database.path} was built for another model; {what}: database {stored}, model {seen}.",
                "attmemo build-database --model … --data …",
            )


def _resolve(
    threshold: Threshold, lookup: Lookup | None, database: Database, layers: int
) -> tuple[list[float], Lookup, str]:
    """Thresholds per layer, the lookup mode, and where the thresholds come from."""
    if lookup not in (None, "layer", "sequence"):
        raise ValueError(f"lookup must be 'layer' or 'sequence', got {lookup!r}")
    tuning = database.manifest.tuning
    if isinstance(threshold, str):
        if threshold != "auto":
            raise ValueError(f"threshold must be a score in [0, 1], one per layer, or 'auto'; got {threshold!r}")
        if tuning is None:
            raise DatabaseError(
                f"{database.path} was never tuned, so there is no 'auto' threshold.",
                f"attmemo tune {database.path} --data FILE --budget 0.01, or give threshold=0.9",
            )
        tuned, values, budget = _read_tuning(tuning, database, layers)
        if lookup is not None and lookup != tuned:
            raise DatabaseError(
                f"{database.path} was tuned for lookup={tuned!r}, not {lookup!r}.",
                f"attmemo tune {database.path} --data FILE --lookup {lookup}",
            )
        return values, tuned, f"tuned for a budget of {budget:g}"
    try:
        values = (
            [float(threshold)] * layers if isinstance(threshold, int | float | Real) else [float(t) for t in threshold]
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"a threshold is a similarity score in [0, 1], got {threshold!r}") from error
    if len(values) != layers:
        raise ValueError(f"expected one threshold or one for each of {layers} layers, got {len(values)}")
    if not all(0.0 <= t <= 1.0 for t in values):
        raise ValueError(f"a threshold is a similarity score in [0, 1], got {threshold!r}")
    return values, lookup or "sequence", "given"


def _read_tuning(tuning: dict[str, Any], database: Database, layers: int) -> tuple[Lookup, list[float], float]:
    """Lookup, thresholds and budget that `tune` stored; DatabaseCorruptError if they are none."""
    lookup, thresholds, budget = (tuning.get(key) for key in ("lookup", "thresholds", "budget"))
    fine = (
        lookup in ("layer", "sequence")
        and isinstance(thresholds, list)
        and len(thresholds) == layers
        and all(isinstance(t, int | float) and 0.0 <= t <= 1.0 for t in thresholds)
        and isinstance(budget, int | float)
    )
    if not fine:
        raise DatabaseCorruptError(
            f"{database.path}: the stored tuning has no lookup, budget and {layers} thresholds in [0, 1].",
            f"attmemo tune {database.path} --data FILE --budget 0.01",
        )
    return cast(Lookup, lookup), [float(t) for t in cast("list[float]", thresholds)], float(cast(float, budget))
