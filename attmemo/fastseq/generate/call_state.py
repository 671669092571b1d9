"""What one call of `generate` holds: its counters, the encoder's states at one row a sample, and its cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from attmemo.fastseq.generate.beam_cache import BeamCache, SharedTensors

if TYPE_CHECKING:
    from attmemo.fastseq.generate.decoders import PackedDecoder
    from attmemo.fastseq.generate.el_attention import ELStates
    from attmemo.fastseq.generate.packed_stepper import PackedStepper


@dataclass
class CallState:
    """Lives as long as one call; the attention function and the loop meet here.

    Attributes
    ----------
    mode : str
        "shared" or "el": how cross-attention states, and a decoder's prompt, are held. "auto" until the sizes
        are known.
    el_holds : callable
        Whether EL-attention gives this model's results; asked only if the cost model would choose it.
    shared : SharedTensors
    counts : Counter
        How often each kind of attention ran: "shared", "prefix", "el", "el_self", "plain"; and what else happened:
        "steps", "packed_steps", "rows_removed", "encoder_tokens", "encoder_tokens_padded".
    encoder_outputs : ModelOutput or None
        With `last_hidden_state` `[B, N, D]`. What passes through `generate` is a stand-in of shape `[B, N, 1]`, which
        `generate` may repeat for each beam at no cost.
    el : ELStates or None
        The encoder's states, where cross-attention is EL-attention.
    packed : PackedDecoder or None
        What the decoder's layers run on; None: on the model's own code.
    cache : BeamCache, PackedStepper or None
        The last one made; for accounting.
    cache_bytes : dict
        The most that it held, by kind; what `release` leaves.
    """

    mode: str
    el_holds: Callable[[], bool] = lambda: False
    shared: SharedTensors = field(default_factory=SharedTensors)
    counts: Counter[str] = field(default_factory=Counter)
    encoder_outputs: Any = None
    el: ELStates | None = None
    packed: PackedDecoder | None = None
    cache: BeamCache | PackedStepper | None = None
    cache_bytes: dict[str, int] = field(default_factory=dict)

    def __deepcopy__(self, memo: object) -> CallState:
        # It rides on a config, and transformers copies configs (get_text_config of an encoder-decoder, generate).
        return self

    def account(self) -> None:
        """Remember what the cache holds; rows that leave later make it smaller, and the peak is what was needed."""
        if self.cache is not None:
            now = self.cache.bytes()
            if sum(now.values()) >= sum(self.cache_bytes.values()):
                self.cache_bytes = now

    def release(self) -> None:
        """Let go of all tensors. Layers and what they share know each other, and would keep each other alive."""
        if self.el is not None:
            self.el.layers.clear()
        self.shared.clear()
        self.cache = self.el = self.encoder_outputs = None
