"""The encoder of a private copy: once a sample, and on the CPU without the padding.

Shapes: B samples, N padded source length, D width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput

from attmemo.fastseq.generate.call_state import CallState
from attmemo.fastseq.generate.refusal import Refusal

# Encoders in which a position's state depends on the valid positions only, so that right padding may be cut off.
_CUTTABLE = {"bart", "mbart", "marian", "pegasus", "t5", "mt5", "umt5", "m2m_100", "blenderbot", "plbart"}
_TOKENS_AT_ONCE = 2048  # larger intermediate tensors fall out of the caches and of malloc's reuse


@contextmanager
def held_once(model: Any, original: Any, state: CallState) -> Iterator[None]:
    """While it lasts, the encoder's states stay in `state`, and `generate` repeats a stand-in of next to no size.

    The encoder itself still gives what it gives: others than `generate` ask it too (Whisper for the language, and
    whether there is speech).

    Parameters
    ----------
    model : PreTrainedModel
        The private copy.
    original : PreTrainedModel
        What it is a copy of.
    state : CallState
    """
    expand = model._expand_inputs_for_generation

    def expand_stand_in(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("encoder_outputs") is not None:
            kwargs["encoder_outputs"] = _stand_in(kwargs["encoder_outputs"], state)
        return expand(*args, **kwargs)

    # Both are bound to what they are put on: they have to go, or the copy would wait for the garbage collector.
    encoder = _cut_padding(model, original, state) if model.config.model_type in _CUTTABLE else None
    model.__dict__["_expand_inputs_for_generation"] = expand_stand_in
    try:
        yield
    finally:
        del model.__dict__["_expand_inputs_for_generation"]
        if encoder is not None:
            del encoder.__dict__["forward"]


def _stand_in(outputs: Any, state: CallState) -> Any:
    """Keep the outputs `[B, N, D]` in the state; return what has their first two dimensions."""
    hidden = getattr(outputs, "last_hidden_state", None)
    if not isinstance(hidden, Tensor):
        raise Refusal("encoder outputs without a last_hidden_state")
    state.encoder_outputs = type(outputs)(last_hidden_state=hidden)
    return type(outputs)(last_hidden_state=hidden.new_zeros(*hidden.shape[:2], 1))


def _cut_padding(model: Any, original: Any, state: CallState) -> Any:
    """Let the copy's encoder leave out the padding; returns the encoder."""
    encoder = model.get_encoder()
    if encoder is model or encoder is original.get_encoder() or "forward" in vars(encoder):
        raise Refusal("no encoder of its own was found")
    inner = encoder.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outputs = None
        if _is_plain(args, kwargs):
            outputs = _packed(state, **kwargs)
            outputs = _without_padding(inner, state, kwargs) if outputs is None else outputs
        return inner(*args, **kwargs) if outputs is None else outputs

    encoder.__dict__["forward"] = forward
    return encoder


def _is_plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether nothing but tokens and a mask are given, on the CPU."""
    given = {name for name, value in kwargs.items() if value is not None and value is not False}
    ids = kwargs.get("input_ids")
    if args or given - {"input_ids", "attention_mask", "return_dict"}:
        return False
    return isinstance(ids, Tensor) and ids.device.type == "cpu" and ids.dim() == 2


def _packed(state: CallState, input_ids: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
    """The outputs, padded with zeros, by this project's kernels; None where there are none for them."""
    if state.packed is None or state.mode == "el":
        return None
    hidden = state.packed.encode(input_ids, attention_mask)
    if hidden is None:
        return None
    tokens = input_ids.numel() if attention_mask is None else int(attention_mask.bool().sum())
    state.counts["packed_encoders"] += 1
    state.counts["encoder_tokens"] += tokens
    state.counts["encoder_tokens_padded"] += input_ids.numel()
    return BaseModelOutput(last_hidden_state=hidden)


def _without_padding(inner: Callable[..., Any], state: CallState, kwargs: dict[str, Any]) -> Any:
    """The outputs, padded with zeros; None where the plain call is better."""
    ids, mask = kwargs["input_ids"], kwargs.get("attention_mask")
    batch, longest = ids.shape
    if batch == 0:
        return None  # the plain call raises the original error
    if mask is None:
        lengths = [longest] * batch
    else:
        if mask.shape != ids.shape:
            return None
        counts = mask.bool().sum(dim=1)
        right_padded = torch.arange(longest) < counts[:, None]
        if not torch.equal(mask.bool(), right_padded) or int(counts.min()) == 0:
            return None
        lengths = counts.tolist()
    groups = length_groups(lengths, _TOKENS_AT_ONCE)
    state.counts["encoder_tokens"] += sum(len(group) * max(lengths[i] for i in group) for group in groups)
    state.counts["encoder_tokens_padded"] += batch * longest
    if len(groups) == 1 and max(lengths) == longest:
        return None
    whole: Tensor | None = None
    outputs: Any = None
    for group in groups:
        cut = max(lengths[i] for i in group)
        part = dict(kwargs, input_ids=ids[group, :cut])
        if mask is not None:
            part["attention_mask"] = mask[group, :cut]
        outputs = inner(**part)
        hidden = outputs.last_hidden_state
        if whole is None:
            whole = hidden.new_zeros(batch, longest, hidden.shape[-1])
        whole[group, :cut] = hidden
    return type(outputs)(last_hidden_state=whole)


def length_groups(lengths: list[int], budget: int) -> list[list[int]]:
    """Samples in groups of similar length, longest first, each group of at most `budget` padded tokens or one sample.

    A group is also closed where a shorter sample would be padded by more than an eighth of its group's length.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for i in order:
        if groups:
            group, top = groups[-1], lengths[groups[-1][0]]
            if (len(group) + 1) * top <= budget and (lengths[i] >= top - top // 8 or top <= 16):
                group.append(i)
                continue
        groups.append([i])
    return groups
