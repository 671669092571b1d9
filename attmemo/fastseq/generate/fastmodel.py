"""`wrap(model)`: the same model with a faster `generate`."""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin, LogitsProcessor, LogitsProcessorList
from transformers.generation.utils import is_deepspeed_zero3_enabled, is_fsdp_managed_module

from attmemo.errors import UnsupportedModelError
from attmemo.fastseq.generate import beam_attention, random_state
from attmemo.fastseq.generate.call_state import CallState
from attmemo.fastseq.generate.decoders import PackedDecoder
from attmemo.fastseq.generate.el_attention import why_no_self_el
from attmemo.fastseq.generate.encoder import held_once
from attmemo.fastseq.generate.loop import decode
from attmemo.fastseq.generate.module_swaps import SWAPPED, swap_modules
from attmemo.fastseq.generate.private_copy import private_copy, wears_another_forward
from attmemo.fastseq.generate.refusal import Refusal
from attmemo.models.cache_name import NEW, OLD

_log = logging.getLogger("attmemo.fastseq")

MODES = ("auto", "shared", "el", "stock")
_ALIKE = 0.5  # correlation: roundings mostly leave more than 0.99, a layer in a wrong place next to none

# Arguments of `generate` whose presence sends the call to the original path, with the reason that `stats` gives.
_STOCK_ARGUMENTS = {
    "streamer": "a streamer",
    "assistant_model": "assisted generation",
    "prompt_lookup_num_tokens": "assisted generation",
    "custom_generate": "custom_generate",
    NEW: "a cache of the caller's",
    OLD: "a cache of the caller's",
    "cache_implementation": "cache_implementation",
    "stop_strings": "stop_strings",
    "negative_prompt_ids": "classifier-free guidance",
    "guidance_scale": "classifier-free guidance",
    "token_healing": "token_healing",
    "decoder_inputs_embeds": "decoder_inputs_embeds",
    "output_attentions": "attentions or hidden states were asked for",
    "output_hidden_states": "attentions or hidden states were asked for",
    "head_mask": "head_mask",
    "cross_attn_head_mask": "head_mask",
    "synced_gpus": "synced_gpus",
}


