"""`memoize` and `unmemoize`: put the engine into a model, in place, and take it out again."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from attmemo.adapters import Site, adapter_for, check_adapter, encoder_of
from attmemo.adapters.base import by_module
from attmemo.db import KIND_MAP, Database, find_database
from attmemo.embed.lookup import LookupName
from attmemo.engine import Engine
from attmemo.errors import AttmemoError, DatabaseError, StaleDatabaseError, UnsupportedModelError
from attmemo.fingerprint import check_fields, fingerprint, model_fields
from attmemo.hooks import Hook, LayerHook, ModelHook
from attmemo.mmap import FetcherName, Residency
from attmemo.perfmodel import SEQUENCE
from attmemo.perfmodel.tuning import Tuning
from attmemo.precision import slow
from attmemo.reuse.maps import Maps
from attmemo.selfcheck import check_serving
from attmemo.watch import Watch

_LOG = logging.getLogger("attmemo")

Model = TypeVar("Model")
Threshold = float | Sequence[float] | Literal["auto"]


class Memoization:
    """The handle at ``model.attmemo``: counters and the switch.

    Attributes
    ----------
    lookup : str
        ``"layer"`` or ``"sequence"``.
    database : Database
    host : nn.Module
        The part of the model that is served.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], engine: Engine, source: str, owned: bool) -> None:
        self.engine = engine
        self.owns_database = owned  # opened for this memoization alone, and closed with it
        self.database = engine.database
        self.lookup: LookupName = engine.lookup
        self.threshold_source = source
        self.host = engine.adapter.host(model)
        self._sites = list(sites)
        self._hooks: list[Hook] = []
        self._undone = False

    @property
    def threshold(self) -> list[float]:
        """Similarity score that a hit needs, one for each layer."""
        return self.engine.threshold.scores

    @property
    def enabled(self) -> bool:
        """Whether the model is being served."""
        return bool(self._hooks)

    def enable(self) -> None:
        """Serve from the database."""
        if self.enabled:
            return
        if self._undone:
            raise AttmemoError("this memoization was undone or replaced.", "call memoize(model, …) again")
        layers = [LayerHook(self, self.engine, sites) for sites in by_module(self._sites)]
        for hook in (*layers, ModelHook(self, self.engine, self.host)):
            hook.insert()
            self._hooks.append(hook)

    def disable(self) -> None:
        """Put the original `forward` of every module back; nothing of the engine stays in the way."""
        while self._hooks:
            self._hooks.pop().remove()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.engine.reset_stats()

    def stats(self) -> dict[str, Any]:
        """Counters since the last reset, JSON-able.

        Returns
        -------
        dict
            ``hit_rate``: share of attention calls served, Eq. 2 of arXiv 2301.09262 (sequences times layers,
            ineligible ones included).
            ``layers``: for each layer ``sequences`` (seen), ``queries`` (looked up), ``hits``, ``declined`` (near
            enough, but too few in their batch to pay), ``mean_predicted_similarity`` of the hits, ``ms_spent``
            (lookup, fetch and A·V), ``ms_saved`` (exact cost by the profile less the cost of serving; None without a
            profile), and the state of the gate.
            ``ineligible``: sequences times layers that stayed exact, by reason.
            ``failures``: sequences times layers that stayed exact after an error, by the error's text.
        """
        engine, counters = self.engine, self.engine.counters.copy()
        gates = {row["layer"]: row for row in engine.gate.state()}
        layers = []
        for layer, s in enumerate(counters.layers):
            gate = gates.get(layer, {})
            layers.append(
                {
                    "layer": layer,
                    "threshold": self.threshold[layer],
                    "sequences": s.sequences,
                    "queries": s.queries,
                    "hits": s.hits,
                    "declined": s.declined,
                    "hit_rate": s.hits / s.sequences if s.sequences else 0.0,
                    "mean_predicted_similarity": s.predicted / s.hits if s.hits else None,
                    "ms_spent": 1e3 * (s.lookup_seconds + s.serve_seconds),
                    "ms_saved": None if engine.profile is None else s.saved_ms - 1e3 * s.lookup_seconds,
                    "ms_lookup": 1e3 * s.lookup_seconds,
                    "ms_serve": 1e3 * s.serve_seconds,
                    "ms_misses": 1e3 * s.exact_seconds,
                    "gate": "on" if gate.get("on", True) else "off",
                    "why": gate.get("why", ""),
                }
            )
        calls = sum(s.sequences for s in counters.layers) + sum(counters.ineligible.values())
        hits = sum(s.hits for s in counters.layers)
        return {
            "enabled": self.enabled,
            "database": str(self.database.path),
            "threshold": list(self.threshold),
            "threshold_source": self.threshold_source,
            "lookup": self.lookup,
            "hit_rate": hits / calls if calls else 0.0,
            "calls": calls,
            "hits": hits,
            "ineligible": dict(counters.ineligible),
            "failures": dict(counters.failures),
            "gate": gates.get(SEQUENCE, {}),
            "layers": layers,
        }

    def undo(self) -> None:
        """Disable for good and give windows back, as `unmemoize` does."""
        self.disable()
        self._undone = True
        self.engine.close()
        if self.owns_database:
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
    lookup: LookupName | None = None,
    gate: bool = True,
    fetch: FetcherName = "auto",
    residency: Residency = "page-cache",
) -> Model:
    """Serve a transformers model's attention maps from a database, in place.

    Parameters
    ----------
    model : transformers model
        On the CPU. A wrapper that holds one (sentence-transformers, pipeline) is accepted.
    threshold : float, sequence of float, or "auto"
        Similarity score (Eq. 1 of arXiv 2301.09262, in [0, 1]) that a record is predicted to have at least, for all
        layers or one for each. ``"auto"`` takes the result of ``attmemo tune`` for this database.
    database : path-like or Database, optional
        Default: the database in the user's cache directory with the model's fingerprint. A `Database` object stays
        yours: after you close it, the model stays exact.
    lookup : {"layer", "sequence"}, optional
        A lookup in every layer, or one for each sequence, whose record serves all layers. Default: the tuned one, else
        ``"sequence"``.
    gate : bool
        Ask the performance model (Eq. 3) before every lookup; False always tries.
    fetch : {"auto", "direct", "map", "view", "copy"}
        How maps are read from the arena; results are the same but for the order of sums.
    residency : {"page-cache", "hugepages"}
        Where the arena is served from. Ignored for a `Database` object, which has its own.

    Returns
    -------
    The same model; ``model.attmemo`` is its `Memoization`.

    Notes
    -----
    During the checks the model is in evaluation mode and computes attention without fused kernels: let no other
    thread use it meanwhile.

    After a change of its weights, or with an adapter attached, the model stays exact until it is memoized anew.

    Raises
    ------
    UnsupportedModelError
        No adapter knows the model, or it is not on the CPU. Nothing was changed.
    AdapterCheckError
        The path that serves does not reproduce this model's own output. Nothing was changed.
    DatabaseError
        There is no usable database: missing, damaged, of another model, untrained, or never tuned (``"auto"``).
    ValueError
        An argument is none of the values above.
    """
    _check_choices(lookup=(lookup, (None, *get_args(LookupName))), fetch=(fetch, get_args(FetcherName)))
    _check_choices(residency=(residency, get_args(Residency)))
    encoder = encoder_of(model)
    before = _handles(encoder)
    serving = [handle for handle in before if handle.enabled]
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
    for earlier in before:
        if earlier.database is handle.database and earlier.owns_database:
            earlier.owns_database, handle.owns_database = False, True
    unmemoize(model)
    handle.enable()
    # A plain attribute, not a module: state_dict and save_pretrained do not see it.
    object.__setattr__(encoder, "attmemo", handle)
    if model is not encoder:
        object.__setattr__(model, "attmemo", handle)
    return model


