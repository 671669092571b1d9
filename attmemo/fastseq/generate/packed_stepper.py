"""One decoding step after another on this project's kernels: all layers in one native call.

A prompt, and a source, are read by them too, once a sample and without padding; their keys and values are shared.

DRAFTS.  One text alone, in float32, waits for weights: a step reads them all for one row. So the same layers in 8 bits
foresee some words, in a quarter of the bytes each, and one step in float32 reads these words together, and so all
weights once for them. What it gives for a word are the same bits as in a step of its own, and it is handed out only
if the word is the one that the caller chose. So a wrong word costs time alone.

Shapes: B samples, M beams, R = B·M rows, N source or prompt positions, V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from attmemo.fastseq.generate.call_state import CallState
from attmemo.fastseq.generate.decoder_stack import OwnKeys, SharedKeys
from attmemo.fastseq.generate.decoders import PackedDecoder, PackedStack
from attmemo.fastseq.generate.stepper import Stepper
from attmemo.fastseq.generate.vocabulary import MOST_ROWS, Rough

_FEWEST_RIGHT: Final = 0.25  # of drafts: with fewer right ones they cost more than they save
_WEIGHT: Final = 0.1  # of the last draft in the share of right ones


def make_stepper(
    model: Any, state: CallState, input_ids: Tensor, rows_each: int, room: int, model_kwargs: dict[str, Any]
) -> Stepper | PackedStepper:
    """A `PackedStepper` where the call has a packed decoder and fits it, else a `Stepper`; takes what that does."""
    stepper = Stepper(model, state, input_ids, rows_each, room, model_kwargs)
    packed = state.packed
    if packed is None or state.mode != "shared":
        return stepper
    odd = [name for name in ("decoder_attention_mask", "decoder_position_ids", "token_type_ids")
           if stepper.kwargs.get(name) is not None]  # fmt: skip
    mask = stepper.kwargs.get("attention_mask")
    if mask is not None and not _is_plain(mask.bool(), stepper.encoder_decoder):
        odd.append("attention_mask")
    if odd:
        state.counts[f"not packed: {odd[0]}"] += 1
        return stepper
    return PackedStepper(stepper, packed, room + input_ids.shape[1])


def _is_plain(seen: Tensor, encoder_decoder: bool) -> bool:
    """Whether each sample has something to read, and a prompt's last token counts: logits behind it are wanted."""
    if seen.dim() != 2:
        return False
    return bool(seen.any(1).all()) if encoder_decoder else bool(seen[:, -1].all())


