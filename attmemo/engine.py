"""The online engine: what happens to one call of one attention layer.

    hidden states ─ gate ─no──────────────────────────────► exact attention
        │ yes                                                 ▲
        ▼                                                     │ misses (compacted sub-batch)
      embed ─ search ─ accept (same length, predicted similarity ≥ threshold)
                          │ hits
                          ▼
             A·V, the map read where it lies in the arena ─ output

Source: AttMEMO, section 4 and Fig. 8 (seed 004_17cf05913cb31f45.txt). Where the paper looks up in every layer, this
engine can also look up once per sequence and reuse the record's maps in every layer whose calibrated score reaches
the threshold.

Promises: a call of which no row is served, for whatever reason, runs the original code on the original arguments; rows
that miss beside others that hit run the original code as a smaller batch. Which record a sequence finds, and what it
yields, depends on its own hidden states alone; whether serving pays is asked for the whole batch (`perfmodel.gate`).
Rows of padding behind a hit are zero.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.adapters import Adapter, Call, Rows, Site, Spans
from attmemo.adapters.check import share_heads
from attmemo.adapters.masks import consecutive
from attmemo.db import KIND_INPUT, SEQUENCE, Database
from attmemo.embed import Calibration, SiameseEmbedder, load_embedders
from attmemo.errors import AttmemoError, DatabaseCorruptError, DatabaseError
from attmemo.machine import conditions
from attmemo.mmap import FetcherName
from attmemo.perfmodel import Gate, Profile, Verdict
from attmemo.reuse.source import Ints, MapSource, StoredMaps
from attmemo.watch import CHANGED, Watch

_LOG = logging.getLogger("attmemo")

Lookup = Literal["layer", "sequence"]
Exact = Callable[..., Any]
Floats = npt.NDArray[np.float32]

_WHOLE = 0.8  # share of a batch's tokens from which projecting them all costs less than gathering those that hit


@dataclass(slots=True)
class LayerStats:
    """What one layer did since the counters were last reset; rows are sequences."""

    rows: int = 0
    queries: int = 0
    hits: int = 0
    declined: int = 0  # near enough, but too few in their batch to pay
    predicted: float = 0.0  # sum over hits
    lookup_seconds: float = 0.0
    serve_seconds: float = 0.0
    exact_seconds: float = 0.0  # of the compacted misses in mixed batches
    saved_ms: float = 0.0  # by the profile's cost model, for the rows served


@dataclass(slots=True)
class Found:
    """Nearest records of a batch: ids (-1: none) and distances of embeddings, one per row."""

    records: Ints
    distances: Floats


@dataclass(frozen=True, slots=True)
class _Served:
    """What hits give: their rows, the finished output ``[g, L, H]``, and K and V ``[g, heads, L, d]`` for a cache.

    If every row of the batch hit, in the batch's order; else in the order of `rows`.
    """

    rows: Ints
    output: Tensor
    keys: Tensor | None
    values: Tensor | None


_NOTHING = Spans([])


class _Forward(threading.local):
    """What the layers of one forward share, one per thread: valid lengths, and the lookup made once per sequence."""

    def __init__(self) -> None:  # called anew in every thread
        self.reset()
        self.inside = False  # in a forward of the model, not of one layer called by hand
        self.exact_only: str | None = None
        self.positions: Tensor | None = None  # given to the model, where they matter to attention itself
        self.turns: Counter[int] = Counter()  # calls of modules that several layers share

    def reset(self) -> None:
        self.masks: list[tuple[Any, int | None, tuple[int, int], Spans | str]] = []
        self.looked_up = False
        self.found: Found | None = None
        self.last: Found | None = None
        # Rows of a forward that the first layer decided to leave alone, 0 otherwise: later layers need not read it.
        self.left_exact = 0
        self.verdict: Verdict | None = None
        self.misses: Rows | None = None

    def missed(self, batch: int, hits: Ints) -> Rows:
        """The rows that did not hit; layers that miss the same ones share what was taken out of the mask for them."""
        kept = np.ones(batch, bool)
        kept[hits] = False
        rows = np.flatnonzero(kept)
        if self.misses is None or self.misses.batch != batch or not np.array_equal(self.misses.rows, rows):
            self.misses = Rows(batch, rows)
        return self.misses


class Engine:
    """Serves attention maps from a database to the layers of one model.

    Parameters
    ----------
    adapter : Adapter
        Knows the model's attention modules.
    watch : Watch
        Made of the model as the database knows it.
    layers : int
        Number of attention layers.
    database : Database
        Opened, with a trained embedder.
    thresholds : sequence of float
        Similarity score in [0, 1] that a hit needs, one per layer.
    lookup : {"layer", "sequence"}
        One lookup in each layer, or one per sequence.
    gated : bool
        Ask the performance model before every lookup; False tries always.
    fetch : {"auto", "direct", "map", "view", "copy"}
        How maps are read (`maps.StoredMaps`).
    """

    def __init__(
        self,
        adapter: Adapter,
        watch: Watch,
        layers: int,
        database: Database,
        thresholds: Sequence[float],
        lookup: Lookup,
        *,
        gated: bool = True,
        fetch: FetcherName = "auto",
    ) -> None:
        self.adapter = adapter
        self._watch = watch
        self._told = False  # that weights changed
        self.layers = layers
        self.database = database
        self.thresholds = [float(t) for t in thresholds]
        self.lookup: Lookup = lookup
        profile = database.manifest.profile
        self.profile = None if profile is None else Profile.from_dict(profile)
        foreign = self.profile.foreign(conditions()) if gated and self.profile is not None else None
        if foreign is not None:
            _LOG.warning("attmemo: %s attmemo train-embedder %s measures again", foreign, database.path)
        self._gated = gated
        if lookup == "layer" and database.manifest.layers_kept(KIND_INPUT) < layers:
            raise DatabaseError(
                f"{database.path} keeps hidden states of the first layer only: there is no lookup in each layer.",
                "lookup='sequence', or build with --inputs all",
            )
        ref = database.embedder_ref()
        self._embedders: dict[int, SiameseEmbedder] = load_embedders(
            database.derived(ref.weights), database.manifest.model.hidden
        )
        used = [SEQUENCE] if lookup == "sequence" else range(layers)
        for layer in used:
            if layer not in self._embedders:
                raise DatabaseCorruptError(
                    f"{database.path}: there is no embedder for layer {layer}.",
                    f"attmemo train-embedder {database.path}",
                )
            database.index(layer)  # now, so that a damaged index is an error here and not in the first request
        self.curves = [self._curve(ref.calibration, layer) for layer in range(layers)]
        self.set_thresholds(self.thresholds)
        self.maps: MapSource = StoredMaps(database, fetch)
        self._forward = _Forward()
        self.reset_stats()

    def set_thresholds(self, thresholds: Sequence[float], radii: Sequence[float] | None = None) -> None:
        """Accept other scores from now on; the gate begins anew, as after `memoize`."""
        self.thresholds = [float(t) for t in thresholds]
        known = [curve.radius(t) for curve, t in zip(self.curves, self.thresholds, strict=True)]
        self.set_radii(known if radii is None else radii)
        profile = self.profile if self._gated else None
        self.gate = Gate(profile, self.thresholds, self.lookup, self.layers, always=not self._gated)

    def set_radii(self, radii: Sequence[float]) -> None:
        """The greatest distance that each layer accepts: a threshold, seen through the calibration."""
        self.radii = [float(r) for r in radii]

    # -- the path

    def attend(self, sites: Sequence[Site], exact: Exact, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of an attention module: `exact(*args, **kwargs)`, or the same from stored maps.

        `sites` is the one layer that the module is, or all that it stands for.
        """
        forward = self._forward
        site = sites[0] if len(sites) == 1 else self._next(sites)
        if site is None:
            self._ineligible("a layer that stands for several was called by hand", args, kwargs)
            return exact(*args, **kwargs)
        if site.layer == 0:
            forward.reset()
            idle = self.gate.hopeless and forward.inside and forward.exact_only is None
            if idle and not site.module.training and not torch.is_grad_enabled():
                forward.left_exact = _rows(args, kwargs)  # not even the mask need be read
        if forward.left_exact:
            stats = self.stats[site.layer]
            stats.rows += forward.left_exact
            if forward.last is not None:  # looked up by the first layer, which found nothing near enough
                stats.queries += forward.left_exact
            return exact(*args, **kwargs)
        call, spans = self._read(site, args, kwargs)
        if call is None:
            return exact(*args, **kwargs)
        lengths = spans.lengths
        stats = self.stats[site.layer]
        stats.rows += len(lengths)
        if not self._worth_trying(site.layer, spans, call):
            return exact(*args, **kwargs)
        found = self._look_up(site.layer, call, spans)
        if site.layer == self.layers - 1:
            forward.looked_up, forward.found = False, None  # what was found is for this forward's layers only
        rows = self._accept(site.layer, found, lengths)
        if not len(rows):
            return exact(*args, **kwargs)
        start = perf_counter()
        try:
            served = self._serve(site, call, spans, rows, found.records[rows])
        except (AttmemoError, OSError, MemoryError, RuntimeError, ValueError, IndexError) as error:
            # A file that went away, a machine out of descriptors or out of memory (which torch calls a RuntimeError)
            # must cost time, not requests.
            self._give_up(site.layer, found.distances[rows], error)
            return exact(*args, **kwargs)
        output = self._compute_misses(site, exact, args, kwargs, rows, call, served)
        if self.profile is not None:
            batch, padded = call.hidden.shape[:2]
            exact_ms = self.profile.exact_ms(site.layer, batch, padded)
            stats.saved_ms += exact_ms - 1e3 * (perf_counter() - start)
        return self.adapter.pack(site.module, output, call)

    def _worth_trying(self, layer: int, spans: Spans, call: Call) -> bool:
        """The gate (Eq. 3): once per forward when there is one lookup, else in every layer."""
        padded, lengths = call.hidden.shape[1], spans.lengths
        forward = self._forward
        if self.lookup == "layer":
            return self._ask(layer, lengths, padded)
        if not forward.looked_up:
            forward.looked_up = True
            forward.found = None
            # Only the first layer's input can be looked up, and what it finds serves the layers behind it in the same
            # forward of the model. Layers that are called by hand could be fed anything: they stay exact.
            if layer == 0 and forward.inside and self._ask(SEQUENCE, lengths, padded):
                forward.last = forward.found = self._search(SEQUENCE, call, spans)
                served = self._record_sequence(forward.found, lengths)
                forward.left_exact = 0 if served else len(lengths)
            elif forward.inside:
                forward.left_exact = len(lengths)
        return forward.found is not None

    def _ask(self, layer: int, lengths: list[int], padded: int) -> bool:
        verdict = self._forward.verdict = self.gate.ask(layer, lengths, padded)
        if not verdict.tries:
            self.gate.leave(verdict)
        return verdict.tries

    def _look_up(self, layer: int, call: Call, spans: Spans) -> Found:
        """The nearest record of every row: searched now, or found by the first layer."""
        found = self._forward.found
        if self.lookup == "sequence" and found is not None:
            return found
        return self._search(layer, call, spans)

    def _search(self, layer: int, call: Call, spans: Spans) -> Found:
        start = perf_counter()
        hidden = _to_front(call.hidden, spans) if spans.left else call.hidden
        found = self.find(layer, hidden, spans.lengths)
        self.stats[max(layer, 0)].lookup_seconds += perf_counter() - start
        return found

    def find(self, layer: int, hidden: Tensor, lengths: Sequence[int]) -> Found:
        """Embed the hidden states and ask the index; the hard key (token length) chooses which index.

        Parameters
        ----------
        layer : int
            Attention layer, or -1 for the once-per-sequence lookup.
        hidden : Tensor
            What enters the layer (the first one for -1), ``[B, L, H]``.
        lengths : sequence of int
            Valid tokens of each row.
        """
        index = self.database.index(layer)
        records = np.full(len(lengths), -1, np.int64)
        distances = np.full(len(lengths), np.inf, np.float32)
        # Beyond the longest record it was trained on the embedder sees no token: such a distance says nothing.
        longest = self._embedders[layer].longest
        rows = [row for row, n in enumerate(lengths) if n <= longest and n in index.lengths]
        if rows:
            kept = [lengths[row] for row in rows]
            if len(rows) < len(lengths):
                hidden = hidden[rows]
            vectors = self._embedders[layer].embed(hidden, kept).numpy()
            for length in set(kept):
                where = [place for place, n in enumerate(kept) if n == length]
                ids, near = index.search(length, vectors[where])
                at = [rows[place] for place in where]
                records[at], distances[at] = ids[:, 0], near[:, 0]
        return Found(records, distances)

    def _accept(self, layer: int, found: Found, lengths: list[int]) -> Ints:
        """Rows whose record may serve: the index proposes, the record decides."""
        stats = self.stats[layer]
        # Beyond the radius a score is predicted below the threshold; NaN compares false and is a miss.
        rows = np.flatnonzero((found.records >= 0) & (found.distances <= self.radii[layer]))
        if len(rows):
            stored = self.database.records.lengths[found.records[rows]]
            rows = rows[stored == np.asarray(lengths)[rows]]
        verdict = self._forward.verdict
        assert verdict is not None
        if len(rows) and not verdict.pays(layer, [lengths[row] for row in rows.tolist()]):
            stats.declined += len(rows)
            rows = rows[:0]
        if len(rows):
            stats.predicted += float(self.curves[layer].predict(found.distances[rows]).sum())
        stats.queries += len(lengths)
        stats.hits += len(rows)
        if self.lookup == "layer":
            self.gate.record(verdict, len(rows))
        return rows

    def _serve(self, site: Site, call: Call, spans: Spans, rows: Ints, records: Ints) -> _Served:
        """V for the rows that hit, and A·V with the maps read where they lie; what the module makes of it."""
        start = perf_counter()
        adapter, module, hidden, lengths = self.adapter, site.module, call.hidden, spans.lengths
        batch, padded, _ = hidden.shape
        heads, width = adapter.shape(module)
        order = np.argsort([lengths[row] for row in rows], kind="stable")
        rows, records = rows[order], records[order]
        counts = np.asarray([lengths[row] for row in rows.tolist()], np.int64)
        offsets = padded - counts if spans.left else np.zeros_like(counts)
        every = len(rows) == batch
        keys = cached = None
        if call.cache is None:
            tokens, starts = _gather(hidden, rows, counts, offsets)
            projected = adapter.value(module, tokens)  # [N, h * d], fewer heads if they are shared
        else:  # the cache wants K and V of padding too
            mine = call if every else self._take(call, Rows(batch, rows))
            starts = (rows if every else np.arange(len(rows))) * padded + offsets
            projected = adapter.value(module, mine.hidden.reshape(len(rows) * padded, -1))
            keys = adapter.key(module, mine)  # [g, heads of K, L, d]
            cached = projected.view(len(rows), padded, -1, width).transpose(1, 2)
        values = share_heads(projected, heads, width).contiguous()
        # Rows go where they belong in the batch, or, if others miss, one behind the other.
        places = rows if every else np.arange(len(rows))
        context = values.new_empty(len(rows), padded, heads * width)
        for n in np.unique(counts).tolist():
            group = slice(*np.searchsorted(counts, (n, n + 1)))
            self.maps.multiply(site.layer, n, records[group], values, starts[group], context, places[group])
        if spans.left:
            context = _to_back(context, counts if not every else np.asarray(lengths, np.int64))
        output = adapter.finish(module, context, hidden if every else hidden[torch.from_numpy(rows)])
        self.stats[site.layer].serve_seconds += perf_counter() - start
        return _Served(rows, output, keys, cached)

    def _take(self, call: Call, rows: Rows) -> Call:
        """The call for some rows, without its cache."""
        _, given = self.adapter.take_rows((), call.given, rows)
        return replace(call, hidden=given["hidden_states"], cache=None, given=given)

    def _give_up(self, layer: int, distances: Floats, error: Exception) -> None:
        """Count hits whose maps could not be read as what they become: exact rows, by the reason."""
        rows = len(distances)
        self.stats[layer].hits -= rows
        self.stats[layer].predicted -= float(self.curves[layer].predict(distances).sum())
        reason = f"maps could not be read ({type(error).__name__})"
        if not self.failures[reason]:
            _LOG.warning("attmemo: %s, layer %d stays exact: %s", reason, layer, error)
        self.failures[reason] += rows

    def _compute_misses(
        self,
        site: Site,
        exact: Exact,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        hits: Ints,
        call: Call,
        served: _Served,
    ) -> Tensor:
        """The output of all rows; those that missed run the original code, as a smaller batch.

        A cache is filled last and at once, so that whatever fails before leaves it empty.
        """
        batch = call.hidden.shape[0]
        if len(hits) == batch:
            if call.cache is not None:
                self._fill(call.cache, site, served.keys, served.values)
            return served.output
        from transformers.cache_utils import DynamicCache  # seconds to import, for whoever needs no model

        start = perf_counter()
        missed, hit = self._forward.missed(batch, hits), torch.from_numpy(served.rows)
        scratch = None if call.cache is None else DynamicCache()
        some_args, some_kwargs = self.adapter.take_rows(args, kwargs, missed, scratch)
        computed = self.adapter.output_of(exact(*some_args, **some_kwargs))
        output = computed.new_empty(batch, *computed.shape[1:])
        output[missed.index] = computed
        output[hit] = served.output
        if scratch is not None:
            own = scratch.layers[self.adapter.layer_index(site.module)]
            both = []
            for theirs, ours in ((own.keys, served.keys), (own.values, served.values)):
                whole = theirs.new_empty(batch, *theirs.shape[1:])
                whole[missed.index], whole[hit] = theirs, ours
                both.append(whole)
            self._fill(call.cache, site, *both)
        self.stats[site.layer].exact_seconds += perf_counter() - start
        return output

    def _fill(self, cache: Any, site: Site, keys: Tensor | None, values: Tensor | None) -> None:
        """Give a decoder's cache what the original code would have given it: decoding goes on from there."""
        cache.update(keys, values, self.adapter.layer_index(site.module))

    # -- reading a call

    def _next(self, sites: Sequence[Site]) -> Site | None:
        """Which layer a module that several share is called as; None if no forward of the model counts them."""
        forward, key = self._forward, id(sites[0].module)
        turn = forward.turns[key]
        forward.turns[key] += 1
        return sites[turn] if forward.inside and turn < len(sites) else None

    def _read(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call | None, Spans]:
        """The call and where its valid tokens lie, or None if it must stay exact."""
        forward = self._forward
        if site.module.training:
            return self._ineligible("training mode", args, kwargs)
        if self._watch.drops(site.layer):
            return self._ineligible("dropout in training mode", args, kwargs)
        if forward.exact_only is not None:
            return self._ineligible(forward.exact_only, args, kwargs)
        if not forward.inside and self._has_changed():
            return self._ineligible(CHANGED, args, kwargs)
        call = self.adapter.read(site.module, args, kwargs)
        if isinstance(call, str):
            return self._ineligible(call, args, kwargs)
        hidden = call.hidden
        if torch.is_grad_enabled() and _records_gradients(site.module, hidden):
            return self._ineligible("gradients are recorded (use torch.inference_mode)", args, kwargs)
        if hidden.device.type != "cpu":
            return self._ineligible(f"the model is on {hidden.device.type}", args, kwargs)
        spans = self._spans(site.module, call)
        if isinstance(spans, str):
            return self._ineligible(spans, args, kwargs)
        return call, spans

    def _spans(self, module: nn.Module, call: Call) -> Spans | str:
        """Where valid tokens lie, or why nobody knows.

        All layers of a forward get the same mask object, or one of two: each is read once.
        """
        forward, window = self._forward, self.adapter.window(module)
        size = int(call.hidden.shape[0]), int(call.hidden.shape[1])
        if forward.inside:
            for mask, known, shape, found in forward.masks:
                if mask is call.mask and known == window and shape == size:
                    return found
        spans = self.adapter.spans(module, call.mask, *size) if size[0] else None
        found = spans if spans is not None else "the mask is not plain padding on one side"
        if spans is not None and self.adapter.rotary:
            if not forward.inside:
                found = "a layer was called outside of its model: nobody knows its positions"
            elif not consecutive(forward.positions, spans, size[1]):
                found = "positions are not consecutive"
        if forward.inside:
            forward.masks.append((call.mask, window, size, found))  # holding it keeps its identity from reuse
        return found

    def _ineligible(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[None, Spans]:
        self.ineligible[reason] += _rows(args, kwargs)
        return None, _NOTHING

    def begin_forward(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Before a forward of the model: outputs that only the exact path can give make the whole forward exact."""
        forward = self._forward
        forward.reset()
        forward.inside, forward.exact_only = True, None
        forward.turns.clear()
        forward.positions = given.get("position_ids") if self.adapter.rotary else None
        config = getattr(model, "config", None)
        for wanted in ("output_attentions", "output_hidden_states"):
            value = given.get(wanted)
            # 0 selects a layer
            if getattr(config, wanted, False) if value is None else value is not False:
                forward.exact_only = wanted
        past = getattr(given.get("past_key_values"), "get_seq_length", None)
        if forward.exact_only is None and past is not None and int(past()) > 0:
            forward.exact_only = "cached decoding"
        if forward.exact_only is None and self._has_changed():
            forward.exact_only = CHANGED

    def end_forward(self) -> None:
        """After a forward of the model, or an error in it: nothing that was found serves what is called later."""
        forward = self._forward
        last = forward.last
        forward.reset()
        forward.last, forward.inside, forward.exact_only, forward.positions = last, False, None, None

    def _has_changed(self) -> bool:
        changed = self._watch.changed()
        if changed and not self._told:
            self._told = True
            _LOG.warning("attmemo: the model stays exact: %s", CHANGED)
        return changed

    @property
    def last_found(self) -> Found | None:
        """What the once-per-sequence lookup of this thread's last forward found; None if none was made."""
        return self._forward.last

    # -- counters

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.stats = [LayerStats() for _ in range(self.layers)]
        self.ineligible: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    def _record_sequence(self, found: Found, lengths: list[int]) -> int:
        """Tell the gate what one lookup yields, in the mean over layers; rows to be served, over all of them."""
        known, served, verdict = found.records >= 0, 0, self._forward.verdict
        assert verdict is not None
        for layer, radius in enumerate(self.radii):
            rows = np.flatnonzero(known & (found.distances <= radius)).tolist()
            if rows and verdict.pays(layer, [lengths[row] for row in rows]):
                served += len(rows)
        self.gate.record(verdict, served / self.layers)
        return served

    # -- inside

    def _curve(self, calibration: dict[str, Any], layer: int) -> Calibration:
        owner = SEQUENCE if self.lookup == "sequence" else layer
        curves = calibration.get(str(owner))
        data = curves.get(str(layer)) if isinstance(curves, dict) else None
        return Calibration.from_dict(data, f"{self.database.path}: calibration {owner}.{layer}")

    def close(self) -> None:
        """Give windows back. The database stays open: others may use it."""
        self.maps.close()


def _rows(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Sequences in a call that nobody has read yet."""
    hidden = args[0] if args else kwargs.get("hidden_states")
    return int(hidden.shape[0]) if isinstance(hidden, Tensor) and hidden.dim() else 1


def _records_gradients(module: nn.Module, hidden: Tensor) -> bool:
    """Whether autograd would follow this call; stored maps carry no gradient to the query and key weights."""
    return hidden.requires_grad or any(p.requires_grad for p in module.parameters())


def _gather(hidden: Tensor, rows: Ints, counts: Ints, offsets: Ints) -> tuple[Tensor, Ints]:
    """Tokens that need V, ``[N, H]``, and where each row's begin.

    Of ``[B, L, H]``, `counts` tokens of `rows` from `offsets` on.
    """
    batch, padded, size = hidden.shape
    if counts.sum() >= _WHOLE * batch * padded:
        return hidden.reshape(batch * padded, size), rows * padded + offsets
    starts = np.cumsum(counts) - counts
    if counts[0] == padded:  # the least of them
        return hidden[torch.from_numpy(rows)].view(-1, size), starts
    spans = zip(rows.tolist(), offsets.tolist(), (offsets + counts).tolist(), strict=True)
    return torch.cat([hidden[row, first:last] for row, first, last in spans]), starts


def _to_front(hidden: Tensor, spans: Spans) -> Tensor:
    """Rows padded on the left ``[B, L, H]``, turned so that their tokens come first."""
    return _turned(hidden, hidden.shape[1] - torch.tensor(spans.lengths))


def _to_back(context: Tensor, counts: Ints) -> Tensor:
    """The reverse."""
    return _turned(context, torch.from_numpy(counts))


def _turned(rows: Tensor, by: Tensor) -> Tensor:
    batch, length = rows.shape[:2]
    places = (torch.arange(length)[None] + by[:, None]) % length
    return rows[torch.arange(batch)[:, None], places]
