"""Reuse of attention maps: V and A·V over the record's map, instead of Q, K, QKᵀ, softmax and A·V.

Source: AttMEMO (arXiv 2301.09262), section 4 and Fig. 8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.db import KIND_INPUT, KIND_MAP, Database
from attmemo.forward.context import Forward
from attmemo.forward.plan import Share
from attmemo.forward.reuse import Exact
from attmemo.maps.source import MapSource, StoredMaps
from attmemo.mmap import FetcherName
from attmemo.models import Adapter, Call, Rows, Site, Spans
from attmemo.models.masks import consecutive
from attmemo.models.projections import share_heads

Ints = npt.NDArray[np.int64]

_WHOLE = 0.8  # share of a batch's tokens from which projecting all of them costs less than gathering the hits


@dataclass(frozen=True, slots=True)
class _Hits:
    """Finished output ``[g, L, H]`` of the hits, and their K and V ``[g, heads, L, d]`` if a cache wants them.

    In the order of the batch if every sequence hit, else in the order of `sequences`.
    """

    sequences: Ints
    output: Tensor
    keys: Tensor | None
    values: Tensor | None


class Maps:
    """Serves attention modules from stored maps.

    Parameters
    ----------
    adapter : Adapter
        Knows the model's attention modules.
    database : Database
    fetch : {"auto", "direct", "map", "view", "copy"}
        How maps are read (`source.StoredMaps`).

    Attributes
    ----------
    source : MapSource
        Where maps come from. Measurements put other maps in their place.
    """

    name: ClassVar[str] = "maps"
    whole: ClassVar[bool] = False
    failure: ClassVar[str] = "maps could not be read"

    def __init__(self, adapter: Adapter, database: Database, fetch: FetcherName = "auto") -> None:
        self.adapter, self.database = adapter, database
        self.source: MapSource = StoredMaps(database, fetch)

    def read(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        return self.adapter.read(site.module, args, dict(kwargs))

    def watch(self, hooks: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> None:
        """A `forward` around a module sees what the original one would."""

    def modules(self, site: Site) -> Sequence[nn.Module]:
        return (site.module,)

    def window(self, module: nn.Module) -> int | None:
        return self.adapter.window(module)

    def spans(self, module: nn.Module, call: Call, given: Mapping[str, Any] | None) -> Spans | str:
        spans = self.adapter.spans(module, call.mask, int(call.hidden.shape[0]), int(call.hidden.shape[1]))
        if spans is None:
            return "the mask is not plain padding on one side"
        if self.adapter.rotary:
            if given is None:
                return "a layer was called outside of its model: its positions are unknown"
            if not consecutive(given.get("position_ids"), spans, int(call.hidden.shape[1])):
                return "positions are not consecutive"
        return spans

    def serve(self, site: Site, call: Call, spans: Spans, share: Share, forward: Forward) -> _Hits:
        """V of the hits, A·V with the maps read where they lie, and the rest of the module."""
        adapter, module, hidden = self.adapter, site.module, call.hidden
        batch, padded, _ = hidden.shape
        heads, width = adapter.shape(module)
        lengths = np.asarray(spans.lengths, np.int64)
        order = np.argsort(lengths[share.sequences], kind="stable")
        sequences, records = share.sequences[order], share.records[order]
        counts = lengths[sequences]
        offsets = padded - counts if spans.left else np.zeros_like(counts)
        every = len(sequences) == batch
        keys = cached = None
        if call.cache is None:
            tokens, starts = _gather(hidden, sequences, counts, offsets)
            projected = adapter.value(module, tokens)  # [N, h * d], fewer heads if they are shared
        else:  # a cache wants K and V of padding too
            mine = call if every else _some(adapter, call, Rows(batch, sequences))
            starts = (sequences if every else np.arange(len(sequences))) * padded + offsets
            projected = adapter.value(module, mine.hidden.reshape(len(sequences) * padded, -1))
            keys = adapter.key(module, mine)  # [g, heads of K, L, d]
            cached = projected.view(len(sequences), padded, -1, width).transpose(1, 2)
        values = share_heads(projected, heads, width).contiguous()
        # Outputs go where they belong in the batch; if other sequences miss, one behind the other.
        places = sequences if every else np.arange(len(sequences))
        context = values.new_empty(len(sequences), padded, heads * width)
        for n in np.unique(counts).tolist():
            group = slice(*np.searchsorted(counts, (n, n + 1)))
            self.source.multiply(site.layer, n, records[group], values, starts[group], context, places[group])
        if spans.left:
            context = Spans([int(n) for n in (lengths if every else counts)], left=True).to_back(context)
        output = adapter.finish(module, context, hidden if every else hidden[torch.from_numpy(sequences)])
        return _Hits(sequences, output, keys, cached)

    def join(
        self, site: Site, call: Call, share: Share, served: _Hits, exact: Exact, arguments: tuple[Any, Any]
    ) -> tuple[Any, float]:
        """Run the original code for the misses, as a smaller batch; then fill the cache.

        The cache is filled last and at once: an error before leaves the cache empty.
        """
        batch, module, cache = call.hidden.shape[0], site.module, call.cache
        if len(served.sequences) == batch:
            if cache is not None:
                self._fill(cache, module, served.keys, served.values)
            return self.adapter.pack(module, served.output, call), 0.0
        from transformers.cache_utils import DynamicCache  # seconds to import

        start = perf_counter()
        missed, hit = share.missed.index, torch.from_numpy(served.sequences)
        scratch = None if cache is None else DynamicCache()
        some_args, some_kwargs = self.adapter.take_rows(*arguments, share.missed, scratch)
        computed = self.adapter.output_of(exact(*some_args, **some_kwargs))
        output = _both(computed, missed, served.output, hit, batch)
        if scratch is not None:
            assert served.keys is not None
            assert served.values is not None
            own = scratch.layers[self.adapter.layer_index(module)]
            keys = _both(own.keys, missed, served.keys, hit, batch)
            self._fill(cache, module, keys, _both(own.values, missed, served.values, hit, batch))
        spent = perf_counter() - start
        return self.adapter.pack(module, output, call), spent

    @staticmethod
    def slots(inputs: Sequence[Tensor], maps: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        """A map ``[heads, n, n]`` of each layer, and the hidden states ``[n, hidden]`` that entered the layers."""
        return {KIND_MAP: maps, KIND_INPUT: inputs}

    def passed(self, hidden: Tensor) -> Any:
        return hidden

    def close(self) -> None:
        self.source.close()

    def _fill(self, cache: Any, module: nn.Module, keys: Tensor | None, values: Tensor | None) -> None:
        """Give a decoder's cache the keys and values that the original code gives; decoding goes on from there."""
        cache.update(keys, values, self.adapter.layer_index(module))


