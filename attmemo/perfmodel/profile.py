"""What was measured for one database on one machine: it predicts whether a lookup pays.

A profile holds the costs of each attention layer in milliseconds (`cost`), and the similarity scores that lookups
predicted on *held-out* sequences. The paper measures its memoization rate alpha on the training sequences. These are
in the database and find themselves: no new request will see such a rate.

There are two sets of scores, one for each way of looking up. A layer that looks up for itself finds a record close to
its own input. A layer served by the lookup once per sequence gets the record that suited the first layer. The same
layer then hits at different rates.

Scores are kept, not rates: a rate belongs to one threshold, and the user may choose another.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attmemo.fields import Field
from attmemo.perfmodel.cost import CostModel

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
        known = {"exact": self.exact, "hit": self.hit, "lookup": self.lookup, "miss": self.miss}
        return {name: model.to_dict() for name, model in known.items() if model is not None}

    @classmethod
    def read(cls, field: Field) -> LayerCosts:
        """Read what `to_dict` wrote; DatabaseCorruptError names the malformed field."""
        exact, hit, lookup = (CostModel.read(field[name]) for name in ("exact", "hit", "lookup"))
        miss = field.get("miss")
        return cls(exact, hit, lookup, None if miss is None else CostModel.read(miss))


class HitRates:
    """Similarity scores predicted for held-out sequences, by layer and token length.

    Parameters
    ----------
    scores : mapping of (layer, length) to scores
        `layer` counts from 0; `length` is the number of valid tokens. One score for each held-out query at a length
        for which the database holds a record. A query that found nothing counts as well: give it a negative score.
    stored : iterable of int, optional
        The token lengths for which the database holds at least one record. Default: the lengths in `scores`.

    Raises
    ------
    ValueError
        A layer < 0, a length < 1, a score that is not finite, or scores at a length that is not `stored`.

    Notes
    -----
    The memoization rate alpha is that of AttMEMO (arXiv 2301.09262), Eq. 2, for one layer and one length: a record
    serves only its own length, so rates differ by length as records do.
    """

    def __init__(self, scores: Mapping[tuple[int, int], Iterable[float]], stored: Iterable[int] | None = None) -> None:
        self._scores: dict[int, dict[int, array[float]]] = {}
        for (layer, length), values in sorted(scores.items(), key=lambda item: item[0]):
            if layer < 0 or length < 1:
                raise ValueError(f"scores need a layer >= 0 and a length >= 1, got {(layer, length)!r}")
            ordered = array("d", sorted(float(value) for value in values))
            if not all(map(math.isfinite, ordered)):
                raise ValueError(f"layer {layer}, length {length}: every score must be finite")
            if ordered:
                self._scores.setdefault(layer, {})[length] = ordered
        if stored is None:
            stored = (length for by_length in self._scores.values() for length in by_length)
        self._stored = tuple(sorted({int(length) for length in stored}))
        if self._stored and self._stored[0] < 1:
            raise ValueError(f"a stored length must be >= 1, got {self._stored[0]}")
        known = set(self._stored)
        for layer, by_length in self._scores.items():
            for length in by_length:
                if length not in known:
                    raise ValueError(f"layer {layer} has scores at length {length}, for which no record is stored")
        self._pools: dict[tuple[int, int], array[float]] = {}

    @property
    def stored(self) -> tuple[int, ...]:
        """Token lengths for which the database holds a record, ascending."""
        return self._stored

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have scores, ascending."""
        return tuple(self._scores)

    def samples(self, layer: int, length: int) -> int:
        """Number of held-out scores at exactly this layer and length."""
        return len(self._scores.get(layer, {}).get(length, ()))

    def alpha(self, threshold: float, layer: int, length: int) -> float:
        """Share of held-out queries of this layer and length with a score >= `threshold`.

        A length with fewer than `MIN_SAMPLES` scores of its own borrows those of the lengths at distance 1, 2, 3, ...
        on both sides (same layer), until there are enough or no more to take. There is no limit to the distance: live
        traffic corrects a poor guess, but a guess of 0 would never be tried and so never corrected.

        Returns
        -------
        float
            In [0, 1], not increasing in `threshold`. 0 for a length without any record (it cannot be served) and for a
            layer without any score.
        """
        pool = self._pool(layer, length)
        return (len(pool) - bisect_left(pool, threshold)) / len(pool) if pool else 0.0

    def _pool(self, layer: int, length: int) -> array[float]:
        """Sorted scores that speak for this layer and length."""
        key = layer, length
        if key in self._pools:
            return self._pools[key]
        by_length = self._scores.get(layer, {})
        position = bisect_left(self._stored, length)
        if position == len(self._stored) or self._stored[position] != length:
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

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, HitRates):
            return NotImplemented
        return self._scores == other._scores and self._stored == other._stored

    def to_dict(self) -> dict[str, Any]:
        """Scores and stored lengths, JSON-able: ``{"stored": [16], "scores": {"0": {"16": [0.9]}}}``."""
        return {
            "stored": list(self._stored),
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
    """The measured profile of one database on one machine.

    Parameters
    ----------
    costs : list of LayerCosts
        One for each attention layer of the model.
    rates : HitRates
        Held-out scores of the lookups that each layer makes for itself.
    rates_sequence : HitRates
        Held-out scores of the lookup once per sequence: for each layer, the score that the layer's own calibration
        predicts from the one distance found at the first layer.
    lookup_sequence : CostModel
        Milliseconds of one lookup once per sequence for a batch, by the valid lengths.
    threads : int
        Threads that the costs were measured with. Another number changes the costs, not the rates.
    dtype : str
        Precision that the model ran in, such as "float32" or "bfloat16".
    conditions : Conditions, optional
        The machine. None: not noted, as in profiles of version 1 of the format.

    Raises
    ------
    ValueError
        No layer, `threads` < 1, an empty `dtype`, or scores for a layer that has no costs.
    """

    costs: list[LayerCosts]
    rates: HitRates
    rates_sequence: HitRates
    lookup_sequence: CostModel
    threads: int
    dtype: str
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        if not self.costs:
            raise ValueError("a profile needs the costs of at least one layer")
        if self.threads < 1:
            raise ValueError(f"threads must be >= 1, got {self.threads}")
        if not self.dtype:
            raise ValueError("dtype must be named, such as 'float32'")
        for rates in (self.rates, self.rates_sequence):
            if rates.layers and rates.layers[-1] >= len(self.costs):
                raise ValueError(f"scores for layer {rates.layers[-1]}, but costs for {len(self.costs)} layers only")

    def exact_ms(self, layer: int, batch: int, padded: int) -> float:
        """Milliseconds of exact attention for `batch` sequences padded to one length. ValueError: no such layer."""
        return self._of(layer).exact.estimate(float(batch * padded), float(batch * padded * padded))

    def saving_ms(self, layer: int, lengths: Sequence[int], padded: int, batch: int | None = None) -> float:
        """Milliseconds that serving these sequences saves; negative if serving costs more than exact attention.

        Parameters
        ----------
        layer : int
            From 0.
        lengths : sequence of int
            Valid tokens of the sequences that are served.
        padded : int
            Length that all sequences of the batch are padded to.
        batch : int, optional
            Sequences of the batch; the others miss and are computed as a smaller batch. Default: all are served.

        Raises
        ------
        ValueError
            No such layer.
        """
        cost, served = self._of(layer), len(lengths)
        missed = 0 if batch is None else batch - served
        saved = self.exact_ms(layer, served, padded)
        if missed > 0 and cost.miss is not None:
            saved = self.exact_ms(layer, served + missed, padded)
            saved -= cost.miss.estimate(float(missed * padded), float(missed * padded * padded))
        return saved - cost.hit.estimate_lengths(lengths)

    def _of(self, layer: int) -> LayerCosts:
        if not 0 <= layer < len(self.costs):
            raise ValueError(f"layer must be in 0..{len(self.costs) - 1}, got {layer}")
        return self.costs[layer]

    def foreign(self, conditions: Mapping[str, Any]) -> str | None:
        """One sentence if the costs were measured under other conditions than these, else None.

        Parameters
        ----------
        conditions : mapping
            What `attmemo.machine.conditions` gives here and now; ``cpu``, ``features`` and ``threads`` are compared.
        """
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
            "lookup_sequence": self.lookup_sequence.to_dict(),
            "threads": self.threads,
            "dtype": self.dtype,
            "conditions": None if self.conditions is None else asdict(self.conditions),
        }

    @classmethod
    def from_dict(cls, data: object) -> Profile:
        """Read what `to_dict` wrote.

        Raises
        ------
        DatabaseCorruptError
            A field is missing or malformed; the message names it, as in ``costs[3].exact.a``. Fields that this
            version does not know are ignored: the format version of the database speaks for those.
        """
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