def unmemoize(model: Model) -> Model:
    """Undo `memoize`; a model that is not memoized is left as it is."""
    encoder = encoder_of(model)
    for handle in _handles(encoder):
        handle.undo()
    for holder in (encoder, model):
        holder.__dict__.pop("attmemo", None)
    return model


def _prepare(
    encoder: nn.Module,
    threshold: Threshold,
    database: str | os.PathLike[str] | Database | None,
    lookup: LookupName | None,
    gate: bool,
    fetch: FetcherName,
    residency: Residency,
) -> Memoization:
    """Check everything and make the handle; the model is not changed yet."""
    adapter, sites = adapter_for(encoder)
    weight = next(p for p in encoder.parameters() if p.is_floating_point())
    if weight.device.type != "cpu":
        where = f"the model is on {weight.device}; attmemo serves models on the CPU."
        raise UnsupportedModelError(where, "model.to('cpu')")
    fields = model_fields(adapter.host(encoder))
    with ExitStack() as undo:
        if isinstance(database, Database):
            opened = database
        else:
            opened = Database(database if database is not None else find_database(fingerprint(fields)))
            undo.callback(opened.close)
        check_fields(opened.manifest.model.fields, fields, opened.path)
        _check_kind(opened, adapter.family, adapter.mask_kind, len(sites))
        _check_maps(opened, len(sites))
        scores, radii, chosen, source = _resolve(threshold, lookup, opened, len(sites))
        check_adapter(adapter, encoder, sites)
        reuse = Maps(adapter, opened, fetch)
        undo.callback(reuse.close)
        watch = Watch(adapter.host(encoder), sites)
        engine = Engine(adapter, watch, len(sites), opened, reuse, scores, chosen, radii=radii, gated=gate)
        handle = Memoization(encoder, sites, engine, source, owned=opened is not database)
        check_serving(handle, reuse, encoder, sites)
        if opened is not database:
            _reside(opened, residency)  # last: it may take minutes and gigabytes
        warning = slow(weight.dtype)
        if warning is not None:
            _LOG.warning("attmemo: %s", warning)
        undo.pop_all()
    return handle


