"""What the engine must know about the attention of one family: README.md beside this file shows how to add one.

Shapes: B sequences of padded length L, hidden size H, h heads of width d (V may have fewer: grouped heads), n valid
tokens in a sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.models.cache_name import CACHE_NAME
from attmemo.models.masks import Spans, adds_booleans, read_mask
from attmemo.models.projections import is_linear

if TYPE_CHECKING:
    from attmemo.models.blocks import Blocks
    from attmemo.models.embeddings import Embeddings

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Two lengths, so that the self-check covers padding, the mask and the order of sequences.
CHECK_LENGTHS = (7, 11)

# Arguments of an attention module that cannot change a map; a family adds its own. Any other argument might
# (is_causal, cu_seq_lens_q, …), so it keeps a call exact.
HARMLESS = frozenset({
    "hidden_states", "attention_mask", CACHE_NAME, "position_ids", "position_embeddings", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "return_dict", "token_type_ids",
})  # fmt: skip
_BY_LENGTH = ("dynamic", "longrope")  # rotary angles that depend on the longest sequence so far
_FALSE_MATTERS = ("is_causal",)  # flags that matter also when they are False
_CROSS = ("encoder_hidden_states", "key_value_states")  # if given: keys of another sequence


@dataclass(frozen=True, slots=True)
class Site:
    """One self-attention layer of a model, whose `forward` is replaced. Layers may share a module (ALBERT)."""

    layer: int
    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a site: its input and its mask.

    ``mask`` is the module's own mask argument (None: every token sees all tokens, or all tokens before it).
    ``cache`` is a key-value cache that is empty in this layer and must be filled. ``given`` has all arguments by name.
    """

    hidden: Tensor  # [B, L, H], as the module sees it
    mask: Any
    cache: Any
    given: dict[str, Any]

    @property
    def shape(self) -> tuple[int, int, int]:
        """B, L and H."""
        batch, padded, width = self.hidden.shape
        return batch, padded, width

    @property
    def firsts(self) -> npt.NDArray[np.int64] | None:
        """For each sequence ``[B]`` the first one with the same rows, often itself; None: it is not known."""
        return None

    def rows_at(self, places: Tensor | None) -> Tensor:
        """Rows ``[N, H]`` at these places of the flat batch; None: all."""
        flat = self.hidden.reshape(-1, self.hidden.shape[-1])
        return flat if places is None else flat.index_select(0, places)


class Rows:
    """Some sequences of a batch of B, at the places `rows`, to be cut out of a call's arguments."""

    def __init__(self, batch: int, rows: npt.NDArray[np.int64]) -> None:
        self.batch = batch
        self.index = torch.from_numpy(rows)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def without(cls, batch: int, rows: npt.NDArray[np.int64]) -> Rows:
        """All rows of a batch but these."""
        kept = np.ones(batch, bool)
        kept[rows] = False
        return cls(batch, np.flatnonzero(kept))

    def of(self, value: Any, keep: bool = False) -> Any:
        """The sequences of a tensor whose first dimension is the batch; any other value is returned unchanged.

        `keep` is for arguments that many layers share: they are cut only once.
        """
        if isinstance(value, tuple):
            return tuple(self.of(item, keep) for item in value)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self.batch or self.batch == 1:
            return value
        if not keep:
            return value[self.index]
        if id(value) not in self._kept:
            self._kept[id(value)] = value, value[self.index]  # a held tensor keeps its id from reuse
        return self._kept[id(value)][1]


