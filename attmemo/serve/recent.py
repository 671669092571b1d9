"""The last two minutes of a service, second by second, and the latencies of its last requests."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from time import monotonic
from typing import Any, Final

import numpy as np

SECONDS: Final = 120
RATE: Final = 10
"""Seconds that a rate is a mean over."""
LATENCIES: Final = 4096
"""Requests whose latency is remembered."""


@dataclass(slots=True)
class Second:
    """What happened in one second."""

    number: int
    requests: int = 0
    sequences: int = 0
    refusals: int = 0
    tokens: int = 0
    rows: int = 0
    extra: int = 0
    busy: float = 0.0  # seconds of the model


class Recent:
    """Counts by second."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: deque[Second] = deque(maxlen=SECONDS)
        self._latencies: deque[tuple[float, float]] = deque(maxlen=LATENCIES)

    def request(self, milliseconds: float, sequences: int) -> None:
        """A request was answered."""
        with self._lock:
            second = self._second()
            second.requests += 1
            second.sequences += sequences
            self._latencies.append((monotonic(), milliseconds))

    def refusal(self) -> None:
        """A request was refused."""
        with self._lock:
            self._second().refusals += 1

    def forward(self, tokens: int, rows: int, extra: int, seconds: float) -> None:
        """A forward of the model."""
        with self._lock:
            second = self._second()
            second.tokens += tokens
            second.rows += rows
            second.extra += extra
            second.busy += seconds

    def show(self) -> dict[str, Any]:
        """Rates, percentiles and one number a second, JSON-able.

        The second that runs is left out. Rates are means over the last `RATE` whole seconds, percentiles are those of
        requests answered in the last `SECONDS` seconds.
        """
        with self._lock:
            now = monotonic()
            last = int(now)
            known = {second.number: second for second in self._seconds}
            latencies = [spent for at, spent in self._latencies if at > now - SECONDS]
        line = [known.get(number, Second(number)) for number in range(last - SECONDS, last)]
        few = line[-RATE:]
        tokens, rows = sum(one.tokens for one in line), sum(one.rows for one in line)
        found: dict[str, Any] = {
            "requests_per_second": sum(one.requests for one in few) / RATE,
            "sequences_per_second": sum(one.sequences for one in few) / RATE,
            "refusals_per_second": sum(one.refusals for one in few) / RATE,
            "tokens_per_second": sum(one.tokens for one in few) / RATE,
            "rows_per_second": sum(one.rows + one.extra for one in few) / RATE,
            "busy": min(1.0, sum(one.busy for one in few) / RATE),
            "share_computed": rows / tokens if tokens else None,
            "verified_rows": sum(one.extra for one in line),
            "latency_ms": None,
            "history": {
                "requests": [one.requests for one in line],
                "share": [one.rows / one.tokens if one.tokens else None for one in line],
            },
        }
        if latencies:
            p50, p90, p99 = np.percentile(latencies, [50, 90, 99]).tolist()
            found["latency_ms"] = {"p50": p50, "p90": p90, "p99": p99, "requests": len(latencies)}
        return found

    def _second(self) -> Second:
        number = int(monotonic())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(Second(number))
        return self._seconds[-1]
