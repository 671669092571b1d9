"""Does a lookup pay, for this layer and this batch? The engine asks before every lookup.

The prediction is Equation 3 of AttMEMO (arXiv 2301.09262, section 5.4), in milliseconds for the whole batch, with the
cost of a hit, which the paper leaves out: ``PB = sum of alpha_l * (T_exact_l - T_hit_l) - T_lookup > 0``, over the
layers l that the lookup serves, at their own thresholds. Layers in which a hit costs more than it saves count as 0.

Traffic changes, so the gate also watches what really hits: a lookup whose live hit rate falls below break-even is
switched off, and probed now and then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from attmemo.perfmodel.profile import SEQUENCE, Profile
from attmemo.system.locking import thread_lock

_MANY = 50  # held-out texts; if none of so many reaches a threshold, no lookup is tried any more
_MIN_QUERIES = 32  # live sequences before the live hit rate counts
_HALF_LIFE = 128.0  # live sequences after which one counts half in the rate
# A lookup that is switched off leaves so many batches alone, then probes. Each failed probe doubles the wait. Only
# batches that the prediction favours count.
_BACKOFF, _BACKOFF_MAX = 16, 1024
# A probe lasts for so many sequences. It must find `_MARGIN` times the break-even rate to switch the lookup on again
# (at most half-way from break-even to 1): a lookup near break-even would switch all the time.
_PROBE_QUERIES, _MARGIN = 16, 1.25


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer about one batch. The caller keeps it and hands it back to `Gate.leave` or `Gate.record`."""

    tries: bool  # a lookup pays: the prediction says so, and live traffic does not say otherwise
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
        """Whether serving the sequences that hit, of these valid tokens, costs less than computing the whole batch.

        Ask after the lookup. A batch with hits and misses is computed in two parts: a few hits in a large batch save
        less than the second part costs.
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

    def add(self, verdict: Verdict, hits: float) -> None:
        """Count one batch."""
        queries = len(verdict.lengths)
        keep = 0.5 ** (queries / _HALF_LIFE)
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
    False, else `record`. Any number of threads may do so.

    Without a profile nothing can be predicted: every batch is tried, and hits are counted. So it is with `always`.
    `thresholds` are the similarity scores that a hit needs, by layer. ValueError: the profile has other layers.

    Drift works in one direction. Live traffic can switch off what the prediction favours. It never switches on what
    the prediction is against: where nothing is tried, nothing is learnt. One lookup for all layers is watched as a
    whole, by the mean share of sequences served. This share times the saving if every sequence hit everywhere is exact
    where layers save alike or hit alike, and good enough to notice traffic that finds nothing.
    """

    def __init__(
        self,
        profile: Profile | None,
        thresholds: Sequence[float],
        lookup: Literal["layer", "sequence"],
        layers: int,
        *,
        always: bool = False,
    ) -> None:
        if profile is not None and len(profile.costs) != layers:
            raise ValueError(f"the profile has costs for {len(profile.costs)} layers, the model has {layers}")
        self._profile = None if always else profile
        self._why_always = "always on by request" if always else "no profile: always tried"
        self._sequence, self._layers = lookup == "sequence", layers
        self._live = {layer: _Live() for layer in ((SEQUENCE,) if self._sequence else range(layers))}
        # lookup -> length -> alpha of each layer that the lookup serves; a missing length has no record
        self._alphas: dict[int, dict[int, tuple[float, ...]]] = {layer: {} for layer in self._live}
        self.hopeless = False
        """Whether no held-out sequence of any length reaches a threshold: nothing need be asked."""
        if self._profile is not None:
            rates = self._profile.rates_sequence if self._sequence else self._profile.rates
            for layer, table in self._alphas.items():
                for length in rates.stored:
                    table[length] = tuple(rates.alpha(thresholds[i], i, length) for i in self._served(layer))
            reached = any(any(alphas) for table in self._alphas.values() for alphas in table.values())
            # A few held-out texts that all miss prove little: then batches are tried, and live traffic decides.
            self.hopeless = not reached and sum(rates.samples(0, length) for length in rates.stored) >= _MANY
        self._lock = thread_lock()

    def ask(self, layer: int, lengths: Sequence[int], padded: int) -> Verdict:
        """Whether a lookup for this batch pays: for a layer, or `SEQUENCE` if there is one lookup per sequence.

        `lengths` are the valid tokens of each sequence. Exact attention is computed at the length `padded`.
        """
        live, lengths, profile = self._live[layer], tuple(lengths), self._profile
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
        """Report that the batch was left alone; a lookup that is switched off learns that time has passed."""
        live = self._live[verdict.layer]
        with self._lock:
            live.last = verdict
            if verdict.benefit > 0.0 and live.wait > 0:
                live.wait -= 1
                if live.wait == 0:
                    live.forget()

    def record(self, verdict: Verdict, hits: float) -> None:
        """Report how many sequences a lookup served; with one lookup for all layers, the mean over the layers."""
        queries = len(verdict.lengths)
        live = self._live[verdict.layer]
        with self._lock:
            live.last = verdict
            live.all_queries += queries
            live.all_hits += hits
            if live.wait == 0:  # else another thread has switched off since: no evidence about what comes after
                live.add(verdict, hits)
                self._review(live)

    def state(self) -> list[dict[str, Any]]:
        """What is on, what is off and why, JSON-able: a row for each layer.

        With one lookup for all layers a row for `SEQUENCE` comes first: its rates and hits are means over the layers,
        and of the layers below only ``predicted_hit_rate`` is their own. ``on`` and ``why`` are about a batch like the
        last one, ``predicted_benefit_ms`` and ``predicted_hit_rate`` (alpha) about the last one, ``break_even`` and
        ``hit_rate`` about sequences tried lately, ``queries`` and ``hits`` about all since the start.
        """
        with self._lock:
            rows = [self._state_of(layer, live) for layer, live in self._live.items()]
            if self._sequence:
                rows += [self._state_served(layer, rows[0]) for layer in range(self._layers)]
        return rows

    def _served(self, layer: int) -> Sequence[int]:
        """The layers that this lookup serves."""
        return range(self._layers) if layer == SEQUENCE else (layer,)

    def _review(self, live: _Live) -> None:
        """Switch off or on after new evidence; called with the lock held."""
        rate, break_even = live.rate, live.break_even
        if rate is None or break_even is None:
            return
        if live.on:
            if live.count >= _HALF_LIFE:
                live.backoff = 0  # it has held: the next drift is a new story
            if live.count >= _MIN_QUERIES and rate < break_even:
                self._switch_off(live)
        elif live.count >= _PROBE_QUERIES:
            if rate >= min(break_even * _MARGIN, (1.0 + break_even) / 2.0):
                # The backoff is kept: a lookup that flaps is soon probed as rarely as one that never hits.
                live.on, live.count = True, 0
            else:
                self._switch_off(live)

    def _switch_off(self, live: _Live) -> None:
        live.on = False
        live.wait = live.backoff = min(max(2 * live.backoff, _BACKOFF), _BACKOFF_MAX)

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
                why = f"probing: {live.count} of {_PROBE_QUERIES} sequences seen"
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
        unknown = ("predicted_benefit_ms", "break_even", "predicted_hit_rate", "hit_rate", "hits")
        row = decision | {"layer": layer} | dict.fromkeys(unknown)  # they are the decision's, not this layer's
        if last is not None and last.savings:
            row["predicted_hit_rate"] = last.alphas[layer]
            if last.savings[layer] <= 0.0:
                row["on"] = False
                row["why"] = f"a hit costs {-last.savings[layer]:.3g} ms more than exact attention"
        return row


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100.0 * share:.3g} %"
