"""What was measured for one database on one machine: it predicts whether a lookup pays.

A profile holds the costs of each attention layer, and for each way of looking up the similarity scores that lookups
predicted on *held-out* sequences. The paper measures its rate alpha on the training sequences; these find themselves
in the database, and no new request will see such a rate. Scores are kept, not rates: a rate belongs to one threshold,
and the user may choose another.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attmemo.perfmodel.cost import CostModel
from attmemo.system.json_fields import Field

SEQUENCE = -1
"""The "layer" that `Gate` is asked about when one lookup per sequence serves all layers. No scores lie under it."""

MIN_SAMPLES = 8
"""Held-out scores below which a length borrows from its neighbours: with fewer, a rate moves in steps of over 12 %."""


@dataclass(frozen=True, slots=True)
class LayerCosts:
    """The costs of one attention layer, in milliseconds per batch.

    Fetch and A·V are timed together: a mapping that is quick to set up may defer its cost into the multiplication.
    """

    exact: CostModel  # exact attention, by the padded lengths
    hit: CostModel  # attention when every sequence is served, by the valid lengths
    lookup: CostModel  # embedding and search, by the valid lengths; unused when the lookup is made once per sequence
    miss: CostModel | None = None  # sequences that miss beside hits: taken out, computed, put back; by padded lengths

    def to_dict(self) -> dict[str, dict[str, float]]:
        """The models, JSON-able."""
        return {name: model for name, model in asdict(self).items() if model is not None}

    @classmethod
    def read(cls, field: Field) -> LayerCosts:
        """Read what `to_dict` wrote; DatabaseCorruptError names the malformed field."""
        exact, hit, lookup = (CostModel.read(field[name]) for name in ("exact", "hit", "lookup"))
        miss = field.get("miss")
        return cls(exact, hit, lookup, None if miss is None else CostModel.read(miss))


class HitRates:
    """Similarity scores predicted for held-out sequences, by layer and token length (alpha of AttMEMO, Eq. 2).

    `scores` has, by (layer, valid tokens), one score for each held-out query at a length for which the database holds
    a record; a negative one if the query found nothing. `stored` are these lengths; default: those in `scores`.
    """

    def __init__(self, scores: Mapping[tuple[int, int], Iterable[float]], stored: Iterable[int] | None = None) -> None:
        self._scores: dict[int, dict[int, array[float]]] = {}
        for (layer, length), values in sorted(scores.items(), key=lambda item: item[0]):
            ordered = array("d", sorted(values))
            if ordered:
                self._scores.setdefault(layer, {})[length] = ordered
        if stored is None:
            stored = (length for by_length in self._scores.values() for length in by_length)
        self.stored = tuple(sorted(set(stored)))
        """Token lengths for which the database holds a record, ascending."""
        self._pools: dict[tuple[int, int], array[float]] = {}

    def samples(self, layer: int, length: int) -> int:
        """Number of held-out scores at exactly this layer and length."""
        return len(self._scores.get(layer, {}).get(length, ()))

    def alpha(self, threshold: float, layer: int, length: int) -> float:
        """Share of held-out queries of this layer and length with a score >= `threshold`; 0 where there is no record.

        A length with fewer than `MIN_SAMPLES` scores of its own borrows those of the lengths at distance 1, 2, 3, ...
        on both sides (same layer), until there are enough or no more to take. There is no limit to the distance: live
        traffic corrects a poor guess, but a guess of 0 would never be tried and so never corrected.
        """
        pool = self._pool(layer, length)
        return (len(pool) - bisect_left(pool, threshold)) / len(pool) if pool else 0.0

    def _pool(self, layer: int, length: int) -> array[float]:
        """Sorted scores that speak for this layer and length."""
        key = layer, length
        if key in self._pools:
            return self._pools[key]
        by_length = self._scores.get(layer, {})
        if length not in self.stored:
            return array("d")  # not kept: any integer may be asked for, and the cache must stay as small as the data
        pool = array("d", by_length.get(length, ()))
        if len(pool) < MIN_SAMPLES:
            distances = sorted({abs(other - length) for other in by_length} - {0})
            for distance in distances:
                pool.extend(by_length.get(length - distance, ()))
                pool.extend(by_length.get(length + distance, ()))
                if len(pool) >= MIN_SAMPLES:
                    break
            pool = array("d", sorted(pool))
        self._pools[key] = pool
        return pool

    def to_dict(self) -> dict[str, Any]:
        """Scores and stored lengths, JSON-able: ``{"stored": [16], "scores": {"0": {"16": [0.9]}}}``."""
        return {
            "stored": list(self.stored),
            "scores": {
                str(layer): {str(length): list(values) for length, values in by_length.items()}
                for layer, by_length in self._scores.items()
            },
        }

    @classmethod
    def read(cls, field: Field, layers: int) -> HitRates:
        """Read what `to_dict` wrote for so many layers; DatabaseCorruptError names the malformed field."""
        stored = {item.integer(low=1) for item in field["stored"].items()}
        scores: dict[tuple[int, int], list[float]] = {}
        for by_length in field["scores"].members().values():
            layer = by_length.key(high=layers - 1)
            for values in by_length.members().values():
                length = values.key(low=1)
                if length not in stored:
                    values.refuse("a length of the list 'stored'")
                scores[layer, length] = values.numbers()
        return cls(scores, stored)


@dataclass(frozen=True, slots=True)
class Conditions:
    """The machine that costs were measured on: the costs hold on no other one."""

    cpu: str
    features: tuple[str, ...]
    cores: int

    @classmethod
    def read(cls, field: Field) -> Conditions:
        """Read the JSON of a profile; DatabaseCorruptError names the malformed field."""
        features = tuple(item.text() for item in field["features"].items())
        return cls(field["cpu"].text(), features, field["cores"].integer(low=1))


@dataclass(frozen=True, slots=True)
class Profile:
    """The measured profile of one database on one machine."""

    costs: list[LayerCosts]  # one for each attention layer of the model
    rates: HitRates  # of the lookups that each layer makes for itself
    rates_sequence: HitRates  # of the lookup once per sequence, by each layer's own calibration
    lookup_sequence: CostModel  # one lookup once per sequence for a batch, by the valid lengths
    threads: int  # that the costs were measured with
    dtype: str  # precision that the model ran in, such as "float32" or "bfloat16"
    conditions: Conditions | None = None  # the machine; None: not noted

    def exact_ms(self, layer: int, batch: int, padded: int) -> float:
        """Milliseconds of exact attention for `batch` sequences padded to one length."""
        return self.costs[layer].exact.estimate(batch * padded, batch * padded * padded)

    def saving_ms(self, layer: int, lengths: Sequence[int], padded: int, batch: int | None = None) -> float:
        """Milliseconds that serving sequences of these valid tokens saves; negative if exact attention costs less.

        All sequences of the batch are padded to one length. `batch` counts them; those that are not served are
        computed as a smaller batch. Default: all are served.
        """
        cost, served = self.costs[layer], len(lengths)
        if batch is None or cost.miss is None:
            return self.exact_ms(layer, served, padded) - cost.hit.estimate_lengths(lengths)
        missed = cost.miss.estimate_lengths([padded] * (batch - served)) if batch > served else 0.0
        return self.exact_ms(layer, batch, padded) - missed - cost.hit.estimate_lengths(lengths)

    def foreign(self, conditions: Mapping[str, Any]) -> str | None:
        """One sentence if the CPU, its features or the threads are not those of the costs, else None."""
        measured: dict[str, Any] = {} if self.conditions is None else asdict(self.conditions)
        differ = []
        for name, value in {**measured, "threads": self.threads}.items():
            then, now = _comparable(value), _comparable(conditions.get(name))
            if name != "cores" and then != now:
                differ.append(f"{name} {then}, here {now}")
        return f"The costs were measured under other conditions: {'; '.join(differ)}." if differ else None

    def to_dict(self) -> dict[str, Any]:
        """The whole profile, JSON-able."""
        return {
            "costs": [layer.to_dict() for layer in self.costs],
            "rates": self.rates.to_dict(),
            "rates_sequence": self.rates_sequence.to_dict(),
            "lookup_sequence": asdict(self.lookup_sequence),
            "threads": self.threads,
            "dtype": self.dtype,
            "conditions": None if self.conditions is None else asdict(self.conditions),
        }

    @classmethod
    def from_dict(cls, data: object) -> Profile:
        """Read what `to_dict` wrote; DatabaseCorruptError names the malformed field, as in ``costs[3].exact.a``."""
        field = Field(data, "profile", "attmemo train-embedder measures it again; the records are not affected")
        costs = [LayerCosts.read(item) for item in field["costs"].items()]
        if not costs:
            field["costs"].refuse("at least one layer")
        conditions = field.get("conditions")
        return cls(
            costs=costs,
            rates=HitRates.read(field["rates"], len(costs)),
            rates_sequence=HitRates.read(field["rates_sequence"], len(costs)),
            lookup_sequence=CostModel.read(field["lookup_sequence"]),
            threads=field["threads"].integer(low=1),
            dtype=field["dtype"].text(".+"),
            conditions=None if conditions is None else Conditions.read(conditions),
        )


def _comparable(value: object) -> str:
    return ", ".join(sorted(value)) or "none" if isinstance(value, list | tuple) else str(value)
