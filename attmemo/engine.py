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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from attmemo.adapters import Adapter, Call, Rows, Site
from attmemo.db import KIND_INPUT, SEQUENCE, Database
from attmemo.embed import Calibration, SiameseEmbedder, load_embedders
from attmemo.errors import AttmemoError, DatabaseCorruptError, DatabaseError
from attmemo.maps import Ints, MapSource, StoredMaps
from attmemo.mmap import FetcherName
from attmemo.perfmodel import Gate, Profile

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


class _Forward(threading.local):
    """What the layers of one forward share, one per thread: valid lengths, and the lookup made once per sequence."""

    def __init__(self) -> None:  # called anew in every thread
        self.reset()
        self.inside = False  # in a forward of the model, not of one layer called by hand
        self.exact_only: str | None = None

    def reset(self) -> None:
        self.mask: Tensor | None = None
        self.size: tuple[int, int] | None = None
        self.lengths: list[int] | None = None
        self.looked_up = False
        self.found: Found | None = None
        self.last: Found | None = None
        # Rows of a forward that the first layer decided to leave alone, 0 otherwise: later layers need not read it.
        self.left_exact = 0
        self.misses: Rows | None = None

    def missed(self, batch: int, hits: Ints) -> Rows:
        """The rows that did not hit; layers that miss the same ones share what was taken out of the mask for them."""
        kept = np.ones(batch, bool)
        kept[hits] = False
        rows = np.flatnonzero(kept)
        if self.misses is None or self.misses.batch != batch or not np.array_equal(self.misses.rows, rows):
            self.misses = Rows(batch, rows, self.mask)
        return self.misses


