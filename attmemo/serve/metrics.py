"""What Prometheus reads. Counts and times only: no text of a request, and no label that a client chooses."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from attmemo.serve.recent import Recent

DURATIONS: Final = tuple(0.00001 * 1.5**power for power in range(1, 36))
"""Buckets of durations, in seconds; as TEI."""
SIZES: Final = tuple(float(1 << power) for power in range(21))
TIMES: Final = ("duration", "tokenization_duration", "queue_duration", "inference_duration")


class Metrics:
    """Counters of one service, in a registry of their own.

    Attributes
    ----------
    recent : Recent
        The last two minutes, for the live page.
    now : callable
        Gives gauges by name when metrics are read.
    """

    def __init__(self) -> None:
        self.recent = Recent()
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._counts: Counter[tuple[str, str]] = Counter()  # by name and value of the label
        self.now: Callable[[], dict[str, Any]] = dict
        self._times = [
            Histogram(f"te_request_{name}", "Seconds of a request.", registry=self._registry, buckets=DURATIONS)
            for name in TIMES
        ]
        self._length = self._sizes("te_request_input_length", "Tokens of a request.")
        self._batch = self._sizes("te_batch_next_size", "Sequences in a forward.")
        self._batch_tokens = self._sizes("te_batch_next_tokens", "Tokens in a forward.")
        self._registry.register(_Counters(self))

    def asked(self, method: str) -> None:
        """A request came: ``single`` or ``batch``, or ``tokenize`` or ``decode``."""
        with self._lock:
            self._counts["te_request_count", method] += 1

    def answered(self, method: str, task: str, sequences: int, tokens: int, milliseconds: tuple[float, ...]) -> None:
        """A request was answered: milliseconds in all, of tokenization, of waiting and of the model."""
        with self._lock:
            self._counts["te_request_success", method] += 1
            self._counts[f"te_{task}_success", ""] += sequences
        for histogram, spent in zip(self._times, milliseconds, strict=True):
            histogram.observe(spent / 1e3)
        self._length.observe(tokens)
        self.recent.request(milliseconds[0], sequences)

    def shown(self, method: str, inputs: int, milliseconds: float) -> None:
        """A request of the tokenizer's own routes was answered."""
        with self._lock:
            self._counts["te_request_success", method] += 1
        for histogram in self._times[:2]:  # the model had no part in it
            histogram.observe(milliseconds / 1e3)
        self.recent.request(milliseconds, inputs)

    def failed(self, reason: str) -> None:
        """A request was refused, or could not be answered."""
        with self._lock:
            self._counts["te_request_failure", reason] += 1
        self.recent.refusal()

    def forward(self, sequences: int, tokens: int, rows: int, extra: int, seconds: float) -> None:
        """A forward of the model: rows computed for answers, and extra ones for verifications."""
        with self._lock:
            for name, more in (("forwards", 1), ("sequences", sequences), ("tokens", tokens), ("rows_computed", rows)):
                self._counts[f"attmemo_{name}", ""] += more
            self._counts["attmemo_rows_verified", ""] += extra
        self._batch.observe(sequences)
        self._batch_tokens.observe(tokens)
        self.recent.forward(tokens, rows, extra, seconds)

    def counts(self) -> dict[tuple[str, str], int]:
        """Counters by name and value of the label."""
        with self._lock:
            return dict(self._counts)

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self._registry)

    def _sizes(self, name: str, what: str) -> Histogram:
        return Histogram(name, what, registry=self._registry, buckets=SIZES)


_RISING: Final = frozenset({
    "attmemo_reused", "attmemo_repeated", "attmemo_shadow_tried", "attmemo_shadow_reused", "attmemo_shadow_changed",
})  # fmt: skip
"""Of the levels, those that only rise: counters."""
_LABELS: Final = {"te_request_count": "method", "te_request_success": "method", "te_request_failure": "err"}
_WHAT: Final = {
    "attmemo_forwards": "Forwards of the model.",
    "attmemo_sequences": "Sequences that were answered.",
    "attmemo_tokens": "Tokens of these sequences.",
    "attmemo_rows_computed": "Tokens recomputed for answers.",
    "attmemo_rows_verified": "Tokens recomputed beside answers, to check or to correct them.",
}


class _Counters(Collector):
    """TEI's counters have no ending; prometheus_client gives every counter one, but not to metrics of unknown type."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        for (name, value), count in sorted(self._metrics.counts().items()):
            if name in _WHAT:
                yield CounterMetricFamily(name, _WHAT[name], value=count)
                continue
            metric = found.setdefault(name, Metric(name, "Counted as text-embeddings-inference does.", "unknown"))
            metric.add_sample(name, {_LABELS[name]: value} if name in _LABELS else {}, count)
        yield from found.values()
        for name, (what, level) in self._metrics.now().items():
            if level is not None:
                family_of = CounterMetricFamily if name in _RISING else GaugeMetricFamily
                yield family_of(name, what, value=float(level))
