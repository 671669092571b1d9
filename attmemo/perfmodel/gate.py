"""Does a lookup pay, for this layer and this batch? The engine asks before every lookup.

The prediction is Equation 3 of AttMEMO (arXiv 2301.09262, section 5.4), in milliseconds for the whole batch:

    PB = alpha * (T_exact - T_hit) - T_lookup > 0

with two corrections. The paper writes alpha * T_attention, as if a hit cost nothing. A hit still reads the map and
multiplies by V, and on a machine with fused attention that is most of the cost. And the times are not linear in the
number of tokens (`cost`).

One lookup for all layers is paid once. Every layer gains at its own rate, because every layer accepts the one distance
by its own threshold:

    PB = sum over layers of alpha_l * (T_exact_l - T_hit_l) - T_lookup > 0

where layers in which a hit costs more than it saves count as 0: they stay exact (`Verdict.pays`).

The prediction comes from held-out data. Traffic changes, so the gate also watches what really hits: a lookup whose
live hit rate falls below break-even is switched off, and probed now and then.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attmemo.perfmodel.profile import SEQUENCE, Profile

_MANY = 50  # held-out texts; if none of so many reaches a threshold, no lookup is tried any more


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer about one batch. The caller keeps it and hands it back to `Gate.leave` or `Gate.record`.

    Attributes
    ----------
    tries : bool
        A lookup for this batch pays: the prediction says so, and live traffic does not say otherwise.
    """

    tries: bool
    layer: int  # what the question was about, or `SEQUENCE`
    lengths: tuple[int, ...]
    padded: int
    profile: Profile | None = None  # None: every lookup is tried, and every hit is served
    benefit: float = 0.0  # ms, the prediction PB
    lookup: float = 0.0  # ms of a lookup, hit or not
    saving: float = 0.0  # ms saved if every sequence hits, over the layers where that is positive
    savings: tuple[float, ...] = ()  # ms, T_exact - T_hit of each layer that the lookup serves
    alphas: tuple[float, ...] = ()  # share of the sequences predicted to hit, of each layer that the lookup serves

    def pays(self, layer: int, hits: Sequence[int]) -> bool:
        """Whether serving these sequences costs less than computing the whole batch.

        Ask after the lookup. A batch with hits and misses is computed in two parts: a few hits in a large batch save
        less than the second part costs.

        Parameters
        ----------
        layer : int
            Layer that serves, from 0, whichever the lookup.
        hits : sequence of int
            Valid tokens of the sequences that hit.

        Raises
        ------
        ValueError
            No such layer.
        """
        return self.profile is None or self.profile.saving_ms(layer, hits, self.padded, len(self.lengths)) > 0.0


@dataclass(slots=True)
class _Live:
    """What really hits, for one lookup: a decayed hit rate, on or off, and one counter to wait with.

    The sums are decayed, not their ratio: a batch of 32 weighs 32 times a batch of one, from the first batch on.
    """

    on: bool = True
    wait: int = 0  # switched off: batches to leave alone before the next probe
    backoff: int = 0  # the last such wait; the next one is twice as long
    count: int = 0  # sequences since the last switch or the begin of the probe, not decayed
    queries: float = 0.0
    hits: float = 0.0
    lookup: float = 0.0  # ms
    saving: float = 0.0  # ms
    all_queries: int = 0
    all_hits: float = 0
    last: Verdict | None = None

    def add(self, verdict: Verdict, hits: float, keep: float) -> None:
        """Count one batch; `keep` is the weight that earlier batches keep."""
        queries = len(verdict.lengths)
        self.count += queries
        self.queries = self.queries * keep + queries
        self.hits = self.hits * keep + hits
        self.lookup = self.lookup * keep + verdict.lookup
        self.saving = self.saving * keep + verdict.saving

    def forget(self) -> None:
        """Begin a probe: the rate that switched the lookup off must not judge it."""
        self.count = 0
        self.queries = self.hits = self.lookup = self.saving = 0.0

    @property
    def rate(self) -> float | None:
        """Recent hit rate in [0, 1]; None before the first query."""
        return self.hits / self.queries if self.queries else None

    @property
    def break_even(self) -> float | None:
        """Hit rate at which the recent lookups pay for themselves; None without costs."""
        return self.lookup / self.saving if self.saving > 0.0 else None