class Engine:
    """Serves attention maps from a database to the layers of one model.

    Parameters
    ----------
    adapter : Adapter
        Knows the model's attention modules.
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
        layers: int,
        database: Database,
        thresholds: Sequence[float],
        lookup: Lookup,
        *,
        gated: bool = True,
        fetch: FetcherName = "auto",
    ) -> None:
        self.adapter = adapter
        self.layers = layers
        self.database = database
        self.thresholds = [float(t) for t in thresholds]
        self.lookup: Lookup = lookup
        profile = database.manifest.profile
        self.profile = None if profile is None else Profile.from_dict(profile)
        if gated and self.profile is not None and self.profile.threads != torch.get_num_threads():
            _LOG.warning(
                "attmemo: costs were measured with %d threads, this process has %d: the gate may err "
                "(attmemo train-embedder %s measures again)",
                self.profile.threads,
                torch.get_num_threads(),
                database.path,
            )
        self.gate = Gate(self.profile if gated else None, self.thresholds, lookup, layers, always=not gated)
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

    def set_thresholds(self, thresholds: Sequence[float]) -> None:
        """Accept other scores from now on. The gate keeps predicting for those it was made with."""
        self.thresholds = [float(t) for t in thresholds]
        self.set_radii([curve.radius(t) for curve, t in zip(self.curves, self.thresholds, strict=True)])

    def set_radii(self, radii: Sequence[float]) -> None:
        """The greatest distance that each layer accepts: a threshold, seen through the calibration."""
        self.radii = [float(r) for r in radii]

    # -- the path

    def attend(self, site: Site, exact: Exact, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of one attention layer: `exact(*args, **kwargs)`, or the same from stored maps."""
        forward = self._forward
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
        call, lengths = self._read(site, args, kwargs)
        if call is None:
            return exact(*args, **kwargs)
        stats = self.stats[site.layer]
        stats.rows += len(lengths)
        if not self._worth_trying(site.layer, lengths, call):
            return exact(*args, **kwargs)
        found = self._look_up(site.layer, call, lengths)
        if site.layer == self.layers - 1:
            forward.looked_up, forward.found = False, None  # what was found is for this forward's layers only
        rows = self._accept(site.layer, found, lengths, call.hidden.shape[1])
        if not len(rows):
            return exact(*args, **kwargs)
        start = perf_counter()
        try:
            context = self._serve(site, call, lengths, rows, found.records[rows])
        except (AttmemoError, OSError, MemoryError, ValueError, IndexError) as error:
            # A file that went away or a machine out of descriptors must cost time, not requests.
            self._give_up(site.layer, found.distances[rows], error)
            return exact(*args, **kwargs)
        if len(rows) < len(lengths):
            self._compute_misses(site, exact, args, kwargs, rows, context)
        if self.profile is not None:
            batch, padded = call.hidden.shape[:2]
            exact_ms = self.profile.costs[site.layer].exact.estimate(batch * padded, batch * padded * padded)
            stats.saved_ms += exact_ms - 1e3 * (perf_counter() - start)
        return self.adapter.finish(site.module, context)

    def _worth_trying(self, layer: int, lengths: list[int], call: Call) -> bool:
        """The gate (Eq. 3): once per forward when there is one lookup, else in every layer."""
        padded = call.hidden.shape[1]
        if self.lookup == "layer":
            return self.gate.worth_trying(layer, lengths, padded)
        forward = self._forward
        if not forward.looked_up:
            forward.looked_up = True
            forward.found = None
            # Only the first layer's input can be looked up, and what it finds serves the layers behind it in the same
            # forward of the model. Layers that are called by hand could be fed anything: they stay exact.
            if layer == 0 and forward.inside and self.gate.worth_trying(SEQUENCE, lengths, padded):
                forward.last = forward.found = self._search(SEQUENCE, call, lengths)
                served = self._record_sequence(forward.found, lengths, padded)
                forward.left_exact = 0 if served else len(lengths)
            elif forward.inside:
                forward.left_exact = len(lengths)
        return forward.found is not None and self.gate.serves(layer, lengths, padded)

    def _look_up(self, layer: int, call: Call, lengths: list[int]) -> Found:
        """The nearest record of every row: searched now, or found by the first layer."""
        found = self._forward.found
        if self.lookup == "sequence" and found is not None:
            return found
        return self._search(layer, call, lengths)

    def _search(self, layer: int, call: Call, lengths: list[int]) -> Found:
        start = perf_counter()
        found = self.find(layer, call.hidden, lengths)
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

    def _accept(self, layer: int, found: Found, lengths: list[int], padded: int) -> Ints:
        """Rows whose record may serve: the index proposes, the record decides."""
        stats = self.stats[layer]
        # Beyond the radius a score is predicted below the threshold; NaN compares false and is a miss.
        rows = np.flatnonzero((found.records >= 0) & (found.distances <= self.radii[layer]))
        if len(rows):
            stored = self.database.records.lengths[found.records[rows]]
            rows = rows[stored == np.asarray(lengths)[rows]]
        if len(rows) and not self.gate.pays(layer, [lengths[row] for row in rows.tolist()], len(lengths), padded):
            stats.declined += len(rows)
            rows = rows[:0]
        if len(rows):
            stats.predicted += float(self.curves[layer].predict(found.distances[rows]).sum())
        stats.queries += len(lengths)
        stats.hits += len(rows)
        if self.lookup == "layer":
            self.gate.record(layer, len(lengths), len(rows))
        return rows

    def _serve(self, site: Site, call: Call, lengths: list[int], rows: Ints, records: Ints) -> Tensor:
        """V for the rows that hit, and A·V with the maps read where they lie: ``[B, L, h * d]``, other rows empty."""
        start = perf_counter()
        adapter, hidden = self.adapter, call.hidden
        batch, padded, _ = hidden.shape
        heads, width = adapter.shape(site.module)
        order = np.argsort([lengths[row] for row in rows], kind="stable")
        rows, records = rows[order], records[order]
        counts = np.asarray([lengths[row] for row in rows.tolist()], np.int64)
        tokens, starts = _gather(hidden, rows, counts)
        values = adapter.value(site.module, tokens).contiguous()  # [N, h * d]
        context = values.new_empty(batch, padded, heads * width)
        for n in np.unique(counts).tolist():
            group = slice(*np.searchsorted(counts, (n, n + 1)))
            self.maps.multiply(site.layer, n, records[group], values, starts[group], context, rows[group])
        self.stats[site.layer].serve_seconds += perf_counter() - start
        return context

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
        self, site: Site, exact: Exact, args: tuple[Any, ...], kwargs: dict[str, Any], hits: Ints, context: Tensor
    ) -> None:
        """Run the original code on the rows that missed, as a smaller batch, and put them in their places."""
        start = perf_counter()
        rows = self._forward.missed(context.shape[0], hits)
        some_args, some_kwargs = self.adapter.take_rows(args, kwargs, rows)
        context[torch.from_numpy(rows.rows)] = self.adapter.context_of(exact(*some_args, **some_kwargs))
        self.stats[site.layer].exact_seconds += perf_counter() - start

    # -- reading a call

    def _read(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call | None, list[int]]:
        """The call and its valid lengths, or None if it must stay exact."""
        forward = self._forward
        if site.module.training:
            return self._ineligible("training mode", args, kwargs)
        if forward.exact_only is not None:
            return self._ineligible(forward.exact_only, args, kwargs)
        call = self.adapter.read(site.module, args, kwargs)
        if isinstance(call, str):
            return self._ineligible(call, args, kwargs)
        hidden = call.hidden
        if torch.is_grad_enabled() and _records_gradients(site.module, hidden):
            return self._ineligible("gradients are recorded (use torch.inference_mode)", args, kwargs)
        if hidden.device.type != "cpu":
            return self._ineligible(f"the model is on {hidden.device.type}", args, kwargs)
        batch, length = int(hidden.shape[0]), int(hidden.shape[1])
        # All layers of a forward get the same mask object: read it once. Holding it keeps its identity from reuse.
        if not forward.inside or forward.size != (batch, length) or forward.mask is not call.mask:
            forward.lengths = self.adapter.valid_lengths(call.mask, batch, length) if batch else None
            forward.mask, forward.size = call.mask, (batch, length)
        if forward.lengths is None:
            return self._ineligible("the mask is not plain padding at the end", args, kwargs)
        return call, forward.lengths

    def _ineligible(self, reason: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[None, list[int]]:
        self.ineligible[reason] += _rows(args, kwargs)
        return None, []

    def begin_forward(self, _model: nn.Module, _args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward of the model: outputs that only the exact path can give make the whole forward exact."""
        self._forward.reset()
        self._forward.inside, self._forward.exact_only = True, None
        config = getattr(_model, "config", None)
        for wanted in ("output_attentions", "output_hidden_states"):
            given = kwargs.get(wanted)
            if given if given is not None else getattr(config, wanted, False):
                self._forward.exact_only = wanted

    def end_forward(self) -> None:
        """After a forward of the model, or an error in it: nothing that was found serves what is called later."""
        forward = self._forward
        last = forward.last
        forward.reset()
        forward.last, forward.inside, forward.exact_only = last, False, None

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

    def _record_sequence(self, found: Found, lengths: list[int], padded: int) -> int:
        """Tell the gate what one lookup yields, in the mean over layers; rows to be served, over all of them."""
        known, served = found.records >= 0, 0
        for layer, radius in enumerate(self.radii):
            rows = np.flatnonzero(known & (found.distances <= radius)).tolist()
            if rows and self.gate.pays(layer, [lengths[row] for row in rows], len(lengths), padded):
                served += len(rows)
        self.gate.record(SEQUENCE, len(lengths), served / self.layers)
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


def _gather(hidden: Tensor, rows: Ints, counts: Ints) -> tuple[Tensor, Ints]:
    """Tokens that need V, ``[N, H]``, and where each row's begin; of ``[B, L, H]``, the first `counts` of `rows`."""
    batch, padded, size = hidden.shape
    if counts.sum() >= _WHOLE * batch * padded:
        return hidden.reshape(batch * padded, size), rows * padded
    starts = np.cumsum(counts) - counts
    if counts[0] == padded:  # the least of them
        return hidden[torch.from_numpy(rows)].view(-1, size), starts
    return torch.cat([hidden[row, :n] for row, n in zip(rows.tolist(), counts.tolist(), strict=True)]), starts