class Adapter:
    """One family of attention modules.

    The defaults fit a module of transformers 5 that has one linear layer each for Q, K and V, calls the attention
    interface, has an output projection, and returns ``(output, map)``. An adapter of such a family is only data.
    """

    family: ClassVar[str]  # name shown to users and stored in a database
    models: ClassVar[tuple[str, ...]]  # known to work, for messages
    limits: ClassVar[str] = ""  # what is refused or stays exact, for messages
    part: ClassVar[str | None] = None  # the child of the base model that calls all layers, if there is one
    layers: ClassVar[str] = "num_hidden_layers"  # name of the number of layers in the configuration
    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")  # empty if one layer computes all three
    out: ClassVar[str | None] = "o_proj"  # the output projection; None if it is not in the module
    heads: ClassVar[str | None] = None  # attribute with the number of heads; None: the output projection gives it
    width: ClassVar[str] = "head_dim"  # attribute with the width of a head
    marks: ClassVar[tuple[str, ...]] = ()  # extra attributes that identify modules of this family
    causal: ClassVar[bool] = False  # a token sees itself and those before; maps are stored as lower triangles
    has_rows: ClassVar[bool] = True  # rows of records may serve its packed blocks, if their form allows it
    has_maps: ClassVar[bool] = True  # maps of records may serve its attention
    rotary: ClassVar[bool] = False  # the attention itself uses positions: only consecutive ones can be served
    parameters: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask")  # of `forward`, given by position
    mask_name: ClassVar[str] = "attention_mask"  # the argument with the mask
    cache_name: ClassVar[str] = CACHE_NAME  # the argument with the key-value cache
    harmless: ClassVar[frozenset[str]] = frozenset()  # extra arguments that cannot change a map
    unbatched: ClassVar[frozenset[str]] = frozenset({"cache_position"})  # belong to the layer, not to the batch
    # Arguments that all layers share.
    shared: ClassVar[frozenset[str]] = frozenset({"attention_mask", "position_embeddings", "position_ids"})
    ends_texts: ClassVar[bool] = False  # a head looks for the token that ends a text
    maps_on_request: ClassVar[bool] = False  # `output_attentions` gives maps; if False, the eager implementation does

    @property
    def mask_kind(self) -> str:
        """``"bidirectional"`` or ``"causal"``. A record serves only calls of its own mask kind."""
        return "causal" if self.causal else "bidirectional"

    # -- finding

    def sites(self, model: nn.Module) -> list[Site]:
        """Self-attention modules in layer order, found by structure; empty for a model of another family."""
        found = self._built_alike(model)
        return number([one for one in found if all(is_linear(getattr(one[1], part)) for part in self._parts())])

    def replaced(self, model: nn.Module) -> str | None:
        """Projections that are not plain linear layers, in modules that otherwise fit; `refusal` names fused ones."""
        if not self.projections:
            return None
        kinds: dict[str, set[str]] = {}
        for _, module in self._built_alike(model):
            for part in self._parts():
                projection = getattr(module, part)
                if isinstance(projection, nn.Module) and not is_linear(projection):
                    kind = f"{type(projection).__module__}.{type(projection).__qualname__}"
                    kinds.setdefault(kind, set()).add(part)
        if not kinds:
            return None
        return "; ".join(
            f"{', '.join(part for part in self._parts() if part in parts)}: {kind}" for kind, parts in kinds.items()
        )

    def _parts(self) -> tuple[str, ...]:
        return (*self.projections, *([] if self.out is None else [self.out]))

    def _built_alike(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """Modules with the attributes of this family; their projections may be of any type."""
        named = (*self._parts(), self.width, *([] if self.heads is None else [self.heads]), *self.marks)
        return [(name, module) for name, module in layers_named(self.host(model), named) if self.is_one(name, module)]

    def is_one(self, name: str, module: nn.Module) -> bool:
        """Whether a module with the right attributes is self-attention of this family."""
        return True

    def refusal(self, model: nn.Module) -> str | None:
        """Why a model of this family can never be served; None if it can."""
        return by_length(getattr(self.host(model), "config", None)) if self.rotary else None

    def forget(self, module: nn.Module) -> None:
        """Drop copies of a module's weights, which may have changed."""

    def host(self, model: nn.Module) -> nn.Module:
        """The part of the model whose `forward` calls all of the sites; it may have been loaded alone."""
        base: nn.Module = getattr(model, "base_model", model)
        inner = None if self.part is None else getattr(base, self.part, None)
        return inner if isinstance(inner, nn.Module) else base

    def depth(self, model: nn.Module) -> int | None:
        """The number of sites that the model must have; None if its configuration does not say."""
        return getattr(getattr(self.host(model), "config", None), self.layers, None)

    # -- reading a call

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        """The call's hidden states, mask and empty cache; or the reason why the call must stay exact."""
        if len(args) > len(self.parameters):
            return "more positional arguments than are known"
        given = self.named(args, kwargs)
        hidden = given.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return "hidden states are not [batch, length, hidden]"
        if any(given.get(name) is not None for name in _CROSS):
            return "cross-attention"
        if given.get("output_attentions"):
            return "output_attentions"
        for name, value in given.items():
            if name in HARMLESS or name in self.harmless or value is None:
                continue
            if value is not False or name in _FALSE_MATTERS:
                return f"the argument {name}"
        cache = given.get(self.cache_name)
        if cache is not None:
            reason = self._unfillable(module, cache)
            if reason is not None:
                return reason
        return Call(hidden, given.get(self.mask_name), cache, given)

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a call by name."""
        return dict(zip(self.parameters, args, strict=False)) | kwargs

    def read_captured(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        """`read` for a call that returned its map on request and may already have filled a cache."""
        return self.read(module, (), self.named(args, kwargs) | {"output_attentions": False, self.cache_name: None})

    def _unfillable(self, module: nn.Module, cache: Any) -> str | None:
        """Why a hit cannot fill this cache as the original code would; None if it can."""
        if not self.causal:
            return "a key-value cache is in use"
        from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

        layer = self.layer_index(module)
        if type(cache) is not DynamicCache or getattr(cache, "offloading", False):
            return f"a key-value cache of type {type(cache).__name__}"
        if layer < len(cache.layers) and type(cache.layers[layer]) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"a key-value cache with layers of type {type(cache.layers[layer]).__name__}"
        if cache.get_seq_length(layer) > 0:
            return "cached decoding"
        return None

    def layer_index(self, module: nn.Module) -> int:
        """The module's layer in a key-value cache."""
        return int(module.layer_idx)  # type: ignore[arg-type]

    def window(self, module: nn.Module) -> int | None:
        """How far a token sees by the module's mask (sliding attention); None: without a limit."""
        return None

    def spans(self, module: nn.Module, mask: Any, batch: int, length: int) -> Spans | None:
        """Where the valid tokens of each sequence lie; None if the mask is not the family's own mask with padding.

        Padding on the left is for decoders only: an encoder may pool the first place, and a hit leaves padding out.
        """
        if self.adds(module, mask):
            return None
        spans = read_mask(mask, batch, length, self.causal, self.window(module))
        return None if spans is not None and spans.left and not self.causal else spans

    def adds(self, module: nn.Module, mask: Any) -> bool:
        """Whether the module adds this boolean mask to its scores: then no token is masked by it."""
        return adds_booleans(module, mask)

    # -- a hit

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        """V of packed tokens: ``[N, H]`` to ``[N, h * d]``, or less if heads share V."""
        projected: Tensor = getattr(module, self.projections[2])(tokens)
        return projected

    def key(self, module: nn.Module, call: Call) -> Tensor:
        """K as a key-value cache stores it, ``[B, heads of K, L, d]``. For decoders only."""
        batch, length, _ = call.hidden.shape
        keys: Tensor = getattr(module, self.projections[1])(call.hidden)
        return keys.view(batch, length, -1, self.shape(module)[1]).transpose(1, 2)

    def finish(self, module: nn.Module, context: Tensor, hidden: Tensor) -> Tensor:
        """The module's output ``[B, L, H]`` from the context ``[B, L, h * d]`` and its input ``[B, L, H]``."""
        output: Tensor = context if self.out is None else getattr(module, self.out)(context)
        return output

    def pack(self, module: nn.Module, output: Tensor, call: Call) -> Any:
        """The return value of `forward`, from the finished output."""
        return output, None

    def output_of(self, returned: Any) -> Tensor:
        """The finished output in the return value of the original `forward`."""
        output: Tensor = returned[0]
        return output

    def map_of(self, returned: Any) -> Tensor:
        """The attention map ``[B, h, L, L]`` in the return value of `forward` while capturing."""
        probabilities: Tensor = returned[1]
        return probabilities

    def take_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows, cache: Any = None) -> Arguments:
        """The same call for some sequences of the batch, with another cache if the call has one."""

        def take(name: str, value: Any) -> Any:
            if name == self.cache_name and value is not None:
                return cache
            return value if name in self.unbatched else rows.of(value, name in self.shared)

        # arguments beyond the names get an empty name
        named = zip_longest(self.parameters[: len(args)], args, fillvalue="")
        taken = tuple(take(name, value) for name, value in named)
        return taken, {name: take(name, value) for name, value in kwargs.items()}

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Number of heads of the map and their width, ``(h, d)``."""
        width = int(getattr(module, self.width))
        if self.heads is not None:
            return int(getattr(module, self.heads)), width
        return int(getattr(module, str(self.out)).in_features) // width, width

    # -- blocks

    def blocks(self, model: nn.Module) -> Blocks | str:
        """The blocks of the model, to be run over packed rows; or why there are none."""
        return f"this family ({self.family}) has no packed blocks; only maps"

    def embeddings(self, model: nn.Module) -> Embeddings | None:
        """What the model computes before its blocks, if it is a norm of a sum of rows of tables; else None."""
        return None

    # -- offline

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """Inside, calls of `host` with the yielded keyword arguments make the layers return their maps.

        Layers read their implementation at each call, so it is switched for the time of the capture.
        """
        if self.maps_on_request:
            yield {"output_attentions": True}
            return
        host = self.host(model)
        found = {id(module.config): module.config for module in host.modules() if hasattr(module, "config")}
        configs: list[Any] = [config for config in found.values() if hasattr(config, "_attn_implementation")]
        before = [config._attn_implementation for config in configs]
        for config in configs:
            config._attn_implementation = "eager"
        try:
            yield {"use_cache": False} if self.causal else {}
        finally:
            for config, implementation in zip(configs, before, strict=True):
                config._attn_implementation = implementation

    def sample(self, model: nn.Module) -> tuple[dict[str, Tensor], list[int]]:
        """A small batch for `host` and its lengths, for the self-check; not random: the user may have seeded torch."""
        config: Any = self.host(model).config
        inputs, lengths = inputs_of(config, CHECK_LENGTHS), list(CHECK_LENGTHS)
        if self.ends_texts:
            end_texts(inputs, lengths, getattr(config, "eos_token_id", None))
        return inputs, lengths


def inputs_of(config: Any, lengths: Sequence[int]) -> dict[str, Tensor]:
    """Ids and mask of sequences of these lengths, padded on the right; neighbours among the tokens differ."""
    vocabulary = int(getattr(config, "vocab_size", 100))
    rows, longest = len(lengths), max(lengths)
    ids = (torch.arange(rows * longest).view(rows, longest) * 7919 + vocabulary // 3) % vocabulary
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": ids, "attention_mask": mask.long()}


def end_texts(inputs: dict[str, Tensor], lengths: Sequence[int], end: Any) -> None:
    """Let each text of a sample end with this token, and have it nowhere else: some heads look for it."""
    if isinstance(end, int):
        ids = inputs["input_ids"]
        ids[ids == end] = int(end == 0)
        ids[torch.arange(len(ids)), torch.tensor(lengths) - 1] = end


def layers_named(model: nn.Module, attributes: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules that have all these attributes, of any type, in the order of the model."""
    return [(name, module) for name, module in model.named_modules() if all(hasattr(module, a) for a in attributes)]