class Gate:
    """Decides whether a lookup pays: in each layer, or once for the whole forward.

    ``verdict = gate.ask(...)`` changes nothing. The caller then reports what it did: `leave` if ``verdict.tries`` is
    False, else `record`.

    Parameters
    ----------
    profile : Profile or None
        Measured costs and held-out scores. None: nothing can be predicted, every batch is tried, hits are counted.
    thresholds : float or sequence of float
        Similarity score in [0, 1] that a hit needs; one number, or one for each layer, whichever the lookup.
    lookup : {"layer", "sequence"}
        Each layer looks up for itself, or one lookup per sequence serves all layers.
    layers : int
        Number of attention layers.
    always : bool
        Try every batch, whatever the profile and the live hit rate say.
    min_queries, half_life : int, float
        Live sequences before the live hit rate counts, and after which a sequence counts half in the rate.
    backoff, backoff_max : int
        A lookup that is switched off leaves `backoff` batches alone, then probes. Each failed probe doubles the
        wait, up to `backoff_max`. Only batches that the prediction favours count.
    probe_queries, margin : int, float
        A probe lasts for so many sequences. It must find `margin` times the break-even rate to switch the lookup on
        again (at most half-way from break-even to 1): a lookup near break-even would switch all the time.

    Raises
    ------
    ValueError
        `layers` is not positive or not that of the profile, a threshold is outside [0, 1], their number is not
        `layers`, or a drift parameter is out of range.

    Notes
    -----
    *Rates* are predicted from `Profile.rates` with ``lookup="layer"``, from `Profile.rates_sequence` otherwise.

    *One lookup for all layers is watched as a whole.* `record` hears one number per batch: the mean over the layers
    of the sequences served. This share times the saving if every sequence hit everywhere approximates the benefit.
    It is exact where layers save alike or hit alike, and good enough to notice traffic that finds nothing.

    *Drift works in one direction.* Live traffic can switch off what the prediction favours. It never switches on what
    the prediction is against: where nothing is tried, nothing is learnt.

    *Threads.* Any number of threads may ask, leave and record.
    """

    def __init__(
        self,
        profile: Profile | None,
        thresholds: float | Sequence[float],
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
    ) -> None:
        if layers < 1:
            raise ValueError(f"layers must be >= 1, got {layers}")
        if lookup not in ("layer", "sequence"):
            raise ValueError(f"lookup must be 'layer' or 'sequence', got {lookup!r}")
        if profile is not None and len(profile.costs) != layers:
            raise ValueError(f"the profile has costs for {len(profile.costs)} layers, the model has {layers}")
        if min(min_queries, backoff, probe_queries) < 1 or backoff_max < backoff:
            raise ValueError("min_queries, backoff and probe_queries must be >= 1, backoff_max >= backoff")
        if not (half_life > 0.0 and margin >= 1.0):
            raise ValueError(f"half_life must be > 0 and margin >= 1, got {half_life!r} and {margin!r}")
        values = _thresholds(thresholds, layers)
        self._profile = None if always else profile
        self._why_always = "always on by request" if always else "no profile: always tried"
        self._sequence, self._layers = lookup == "sequence", layers
        self._min_queries, self._half_life, self._margin = min_queries, half_life, margin
        self._backoff, self._backoff_max, self._probe_queries = backoff, backoff_max, probe_queries
        self._live = {layer: _Live() for layer in ((SEQUENCE,) if self._sequence else range(layers))}
        # lookup -> length -> alpha of each layer that the lookup serves; a missing length has no record
        self._alphas: dict[int, dict[int, tuple[float, ...]]] = {layer: {} for layer in self._live}
        self._hopeless = False
        if self._profile is not None:
            rates = self._profile.rates_sequence if self._sequence else self._profile.rates
            for layer, table in self._alphas.items():
                for length in rates.stored:
                    table[length] = tuple(rates.alpha(values[i], i, length) for i in self._served(layer))
            reached = any(any(alphas) for table in self._alphas.values() for alphas in table.values())
            # A few held-out texts that all miss prove little: then batches are tried, and live traffic decides.
            self._hopeless = not reached and sum(rates.samples(0, length) for length in rates.stored) >= _MANY
        self._lock = threading.Lock()

    @property
    def hopeless(self) -> bool:
        """Whether no held-out sequence of any length reaches a threshold: nothing need be asked."""
        return self._hopeless

    def ask(self, layer: int, lengths: Sequence[int], padded: int) -> Verdict:
        """Whether a lookup for this batch pays. Asking changes nothing.

        Parameters
        ----------
        layer : int
            Layer from 0, or `SEQUENCE` when there is one lookup per sequence.
        lengths : sequence of int
            Valid tokens of each sequence.
        padded : int
            Length that the sequences are padded to: exact attention is computed at this length.

        Raises
        ------
        ValueError
            No such layer for this kind of lookup, or `padded` is less than a length.
        """
        live, lengths, profile = self._live.get(layer), tuple(lengths), self._profile
        if live is None:
            known = f"is {SEQUENCE}: one lookup serves all layers" if self._sequence else f"is 0 to {self._layers - 1}"
            raise ValueError(f"layer {known}; got {layer}")
        if padded < max(lengths, default=0):
            raise ValueError(f"padded length {padded} is less than the longest sequence, {max(lengths)}")
        if profile is None or not lengths:
            return Verdict(profile is None, layer, lengths, padded, profile)
        served = self._served(layer)
        lookup = profile.lookup_sequence if self._sequence else profile.costs[layer].lookup
        none = (0.0,) * len(served)
        rates = [self._alphas[layer].get(n, none) for n in lengths]
        alphas = tuple(sum(column) / len(lengths) for column in zip(*rates, strict=True))
        savings = tuple(profile.saving_ms(i, lengths, padded) for i in served)
        overhead = lookup.estimate_lengths(lengths)
        benefit = sum(a * s for a, s in zip(alphas, savings, strict=True) if s > 0.0) - overhead
        return Verdict(
            tries=benefit > 0.0 and (live.on or live.wait == 0),
            layer=layer,
            lengths=lengths,
            padded=padded,
            profile=profile,
            benefit=benefit,
            lookup=overhead,
            saving=sum(s for s in savings if s > 0.0),
            savings=savings,
            alphas=alphas,
        )

    def leave(self, verdict: Verdict) -> None:
        """Report that the batch was left alone because ``verdict.tries`` is False.

        A lookup that is switched off learns from it that time has passed.
        """
        live = self._live[verdict.layer]
        with self._lock:
            live.last = verdict
            if verdict.benefit > 0.0 and live.wait > 0:
                live.wait -= 1
                if live.wait == 0:
                    live.forget()

    def record(self, verdict: Verdict, hits: float) -> None:
        """Report what a lookup yielded.

        Parameters
        ----------
        verdict : Verdict
            The answer about the batch.
        hits : float
            Sequences served; with one lookup for all layers, the mean over the layers.

        Raises
        ------
        ValueError
            Not 0 <= hits <= sequences of the batch.
        """
        queries = len(verdict.lengths)
        if not 0 <= hits <= queries:
            raise ValueError(f"hits must be between 0 and the {queries} sequences of the batch, got {hits}")
        live = self._live[verdict.layer]
        with self._lock:
            live.last = verdict
            live.all_queries += queries
            live.all_hits += hits
            if live.wait == 0:  # else another thread has switched off since: no evidence about what comes after
                live.add(verdict, hits, 0.5 ** (queries / self._half_life))
                self._review(live)

    def state(self) -> list[dict[str, Any]]:
        """What is on, what is off and why, JSON-able.

        Returns
        -------
        list of dict
            One for each layer, preceded by one for `SEQUENCE` when there is one lookup for all layers:

            * ``layer``: int
            * ``on``: bool, for a batch like the last one
            * ``why``: str
            * ``predicted_benefit_ms``: float or None, for the last batch
            * ``break_even``: float or None, hit rate at which lookups pay, over the batches tried lately
            * ``predicted_hit_rate``: float or None, alpha of the last batch
            * ``hit_rate``: float or None, live, recent sequences weighing more
            * ``queries``: int, sequences looked up since the start
            * ``hits``: float or None, of these, since the start

            For `SEQUENCE`, rates and hits are means over the layers. Live numbers of the layers below it are not
            known one by one (None): only ``predicted_hit_rate`` is the layer's own.
        """
        with self._lock:
            rows = [self._state_of(layer, live) for layer, live in self._live.items()]
            if self._sequence:
                rows += [self._state_served(layer, rows[0]) for layer in range(self._layers)]
        return rows

    # -- inside

    def _served(self, layer: int) -> Sequence[int]:
        """The layers that this lookup serves."""
        return range(self._layers) if layer == SEQUENCE else (layer,)

    def _review(self, live: _Live) -> None:
        """Switch off or on after new evidence; called with the lock held."""
        rate, break_even = live.rate, live.break_even
        if rate is None or break_even is None:
            return
        if live.on:
            if live.count >= self._half_life:
                live.backoff = 0  # it has held: the next drift is a new story
            if live.count >= self._min_queries and rate < break_even:
                self._switch_off(live)
        elif live.count >= self._probe_queries:
            if rate >= min(break_even * self._margin, (1.0 + break_even) / 2.0):
                # The backoff is kept: a lookup that flaps is soon probed as rarely as one that never hits.
                live.on, live.count = True, 0
            else:
                self._switch_off(live)

    def _switch_off(self, live: _Live) -> None:
        live.on = False
        live.wait = live.backoff = min(max(2 * live.backoff, self._backoff), self._backoff_max)

    def _state_of(self, layer: int, live: _Live) -> dict[str, Any]:
        rate, break_even, last = live.rate, live.break_even, live.last
        if self._profile is None:
            on, why, last = True, self._why_always, None
        elif live.wait > 0:
            on = False
            why = (
                f"hit rate {_percent(rate)} below break-even {_percent(break_even)}, "
                f"probed again in {live.wait + 1} batches"
            )
        elif last is None:
            on = any(map(any, self._alphas[layer].values()))
            why = "no batch seen yet" if on else "no held-out sequence reaches the threshold"
        else:
            on = last.benefit > 0.0
            why = f"predicted benefit {last.benefit:+.3g} ms"
            if on and not live.on:
                why = f"probing: {live.count} of {self._probe_queries} sequences seen"
        return {
            "layer": layer,
            "on": on,
            "why": why,
            "predicted_benefit_ms": None if last is None else last.benefit,
            "break_even": break_even,
            "predicted_hit_rate": sum(last.alphas) / len(last.alphas) if last is not None and last.alphas else None,
            "hit_rate": rate,
            "queries": live.all_queries,
            "hits": live.all_hits,
        }

    def _state_served(self, layer: int, decision: dict[str, Any]) -> dict[str, Any]:
        """One layer of a model with one lookup for all layers: it follows the decision, or stays out of it."""
        last = self._live[SEQUENCE].last
        row = {**decision, "layer": layer}
        for key in ("predicted_benefit_ms", "break_even", "predicted_hit_rate", "hit_rate", "hits"):
            row[key] = None  # the decision's, not this layer's
        if last is not None and last.savings:
            row["predicted_hit_rate"] = last.alphas[layer]
            if last.savings[layer] <= 0.0:
                row["on"] = False
                row["why"] = f"a hit costs {-last.savings[layer]:.3g} ms more than exact attention"
        return row


def _thresholds(given: float | Sequence[float], layers: int) -> tuple[float, ...]:
    """One threshold for each layer."""
    values = tuple(map(float, given)) if isinstance(given, Sequence) else (float(given),)
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
