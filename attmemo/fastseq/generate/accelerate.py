"""`accelerate(model)`: what `wrap` does, and decoding on this project's kernels: float32, bfloat16, or 8 bits."""

from __future__ import annotations

import copy
import logging
from typing import Any, Literal

import torch

from attmemo.errors import UnsupportedModelError
from attmemo.fastseq.generate.decoders import PackedDecoder, packed_decoder
from attmemo.fastseq.generate.fastmodel import FastModel, self_test, wrap
from attmemo.fastseq.generate.refusal import Refusal
from attmemo.fastseq.generate.vocabulary import Weights

_log = logging.getLogger("attmemo.fastseq")
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def accelerate(
    model: Any,
    dtype: Literal["float32", "bfloat16"] | None = None,
    weights: Weights = None,
    *,
    attention: str = "auto",
    check: bool = True,
) -> FastModel:
    """As `wrap`, with all layers packed, and all layers of an encoder, a prompt or a step in one native call.

    Packed weights are kept beside those of the model, which stays as it is. Accelerate it again when its weights have
    changed. In float32 a decoder is kept in 8 bits too: where one text is written alone, it foresees words, which are
    then checked in float32, several at a time.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        One that can generate, on the CPU.
    dtype : {"float32", "bfloat16"}, optional
        What is computed in. A model of another type is copied first. None: the model's own.
    weights : {"int8"}, optional
        Linear layers in 8 bits, those of an encoder and of the vocabulary too. Rows are rounded to 8 bits as well,
        each with a scale and a zero point of its own: see `attmemo.kernels.linear8`.
    attention, check
        As in `wrap`.

    Returns
    -------
    FastModel
        Where the model's family or the processor has no packed layers, it is what `wrap` gives, and a line in the log
        says so.

    Raises
    ------
    UnsupportedModelError
        As `wrap`; with `weights`, if the layers cannot be packed.
    ValueError
        `dtype`, `weights` or `attention` is none of those above.
    """
    if isinstance(model, FastModel):
        model = model.model
    if dtype is not None and dtype not in _TYPES:
        raise ValueError(f"dtype is float32 or bfloat16, not {dtype!r}")
    if weights not in (None, "int8"):
        raise ValueError(f"weights is 'int8' or None, not {weights!r}")
    if dtype is not None and getattr(model, "dtype", None) != _TYPES[dtype]:
        model = copy.deepcopy(model).to(_TYPES[dtype])
    plain = wrap(model, attention, check=check)
    reason: str | None = None
    packed: PackedDecoder | None = None
    if plain.cache_mode != "shared":
        reason = plain.stock_reason or f"attention={attention!r}"
    elif model.training:
        reason = "the model is in training mode"
    else:
        try:
            packed = packed_decoder(model, weights)
        except Refusal as refusal:
            reason = str(refusal)
    if packed is not None:
        fast = FastModel(model, attention, None, packed=packed)
        if not check or (reason := self_test(fast)) is None:
            return fast
    if weights is not None:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not decode in 8 bits: {reason}.", "leave out weights='int8'"
        )
    _log.info("fastseq: %s decodes by its own code: %s", type(model).__name__, reason)
    return plain
