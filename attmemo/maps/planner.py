"""Plans of maps: the nearest record by an embedder, the threshold, and the gate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter

from attmemo.db import KIND_INPUT, SEQUENCE, Database
from attmemo.embed.lookup import Lookup, LookupName
from attmemo.errors import DatabaseError
from attmemo.forward.context import Forward
from attmemo.forward.plan import Plan, Share
from attmemo.forward.planning import BY_HAND
from attmemo.maps.threshold import Threshold
from attmemo.models import Call, Rows, Spans
from attmemo.perfmodel.gate import Gate
from attmemo.perfmodel.profile import Profile
from attmemo.system.machine import conditions

_LOG = logging.getLogger("attmemo")

_HOPELESS = Plan("no stored record of any length reaches the threshold")


class MapPlanner:
    """Plans maps: the nearest record by an embedder, the threshold, and the gate.

    Parameters
    ----------
    database : Database
        Opened, with a trained embedder.
    layers : int
        Number of attention layers.
    threshold : sequence of float
        Similarity score in [0, 1] that a hit needs, one for each layer.
    lookup : {"layer", "sequence"}
        One lookup in each layer, or one for each sequence.
    radii : sequence of float, optional
        The threshold as distances, where they are known.
    gated : bool
        Ask the performance model before every lookup; False always tries.
    """

    def __init__(
        self,
        database: Database,
        layers: int,
        threshold: Sequence[float],
        lookup: LookupName,
        *,
        radii: Sequence[float] | None = None,
        gated: bool = True,
    ) -> None:
        if lookup == "layer" and database.manifest.layers_kept(KIND_INPUT) < layers:
            raise DatabaseError(
                f"{database.path} keeps hidden states of the first layer only: there is no lookup in each layer.",
                "lookup='sequence', or build with --inputs all",
            )
        self.layers, self.lookup = layers, lookup
        self.index = Lookup(database, lookup)
        profile = database.manifest.profile
        self.profile = None if profile is None else Profile.from_dict(profile)
        foreign = self.profile.foreign(conditions()) if gated and self.profile is not None else None
        if foreign is not None:
            _LOG.warning("attmemo: %s attmemo train-embedder %s measures again", foreign, database.path)
        self._gated = gated
        self.set_thresholds(threshold, radii)

    def set_thresholds(self, scores: Sequence[float], radii: Sequence[float] | None = None) -> None:
        """Accept other scores from now on; the gate begins anew, as after `memoize`."""
        self.threshold = Threshold(self.index.curves, scores, radii)
        profile = self.profile if self._gated else None
        self.gate = Gate(profile, self.threshold.scores, self.lookup, self.layers, always=not self._gated)

    def set_radii(self, radii: Sequence[float]) -> None:
        """Accept other distances from now on. The gate goes on with the scores it has."""
        self.threshold = Threshold(self.index.curves, self.threshold.scores, radii)

    def before(self) -> Plan | None:
        return _HOPELESS if self.gate.hopeless else None

    def plan(self, layer: int, call: Call, spans: Spans, forward: Forward) -> Plan:
        owner, layers = layer, range(layer, layer + 1)
        if self.lookup == "sequence":
            # Only the first layer's input can be looked up. A layer that is called by hand could be fed anything.
            if layer != 0 or forward.given is None:
                return BY_HAND
            owner, layers = SEQUENCE, range(self.layers)
        lengths, padded = spans.lengths, int(call.hidden.shape[1])
        verdict = self.gate.ask(owner, lengths, padded)
        if not verdict.tries:
            self.gate.leave(verdict)
            return Plan("a lookup does not pay")
        start = perf_counter()
        found = self.index.find(owner, spans.to_front(call.hidden), lengths)
        forward.counters.looked_up(layer, perf_counter() - start)
        shares: dict[int, Share] = {}
        declined: dict[int, int] = {}
        missed: dict[bytes, Rows] = {}  # layers that miss the same sequences share the rows taken out of the mask
        for other in layers:
            near = self.threshold.near(other, found.distances)
            if not len(near):
                continue
            if not verdict.pays(other, [lengths[place] for place in near.tolist()]):
                declined[other] = len(near)
                continue
            key = near.tobytes()
            if key not in missed:
                missed[key] = Rows.without(len(lengths), near)
            predicted = self.threshold.predicted(other, found.distances[near])
            shares[other] = Share(near, found.records[near], missed[key], predicted)
        self.gate.record(verdict, sum(len(share.sequences) for share in shares.values()) / len(layers))
        reason = None if shares else "no record is near enough"
        return Plan(reason, spans=spans, found=found, layers=shares, declined=declined)

    def exact_ms(self, layer: int, batch: int, padded: int) -> float | None:
        return None if self.profile is None else self.profile.exact_ms(layer, batch, padded)
