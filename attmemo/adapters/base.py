"""What the engine needs to know about one family's attention: the adapter protocol.

An adapter is data plus a few small methods, one file a family. The engine never looks inside a module itself.
README.md beside this file shows the shapes and how to add a family.

Shapes: B sequences of padded length L, hidden size H, h heads of width d (of which V may have fewer: grouped heads), n
valid tokens in a sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.adapters.masks import Spans, read_mask
from attmemo.adapters.projections import are_linear, is_linear

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

# Two lengths, so that padding, the mask and the row order are all exercised by the self-check.
CHECK_LENGTHS = (7, 11)

# What an attention module is called with that does not change a map; a family adds its own. Anything else might
# (is_causal, cu_seq_lens_q, …), so it keeps a call exact.
HARMLESS = frozenset({
    "hidden_states", "attention_mask", "past_key_values", "position_ids", "position_embeddings", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "return_dict", "token_type_ids",
})  # fmt: skip
_BY_LENGTH = ("dynamic", "longrope")  # rotary angles that depend on the longest sequence so far
_FALSE_MATTERS = ("is_causal",)  # a flag that says something also where it is off
_CROSS = ("encoder_hidden_states", "key_value_states")  # given: keys of another sequence


@dataclass(frozen=True, slots=True)
class Site:
    """One self-attention layer of a model: where `forward` is replaced. Layers may share a module (ALBERT)."""

    layer: int
    name: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a site, read: what goes in and which mask applies.

    ``mask`` is the module's own mask argument (None: everything may attend everything, or everything before it);
    ``cache`` a key-value cache that is empty in this layer and wants its keys and values; ``given`` all by name.
    """

    hidden: Tensor  # [B, L, H], as the module sees it
    mask: Any
    cache: Any
    given: dict[str, Any]


class Rows:
    """Some rows of a batch, to be taken out of a call's arguments.

    Parameters
    ----------
    batch : int
        B, the rows that there are.
    rows : array of int
        Which to take.
    """

    def __init__(self, batch: int, rows: npt.NDArray[np.int64]) -> None:
        self.batch, self.rows = batch, rows
        self.index = torch.from_numpy(rows)
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    @classmethod
    def without(cls, batch: int, rows: npt.NDArray[np.int64]) -> Rows:
        """All rows of a batch but these."""
        kept = np.ones(batch, bool)
        kept[rows] = False
        return cls(batch, np.flatnonzero(kept))

    def of(self, value: Any, keep: bool = False) -> Any:
        """Rows of a tensor whose first dimension is the batch; anything else belongs to all rows alike.

        With `keep`, for arguments that many layers share: their rows are taken once.
        """
        if isinstance(value, tuple):
            return tuple(self.of(item, keep) for item in value)
        if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != self.batch or self.batch == 1:
            return value
        if not keep:
            return value[self.index]
        if id(value) not in self._kept:
            self._kept[id(value)] = value, value[self.index]  # holding the tensor keeps its identity from reuse
        return self._kept[id(value)][1]


