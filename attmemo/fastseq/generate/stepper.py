"""One decoding step after another: the model's own forward, over a cache that shares what beams have in common.

Shapes: B samples, M beams, R = B·M rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache

from attmemo.errors import AttmemoError
from attmemo.fastseq.generate.beam_cache import BeamArena, BeamCache, SuffixLayer, shared_cache
from attmemo.fastseq.generate.call_state import CallState
from attmemo.fastseq.generate.costmodel import Call, choose, measured
from attmemo.fastseq.generate.el_attention import ELCrossLayer, ELSelfLayer, ELStates, swap_self_attention
from attmemo.fastseq.generate.refusal import Refusal
from attmemo.fastseq.generate.shape import ModelShape, decoder_layers
from attmemo.models.cache_name import CACHE_NAME
from attmemo.system.memory import free_memory

# Inputs whose rows are known to be those of the batch. Others (an image's patches) may be numbered in another way.
_INPUTS = {
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "encoder_outputs",
    CACHE_NAME,
}


class Stepper:
    """Feeds tokens to a private copy and returns the logits of the last position.

    Parameters
    ----------
    model : PreTrainedModel
        The private copy.
    state : CallState
    input_ids : Tensor [R, n] int64
        The prompt or the decoder's first tokens, repeated for each beam, as `generate` prepares them.
    rows_each : int
        M: rows of one sample.
    room : int
        Positions that can be generated.
    model_kwargs : dict
        As `generate` prepares them: tensors have R rows.
    """

    def __init__(
        self, model: Any, state: CallState, input_ids: Tensor, rows_each: int, room: int, model_kwargs: dict[str, Any]
    ) -> None:
        self.model = model
        self.state = state
        self.rows_each = rows_each
        self.samples = input_ids.shape[0] // rows_each
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        self.kwargs = dict(model_kwargs)
        for name, value in self.kwargs.items():
            if name not in _INPUTS and not isinstance(value, (bool, int, float, str, type(None))):
                raise Refusal(f"a model input {name!r}")
        if not (layers := decoder_layers(model.config)):
            raise Refusal("a configuration without a number of layers")
        if self.encoder_decoder:
            if state.encoder_outputs is None:
                raise Refusal("the encoder did not run where it was expected to")
            self.kwargs["encoder_outputs"] = state.encoder_outputs
            mask = self.kwargs.get("attention_mask")
            if mask is not None:
                self.kwargs["attention_mask"] = mask[::rows_each]
        room += input_ids.shape[1] if self.encoder_decoder else 0
        length = state.encoder_outputs.last_hidden_state.shape[1] if self.encoder_decoder else input_ids.shape[1]
        state.mode = self._choose(room, length)
        self.wants_greatest = False  # a `PackedStepper` may compute less then
        mask = self.kwargs.get("attention_mask")
        careful = self.encoder_decoder or state.mode == "el"  # a decoder's beams see their own tokens at least
        if careful and mask is not None and not bool(mask.bool().any(dim=-1).all()):
            # A softmax over masked keys alone: the result depends on the kernel, and so on how beams are laid out.
            raise Refusal("a sample that is padding only")
        self.cache = self._make_cache(layers, room)
        state.cache = self.cache
        own, cross = self.cache.self_cache, self.cache.cross_cache
        self.kwargs[CACHE_NAME] = own if cross is None else EncoderDecoderCache(own, cross)

    def _choose(self, room: int, length: int) -> str:
        """The cost model's choice for this call, if the caller left it open."""
        if self.state.mode != "auto":
            return self.state.mode
        device, dtype = self.model.device, self.model.dtype
        try:
            shape = ModelShape.of(self.model.config, dtype)
        except AttmemoError:
            return "shared"
        call = Call(shape, self.samples, self.rows_each, length, room)
        fast_products = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
        chosen = choose(call, measured(device, dtype) if fast_products else None, free_memory(device))
        return "el" if chosen == "el" and self.state.el_holds() else "shared"

    def _make_cache(self, layers: int, room: int) -> BeamCache:
        if self.state.mode != "el":
            return shared_cache(layers, room, self.state.shared, encoder_decoder=self.encoder_decoder)
        arena = BeamArena(layers, room)
        if self.encoder_decoder:
            own = Cache(layers=[SuffixLayer(arena, index) for index in range(layers)])
            self.state.el = ELStates(self.state.encoder_outputs.last_hidden_state)
            cross = Cache(layers=[ELCrossLayer(self.state.el) for _ in range(layers)])
            return BeamCache(arena, own, cross, [self.state.el])
        states = [ELSelfLayer(arena, index) for index in range(layers)]
        swap_self_attention(self.model, self.state.counts)
        return BeamCache(arena, Cache(layers=states), None, states)

    def first(self, input_ids: Tensor) -> Tensor:
        """Logits `[R, V]` after the prompt, which is read at B rows: the beams are still the same.

        For an encoder-decoder this is also how the cross-attention states are projected at B rows by whatever module:
        some (Whisper, UMT5) shape their keys by the number of rows of the queries.
        """
        if self.rows_each == 1:
            return self._forward(input_ids, None, self.kwargs, first=True)
        rows = input_ids.shape[0]
        once = {name: self._each_sample(value, rows) for name, value in self.kwargs.items()}
        logits = self._forward(input_ids[:: self.rows_each], None, once, first=True, keep_for=self.kwargs)
        self.cache.arena.repeat(self.rows_each)
        return logits.repeat_interleave(self.rows_each, dim=0)

    def next(self, input_ids: Tensor) -> Tensor:
        """Logits `[R, V]` after `[R, n]`, of which all but the last column are in the cache."""
        return self._forward(input_ids, 1, self.kwargs, first=False)

    def greatest(self, scores: Tensor) -> Tensor:
        """Of scores of the last step the words with the greatest `[R]`."""
        return scores.argmax(-1)

    def move(self, source: Tensor) -> None:
        """Row i goes on as a copy of row `source[i]`; `[R]` of integers."""
        self.cache.move(source)

    def keep(self, samples: Sequence[int]) -> None:
        """Only these samples stay, in this order."""
        self.state.account()
        before, rows = self.samples, self.samples * self.rows_each
        index = torch.tensor(samples)
        row_index = (index[:, None] * self.rows_each + torch.arange(self.rows_each)).flatten()
        self.cache.keep(samples, self.rows_each)
        for name, value in self.kwargs.items():
            if not isinstance(value, Tensor):
                continue
            if value.dim() == 3:  # positions of several kinds: [kinds, R, n]
                self.kwargs[name] = value[:, row_index.to(value.device)]
            elif self.encoder_decoder and name == "attention_mask" and value.shape[0] == before:
                self.kwargs[name] = value[index.to(value.device)]
            elif value.shape[0] == rows:
                self.kwargs[name] = value[row_index.to(value.device)]
        if self.encoder_decoder:
            # Only the number of rows and the length are read from it from now on: the cross-attention states are
            # cached.
            whole = self.kwargs["encoder_outputs"]
            stand_in = whole.last_hidden_state[: len(samples)]
            self.kwargs["encoder_outputs"] = type(whole)(last_hidden_state=stand_in)
        self.samples = len(samples)
        self.state.counts["rows_removed"] += (before - len(samples)) * self.rows_each

    def _forward(
        self,
        input_ids: Tensor,
        new: int | None,
        kwargs: dict[str, Any],
        *,
        first: bool,
        keep_for: dict[str, Any] | None = None,
    ) -> Tensor:
        inputs = self.model.prepare_inputs_for_generation(
            input_ids, next_sequence_length=new, is_first_iteration=first, **kwargs
        )
        outputs = self.model(**inputs, return_dict=True)
        self.state.shared.require_all_taken()
        self.state.counts["steps"] += 1
        into = kwargs if keep_for is None else keep_for
        cache = into[CACHE_NAME]
        updated = self.model._update_model_kwargs_for_generation(
            outputs, into, is_encoder_decoder=self.encoder_decoder
        )
        if updated.get(CACHE_NAME) is not cache:
            raise Refusal("the model replaced the cache it was given")
        self.kwargs = updated
        logits: Tensor = outputs.logits[:, -1, :]
        return logits.to(copy=True, dtype=torch.float32, device=input_ids.device)

    def _each_sample(self, value: Any, rows: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dim() == 3:  # positions of several kinds: [kinds, R, n]
            return value[:, :: self.rows_each]
        return value[:: self.rows_each] if value.shape[0] == rows else value