def by_length(config: Any) -> str | None:
    """Why the rotary positions give maps that are valid in one batch only; None if they do not."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for part in (part for part in (scaling, *scaling.values()) if isinstance(part, dict)):
        kind = part.get("rope_type", part.get("type"))
        if kind in _BY_LENGTH:
            return f"its rotary positions depend on the length of the batch (rope_type {kind!r})"
        if part.get("llama_4_scaling_beta") is not None:
            return "its queries are scaled by their absolute position (llama_4_scaling_beta)"
    if getattr(config, "attn_temperature_tuning", None):
        return "its queries are scaled by their absolute position (attn_temperature_tuning)"
    return None


def takes(module: nn.Module, *names: str) -> bool:
    """Whether `forward` of the module's class has arguments of these names."""
    parameters = inspect.signature(type(module).forward).parameters
    return all(name in parameters for name in names)


def number(found: Sequence[tuple[str, nn.Module]]) -> list[Site]:
    """One site for each module, in this order."""
    return [Site(layer, name, module) for layer, (name, module) in enumerate(found)]


def by_module(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites grouped by module, each group in the order in which a forward calls the module."""
    groups: dict[int, list[Site]] = {}
    for site in sites:
        groups.setdefault(id(site.module), []).append(site)
    return list(groups.values())