def _some(adapter: Adapter, call: Call, rows: Rows) -> Call:
    """The call for some sequences, without its cache."""
    _, given = adapter.take_rows((), call.given, rows)
    return replace(call, hidden=given["hidden_states"], cache=None, given=given)


def _both(misses: Tensor, missed: Tensor, hits: Tensor, hit: Tensor, batch: int) -> Tensor:
    """Misses and hits in the order of the batch."""
    whole = misses.new_empty(batch, *misses.shape[1:])
    whole[missed], whole[hit] = misses, hits
    return whole


def _gather(hidden: Tensor, sequences: Ints, counts: Ints, offsets: Ints) -> tuple[Tensor, Ints]:
    """Tokens ``[N, H]`` that need V, and where each sequence's tokens begin.

    Of ``[B, L, H]``, `counts` tokens of each sequence from `offsets` on. `counts` ascend.
    """
    batch, padded, size = hidden.shape
    if counts.sum() >= _WHOLE * batch * padded:
        return hidden.reshape(batch * padded, size), sequences * padded + offsets
    starts = np.cumsum(counts) - counts
    if counts[0] == padded:
        return hidden[torch.from_numpy(sequences)].view(-1, size), starts
    spans = zip(sequences.tolist(), offsets.tolist(), (offsets + counts).tolist(), strict=True)
    return torch.cat([hidden[row, first:last] for row, first, last in spans]), starts
