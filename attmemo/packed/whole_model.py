"""A forward of a whole model in few calls: embeddings, blocks and pooler, where nothing looks into the model.

A line of twenty tokens waits longer for modules, masks, hooks and output classes than for its blocks. Here ids become
embedded rows without padding (`kernels/embeddings.py`), the blocks run over them, and the rows go to where the tokens
were. The numbers are those of the model's own modules with hooked blocks, bit by bit: torch's own norm and linear
layer are called where sums have an order. Forwards that are looked up get their plan, and their blocks, from the
engine. Whatever is asked for beside that goes the hooked way.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from time import perf_counter
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from attmemo.forward.context import NOTHING, Forward
from attmemo.forward.engine import FAILURES, Engine, is_traced
from attmemo.forward.plan import Plan
from attmemo.kernels.embeddings import Batch, Tables, embed, read_batch, spread
from attmemo.kernels.members import have
from attmemo.kernels.row_attention import Layout
from attmemo.models import Adapter, Call, Site, Spans
from attmemo.models.embeddings import Embeddings, Pooler, pooler_named
from attmemo.packed.stack import Onlookers, Stack

_PARAMETERS, _WEIGHT = attrgetter("_parameters"), itemgetter("weight")
_TENSORS = frozenset({"input_ids", "token_type_ids", "attention_mask"})
_SWITCHES = {"return_dict": (True,), "use_cache": (False,)}
"""Arguments beside ids, and the values that change nothing; None changes nothing either."""
_ASKED_FOR_MORE = "output_attentions", "output_hidden_states"
_SETTINGS = (*_ASKED_FOR_MORE, "return_dict", "is_causal", "_attn_implementation")
"""Of a configuration: what a forward without arguments is like."""


class WholeModel:
    """Runs forwards of one model. Several threads may call one instance.

    Parameters
    ----------
    host : nn.Module
        The model.
    parts : Parts
        What it computes beside its blocks.
    engine : Engine
        Its kind of reuse is a `Stack`.
    names : sequence of str
        Arguments of the model's `forward`.
    own : sequence of pairs
        Modules, and the `forward` that may stand in front of each.
    site : Site or None
        The blocks, if forwards are looked up that no guard leaves to them.
    """

    def __init__(
        self, host: nn.Module, parts: Parts, engine: Engine, names: Sequence[str],
        own: Sequence[tuple[nn.Module, Callable[..., Any]]], site: Site | None = None,
    ) -> None:  # fmt: skip
        self._site = site
        stack = engine.reuse
        assert isinstance(stack, Stack)
        self._embeddings, self._pooler, self._output = parts.embeddings, parts.pooler, parts.output
        self._engine, self._stack, self._names = engine, stack, tuple(names)
        inner = [module for module in host.modules() if module is not host]
        self._onlookers = Onlookers(inner, own)
        drops = [module for module in inner if isinstance(module, nn.modules.dropout._DropoutNd)]
        rest = [vars(module) for module in (host, *stack.blocks.modules, *drops)]
        self._at_rest = tuple(rest), "training", (False,) * len(rest)
        self._config: Any = getattr(host, "config", None)
        self._settings = [getattr(self._config, name, None) for name in _SETTINGS]
        self._seen = dict(vars(self._config))
        # A model without a table of types that takes types reads none: tokenizers give them all the same.
        untyped = parts.embeddings.types is None and "token_type_ids" in self._names
        self._ignored = ("token_type_ids",) if untyped else ()
        tables = parts.embeddings.words, parts.embeddings.types, parts.embeddings.positions
        self._of = [table for table in tables if table is not None]
        self._tables = self._taken()

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output; None: this forward goes the hooked way; or the plan that it follows there."""
        forward, arrays = self._engine.current.running.get(), None
        if forward is not None and (forward.forced is not None or forward.given is not None):
            return None
        try:
            if not self._is_unseen() or self._stack.keep is not None or self._engine.changed():
                return None
            if len(args) > len(self._names):
                return None
            given = kwargs if not args else dict(zip(self._names, args, strict=False)) | dict(kwargs)
            arrays, tables = self._read(given), self._tables_now()
            batch = None if arrays is None else read_batch(arrays, tables)
            return None if batch is None else self._run(batch, tables, given, forward)
        except FAILURES as error:
            failed, engine = Plan(self._stack.failure), self._engine.of(forward)
            if forward is not None:  # the modules compute all of it: no answer comes from a record
                forward.outcome = NOTHING
            engine.failed(0, failed, error, 1 if arrays is None else len(arrays[0]))
            return failed

    # -- whether it is such a forward

    def _read(self, given: Mapping[str, Any]) -> tuple[Any, Any, Any] | None:
        """Ids, types and mask as arrays, if nothing else was given that changes anything."""
        found: dict[str, Any] = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in self._ignored:
                continue
            if name in _TENSORS:
                if type(value) is not Tensor or not value.is_cpu:
                    return None
                found[name] = (value if value.is_contiguous() else value.contiguous()).numpy()
            elif value is not False if name in _ASKED_FOR_MORE else value not in _SWITCHES.get(name, ()):
                return None
        ids, types = found.get("input_ids"), found.get("token_type_ids")
        if ids is None or not ids.ndim or (types is not None and self._embeddings.types is None):
            return None
        return ids, types, found.get("attention_mask")

    def _is_unseen(self) -> bool:
        """Whether nothing looks into the model, and nothing records what it does."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or is_traced():
            return False
        if not have(*self._at_rest) or self._onlookers.have_forwards or self._onlookers.have_hooks:
            return False
        if self._pooler is not None and not self._pooler.is_in_place:
            return False
        if vars(self._config) != self._seen:
            if [getattr(self._config, name, None) for name in _SETTINGS] != self._settings:
                return False
            self._seen = dict(vars(self._config))
        return True

    # -- the forward

    def _run(self, batch: Batch, tables: Tables, given: Mapping[str, Any], forward: Forward | None) -> Any:
        """The output, or the plan by which the hooked way gets it; None: that way needs no plan."""
        if type(torch.empty(0, device="cpu")) is not Tensor:  # a mode of torch makes others
            return None
        norm = self._embeddings.norm
        if self._site is None or (forward is not None and forward.left):
            last: Tensor | Plan = self._computed(_embedded(batch, tables, norm), batch, forward)
        else:
            last = self._engine.serve(self._site, _Embedded(batch, tables, norm), Spans(batch.lengths.tolist()), given)
        if isinstance(last, Plan):
            return last
        return self._output.make(last, None if forward is not None and forward.unpooled else self._pooled(last))

    def _computed(self, hidden: Tensor, batch: Batch, forward: Forward | None) -> Tensor:
        """Last hidden states ``[B, L, H]`` from embedded rows ``[N, H]``, with nothing looked up."""
        starts, start = batch.starts, perf_counter()
        first, packed = forward is not None and forward.first, None if forward is None else forward.packed
        if batch.distinct < len(batch.lengths):
            starts = np.append(starts[batch.own], starts[-1])
        found = (packed or self._stack.packed).run(
            hidden, Layout(starts, starts), batch.longest, asked=starts[:-1] if first else None
        )
        last = _first_rows(found, batch) if first else spread(found, batch)
        counters = self._engine.of(forward).counters
        lengths, repeats = batch.lengths, forward is not None and forward.repeats
        if forward is not None:
            forward.note_computed(counters, lengths)
        sequences, tokens = (0, 0) if repeats else (len(lengths), batch.tokens)
        why = forward is not None and forward.left
        counters.whole(sequences, tokens, len(hidden), perf_counter() - start, first, why)
        return last

    def _pooled(self, last: Tensor) -> Tensor | None:
        pooler = self._pooler
        if pooler is None:
            return None
        weights = pooler.dense._parameters
        dense = linear(last.select(1, 0), weights["weight"], weights["bias"])  # type: ignore[arg-type]
        pooled: Tensor = dense.tanh() if type(pooler.activation) is nn.Tanh else pooler.activation(dense)
        return pooled

    def _tables_now(self) -> Tables:
        """The tables where they lie now."""
        tables, places = self._tables
        if list(map(Tensor.data_ptr, map(_WEIGHT, map(_PARAMETERS, self._of)))) != places:
            self._tables = tables, _ = self._taken()
        return tables

    def _taken(self) -> tuple[Tables, list[int]]:
        """The tables, and where each of them lies."""
        own = self._embeddings
        words, kinds, positions = (
            None if table is None else table.weight.detach() for table in (own.words, own.types, own.positions)
        )
        assert words is not None
        found = Tables(words, kinds, positions, own.padding)
        return found, [table.data_ptr() for table in (words, kinds, positions) if table is not None]


class _Embedded(Call):
    """What the first block would be given, embedded as far as it is asked for: rows of records need no embedding."""

    __slots__ = ("_batch", "_hidden", "_norm", "_tables", "firsts", "shape")

    firsts: npt.NDArray[np.int64]
    shape: tuple[int, int, int]
    _batch: Batch
    _tables: Tables
    _norm: nn.LayerNorm
    _hidden: Tensor | None

    def __init__(self, batch: Batch, tables: Tables, norm: nn.LayerNorm) -> None:
        shape = *batch.given[0].shape, tables.width
        own: dict[str, Any] = {"_batch": batch, "_tables": tables, "_norm": norm, "_hidden": None}
        given: dict[str, Any] = {"mask": None, "cache": None, "given": {}}
        for name, value in (given | own | {"firsts": batch.firsts, "shape": shape}).items():
            object.__setattr__(self, name, value)  # of a frozen class

    @property
    def hidden(self) -> Tensor:
        found = self._hidden
        if found is None:
            found = spread(_embedded(self._batch, self._tables, self._norm), self._batch)
            object.__setattr__(self, "_hidden", found)
        return found

    def rows_at(self, places: Tensor | None) -> Tensor:
        if places is None or self._hidden is not None:
            return super().rows_at(places)
        return _embedded(self._batch, self._tables, self._norm, places.numpy())


def _embedded(
    batch: Batch, tables: Tables, norm: nn.LayerNorm, places: npt.NDArray[np.int64] | None = None
) -> Tensor:
    """Rows ``[N, H]`` at these places of the padded batch; None: of all sequences that differ."""
    count = batch.rows if places is None else len(places)
    rows, weights = torch.empty(count, tables.width, dtype=tables.dtype, device="cpu"), norm._parameters
    embed(batch, tables, rows, places)
    return torch.layer_norm(rows, rows.shape[1:], weights["weight"], weights["bias"], norm.eps)


class Output:
    """Makes outputs of a class of transformers, as one that was seen is.

    Its own way to be made asks for all of its fields whenever one of them is set, which takes as long as some rows.

    Parameters
    ----------
    seen : ModelOutput
        Last hidden states, and what the pooler gives or nothing.

    Raises
    ------
    ValueError
        It is no such output.
    """

    def __init__(self, seen: Any) -> None:
        self._class: Any = type(seen)
        self._nothing = dict.fromkeys(vars(seen))
        self._plainly = False
        known = {"last_hidden_state", "pooler_output"}
        if not isinstance(seen, OrderedDict) or "last_hidden_state" not in seen or not known.issuperset(seen.keys()):
            raise ValueError(f"a {type(seen).__name__} with other parts than the last hidden states and the pooler's")
        self.is_pooled = "pooler_output" in seen
        given = seen["last_hidden_state"], seen["pooler_output"] if self.is_pooled else None
        made, usual = self.make(*given), self._usual(*given)
        same = vars(made) == vars(usual) and list(made.items()) == list(usual.items())
        self._plainly = not same

    def make(self, last: Tensor, pooled: Tensor | None) -> Any:
        """The output of a forward."""
        if self._plainly:
            return self._usual(last, pooled)
        made = self._class.__new__(self._class)
        parts = vars(made)
        parts.update(self._nothing)
        parts["last_hidden_state"] = last
        OrderedDict.__setitem__(made, "last_hidden_state", last)
        if pooled is not None:
            parts["pooler_output"] = pooled
            OrderedDict.__setitem__(made, "pooler_output", pooled)
        return made

    def _usual(self, last: Tensor, pooled: Tensor | None) -> Any:
        return self._class(last_hidden_state=last, **({} if pooled is None else {"pooler_output": pooled}))


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model computes beside its blocks.

    Attributes
    ----------
    embeddings : Embeddings
    pooler : Pooler or None
    output : Output
        Makes what a forward returns.
    """

    embeddings: Embeddings
    pooler: Pooler | None
    output: Output


def parts_of(adapter: Adapter, model: nn.Module, dtype: torch.dtype, seen: Any) -> Parts | None:
    """The parts of a model whose forward gave `seen`; None: it computes something else beside its blocks."""
    host, embeddings = adapter.host(model), adapter.embeddings(model)
    if embeddings is None or embeddings.words.weight.dtype != dtype or not hasattr(host, "config"):
        return None
    try:
        output = Output(seen)
    except ValueError:
        return None
    pooler = pooler_named(host) if output.is_pooled else None
    return None if output.is_pooled and pooler is None else Parts(embeddings, pooler, output)


def _first_rows(found: Tensor, batch: Batch) -> Tensor:
    """Rows ``[W, H]`` of the sequences that have some, as first rows of all: all others are NaN."""
    last = found.new_full((*batch.given[0].shape, found.shape[1]), torch.nan)
    last[:, 0] = found[torch.from_numpy(np.searchsorted(batch.own, batch.firsts))]
    return last