class Adapter:
    """One family of attention modules.

    The defaults are those of a module of transformers 5 that projects Q, K and V by a linear layer each, asks the
    attention interface, projects once more, and returns ``(output, map)``: such a family is data alone.

    Attributes
    ----------
    family : str
        Name shown to users and stored in a database.
    models : tuple of str
        Models that are known to work, for people to read.
    limits : str
        What of them is refused or left exact, for people to read.
    projections : tuple of str
        Names of the linear layers of Q, K and V; empty if they are one.
    out : str or None
        Name of the output projection; None if it is not the module's.
    heads, width : str
        Names of the attributes that say how many heads there are, and how wide; heads may be None where the output
        projection tells.
    marks : tuple of str
        More attributes by which modules of the family are told.
    causal : bool
        Tokens attend to what comes before them: maps are stored as lower triangles.
    rotary : bool
        Positions enter in the attention itself and not with the hidden states: only consecutive ones can be served.
    parameters : tuple of str
        Names of `forward`'s arguments as far as they are given by position.
    mask_name, cache_name : str
        Which of them are the mask and the key-value cache.
    harmless : frozenset of str
        More arguments that do not change a map.
    """

    family: ClassVar[str]
    models: ClassVar[tuple[str, ...]]
    limits: ClassVar[str] = ""
    projections: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    out: ClassVar[str | None] = "o_proj"
    heads: ClassVar[str | None] = None
    width: ClassVar[str] = "head_dim"
    marks: ClassVar[tuple[str, ...]] = ()
    causal: ClassVar[bool] = False
    rotary: ClassVar[bool] = False
    parameters: ClassVar[tuple[str, ...]] = ("hidden_states", "attention_mask")
    mask_name: ClassVar[str] = "attention_mask"
    cache_name: ClassVar[str] = "past_key_values"
    harmless: ClassVar[frozenset[str]] = frozenset()
    # Arguments of a layer's own, whatever their first dimension happens to be; and those that all layers are given.
    unbatched: ClassVar[frozenset[str]] = frozenset({"cache_position"})
    shared: ClassVar[frozenset[str]] = frozenset({"attention_mask", "position_embeddings", "position_ids"})

    @property
    def mask_kind(self) -> str:
        """A record serves only calls of the same kind: ``"bidirectional"`` or ``"causal"``."""
        return "causal" if self.causal else "bidirectional"

    # -- finding

    def sites(self, model: nn.Module) -> list[Site]:
        """Self-attention modules in the order of layers, found by structure; empty if this is another family."""
        found, parts = self._built_alike(model), self._parts()
        return number([(name, module) for name, module in found if are_linear(module, *parts)])

    def replaced(self, model: nn.Module) -> str | None:
        """Which projections of modules that are else of this family are no plain linear layers, for people to read.

        Families with a fused projection name it themselves, in `refusal`.
        """
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
        """Modules of this family but for what their projections are."""
        named = (*self._parts(), self.width, *([] if self.heads is None else [self.heads]), *self.marks)
        return [(name, module) for name, module in layers_named(self.host(model), named) if self.is_one(name, module)]

    def is_one(self, name: str, module: nn.Module) -> bool:
        """Whether a module that has the projections is self-attention of this family, and not another's."""
        return True

    def refusal(self, model: nn.Module) -> str | None:
        """Why a model of this family can never be served, if so."""
        return by_length(getattr(self.host(model), "config", None)) if self.rotary else None

    def forget(self, module: nn.Module) -> None:
        """Drop what was kept of a module's weights: they may have changed since."""

    def host(self, model: nn.Module) -> nn.Module:
        """The part of the model whose `forward` calls all of the sites."""
        return getattr(model, "base_model", model)

    def depth(self, model: nn.Module) -> int | None:
        """How many sites there have to be; None if nobody says."""
        count = getattr(self.host(model), "config", None)
        return getattr(count, "num_hidden_layers", None)

    # -- reading a call

    def read(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        """The call's hidden states, mask and empty cache, or the reason why it must stay exact."""
        if len(args) > len(self.parameters):
            return "more positional arguments than are known"
        given = self.named(args, kwargs)
        hidden = given.get("hidden_states")
        if not isinstance(hidden, Tensor) or hidden.dim() != 3:
            return "hidden states are not [batch, length, hidden]"
        for name in _CROSS:
            if given.get(name) is not None:
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
        """`read` of a call that was made to return its map, and may have filled a cache since."""
        return self.read(module, (), self.named(args, kwargs) | {"output_attentions": False, self.cache_name: None})

    def _unfillable(self, module: nn.Module, cache: Any) -> str | None:
        """Why a hit cannot give this cache what the original code would."""
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
        """Which layer of a key-value cache is the module's."""
        return int(module.layer_idx)  # type: ignore[arg-type]

    def window(self, module: nn.Module) -> int | None:
        """How far a token sees by the mask that the module is given; None: all the way."""
        return None

    def spans(self, module: nn.Module, mask: Any, batch: int, length: int) -> Spans | None:
        """Where the valid tokens of each sequence lie, or None unless the mask is the family's own with padding.

        Padding on the left is a decoder's. What pools an encoder's first place would read padding there, for which a
        hit makes nothing.
        """
        spans = read_mask(mask, batch, length, self.causal, self.window(module))
        return None if spans is not None and spans.left and not self.causal else spans

    # -- a hit

    def value(self, module: nn.Module, tokens: Tensor) -> Tensor:
        """V for packed tokens: ``[N, H]`` to ``[N, h * d]``, or less if heads of V are shared."""
        projected: Tensor = getattr(module, self.projections[2])(tokens)
        return projected

    def key(self, module: nn.Module, call: Call) -> Tensor:
        """What a key-value cache is given: ``[B, heads of K, L, d]``. Only decoders are asked."""
        batch, length, _ = call.hidden.shape
        keys: Tensor = getattr(module, self.projections[1])(call.hidden)
        return keys.view(batch, length, -1, self.shape(module)[1]).transpose(1, 2)

    def finish(self, module: nn.Module, context: Tensor, hidden: Tensor) -> Tensor:
        """What the module makes of the context ``[B, L, h * d]`` and its input ``[B, L, H]``: ``[B, L, H]``."""
        output: Tensor = context if self.out is None else getattr(module, self.out)(context)
        return output

    def pack(self, module: nn.Module, output: Tensor, call: Call) -> Any:
        """What `forward` returns, from the finished output."""
        return output, None

    def output_of(self, returned: Any) -> Tensor:
        """The finished output inside what the original `forward` returned."""
        output: Tensor = returned[0]
        return output

    def map_of(self, returned: Any) -> Tensor:
        """The attention map ``[B, h, L, L]`` inside what `forward` returned while capturing."""
        probabilities: Tensor = returned[1]
        return probabilities

    def take_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any], rows: Rows, cache: Any = None) -> Arguments:
        """The same call for some rows of the batch, with another cache if it has one."""

        def take(name: str, value: Any) -> Any:
            if name == self.cache_name and value is not None:
                return cache
            return value if name in self.unbatched else rows.of(value, name in self.shared)

        taken = tuple(take(name, value) for name, value in _named(self.parameters, args))
        return taken, {name: take(name, value) for name, value in kwargs.items()}

    def shape(self, module: nn.Module) -> tuple[int, int]:
        """Heads of the map and their width ``(h, d)``."""
        width = int(getattr(module, self.width))
        if self.heads is not None:
            return int(getattr(module, self.heads)), width
        return int(getattr(module, str(self.out)).in_features) // width, width

    # -- offline

    @contextmanager
    def capturing(self, model: nn.Module) -> Iterator[dict[str, Any]]:
        """While inside, calls of `host` made with the yielded keyword arguments make their layers return maps.

        Only the eager implementation has a map to return. The setting is read at each call, so it is switched for the
        time of the capture and put back.
        """
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
        """A small batch for `host` and the valid lengths in it, for the self-check.

        Not drawn: the user may have seeded the generator. Ids from all over the vocabulary, special ones perhaps among
        them: to a layer they are numbers like others.
        """
        vocabulary = int(getattr(self.host(model).config, "vocab_size", 100))
        rows, longest = len(CHECK_LENGTHS), max(CHECK_LENGTHS)
        ids = (torch.arange(rows * longest).view(rows, longest) * 7919 + vocabulary // 3) % vocabulary
        mask = torch.arange(longest)[None] < torch.tensor(CHECK_LENGTHS)[:, None]
        return {"input_ids": ids, "attention_mask": mask.long()}, list(CHECK_LENGTHS)


def _named(names: Sequence[str], args: tuple[Any, ...]) -> list[tuple[str, Any]]:
    return list(zip_longest(names[: len(args)], args, fillvalue=""))  # more arguments than names have none


def layers_named(model: nn.Module, attributes: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """Modules that have all the attributes, as Linear layers or anything else, in the order of the model."""
    return [(name, module) for name, module in model.named_modules() if all(hasattr(module, a) for a in attributes)]


def by_length(config: Any) -> str | None:
    """Why rotary positions make maps that hold in one batch only, if they do."""
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    parts = [part for part in (scaling, *scaling.values()) if isinstance(part, dict)]
    for part in parts:
        kind = part.get("rope_type", part.get("type"))
        if kind in _BY_LENGTH:
            return f"its rotary positions depend on the length of the batch (rope_type {kind!r})"
        if part.get("llama_4_scaling_beta") is not None:
            return "its queries are scaled by their absolute position (llama_4_scaling_beta)"
    if getattr(config, "attn_temperature_tuning", None):
        return "its queries are scaled by their absolute position (attn_temperature_tuning)"
    return None


def takes(module: nn.Module, *names: str) -> bool:
    """Whether the class's `forward` has arguments of these names."""
    parameters = inspect.signature(type(module).forward).parameters
    return all(name in parameters for name in names)


def number(found: Sequence[tuple[str, nn.Module]]) -> list[Site]:
    """One site for each module, in this order."""
    return [Site(layer, name, module) for layer, (name, module) in enumerate(found)]


def by_module(sites: Sequence[Site]) -> list[list[Site]]:
    """Sites that share a module together, in the order in which a forward calls it."""
    groups: dict[int, list[Site]] = {}
    for site in sites:
        groups.setdefault(id(site.module), []).append(site)
    return list(groups.values())


def encoder_part(model: nn.Module) -> nn.Module:
    """The encoder of a model that also has a decoder, or of which only the encoder was loaded."""
    base: nn.Module = getattr(model, "base_model", model)
    inner = getattr(base, "encoder", None)
    return inner if isinstance(inner, nn.Module) else base
