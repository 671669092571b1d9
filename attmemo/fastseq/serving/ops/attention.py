"""The public operator, its registration with torch, and the choice between implementations."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch

from attmemo.errors import ArgumentError, ImplementationError
from attmemo.fastseq.serving.ops import cpu, reference
from attmemo.fastseq.serving.ops.arguments import Arguments, check_arguments

IMPLEMENTATIONS = ("auto", "reference", "cpu", "triton")
_SWITCH = "ATTMEMO_ATTENTION"

_SCHEMA = (
    "(Tensor query, Tensor current_key, Tensor current_value, Tensor seqstarts, Tensor kvstarts, Tensor cachestarts, "
    "Tensor start_pos, Tensor decoding_batches, Tensor? max_seqlen, Tensor? max_kvlen, Tensor(a!) cache, "
    "Tensor(b!)? scale, Tensor? attn_mask, int num_heads, int head_dim, bool is_causal, bool is_alibi, "
    "int num_kv_heads, int num_layer, int layer_idx, int quant_bit, int quant_group, int cache_mode, "
    "int cache_layout, int page_size, str implementation, bool validate) -> Tensor"
)


def multi_head_cache_attention(
    query: torch.Tensor,
    current_key: torch.Tensor,
    current_value: torch.Tensor,
    seqstarts: torch.Tensor,
    kvstarts: torch.Tensor,
    cachestarts: torch.Tensor,
    start_pos: torch.Tensor,
    decoding_batches: torch.Tensor | int,
    max_seqlen: torch.Tensor | int | None,
    max_kvlen: torch.Tensor | int | None,
    cache: torch.Tensor,
    scale: torch.Tensor | None,
    attn_mask: torch.Tensor | None,
    num_heads: int,
    head_dim: int,
    is_causal: bool = True,
    is_alibi: bool = False,
    num_kv_heads: int = 0,
    num_layer: int = 1,
    layer_idx: int = 0,
    quant_bit: int = 0,
    quant_group: int = 8,
    cache_mode: int = 0,
    cache_layout: int = 0,
    page_size: int = 128,
    *,
    implementation: str = "auto",
    validate: bool = True,
) -> torch.Tensor:
    """Write new keys and values into the cache, then attend over it, for a ragged batch of prefill and decode.

    Parameters
    ----------
    query : Tensor, shape [N, num_heads, head_dim]
        float32, float16 or bfloat16; all sequences, one behind the other.
    current_key, current_value : Tensor, shape [N, num_kv_heads, head_dim]
        Of the query's type. They are stored first and attended as they were stored: quantised, if the cache is.
    seqstarts : Tensor of int64, shape [B + 1]
        Where each sequence begins in `query`; ``seqstarts[B]`` is N.
    kvstarts : Tensor of int64, shape [B + 1]
        The same for keys: sequence b has ``start_pos[b] + seqstarts[b + 1] - seqstarts[b]`` of them.
    cachestarts : Tensor of int64, shape [B] or, with ``cache_mode=1``, [B, pages]
        First row in the cache of each sequence, or of each of its pages: *token offsets*, not page numbers
        (`page_offsets` converts those). Entries of pages that are not in use are never looked at.
    start_pos : Tensor of int64, shape [B]
        How many tokens of each sequence the cache holds already.
    decoding_batches : int or Tensor of one element
        So many sequences, the first ones, get no causal mask, however many queries they have.
    max_seqlen, max_kvlen : int, Tensor of one element, or None
        Not less than the longest sequence and its keys; None: computed.
    cache : Tensor
        `cache_shape` gives its shape. float32, float16 or bfloat16; int8 with ``quant_bit=8``; uint8 or int8 with
        ``quant_bit=4``. Written in place: the rows of the new tokens in layer `layer_idx`, nothing else.
    scale : Tensor or None
        `scale_shape` gives its shape; float32, float16 or bfloat16. Only for a quantised cache. Written like `cache`.
    attn_mask : Tensor or None, shape [N, K] or [num_heads, N, K]
        Added to the scores; floating. K is ``kvstarts[B]`` or more; only the block of rows and columns of one sequence
        is ever read.
    num_heads, head_dim : int
        Query heads and elements of each.
    is_causal : bool
        Hide later keys from the queries of sequences with more than one; the last query sees the last key.
    is_alibi : bool
        Add linear biases; this hides later keys always.
    num_kv_heads : int
        Divides `num_heads`; 0 means `num_heads`.
    num_layer, layer_idx : int
        Layers in the cache, and which of them this is.
    quant_bit, quant_group : int
        0, 8 or 4 bits, and how many neighbouring elements share a scale.
    cache_mode, cache_layout, page_size : int
        0 offsets or 1 pages; how the axes lie, see `cache_shape`; tokens of a page.
    implementation : {"auto", "reference", "cpu", "triton"}
        See `choose_implementation`.
    validate : bool
        Check what stands in the index inputs. Without, a wrong one is undefined behaviour on a GPU.

    Returns
    -------
    Tensor, shape [N, num_heads, head_dim]
        In the query's type. A query that sees no key gets zeros.

    Raises
    ------
    ArgumentError
        If a rule is broken; `check_arguments` lists its subclasses. Nothing was written.
    ImplementationError
        If the implementation asked for cannot do this.

    Notes
    -----
    Source: MultiHeadCacheAttention of OpenPPL's ppl.pmx. For inference: there is no backward.
    Registered as ``torch.ops.attmemo.multi_head_cache_attention``, so it goes through torch.compile and torch.export.
    """
    if torch.is_grad_enabled():
        tensors = {
            "query": query, "current_key": current_key, "current_value": current_value,
            "cache": cache, "scale": scale, "attn_mask": attn_mask,
        }  # fmt: skip
        if wanting := [name for name, tensor in tensors.items() if tensor is not None and tensor.requires_grad]:
            raise ArgumentError(
                f"multi_head_cache_attention: {', '.join(wanting)} requires grad, but there is no backward",
                "call it under torch.inference_mode() or torch.no_grad()",
            )
    output: torch.Tensor = torch.ops.attmemo.multi_head_cache_attention(
        query, current_key, current_value, seqstarts, kvstarts, cachestarts, start_pos,
        _as_tensor(decoding_batches), _as_tensor(max_seqlen), _as_tensor(max_kvlen), cache, scale, attn_mask,
        num_heads, head_dim, is_causal, is_alibi, num_kv_heads, num_layer, layer_idx, quant_bit, quant_group,
        cache_mode, cache_layout, page_size, implementation, validate,
    )  # fmt: skip
    return output


def choose_implementation(arguments: Arguments, implementation: str = "auto") -> str:
    """Which implementation a call takes: the one asked for, or the fastest that can do it.

    ``auto`` is what the environment variable ``ATTMEMO_ATTENTION`` says, if it is set; else ``cpu`` for tensors in the
    host's memory and ``triton`` for others, or ``reference`` where those cannot.

    Raises
    ------
    ImplementationError
        If there is no such implementation, or it cannot do this.
    """
    if implementation == "auto":
        implementation = os.environ.get(_SWITCH) or "auto"
    if implementation not in IMPLEMENTATIONS:
        raise ImplementationError(
            f"multi_head_cache_attention: there is no implementation {implementation!r}",
            f"expected one of {', '.join(IMPLEMENTATIONS)}",
        )
    if implementation == "reference":
        return implementation
    wanted = implementation
    if implementation == "auto":
        wanted = "cpu" if arguments.query.device.type == "cpu" else "triton"
    reason = _module(wanted).why_not(arguments)
    if reason is None:
        return wanted
    if implementation == "auto":
        return "reference"
    raise ImplementationError(f"multi_head_cache_attention: {wanted} cannot do this: {reason}", "leave it to 'auto'")


def _module(name: str) -> Any:
    """Its functions: ``attend(arguments)``, and ``why_not(arguments)``, the reason why it cannot, or None."""
    if name == "triton":  # only where it is wanted: the compiler need not be installed
        return import_module("attmemo.fastseq.serving.ops.triton")
    return {"cpu": cpu, "reference": reference}[name]


def _as_tensor(number: torch.Tensor | int | None) -> torch.Tensor | None:
    """The operator takes numbers as tensors in the host's memory: what a traced program changes from call to call."""
    return number if number is None or isinstance(number, torch.Tensor) else torch.tensor(number, device="cpu")


def _run(*given: Any) -> torch.Tensor:
    *rest, implementation, validate = given
    arguments = check_arguments(*rest, validate=validate)
    output: torch.Tensor = _module(choose_implementation(arguments, implementation)).attend(arguments)
    return output


def _fake(query: torch.Tensor, *rest: Any) -> torch.Tensor:
    numbers = slice(6, 9)  # decoding_batches and the limits are in the host's memory
    for tensor in (*rest[: numbers.start], *rest[numbers.stop :]):
        if isinstance(tensor, torch.Tensor) and tensor.device != query.device:
            raise ArgumentError(f"multi_head_cache_attention: query is on {query.device}, others on {tensor.device}")
    return torch.empty_like(query, memory_format=torch.contiguous_format)


_LIBRARY: Any = torch.library.Library("attmemo", "FRAGMENT")  # type: ignore[no-untyped-call]
_LIBRARY.define(f"multi_head_cache_attention{_SCHEMA}")
_LIBRARY.impl("multi_head_cache_attention", _run, "CompositeExplicitAutograd")
torch.library.register_fake("attmemo::multi_head_cache_attention", _fake, lib=_LIBRARY)