class FastModel:
    """A model whose `generate` is faster and returns the same; everything else is the model itself.

    Made by `wrap`. Holds no state of a call: calls from several threads, of several wrapped models, or of the
    same one, do not see each other.
    """

    def __init__(
        self, model: Any, attention_mode: str, reason: str | None, *, untested: bool = False,
        packed: PackedDecoder | None = None,
    ) -> None:  # fmt: skip
        self._packed = packed
        self._model = model
        self._mode = attention_mode
        self._reason = reason
        self._untested = untested
        self._lock = threading.Lock()
        self._stats = _Stats()
        self._last: dict[str, int] = {}
        self._el: bool | None = None

    @property
    def model(self) -> Any:
        """The model that was wrapped, unchanged."""
        return self._model

    @property
    def cache_mode(self) -> str:
        """ "shared", "el" or "stock": what the memory of a call is to be planned for."""
        if self._reason is not None or self._mode == "stock":
            return "stock"
        return "el" if self._mode == "el" else "shared"

    @property
    def stock_reason(self) -> str | None:
        """Why all calls take the original path, or None."""
        return self._reason

    @property
    def packed_bytes(self) -> int | None:
        """Bytes of packed weights that each decoding step reads; None: there are none."""
        return None if self._packed is None else self._packed.step_bytes

    def cache_mode_for(self, generation: Mapping[str, Any]) -> str:
        """As `cache_mode`, of a call with these arguments: some send it to the original path."""
        return self.cache_mode if self._why_stock(dict(generation)) is None else "stock"

    def __getattr__(self, name: str) -> Any:
        if "_model" not in self.__dict__:  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self._model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def __repr__(self) -> str:
        path = "stock: " + self._reason if self._reason else self._mode
        return f"FastModel({type(self._model).__name__}, attention={path!r})"

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As `model.generate`: the same arguments, the same result.

        What the fast path does not cover (a streamer, assisted generation, attentions to be returned, …) runs on the
        original path; `stats` says what and why. A `ModelOutput` has no `past_key_values` after the fast path.

        Returns
        -------
        Tensor or ModelOutput

        Notes
        -----
        Some of it shows only on the way. The call is then begun anew, with torch's default generators where they
        were; these belong to the process, and so another thread that samples meanwhile may draw twice the same.
        """
        if args:  # by name from here on: the first is called `inputs`, but `input_features` by Whisper
            names = list(inspect.signature(self._model.generate).parameters)
            if len(args) > len(names):
                raise TypeError(f"generate takes at most {len(names)} positional arguments; got {len(args)}")
            given = dict(zip(names, args, strict=False))
            if twice := given.keys() & kwargs.keys():
                raise TypeError(f"generate got {sorted(twice)} twice: by position and by name")
            kwargs = given | kwargs
        reason = self._reason or self._why_stock(kwargs) or self._test_late()
        if reason is None:
            rewind = random_state.remember(self._model.device)
            state = CallState(mode=self._mode, el_holds=self._el_holds, packed=self._packed)
            try:
                result = self._fast(state, kwargs)
            except Refusal as refusal:
                reason = str(refusal)
                rewind()
            else:
                with self._lock:
                    self._stats.fast += 1
                    self._stats.counts.update(state.counts)
                    self._last = dict(state.cache_bytes)
                return result
        with self._lock:
            self._stats.stock += 1
            self._stats.reasons[reason] += 1
            first = self._stats.reasons[reason] == 1
        if first and self._mode != "stock":
            _log.info("fastseq: the original path for this call: %s", reason)
        return self._model.generate(**kwargs)

    def stats(self) -> dict[str, Any]:
        """What ran since `wrap`.

        Returns
        -------
        dict
            "calls": {"fast", "stock"}; "stock_reasons": count of each reason; "counts": attention calls by kind
            ("shared", "prefix", "el", "el_self", "plain"), "steps", "rows_removed", "encoder_tokens" beside
            "encoder_tokens_padded"; "cache_bytes": the most that the last fast call's cache held.
        """
        with self._lock:
            return {
                "calls": {"fast": self._stats.fast, "stock": self._stats.stock},
                "stock_reasons": dict(self._stats.reasons),
                "counts": dict(self._stats.counts),
                "cache_bytes": dict(self._last),
            }

    def close(self) -> Any:
        """The model that was wrapped. There is nothing to undo: it was never changed."""
        return self._model

    def _fast(self, state: CallState, kwargs: dict[str, Any], *, plain: bool = False) -> Any:
        # plain: transformers' own generate, also where the model has one of its own around it (Whisper).
        copy = private_copy(self._model, beam_attention.NAME, state, also=SWAPPED)
        swap_modules(copy, state)

        def loop(
            self: Any,
            input_ids: Tensor,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **model_kwargs: Any,
        ) -> Any:
            return decode(self, state, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)

        generate = functools.partial(GenerationMixin.generate, copy) if plain else copy.generate
        once = held_once(copy, self._model, state) if copy.config.is_encoder_decoder else nullcontext()
        try:
            with once:
                return generate(**kwargs | {"custom_generate": loop})
        finally:
            state.release()

    def _test_late(self) -> str | None:
        """Make up for the test that `wrap` could not do on a model in training mode; as `self_test` returns."""
        with self._lock:
            if self._untested:
                self._reason = self_test(self, "el" if self._mode == "el" else "shared")
                self._untested = False
                if self._reason is not None:
                    _warn(self._model, self._reason)
            return self._reason

    def _el_holds(self) -> bool:
        """Whether EL-attention reproduces this model; tested when it is first asked for.

        It reads weights for keys and values that are not rounded.
        """
        if self._packed is not None and self._packed.weights is not None:
            return False
        with self._lock:
            if self._el is None:
                self._el = why_no_el(self) is None
            return self._el

    def _why_stock(self, kwargs: dict[str, Any]) -> str | None:
        if self._mode == "stock":
            return "attention='stock'"
        if self._model.training:
            return "the model is in training mode"
        configs = (kwargs.get("generation_config"), self._model.generation_config)

        def setting(name: str) -> Any:
            given = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
            return next((value for value in given if value is not None), None)

        for name, reason in _STOCK_ARGUMENTS.items():
            value = setting(name)
            if value is not None and value is not False:
                return reason
        if setting("use_cache") is False:
            return "use_cache=False"
        if kwargs.get("use_cache") and setting("return_dict_in_generate"):
            return "the cache is to be returned"  # it is held in another way here
        if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(self._model):
            return "weights that are sharded (ZeRO-3, FSDP)"
        if kwargs.get("inputs_embeds") is not None and not self._model.config.is_encoder_decoder:
            return "inputs_embeds for a decoder"
        if (module := wears_another_forward(self._model)) is not None:
            return f"the forward of {module or 'the model'} was replaced (by accelerate or a compiler)"
        return None


def why_no_el(fast: FastModel) -> str | None:
    """The reason why EL-attention does not hold for a model, by name, or None if it was tested and does."""
    model = fast.model
    if not model.config.is_encoder_decoder and (reason := why_no_self_el(model)) is not None:
        return reason
    return None if model.training else self_test(fast, "el")


def self_test(fast: FastModel, mode: str = "shared") -> str | None:
    """Generate three tokens from made-up input with both paths; None if they agree, else what is wrong.

    The scores are compared, not the tokens: a small difference would not show in three tokens. The tokens are given:
    by their scores two that almost tie would change places in half precision, and the later scores would be of others.
    """
    model = fast.model
    made_up = _dummy_inputs(model)
    if made_up is None:
        return f"nothing is known about its input {model.main_input_name!r}, so it cannot be tested"
    dummy: dict[str, Any] = {
        **made_up,
        "max_new_tokens": 3,
        "min_new_tokens": 3,
        "num_beams": 2,
        "do_sample": False,
        "num_return_sequences": 1,
        "return_dict_in_generate": True,
        "output_logits": True,
        "logits_processor": LogitsProcessorList([_GivenWords()]),
    }
    if (reason := fast._why_stock(dummy)) is not None:
        return reason
    state = CallState(mode=mode, packed=None if mode == "el" else fast._packed)
    with torch.no_grad():
        try:
            expected = GenerationMixin.generate(model, **dummy)
        except Exception as error:  # it needs more than tokens: an image, a second text
            return f"it does not generate from made-up input ({type(error).__name__}), so it cannot be tested"
        try:
            got = fast._fast(state, dummy, plain=True)
        except Refusal as refusal:
            return str(refusal)
        except Exception as error:  # whatever an unknown model does, the original path has just worked
            return f"the fast path failed with {type(error).__name__}: {error}"
    kinds = ("el", "el_self") if mode == "el" else ("shared", "prefix", "packed_steps")
    if not sum(state.counts[kind] for kind in kinds):
        return "its attention does not go through transformers' attention interface"
    tolerance = 1e-3 if model.dtype == torch.float32 else 0.2
    for one, other in zip(expected.logits, got.logits, strict=True):
        one, other = one.log_softmax(-1), other.log_softmax(-1)
        if state.packed is not None and (state.packed.weights is not None or model.dtype != torch.float32):
            if one.shape != other.shape or not are_alike(one, other):
                return "its rounded scores are not like those of the original path"
            continue
        if one.shape != other.shape or not torch.allclose(one, other, rtol=tolerance, atol=tolerance):
            return "its scores differ from those of the original path"
    return None


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Whether scores of rounded weights can be those: they rise and fall together."""
    both = torch.stack((one.flatten(), other.flatten()))
    return bool(torch.corrcoef(both)[0, 1] > _ALIKE)


