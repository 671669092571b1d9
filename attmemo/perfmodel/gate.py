"""Is trying memoization worth it, for this layer and this batch? Asked before every lookup.

The prediction is Equation 3 of the paper (seed 004_17cf05913cb31f45.txt, section 5.4):

    PB = alpha * (T_exact - T_hit) - T_lookup > 0        all in milliseconds, for the whole batch

with two corrections. The paper writes alpha * T_attention, as if a hit cost nothing; a hit still fetches the map and
multiplies by V, and on a machine with fused attention that is most of the cost. And the times are not scaled
linearly with the tokens (`cost.py`).

With one lookup for all layers the lookup is paid once and every layer gains at its own rate, because each accepts the
one distance by its own curve and its own threshold:

    PB = sum over layers of alpha_l * (T_exact_l - T_hit_l) - T_lookup > 0

where layers in which a hit costs more than it saves are left out, and computed exactly (`Gate.serves`).

The prediction comes from held-out data. Traffic changes, so what really hits is watched as well: a layer whose live
hit rate falls below break-even is switched off, and tried again now and then.

What the prediction does not model: a batch in which some rows hit and some miss is computed in two parts, and pays the
fixed cost of a call twice. The formula interpolates between all rows exact and all rows served. Once it is known which
rows hit, `Gate.pays` asks again with the cost of both parts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import mul
from typing import Any, Final, Literal, NamedTuple

from attmemo.perfmodel.cost import CostModel
from attmemo.perfmodel.profile import SEQUENCE, Profile


class _Verdict(NamedTuple):
    """What is predicted for one batch; `savings` and `alphas` have an entry for each layer that the lookup serves."""

    worth: bool
    benefit: float  # ms: sum of alpha * saving over the layers where saving is positive - lookup
    lookup: float  # ms that a lookup costs, hit or not
    saving: float  # ms saved if every row hits, summed over the layers where that is positive
    savings: tuple[float, ...]  # ms: T_exact - T_hit by layer, negative where a hit costs more than it saves
    alphas: tuple[float, ...]  # share of the rows predicted to hit, by layer

    @property
    def alpha(self) -> float | None:
        """What `Gate.record` is told live: the mean over the layers of the share that hits; None without rows."""
        return sum(self.alphas) / len(self.alphas) if self.alphas else None


_NOTHING: Final = _Verdict(False, 0.0, 0.0, 0.0, (), ())

_MANY: Final = 50  # held-out texts, none of which reaches a threshold, after which nothing is tried any more

_ON: Final = "on"
_OFF: Final = "off"
_PROBING: Final = "probing"


class _Window:
    """Hits and stakes of the batches tried lately; the weight of a query halves every `half_life` queries.

    Decayed sums, not a decayed ratio: the first batch then counts for what it is instead of being averaged with an
    arbitrary start value, and a batch of 32 weighs 32 times a batch of one.
    """

    __slots__ = ("count", "hits", "keep", "lookup", "queries", "saving")

    def __init__(self, half_life: float) -> None:
        self.keep = 0.5 ** (1.0 / half_life)
        self.count = 0  # queries seen, not decayed
        self.queries = self.hits = self.lookup = self.saving = 0.0

    def add(self, queries: int, hits: float, lookup: float, saving: float) -> None:
        keep = self.keep**queries
        self.count += queries
        self.queries = self.queries * keep + queries
        self.hits = self.hits * keep + hits
        self.lookup = self.lookup * keep + lookup
        self.saving = self.saving * keep + saving

    @property
    def rate(self) -> float | None:
        """Live hit rate in [0, 1]; None before the first query."""
        return self.hits / self.queries if self.count else None

    @property
    def break_even(self) -> float | None:
        """Hit rate at which the lookups of the batches seen pay for themselves; None without costs."""
        return self.lookup / self.saving if self.saving > 0.0 else None


class _Live:
    """Everything that changes while serving, for one lookup (a layer, or the once-per-sequence one)."""

    __slots__ = ("asked", "backoff", "hits", "phase", "queries", "since", "skipped", "tried", "window")

    def __init__(self, half_life: float) -> None:
        self.phase = _ON
        self.window = _Window(half_life)
        self.backoff = 0  # batches to leave alone before the next probe; 0: nothing to remember
        self.skipped = 0  # batches left alone since it was switched off
        self.since = 0  # queries since it was last switched on
        self.queries = 0
        self.hits: float = 0  # a fraction only where it is a mean over layers
        self.asked: _Verdict | None = None  # the last batch asked about
        self.tried: _Verdict | None = None  # the last batch answered with yes


class Gate:
    """Decides whether trying memoization pays for a batch, per layer or once for the whole forward.

    Parameters
    ----------
    profile : Profile or None
        Measured costs and held-out scores. With None nothing can be predicted: every batch is worth trying, and
        hit rates are only recorded.
    threshold : float or sequence of float
        Similarity score in [0, 1] that a hit needs; one number, or one for each layer, whichever the lookup.
    lookup : {"layer", "sequence"}
        Whether each layer looks up for itself or one lookup serves all layers.
    layers : int
        Number of attention layers.
    always : bool
        Answer every question with yes, whatever the profile and the live hit rate say: for measurements, and for
        users who want memory traded for computation at any price.
    min_queries : int
        Live queries before the live hit rate is believed.
    half_life : float
        Queries after which a query counts half in the live hit rate.
    backoff, backoff_max : int
        A layer switched off for its live hit rate is left alone for `backoff` batches, then probed. Each probe that
        fails doubles the wait, up to `backoff_max`. Only batches that the prediction favours are counted.
    probe_queries : int
        Queries that a probe consists of, over as many batches as that takes.
    margin : float
        A probe must find a hit rate of `margin` times break-even to switch the layer on again (at most half-way
        from break-even to 1, which otherwise might be out of reach). Without the margin a layer right at break-even
        would switch at every turn.
    cache_size : int
        Number of different batches whose prediction is remembered.

    Raises
    ------
    ValueError
        `layers` is not positive or not that of the profile, a threshold is outside [0, 1], their number is not
        `layers`, or a drift parameter is out of range.

    Notes
    -----
    *Layers.* With ``lookup="layer"`` layers are numbered from 0. With ``lookup="sequence"`` there is one decision
    for each forward, so `worth_trying` and `record` take the layer `SEQUENCE` (-1) and nothing else, and are to be
    called once per forward; `serves` then tells which layers the hit is good for.

    *Rates.* Predicted from `Profile.rates` with ``lookup="layer"``, from `Profile.rates_sequence` with
    ``lookup="sequence"``.

    *One lookup is watched as a whole.* Live, `record` hears one number per batch: the mean over the layers of the
    rows accepted. That share times the saving if every row hit everywhere approximates the benefit; it is exact
    where layers save alike or hit alike, and otherwise off by how much the layers that save most hit more than the
    mean. Good enough to notice traffic that finds nothing any more, which is what it is for; counting by layer
    would mean as many reports per forward as there are layers, for a decision that is one.

    *Drift works in one direction.* Live traffic can switch off what the prediction favours, never on what it does
    not: where nothing is tried nothing is learnt.

    *Threads.* Any number of threads may ask and record. `record` attributes hits to the batch that was last
    answered with yes for that layer; when threads interleave, that may be another thread's batch. It concerns only
    the weight of a batch in an average over hundreds, and saves a handle that every caller would have to carry.
    """

    def __init__(
        self,
        profile: Profile | None,
        threshold: float | Sequence[float],
        lookup: Literal["layer", "sequence"],
        layers: int,
        *,
        always: bool = False,
        min_queries: int = 32,
        half_life: float = 128.0,
        backoff: int = 16,
        backoff_max: int = 1024,
        probe_queries: int = 16,
        margin: float = 1.25,
        cache_size: int = 4096,
    ) -> None:
        if layers < 1:
            raise ValueError(f"layers must be >= 1, got {layers}")
        if lookup not in ("layer", "sequence"):
            raise ValueError(f"lookup must be 'layer' or 'sequence', got {lookup!r}")
        if profile is not None and len(profile.costs) != layers:
            raise ValueError(f"the profile has costs for {len(profile.costs)} layers, the model has {layers}")
        if min(min_queries, backoff, probe_queries, cache_size) < 1 or backoff_max < backoff:
            raise ValueError("min_queries, backoff, probe_queries, cache_size must be >= 1, backoff_max >= backoff")
        if not (half_life > 0.0 and margin >= 1.0):
            raise ValueError(f"half_life must be > 0 and margin >= 1, got {half_life!r} and {margin!r}")
        self._thresholds = _thresholds(threshold, layers)
        self._profile = profile
        self._sequence = lookup == "sequence"
        self._layers = layers
        self._always = always or profile is None
        self._why_always = "always on by request" if always else "no profile: always tried"
        self._min_queries = min_queries
        self._half_life = half_life
        self._backoff = backoff
        self._backoff_max = backoff_max
        self._probe_queries = probe_queries
        self._margin = margin
        self._cache_size = cache_size
        # lookup -> length -> alpha of each layer it serves, at the layer's threshold; a missing length has no record
        self._alphas: dict[int, Mapping[int, tuple[float, ...]]] = {}
        self._live: dict[int, _Live] = {}
        for layer in (SEQUENCE,) if self._sequence else range(layers):
            self._live[layer] = _Live(half_life)
            if profile is not None:
                served = range(layers) if self._sequence else (layer,)
                rates = profile.rates_sequence if self._sequence else profile.rates
                tables = [rates.table(self._thresholds[i], i) for i in served]
                self._alphas[layer] = {length: tuple(table[length] for table in tables) for length in rates.stored}
        reached = any(any(alphas) for table in self._alphas.values() for alphas in table.values())
        # A few held-out texts that all miss prove little: then batches are tried, and live traffic decides.
        judged = 0 if profile is None else sum(rates.samples(0, length) for length in rates.stored)
        self._hopeless = profile is not None and not always and not reached and judged >= _MANY
        self._no_record = (0.0,) * (layers if self._sequence else 1)
        self._cache: dict[tuple[int, int, tuple[int, ...]], _Verdict] = {}
        self._lock = threading.Lock()

    def worth_trying(self, layer: int, lengths: Sequence[int], padded: int) -> bool:
        """Whether a lookup for this batch is predicted to pay, and live traffic does not say otherwise.

        Asking is not quite free of effect: a layer that is switched off counts the batches it leaves alone, because
        nothing else tells it that time has passed.

        Parameters
        ----------
        layer : int
            Layer from 0, or `SEQUENCE` when there is one lookup per sequence.
        lengths : sequence of int
            Valid tokens of each row.
        padded : int
            Length that the rows are padded to, which is what exact attention would be computed at.

        Raises
        ------
        ValueError
            No such layer for this kind of lookup, or `padded` is less than a length.
        """
        if self._always:
            return True
        verdict = self._verdict(layer, lengths, padded)
        live = self._live[layer]
        live.asked = verdict
        if not verdict.worth:
            return False
        if live.phase == _OFF and not self._probe(live):
            return False
        live.tried = verdict
        return True

    def serves(self, layer: int, lengths: Sequence[int], padded: int) -> bool:
        """Whether a hit in this layer is cheaper than exact attention for this batch: T_exact - T_hit > 0.

        With one lookup for all layers, this is asked after a hit: the lookup is paid, and a layer where serving
        costs more than it saves computes its attention exactly. Parameters and errors as for `worth_trying`, except
        that `layer` always counts from 0.
        """
        if not 0 <= layer < self._layers:
            raise ValueError(f"layer must be in 0..{self._layers - 1}, got {layer}")
        if self._always:
            return True
        if self._sequence:
            savings = self._verdict(SEQUENCE, lengths, padded).savings
            return bool(savings) and savings[layer] > 0.0
        return self._verdict(layer, lengths, padded).saving > 0.0

    @property
    def hopeless(self) -> bool:
        """Whether no batch whatever is worth trying: no held-out sequence of any length reaches a threshold."""
        return self._hopeless

    def pays(self, layer: int, hits: Sequence[int], batch: int, padded: int) -> bool:
        """Whether serving these rows is cheaper than computing the whole batch, now that it is known which hit.

        A batch of which some rows hit and some miss is computed in two parts. A few hits in a large batch save less
        than taking the others out and putting them back costs.

        Parameters
        ----------
        layer : int
            From 0.
        hits : sequence of int
            Valid tokens of the rows that hit.
        batch, padded : int
            Rows of the batch, and the length that they are padded to.
        """
        missed = batch - len(hits)
        if self._always or self._profile is None or missed == 0:
            return True
        cost = self._profile.costs[layer]
        if cost.miss is None:
            return True
        whole = cost.exact.estimate(float(batch * padded), float(batch * padded * padded))
        rest = cost.miss.estimate(float(missed * padded), float(missed * padded * padded))
        return cost.hit.estimate_lengths(hits) + rest < whole

    def record(self, layer: int, queries: int, hits: float) -> None:
        """Tell the outcome of a lookup: of `queries` rows looked up, `hits` were served.

        Parameters
        ----------
        layer : int
            As for `worth_trying`.
        queries : int
            Rows of the batch looked up.
        hits : float
            Rows accepted. With one lookup for all layers, the mean over the layers of the rows that each accepts:
            this share of `queries` times the total saving approximates the benefit (see Notes of the class).

        Raises
        ------
        ValueError
            No such layer for this kind of lookup, or not 0 <= hits <= queries.
        """
        live = self._live.get(layer)
        if live is None:
            raise self._no_such_layer(layer)
        if not 0 <= hits <= queries:
            raise ValueError(f"hits must be between 0 and queries = {queries}, got {hits}")
        if queries == 0:
            return
        with self._lock:
            live.queries += queries
            live.hits += hits
            verdict = live.tried
            if self._always or verdict is None:
                live.window.add(queries, hits, 0.0, 0.0)
            elif live.phase != _OFF:  # off: a batch that another thread had begun before the switch
                live.window.add(queries, hits, verdict.lookup, verdict.saving)
                self._review(live, queries)

    def state(self) -> list[dict[str, Any]]:
        """What is on, what is off and why, JSON-able.

        Returns
        -------
        list of dict
            One for each layer, preceded by one for `SEQUENCE` when there is one lookup for all layers:

            * ``layer``: int
            * ``on``: bool, for a batch like the last one asked about
            * ``why``: str
            * ``predicted_benefit_ms``: float or None, for the last batch asked about
            * ``break_even``: float or None, hit rate at which lookups pay, over the batches tried lately
            * ``predicted_hit_rate``: float or None, alpha of the last batch asked about
            * ``hit_rate``: float or None, live, recent queries weighing more
            * ``queries``: int, rows looked up since the start
            * ``hits``: float or None, of these, since the start

            For `SEQUENCE`, rates and hits are means over the layers. For the layers below it, live numbers are not
            known one by one (None): only ``predicted_hit_rate`` is the layer's own.
        """
        with self._lock:
            rows = [self._state_of(layer, live) for layer, live in self._live.items()]
            if self._sequence:
                rows += [self._state_served(layer, rows[0]) for layer in range(self._layers)]
        return rows

    # -- prediction

    def _verdict(self, layer: int, lengths: Sequence[int], padded: int) -> _Verdict:
        # The rows as they are, not sorted or summed: that would give more equal keys and cost more than it saves,
        # since all layers of a forward ask about the same rows and the first of them has to compute anyway.
        key = layer, padded, tuple(lengths)
        verdict = self._cache.get(key)
        if verdict is None:
            verdict = self._predict(*key)
            # Emptied when full. Evicting the oldest one by one needs a lock on every question; starting over costs a
            # few microseconds for each batch that comes again.
            if len(self._cache) >= self._cache_size:
                self._cache.clear()
            self._cache[key] = verdict
        return verdict

    def _predict(self, layer: int, padded: int, lengths: tuple[int, ...]) -> _Verdict:
        """Eq. 3 for one batch. Plain floats: at 32 rows numpy spends more on its calls than on the arithmetic."""
        profile = self._profile
        assert profile is not None  # without one, `worth_trying` and `serves` have answered already
        by_length = self._alphas.get(layer)
        if by_length is None:
            raise self._no_such_layer(layer)
        rows = len(lengths)
        if rows == 0:
            return _NOTHING
        if padded < max(lengths):
            raise ValueError(f"padded length {padded} is less than the longest row, {max(lengths)}")
        # transposed: one column of alphas for each layer, one entry in it for each row
        by_row = map(by_length.get, lengths, repeat(self._no_record))
        alphas = tuple(sum(column) / rows for column in zip(*by_row, strict=True))
        tokens = float(sum(lengths))
        squares = float(sum(map(mul, lengths, lengths)))
        exact_tokens = float(rows * padded)
        exact_squares = exact_tokens * padded
        lookup: CostModel
        if self._sequence:
            costs, lookup = profile.costs, profile.lookup_sequence
        else:
            costs, lookup = profile.costs[layer : layer + 1], profile.costs[layer].lookup
        savings = tuple(
            cost.exact.estimate(exact_tokens, exact_squares) - cost.hit.estimate(tokens, squares) for cost in costs
        )
        saving = sum(value for value in savings if value > 0.0)  # the other layers stay exact, see `serves`
        overhead = lookup.estimate(tokens, squares)
        gain = sum(alpha * value for alpha, value in zip(alphas, savings, strict=True) if value > 0.0)
        benefit = gain - overhead
        return _Verdict(benefit > 0.0, benefit, overhead, saving, savings, alphas)

    # -- drift

    def _probe(self, live: _Live) -> bool:
        """Count a batch that a switched-off layer leaves alone; True when it is time for a probe instead."""
        with self._lock:
            if live.phase == _OFF:  # asked again under the lock: another thread may have started the probe
                if live.skipped < live.backoff:
                    live.skipped += 1
                    return False
                live.phase = _PROBING
                live.window = _Window(self._half_life)  # the rate that switched it off must not judge the probe
            return True

    def _review(self, live: _Live, queries: int) -> None:
        """Switch off or on after new evidence; called with the lock held."""
        rate, break_even = live.window.rate, live.window.break_even
        if rate is None or break_even is None:
            return
        if live.phase == _ON:
            live.since += queries
            if live.since >= self._half_life:
                live.backoff = 0  # it has held: the next time it drifts is a new story
            if live.window.count >= self._min_queries and rate < break_even:
                self._switch_off(live)
        elif live.window.count >= self._probe_queries:
            if rate >= min(break_even * self._margin, (1.0 + break_even) / 2.0):
                # The wait is kept, not reset: a layer that flaps is soon asked as rarely as one that never hits.
                live.phase = _ON
                live.since = 0
            else:
                self._switch_off(live)

    def _switch_off(self, live: _Live) -> None:
        live.phase = _OFF
        live.skipped = 0
        live.backoff = min(max(2 * live.backoff, self._backoff), self._backoff_max)

    # -- words

    def _state_of(self, layer: int, live: _Live) -> dict[str, Any]:
        rate, break_even, asked = live.window.rate, live.window.break_even, live.asked
        on = True
        if self._always:
            why = self._why_always
        elif live.phase == _OFF:
            on = False
            why = (
                f"hit rate {_percent(rate)} below break-even {_percent(break_even)}, "
                f"probed again in {live.backoff - live.skipped + 1} batches"
            )
        elif asked is None:
            on = any(map(any, self._alphas[layer].values()))
            why = "no batch seen yet" if on else "no held-out sequence reaches the threshold"
        elif not asked.worth:
            on = False
            why = f"predicted benefit {asked.benefit:+.3g} ms"
        elif live.phase == _PROBING:
            why = f"probing: {live.window.count} of {self._probe_queries} queries seen"
        else:
            why = f"predicted benefit {asked.benefit:+.3g} ms"
        return {
            "layer": layer,
            "on": on,
            "why": why,
            "predicted_benefit_ms": None if asked is None else asked.benefit,
            "break_even": break_even,
            "predicted_hit_rate": None if asked is None else asked.alpha,
            "hit_rate": rate,
            "queries": live.queries,
            "hits": live.hits,
        }

    def _state_served(self, layer: int, decision: dict[str, Any]) -> dict[str, Any]:
        """One layer of a model with one lookup for all layers: it follows the decision, or stays out of it."""
        asked = self._live[SEQUENCE].asked
        row = {**decision, "layer": layer}
        for key in ("predicted_benefit_ms", "break_even", "predicted_hit_rate", "hit_rate", "hits"):
            row[key] = None  # the decision's, not this layer's
        if asked is not None and asked.savings:
            row["predicted_hit_rate"] = asked.alphas[layer]
            if asked.savings[layer] <= 0.0:
                row["on"] = False
                row["why"] = f"a hit costs {-asked.savings[layer]:.3g} ms more than exact attention"
        return row

    def _no_such_layer(self, layer: int) -> ValueError:
        if self._sequence:
            return ValueError(f"one lookup serves all layers: ask for layer {SEQUENCE}, got {layer}")
        return ValueError(f"layer must be in 0..{self._layers - 1}, got {layer}")


def _thresholds(threshold: float | Sequence[float], layers: int) -> tuple[float, ...]:
    """One threshold for each layer."""
    values = tuple(float(value) for value in threshold) if isinstance(threshold, Sequence) else (float(threshold),)
    if len(values) == 1:
        values *= layers
    if len(values) != layers:
        raise ValueError(f"expected one threshold or {layers}, one for each layer, got {len(values)}")
    for value in values:
        if not (math.isfinite(value) and 0.0 <= value <= 1.0):
            raise ValueError(f"a threshold is a similarity score in [0, 1], got {value!r}")
    return values


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100.0 * share:.3g} %"
