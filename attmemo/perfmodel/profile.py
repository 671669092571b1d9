"""What was measured for one database on one machine, and is needed to predict whether a lookup pays.

A profile holds, per attention layer, what the exact path, a hit and a lookup cost (`cost.py`), and the similarity
scores that lookups predicted on *held-out* sequences. The paper measures its memoization rate alpha on the training
sequences, which are in the database and find themselves; the rate it gets is one that no new request will see.

There are two sets of scores, one for each way of looking up. A layer that looks up for itself finds a record close to
its own input; a layer served by the once-per-sequence lookup gets the record that suited the first layer. The
same layer at the same threshold then hits at different rates.

Scores are kept rather than rates, because a rate belongs to one threshold and the user may choose another.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping
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
    """The three costs of one attention layer, in milliseconds per batch.

    Parameters
    ----------
    exact : CostModel
        Exact attention, as a function of the lengths it is computed at: the padded ones.
    hit : CostModel
        Attention when every row is served, as a function of the valid lengths. Fetch and A·V are timed together:
        a mapping that is quick to set up may only defer its cost into the multiplication.
    lookup : CostModel
        Embedding and search, as a function of the valid lengths. Unused when the lookup is made once per sequence.
    miss : CostModel, optional
        The rows that miss in a batch of which others hit: taken out, computed exactly, put back; as a function of
        their padded lengths. None: not measured.
    """

    exact: CostModel
    hit: CostModel
    lookup: CostModel
    miss: CostModel | None = None

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
    The memoization rate alpha is that of paper Eq. 2 for one layer (seed 004_17cf05913cb31f45.txt), split by length:
    a record serves only its own length, so rates differ by length as records do.
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

        A length with fewer than `MIN_SAMPLES` scores of its own borrows: the scores of the lengths at distance 1, 2,
        3, ... on both sides (same layer) are pooled with its own, one whole distance at a time so that neither side is
        preferred, until there are `MIN_SAMPLES` or no more to take. There is no limit to the distance: a rate
        from far away is a poor guess, but the gate corrects it with live traffic, whereas a guess of 0 would
        never be tried and so never corrected.

        Returns
        -------
        float
            In [0, 1], not increasing in `threshold`. 0 for a length without any record in the database (the hard
            key forbids serving it) and for a layer without any score.
        """
        pool = self._pool(layer, length)
        return (len(pool) - bisect_left(pool, threshold)) / len(pool) if pool else 0.0

    def table(self, threshold: float, layer: int) -> dict[int, float]:
        """`alpha` for every stored length; a length that is not a key has alpha 0."""
        return {length: self.alpha(threshold, layer, length) for length in self._stored}

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

    def __repr__(self) -> str:
        total = sum(len(values) for by_length in self._scores.values() for values in by_length.values())
        return f"HitRates({total} scores, {len(self._scores)} layers, {len(self._stored)} stored lengths)"

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
        Held-out scores of the once-per-sequence lookup: for each layer, the score that its own calibration predicts
        from the one distance found at the first layer.
    lookup_sequence : CostModel
        Milliseconds of one once-per-sequence lookup for a batch, as a function of the valid lengths.
    threads : int
        Number of threads that the costs were measured with. Another number changes the costs, not the rates.
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