def _handles(encoder: nn.Module) -> list[Memoization]:
    """All that serve this model or layers in it, also through a model around or inside this one."""
    found = {encoder.__dict__.get("attmemo")}
    for module in encoder.modules():
        forward = module.__dict__.get("forward")
        found.add(forward.owner if isinstance(forward, Hook) else None)
    return [handle for handle in found if isinstance(handle, Memoization)]


def _reside(database: Database, residency: Residency) -> None:
    if residency == "page-cache":
        return
    from tqdm.auto import tqdm

    with tqdm(unit="B", unit_scale=True, desc="loading maps", leave=False, disable=None) as bar:

        def tell(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        database.reside(residency, tell)


def _check_choices(**choices: tuple[object, tuple[object, ...]]) -> None:
    for name, (value, allowed) in choices.items():
        if value not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}; got {value!r}")


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


def _check_maps(database: Database, layers: int) -> None:
    if database.manifest.layers_kept(KIND_MAP) < layers:
        raise DatabaseError(
            f"{database.path} keeps no attention maps of {layers} layers.",
            "attmemo build-database --model … --data …, or a newer attmemo",
        )


def _resolve(
    threshold: Threshold, lookup: LookupName | None, database: Database, layers: int
) -> tuple[list[float], list[float] | None, LookupName, str]:
    """Scores and radii of the layers (None: not known), the lookup, and where the threshold comes from."""
    allowed = f"a similarity score in [0, 1], one for each of {layers} layers, or 'auto'"
    expected = f"a threshold is {allowed}; got {threshold!r}"
    if isinstance(threshold, str):
        if threshold != "auto":
            raise ValueError(expected)
        if database.manifest.tuning is None:
            raise DatabaseError(
                f"{database.path} was never tuned, so there is no 'auto' threshold.",
                f"attmemo tune {database.path} --data FILE --budget 0.01, or give threshold=0.9",
            )
        tuning = Tuning.from_dict(database.manifest.tuning, layers, str(database.path))
        if lookup not in (None, tuning.lookup):
            raise DatabaseError(
                f"{database.path} was tuned for lookup={tuning.lookup!r}, not {lookup!r}.",
                f"attmemo tune {database.path} --data FILE --lookup {lookup}",
            )
        radii = None if tuning.radii is None else list(tuning.radii)
        return list(tuning.thresholds), radii, tuning.lookup, f"tuned for a budget of {tuning.budget:g}"
    several = list(threshold) if isinstance(threshold, Iterable) else [threshold] * layers
    numbers = [value for value in several if isinstance(value, Real) and not isinstance(value, bool)]
    if len(several) != layers or len(numbers) != layers or not all(0.0 <= float(value) <= 1.0 for value in numbers):
        raise ValueError(expected)
    return [float(value) for value in numbers], None, lookup or "sequence", "given"