class _GivenWords(LogitsProcessor):  # type: ignore[misc]
    """Two beams that change places at every step after the first, whatever the model says."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        given = torch.full_like(scores, -float("inf"))
        word = scores.shape[-1] // 2 + input_ids.shape[1] % 5
        given[::2, word], given[::2, word + 1] = 0.0, -2.0  # at first both beams come from the first
        given[1::2, word + 2] = 3.0
        return given


def _dummy_inputs(model: Any) -> dict[str, Tensor] | None:
    """Two different inputs, one of them padded, for a model that takes tokens or Whisper's features."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    if model.main_input_name == "input_ids":
        vocabulary = config.get_text_config().vocab_size
        ids = torch.randint(vocabulary // 2, vocabulary, (2, 7), generator=generator)
        mask = torch.ones_like(ids)
        side = slice(5, None) if config.is_encoder_decoder else slice(0, 2)
        mask[1, side] = 0
        return {"input_ids": ids.to(model.device), "attention_mask": mask.to(model.device)}
    if model.main_input_name == "input_features" and hasattr(config, "num_mel_bins"):
        length = 2 * getattr(config, "max_source_positions", 50)
        features = torch.randn(2, config.num_mel_bins, length, generator=generator)
        return {"input_features": features.to(model.device, model.dtype)}
    return None


def _warn(model: Any, wrong: str) -> None:
    _log.warning(
        "fastseq: %s generates on the original path: %s. Nothing is lost but speed.", type(model).__name__, wrong
    )


class _Stats:
    def __init__(self) -> None:
        self.fast = 0
        self.stock = 0
        self.reasons: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()


def wrap(model: Any, attention: str = "auto", *, check: bool = True) -> FastModel:
    """The same model with a faster `generate`. The model itself is not changed.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        One that can generate.
    attention : {"auto", "shared", "el", "stock"}
        How the states that beams have in common are held. "shared": keys and values, once a sample. "el": hidden
        states, once for all layers (EL-attention); less memory, more arithmetic. "auto": chosen by a cost model, in
        effect "shared" unless it would not fit. "stock": nothing is changed; for comparison.
    check : bool
        Generate three tokens on both paths and compare. If they differ, or the fast path did not run, the original
        path is used from then on, and a warning says so. Of a model in training mode, which generates on the original
        path, the first call out of it is preceded by that, and by the test of attention="el".

    Returns
    -------
    FastModel

    Raises
    ------
    UnsupportedModelError
        If it is not a transformers model that generates; with attention="el", if EL-attention does not hold for it:
        rotary positions, normed keys, …
    ValueError
        If `attention` is none of the four.

    Examples
    --------
    >>> fast = wrap(model)                                # doctest: +SKIP
    >>> fast.generate(**inputs, num_beams=4)              # doctest: +SKIP
    """
    if isinstance(model, FastModel):
        model = model.model
    if attention not in MODES:
        raise ValueError(f"attention is one of {', '.join(MODES)}; got {attention!r}")
    can = getattr(model, "can_generate", None)
    if can is None or not inspect.ismethod(can) or not can():
        raise UnsupportedModelError(
            f"{type(model).__name__} does not generate (no language modelling head, or no transformers model).",
            "load it with AutoModelForSeq2SeqLM or AutoModelForCausalLM",
        )
    beam_attention.register()
    untested = model.training and (attention == "el" or (check and attention != "stock"))
    fast = FastModel(model, attention, None, untested=untested)
    if attention == "el" and (reason := why_no_el(fast)) is not None:
        raise UnsupportedModelError(
            f"EL-attention does not hold for {type(model).__name__}: {reason.removeprefix('EL-attention: ')}.",
            "use attention='auto' or 'shared'",
        )
    if check and not untested and attention not in ("stock", "el") and (wrong := self_test(fast)) is not None:
        _warn(model, wrong)
        return FastModel(model, attention, wrong)
    return fast
