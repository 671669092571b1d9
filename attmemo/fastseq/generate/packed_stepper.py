"""One decoding step after another on this project's kernels: all layers in one native call.

The prompt of a decoder is read by the model's own code, once a sample; its keys and values are then handed over. Of an
encoder-decoder, the keys and values of the source are computed here, without the padding.

Shapes: B samples, M beams, R = B·M rows, N source or prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.fastseq.generate.call_state import CallState
from attmemo.fastseq.generate.decoders import PackedDecoder
from attmemo.fastseq.generate.stepper import Stepper
from attmemo.fastseq.generate.vocabulary import Rough
from attmemo.kernels.decoder import OwnKeys, SharedKeys


def make_stepper(
    model: Any, state: CallState, input_ids: Tensor, rows_each: int, room: int, model_kwargs: dict[str, Any]
) -> Stepper | PackedStepper:
    """A `PackedStepper` where the call has a packed decoder and fits it, else a `Stepper`; takes what that does."""
    stepper = Stepper(model, state, input_ids, rows_each, room, model_kwargs)
    packed = state.packed
    if packed is None or state.mode != "shared":
        return stepper
    for name in ("decoder_attention_mask", "decoder_position_ids", "token_type_ids"):
        if stepper.kwargs.get(name) is not None:
            state.counts[f"not packed: {name}"] += 1
            return stepper
    return PackedStepper(stepper, packed, room + input_ids.shape[1])


class PackedStepper:
    """Does what a `Stepper` does, with the same methods.

    Parameters
    ----------
    stepper : Stepper
        Of the same call, not begun.
    packed : PackedDecoder
    span : int
        Positions at most, the prompt's among them.
    """

    def __init__(self, stepper: Stepper, packed: PackedDecoder, span: int) -> None:
        self.stepper, self.packed, self.span = stepper, packed, span
        self.state, self.rows_each, self.samples = stepper.state, stepper.rows_each, stepper.samples
        stack = packed.stack
        rows = self.samples * self.rows_each
        self.own = OwnKeys(stack.layers, stack.key_heads, stack.width, rows, stack.dtype)
        self.shared: SharedKeys | None = None
        self.positions = torch.zeros(rows, dtype=torch.int64)
        description = packed.description
        self.angles = None if description.angles is None else description.angles(span + 1)
        self.bias = None if description.bias is None else description.bias(span + 1)
        self.wants_greatest = False
        self._rough: Rough | None = None

    def first(self, input_ids: Tensor) -> Tensor:
        """Logits `[R, V]` after the prompt, which is read at B rows."""
        once = input_ids[:: self.rows_each]
        logits = self._begin(once) if self.stepper.encoder_decoder else self._read_prompt(input_ids)
        self.state.cache = self
        if self.stepper.encoder_decoder:
            rows = np.repeat(np.arange(self.samples), self.rows_each)
            self.own.take(rows)
            self.positions = self.positions[torch.from_numpy(rows)]
            return logits[torch.from_numpy(rows)]
        return logits

    def next(self, input_ids: Tensor) -> Tensor:
        """Logits `[R, V]` after `[R, n]`, of which all but the last column are in the cache."""
        return self._step(input_ids[:, -1], self.rows_each)

    def greatest(self, scores: Tensor) -> Tensor:
        """Of scores of the last step the words with the greatest `[R]`.

        With `wants_greatest`, a step may return rough logits, of which the caller may only set some to minus infinity.
        """
        if self._rough is None:
            return scores.argmax(-1)
        rough, self._rough = self._rough, None
        words = self.packed.vocabulary.greatest(rough, scores)
        if words is None:
            self.wants_greatest = False  # such weights or such texts: it would be so again
            exact = self.packed.vocabulary.logits(rough.hidden)
            return exact.masked_fill_(scores == -torch.inf, -torch.inf).argmax(-1)
        self.state.counts["rough_steps"] += 1
        return words

    def move(self, source: Tensor) -> None:
        """Row i goes on as a copy of row `source[i]`; `[R]` of integers."""
        self.own.take(source.numpy())

    def keep(self, samples: Sequence[int]) -> None:
        """Only these samples stay, in this order."""
        self.state.account()
        before = self.samples
        rows = (np.asarray(samples)[:, None] * self.rows_each + np.arange(self.rows_each)).ravel()
        self.own.take(rows)
        self.positions = self.positions[torch.from_numpy(rows)]
        if self.shared is not None:
            self.shared.keep(samples)
        self.samples = len(samples)
        self.state.counts["rows_removed"] += (before - len(samples)) * self.rows_each

    def bytes(self) -> dict[str, int]:
        """Bytes of the states held, as those of `BeamCache`."""
        return {"shared": 0 if self.shared is None else self.shared.nbytes, "suffix": self.own.nbytes}

    def _step(self, tokens: Tensor, beams: int) -> Tensor:
        description, stack = self.packed.description, self.packed.stack
        hidden = description.embed(tokens, self.positions).contiguous()
        bias = self.bias
        hidden = stack.step(
            hidden, beams, self.own, self.shared, positions=self._places(), angles=self.angles, bias=bias
        )
        self.positions += 1
        self.state.counts["steps"] += 1
        self.state.counts["packed_steps"] += 1
        self._rough = self.packed.vocabulary.rough(hidden) if self.wants_greatest else None
        return self.packed.vocabulary.logits(hidden) if self._rough is None else self._rough.logits

    def _places(self) -> npt.NDArray[np.int32] | None:
        return None if self.angles is None else self.positions.numpy().astype(np.int32)

    def _begin(self, once: Tensor) -> Tensor:
        """Keys and values of the source, and the decoder's first tokens `[B, n]`."""
        source: Tensor = self.state.encoder_outputs.last_hidden_state
        mask = self.stepper.kwargs.get("attention_mask")
        seen = torch.ones(source.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        stack, crosses = self.packed.stack, self.packed.description.crosses
        assert crosses is not None
        rows = source[seen]  # [sum of lengths, D]
        lengths: list[int] = seen.sum(1).tolist()
        self.shared = SharedKeys(stack.layers, stack.key_heads, stack.width, lengths, stack.dtype)
        for layer, (key, value) in enumerate(crosses):
            key, value = (self.packed.stand_in(module) for module in (key, value))
            self.shared.put(layer, key(rows), value(rows))
        self.own.take(np.arange(self.samples))
        self.positions = torch.zeros(self.samples, dtype=torch.int64)
        for column in once.unbind(1):
            logits = self._step(column, 1)
        return logits

    def _read_prompt(self, input_ids: Tensor) -> Tensor:
        """The model's own code reads the prompt; what it leaves becomes shared keys."""
        logits = self.stepper.first(input_ids)
        kwargs, stack = self.stepper.kwargs, self.packed.stack
        rows = len(input_ids)
        positions = kwargs.get("position_ids")
        mask = kwargs.get("attention_mask")
        length = input_ids.shape[1]
        if positions is not None:
            self.positions = positions[:, -1].expand(rows).clone().to(torch.int64)
        elif mask is not None:
            self.positions = mask[:, :length].sum(1).to(torch.int64)
        else:
            self.positions = torch.full((rows,), length, dtype=torch.int64)
        seen = torch.ones(self.samples, length, dtype=torch.bool)
        if mask is not None:
            seen = mask[:: self.rows_each, :length].bool()
        layers: Any = self.stepper.cache.self_cache.layers
        lengths: list[int] = seen.sum(1).tolist()
        self.shared = SharedKeys(stack.layers, stack.key_heads, stack.width, lengths, stack.dtype)
        for number, layer in enumerate(layers):
            keys, values = (part.transpose(1, 2)[seen].flatten(1) for part in (layer.prefix_keys, layer.prefix_values))
            self.shared.put(number, keys, values)
            layer.prefix_keys = layer.prefix_values = None
        return logits
