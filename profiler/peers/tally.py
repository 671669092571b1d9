"""What one path took and answered at one batch size, and the cell that is made of it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attmemo.profiler.answers import changed, cosine
from attmemo.profiler.models import Tokens
from attmemo.profiler.peers.paths import MIN_COSINE
from attmemo.profiler.peers.stream import Turn


class Tally:
    """Seconds and answers of one path, batch by batch."""

    def __init__(self) -> None:
        self.seconds: dict[int, float] = defaultdict(float)  # by window
        self.texts: dict[int, int] = defaultdict(int)
        self.sampled: set[int] = set()
        self._places: list[tuple[int, int]] = []  # row and window of each answer
        self._answers: list[Tensor] = []

    def add(self, turn: Turn, texts: Sequence[Tokens], seconds: float, given: Tensor) -> None:
        """One batch of this turn."""
        self.seconds[turn.window] += seconds
        self.texts[turn.window] += len(texts)
        if turn.whole:
            self.sampled.add(turn.window)
        self._places += [(text.row, turn.window) for text in texts]
        self._answers.append(given)

    def ms(self, windows: Sequence[int]) -> float:
        """Milliseconds a text in these windows."""
        return 1e3 * sum(self.seconds[w] for w in windows) / sum(self.texts[w] for w in windows)

    def quality(self, kind: str, exact: Tensor, first: int = 0) -> dict[str, Any] | None:
        """How the answers differ from the exact ones, of which there is one for each text of the stream.

        From the window `first` on; None if there is no answer.
        """
        rows, windows = torch.tensor(self._places).T
        kept = windows >= first
        if not kept.any():
            return None
        given, wanted = torch.cat(self._answers)[kept], exact[rows[kept]]
        share = float(changed(kind, wanted, given, MIN_COSINE).float().mean())
        found: dict[str, Any] = {"texts": len(given), "changed": share}
        if kind == "classifier":
            return found
        near = cosine(wanted, given)
        return found | {"cosine_mean": float(near.mean()), "cosine_p1": float(near.quantile(0.01))}


def cell(tally: Tally, stock: Tally, kind: str, exact: Tensor, windows: int) -> dict[str, Any]:
    """Return times, speed over the stock model and quality, JSON-able.

    Both tallies answered the sampled windows; `exact` has an answer of the stock model in float32 for each text of the
    stream, and `windows` is the number of its whole windows. ``texts``, ``ms`` a text and ``speed`` are of the sampled
    windows, ``speeds`` of each, ``late_speed`` of those with their middle in the last third of the stream, None if
    there is none; ``quality`` is of all texts that the path answered, ``late_quality`` of those in the last third.
    """
    sampled = sorted(stock.sampled)
    first = math.ceil(2 * windows / 3 - 0.5)
    late = [window for window in sampled if window >= first]
    return {
        "texts": sum(tally.texts[w] for w in sampled), "ms": tally.ms(sampled),
        "speed": stock.ms(sampled) / tally.ms(sampled), "speeds": [stock.ms([w]) / tally.ms([w]) for w in sampled],
        "late_speed": stock.ms(late) / tally.ms(late) if late else None, "quality": tally.quality(kind, exact),
        "late_quality": tally.quality(kind, exact, first),
    }  # fmt: skip


def counts(stats: Mapping[str, Any]) -> dict[str, Any]:
    """What a reader wants to know of a memoized model's statistics."""
    kept = (
        "sequences", "reused", "repeated", "served", "tokens", "rows_computed", "records", "record_bytes", "hits",
        "calls",
    )  # fmt: skip
    found = {key: stats[key] for key in kept if isinstance(stats.get(key), int)}
    if found.get("tokens"):
        found["share_computed"] = found["rows_computed"] / found["tokens"]
    if stats.get("guard"):
        found["guard"] = {key: stats["guard"][key] for key in ("state", "says", "verified", "changed")}
    return found