@dataclass(frozen=True)
class _Foreseen:
    """A word, and the logits behind it, if it is the one."""

    word: int
    logits: Tensor
    rough: Rough | None


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
        # Drafts must not ask for positions that the model has no vectors of.
        self._last = min(span, int(getattr(stepper.model.config, "max_position_embeddings", None) or span))
        self.state, self.rows_each, self.samples = stepper.state, stepper.rows_each, stepper.samples
        stack = packed.stack.blocks
        rows = self.samples * self.rows_each
        self.own = OwnKeys(stack.layers, stack.key_heads, stack.width, rows, stack.dtype)
        self.shared: SharedKeys | None = None
        self.positions = torch.zeros(rows, dtype=torch.int64)
        parts = packed.stack.parts
        self.angles = None if parts.angles is None else parts.angles(span + 1)
        self.bias = None if parts.bias is None else parts.bias(span + 1)
        self.wants_greatest = False
        self._rough: Rough | None = None
        self._foreseen: deque[_Foreseen] = deque()
        self._drafted = self._right = 0  # words of the last draft, and how many of them were right
        self._share = 1.0  # of drafts that were right in their first word

    def first(self, input_ids: Tensor) -> Tensor:
        """Logits `[R, V]` after the prompt, which is read at B rows."""
        once = input_ids[:: self.rows_each]
        logits = self._begin(once) if self.stepper.encoder_decoder else self._read_prompt(once)
        self.state.cache = self
        rows = np.repeat(np.arange(self.samples), self.rows_each)
        self.own.take(rows)
        self.positions = self.positions[torch.from_numpy(rows)]
        return logits if self.rows_each == 1 else logits[torch.from_numpy(rows)]

    def next(self, input_ids: Tensor) -> Tensor:
        """Logits `[R, V]` after `[R, n]`, of which all but the last column are in the cache."""
        tokens = input_ids[:, -1]
        if len(tokens) > 1 or self.packed.draft is None:
            return self._step(tokens, self.rows_each)
        word = int(tokens)
        if self._foreseen:
            found = self._foreseen.popleft()
            if found.word == word:
                self._right += 1
                self.state.counts["foreseen"] += 1
                self.own.add()
                return self._handed_out(found)
            self._foreseen.clear()
        return self._look_ahead(self.packed.draft, word)

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
        hidden = self._pass(self.packed.stack, tokens, self.positions, beams)
        self._count()
        return self._logits(hidden)

    def _pass(
        self, stack: PackedStack, tokens: Tensor, positions: Tensor, beams: int, *, chained: bool = False
    ) -> Tensor:
        """Hidden states of tokens `[n]` behind what the cache holds, which gains them."""
        hidden = stack.parts.embed(tokens, positions).contiguous()
        places = None if self.angles is None else positions.numpy().astype(np.int32)
        return stack.blocks.step(
            hidden, beams, self.own, self.shared, chained=chained, positions=places, angles=self.angles, bias=self.bias
        )

    def _count(self) -> None:
        self.positions += 1
        self.state.counts["steps"] += 1
        self.state.counts["packed_steps"] += 1

    def _logits(self, hidden: Tensor) -> Tensor:
        self._rough = self.packed.vocabulary.rough(hidden) if self.wants_greatest else None
        return self.packed.vocabulary.logits(hidden) if self._rough is None else self._rough.logits

    def _look_ahead(self, draft: PackedStack, word: int) -> Tensor:
        """Logits `[1, V]` after a word, and after those that the draft foresees behind it, for later calls."""
        length = self.own.length
        if self._drafted:
            self._share += _WEIGHT * ((self._right > 0) - self._share)
        wanted = min(self._right + 1, MOST_ROWS - 1) if self._drafted else MOST_ROWS - 1
        count = min(wanted, max(self._last - int(self.positions) - 1, 0)) if self._share > _FEWEST_RIGHT else 0
        words = torch.tensor([word])
        for place in range(count):
            hidden = self._pass(draft, words[-1:], self.positions + place, 1)
            words = torch.cat((words, self.packed.vocabulary.likely(hidden)))
        self.own.length = length
        places = self.positions + torch.arange(len(words))
        hidden = self._pass(self.packed.stack, words, places, len(words), chained=True)
        self.own.length = length + 1
        logits, rough = self._logits(hidden), self._rough
        for row, word in enumerate(words.tolist()):
            one = slice(row, row + 1)
            part = None if rough is None else Rough(logits[one], rough.distances[one], rough.hidden[one])
            self._foreseen.append(_Foreseen(word, logits[one], part))
        self._drafted, self._right = count, 0
        self.state.counts["drafts"] += count
        return self._handed_out(self._foreseen.popleft())

    def _handed_out(self, found: _Foreseen) -> Tensor:
        self._rough = found.rough
        self._count()
        return found.logits

    def _begin(self, once: Tensor) -> Tensor:
        """Keys and values of the source, and the decoder's first tokens `[B, n]`."""
        source: Tensor = self.state.encoder_outputs.last_hidden_state
        mask = self.stepper.kwargs.get("attention_mask")
        seen = torch.ones(source.shape[:2], dtype=torch.bool) if mask is None else mask.bool()
        rows = source[seen]  # [sum of lengths, D]
        self.shared = self._shared_keys(seen)
        for layer, panels in enumerate(self.packed.crosses):
            self.shared.put(layer, *panels(rows).chunk(2, 1))
        self.own.take(np.arange(self.samples))
        self.positions = torch.zeros(self.samples, dtype=torch.int64)
        for column in once.unbind(1):
            logits = self._step(column, 1)
        return logits

    def _shared_keys(self, seen: Tensor) -> SharedKeys:
        stack = self.packed.stack.blocks
        lengths: list[int] = seen.sum(1).tolist()
        return SharedKeys(stack.layers, stack.key_heads, stack.width, lengths, stack.dtype)

    def _read_prompt(self, once: Tensor) -> Tensor:
        """Logits `[B, V]` after prompts `[B, n]`, whose keys and values become shared ones."""
        kwargs = self.stepper.kwargs
        places, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
        seen = torch.ones_like(once, dtype=torch.bool)
        if mask is not None:
            seen = mask[:: self.rows_each, : once.shape[1]].bool()
        if places is None:
            places = seen.cumsum(1) - 1
        elif len(places) > self.samples:
            places = places[:: self.rows_each]
        places = places[:, : once.shape[1]].expand_as(once)
        self.shared = self._shared_keys(seen)
        hidden = self.packed.stack.read(once, places, seen, self.shared, causal=True)
        self.positions = places[:, -1].clone()
        self.own.take(np.arange(self.samples))
        self._count()
        return self._logits(hidden[seen.sum(1).cumsum(0) - 1])
