"""What one call of `generate` holds: its counters, the encoder's states at one row a sample, and its cache."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from attmemo.fastseq.cache import BeamCache, SharedTensors


@dataclass
class CallState:
    """Lives as long as one call; the attention function and the loop meet here.

    Attributes
    ----------
    mode : str
        "shared" or "el": how cross-attention states, and a decoder's prompt where that is possible, are held.
    shared : SharedTensors
    counts : Counter
        How often each kind of attention ran: "shared", "prefix", "el", "el_self", "plain"; and what else happened:
        "steps", "rows_removed", "encoder_tokens", "encoder_tokens_padded".
    encoder_outputs : ModelOutput or None
        With `last_hidden_state` `[B, N, D]`. What passes through `generate` is a stand-in of shape `[B, N, 1]`, which
        `generate` may repeat for each beam at no cost.
    cache : BeamCache or None
        The last one made; for accounting.
    """

    mode: str
    remove_finished: bool = True
    shared: SharedTensors = field(default_factory=SharedTensors)
    counts: Counter[str] = field(default_factory=Counter)
    encoder_outputs: Any = None
    cache: BeamCache | None = None
    cache_bytes: dict[str, int] = field(default_factory=dict)

    def account(self) -> None:
        """Remember what the cache holds; rows that leave later make it smaller, and the peak is what was needed."""
        if self.cache is not None:
            now = self.cache.bytes()
            if sum(now.values()) >= sum(self.cache_bytes.values()):
                self.cache_bytes = now
