"""Memoization by stored attention maps: what `memoize(reuse="maps")` checks and makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from numbers import Real
from typing import Any, Literal

from torch import nn

from attmemo.db import KIND_MAP, Database
from attmemo.embed.lookup import LookupName
from attmemo.errors import ArgumentError, DatabaseError, StaleDatabaseError
from attmemo.forward.engine import Engine
from attmemo.forward.handle import Memoization
from attmemo.forward.watch import Watch
from attmemo.maps.check import check_serving
from attmemo.maps.planner import MapPlanner
from attmemo.maps.serve import Maps
from attmemo.mmap import FetcherName
from attmemo.models import Adapter, Site, check_adapter
from attmemo.perfmodel.profile import SEQUENCE
from attmemo.perfmodel.tuning import Tuning

Threshold = float | Sequence[float] | Literal["auto"]


class MapMemoization(Memoization):
    """The handle of a model that reuses stored maps.

    Attributes
    ----------
    lookup : str
        ``"layer"`` or ``"sequence"``.
    planner : MapPlanner
    store : Database
    """

    def __init__(
        self, model: nn.Module, sites: Sequence[Site], engine: Engine, planner: MapPlanner, store: Database,
        source: str, owned: bool,
    ) -> None:  # fmt: skip
        super().__init__(model, sites, engine, owned=owned)
        self.planner, self.store, self.threshold_source = planner, store, source
        self.lookup: LookupName = planner.lookup

    @property
    def reuse(self) -> str:
        """``"maps"``."""
        return self.engine.reuse.name

    @property
    def threshold(self) -> list[float]:
        """Similarity score that a hit needs, one for each layer."""
        return self.planner.threshold.scores

    def stats(self) -> dict[str, Any]:
        """Counters since the last reset, JSON-able.

        Returns
        -------
        dict
            ``hit_rate``: share of attention calls reused, Eq. 2 of arXiv 2301.09262 (sequences times layers,
            ineligible ones included).
            ``layers``: for each layer ``sequences`` (seen), ``queries`` (looked up), ``hits``, ``declined`` (near
            enough, but too few in their batch to pay), ``mean_predicted_similarity`` of the hits, ``ms_spent``
            (lookup, fetch and A·V), ``ms_saved`` (exact cost by the profile less the cost of serving; None without a
            profile), and the state of the gate.
            ``ineligible``: sequences times layers that stayed exact, by reason.
            ``failed``: sequences times layers that stayed exact after an error, 0 as long as all is well;
            ``failures``: the same by the error's text.
        """
        planner, counters = self.planner, self.engine.counters.copy()
        gates = {row["layer"]: row for row in planner.gate.state()}
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
                    "ms_saved": None if planner.profile is None else s.saved_ms - 1e3 * s.lookup_seconds,
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
            "reuse": self.reuse,
            "database": str(self.store.path),
            "threshold": list(self.threshold),
            "threshold_source": self.threshold_source,
            "lookup": self.lookup,
            "hit_rate": hits / calls if calls else 0.0,
            "calls": calls,
            "hits": hits,
            "ineligible": dict(counters.ineligible),
            "failed": counters.failed,
            "failures": dict(counters.failures),
            "gate": gates.get(SEQUENCE, {}),
            "layers": layers,
        }

    def __repr__(self) -> str:
        state = "on" if self.enabled else "off"
        return f"<attmemo {state}: {self.store}, lookup per {self.lookup}, threshold {self.threshold}>"


def prepare_maps(
    encoder: nn.Module,
    adapter: Adapter,
    sites: list[Site],
    opened: Database,
    *,
    owned: bool,
    threshold: Threshold,
    lookup: LookupName | None,
    gate: bool,
    fetch: FetcherName,
) -> MapMemoization:
    """Check everything and make the handle; the model is not changed yet."""
    check_kind(opened, adapter, len(sites))
    _check_maps(opened, len(sites))
    scores, radii, chosen, source = _resolve(threshold, lookup, opened, len(sites))
    check_adapter(adapter, encoder, sites)
    with ExitStack() as undo:
        reuse = Maps(adapter, opened, fetch)
        undo.callback(reuse.close)
        watch = Watch(adapter.host(encoder), [[site.module] for site in sites])
        planner = MapPlanner(opened, len(sites), scores, chosen, radii=radii, gated=gate)
        engine = Engine(adapter, watch, len(sites), opened, reuse, planner)
        handle = MapMemoization(encoder, sites, engine, planner, opened, source, owned)
        check_serving(handle, reuse, encoder, sites)
        undo.pop_all()
    return handle


def check_kind(database: Database, adapter: Adapter, layers: int) -> None:
    """Check that the database holds records of such a model, or raise StaleDatabaseError."""
    model = database.manifest.model
    for what, stored, seen in (
        ("family", model.family, adapter.family),
        ("mask kind", model.mask_kind, adapter.mask_kind),
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
    wrong = ArgumentError(f"a threshold is {allowed}; got {threshold!r}.", "threshold=0.9")
    if isinstance(threshold, str):
        if threshold != "auto":
            raise wrong
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
        raise wrong
    return [float(value) for value in numbers], None, lookup or "sequence", "given"
