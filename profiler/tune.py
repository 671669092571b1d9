"""Choose thresholds from a budget of changed answers, on data that the embedder has not learned from.

The data may be in the database, if it was added after the training. Then each text is judged as it would have been
served when it came, with the records of the texts before it. All records serve what comes later, so more is served
then, and more may change: the bound grows by as much (`_Growth`).

The certified path is the path that serves: each candidate runs with the gate on (the rule: `perfmodel.tuner`). For a
lookup in every layer, the candidates are fixed thresholds, one for all layers. For one lookup per sequence and too few
texts for two parts, they are fixed radii, one for all layers. With enough texts each layer gets a radius of its own:
layers are ordered by the harm that each does alone, and served in nested groups. These forced passes, without a gate,
see the selection part of the texts only. `perfmodel.policy` makes candidates of them for the certification part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attmemo.db import SEQUENCE, Database, DatabaseWriter
from attmemo.db.pools.filling import is_sealed
from attmemo.embed.calibration import Calibration
from attmemo.embed.indexing import extend_indexes, remove_stale
from attmemo.embed.lookup import LookupInTime, LookupName
from attmemo.errors import StaleDatabaseError, TuningError
from attmemo.maps.handle import MapMemoization
from attmemo.maps.planner import MapPlanner
from attmemo.perfmodel import tuner
from attmemo.perfmodel.policy import NEVER, propose, split
from attmemo.perfmodel.tuner import JUDGED, Candidate, Outcome
from attmemo.profiler.answers import ask, changed, harm, prepare, serving
from attmemo.profiler.data import digest, read_texts
from attmemo.profiler.models import Answer, LoadedModel, Tokens
from attmemo.profiler.open import Ints, added, by_length, first_inputs, open_in_time, open_model
from attmemo.profiler.turns import Progress, silent, told

MOST_GROUPS = 6
PROBE = 200  # sequences on which layers are ordered
LEAST, MOST = 0.02, 0.55  # of the radii that are tested with little data, beside the greatest that is known
THRESHOLDS = tuple(round(1.0 - 0.025 * step, 3) for step in range(40))  # tested for a lookup in every layer
EXACT = 1.0  # the threshold of a layer that is never served: no prediction is so high


@dataclass(frozen=True)
class TuneOptions:
    """What `tune` was asked for."""

    budget: float = 0.01
    confidence: float = 0.95
    text_column: str | None = None
    limit: int | None = None
    batch_size: int = 32
    lookup: LookupName = "sequence"
    min_cosine: float = 0.98
    allow_uncertified: bool = False
    seed: int = 0
    fineness: int = 12  # with little data: radii tested each time the distance doubles. More cost time, no confidence
    model: str | None = None
    pooling: str | None = None
    answer: Answer | None = None


def tune(path: Path, files: Sequence[str | Path], options: TuneOptions, tell: Progress = silent) -> dict[str, Any]:
    """Find the thresholds that serve most within the budget, and store them as the database's ``"auto"``.

    Returns
    -------
    dict
        JSON-able: ``thresholds`` and ``radii`` (by layer: the score that a hit needs, and the same as a distance),
        ``lookup``, ``budget``, ``confidence``, ``certified``, ``observed`` and ``upper_bound`` (share of changed
        answers), ``served`` (share of attention calls), ``judged`` and ``total`` (sequences: these numbers are about,
        given), ``needed`` (to give at least), ``reached``, ``sentence``, ``path`` (candidates tested), ``groups`` (of
        layers, most robust first; only with one lookup per sequence).

    Raises
    ------
    DataError
        The data cannot be read, or is what the database was built from.
    EmbedderMissingError
        The database was never trained.
    TuningError
        A budget or confidence outside (0, 1), a database of rows, no data, or nothing can be certified.
    """
    needed = tuner.sequences_needed(options.budget, options.confidence)
    if is_sealed(path):
        raise TuningError(
            f"{path} keeps rows, and tune chooses thresholds of maps only.",
            f"attmemo evaluate {path} --data FILE shows speed and quality at several thresholds",
        )
    _index_all(path, files, options, tell)
    with Database(path) as database:
        database.embedder_ref()
        loaded = open_model(database.manifest.model, options.model, options.pooling, options.answer)
        asked = open_in_time(loaded, database, files, options.text_column, options.limit)
        tokens, before = asked.tokens, asked.before
        if not tokens:
            raise TuningError("there is no text to tune on.", "check the files and --text-column")
        judged = np.arange(len(tokens))
        groups, policies = [list(range(database.manifest.model.layers))], None
        by_layer = options.lookup == "sequence"
        if by_layer and (count := tuner.sequences_judged(len(tokens), options.budget, options.confidence)):
            needed = math.ceil(needed / JUDGED)
            count = int(JUDGED * len(tokens)) if asked.in_time else count  # more than the bound takes: it grows
            select, judged = split(len(tokens), count, options.seed)
            allowed = tuner.changes_allowed(count, options.budget, options.confidence) * len(select) / count
            texts = _Texts(loaded, [tokens[row] for row in select], before[select], options, tell)
            groups, policies = _policies(loaded, database, texts, allowed)
        texts = _Texts(loaded, [tokens[row] for row in judged], before[judged], options, tell)
        growth = _Growth(LookupInTime(database, "sequence"), texts) if asked.in_time else None
        with _serving(loaded, database, options.lookup, gate=True) as handle:
            candidates = _candidates(options, handle.planner.index.curves, policies)
            trial, uncertified = _Trial(handle, texts, len(candidates), growth), options.allow_uncertified
            choice = tuner.choose(candidates, trial, options.budget, options.confidence, allow_uncertified=uncertified)
        manifest = database.manifest
    if choice.candidate is None:
        raise TuningError(choice.sentence(), "give more texts, a larger --budget, or --allow-uncertified")
    outcome = choice.to_dict() | {
        "thresholds": list(choice.candidate.thresholds), "radii": list(choice.candidate.radii), "total": len(tokens),
        "needed": needed, "lookup": options.lookup, "pooling": loaded.pooling, "batch_size": options.batch_size,
        "min_cosine": options.min_cosine if loaded.kind == "encoder" else None,
        "in_database": asked.in_database, "in_time": asked.in_time,
        "data": [Path(file).name for file in files], "digests": [digest(file) for file in files],
    }  # fmt: skip
    if options.lookup == "sequence":
        outcome["groups"] = groups
    with DatabaseWriter.reopen(path) as writer:
        if writer.manifest.embedder != manifest.embedder:
            raise StaleDatabaseError(
                f"{path} was trained again while it was being tuned; the thresholds are for the embedder before.",
                "run tune again",
            )
        writer.publish(tuning=outcome)
    return outcome


def _index_all(path: Path, files: Sequence[str | Path], options: TuneOptions, tell: Progress) -> None:
    """Have every record found, also those that were stored after the training. A bad request changes nothing.

    Thresholds that were chosen for fewer records are dropped: more would be served by them.
    """
    with DatabaseWriter.reopen(path) as writer, Database(path) as database:
        ref = database.manifest.embedder
        if ref is None:
            return
        if added(database, files) and options.lookup == "layer":
            raise TuningError(
                "texts that are in the database are judged with one lookup per sequence only.",
                "leave --lookup out, or give data that is not in the database",
            )
        if ref.next_id == len(database):
            return
        for _ in read_texts(files, text_column=options.text_column, limit=options.limit):
            pass
        writer.publish(embedder=(found := extend_indexes(database, tell)), tuning=None)
        remove_stale(path, found, ref)


@contextmanager
def _serving(
    loaded: LoadedModel, database: Database, lookup: LookupName, *, gate: bool = False
) -> Iterator[MapMemoization]:
    """The model memoized while inside, with a lookup that finds what was stored before a text."""
    with serving(loaded, database, lookup, gate=gate) as handle:
        handle.planner.index = LookupInTime(database, lookup)
        yield handle


class _Texts:
    """Texts and their exact answers, with which a pass is compared. `before`: see `LookupInTime`."""

    def __init__(
        self, loaded: LoadedModel, tokens: Sequence[Tokens], before: Ints, options: TuneOptions, tell: Progress
    ) -> None:
        self.loaded, self.before, self.options, self.tell = loaded, before, options, tell
        self.tokens = _numbered(tokens)
        self.prepared = prepare(loaded, self.tokens, options.batch_size)
        self.distances = np.full(len(tokens), np.inf)  # of their records, as far as lookups were made
        self.exact = self.ask("exact answers")

    def ask(self, what: str, handle: MapMemoization | None = None) -> Tensor:
        """One pass; `handle` is that of the served model, and tells distances."""

        def keep(batch: list[Tokens]) -> None:
            found = None if handle is None else handle.engine.last_found
            if found is not None:
                self.distances[[item.row for item in batch]] = found.distances

        turn = None if handle is None else _turn(handle, self.before)
        return ask(self.loaded, self.prepared, before=turn, after=keep, tell=self.tell, what=what)

    def changed(self, what: str, handle: MapMemoization) -> npt.NDArray[np.bool_]:
        """Whose answer is another one now."""
        given = self.ask(what, handle)
        return np.asarray(changed(self.loaded.kind, self.exact, given, self.options.min_cosine), np.bool_)


def _turn(handle: MapMemoization, before: Ints) -> Callable[[list[Tokens]], None]:
    """Tell the lookup when the texts of the next batch came."""

    def turn(batch: list[Tokens]) -> None:
        assert isinstance(handle.planner.index, LookupInTime)
        handle.planner.index.before = before[[item.row for item in batch]]

    return turn


def _numbered(tokens: Iterable[Tokens]) -> list[Tokens]:
    """The same texts, numbered anew: answers come by these numbers."""
    return [Tokens(place, item.ids, item.segments) for place, item in enumerate(tokens)]


class _Growth:
    """How many times as many of the texts are served by all records as by those before each of them.

    A text's own record is never among them. No answer is looked at, so this is no second test.
    """

    def __init__(self, lookup: LookupInTime, texts: _Texts) -> None:
        self._then, self._now = np.full((2, len(texts.tokens)), np.inf)
        for length, items in by_length(texts.tokens).items():
            hidden = torch.stack(list(first_inputs(texts.loaded, items)))
            rows = [item.row for item in items]
            lookup.before = texts.before[rows]
            for later, distances in ((False, self._then), (True, self._now)):
                lookup.later = later
                distances[rows] = lookup.find(SEQUENCE, hidden, [length] * len(items)).distances

    def __call__(self, radii: Sequence[float]) -> float:
        then, now = (int((distances <= max(radii)).sum()) for distances in (self._then, self._now))
        return max(1.0, now / max(1, then))


class _Trial:
    """Runs candidates through the path that serves."""

    def __init__(self, handle: MapMemoization, texts: _Texts, most: int, growth: _Growth | None) -> None:
        self._handle, self._texts, self._most, self._growth = handle, texts, most, growth
        self._step = 0
        self._before: tuple[Candidate, list[bool], Outcome] | None = None

    def __call__(self, candidate: Candidate) -> Outcome:
        planner, texts, total = self._handle.planner, self._texts, len(self._texts.tokens)
        self._step += 1
        what = f"candidate {self._step}/{self._most}"
        planner.set_thresholds(candidate.thresholds, candidate.radii)
        tried: list[bool] = []
        if planner.lookup == "sequence":
            lengths = [[len(item) for item in batch] for batch, _ in texts.prepared]
            tried = [planner.gate.ask(SEQUENCE, batch, max(batch)).tries for batch in lengths]
        if max(candidate.radii) < 0.0:
            outcome = Outcome(0, total, 0.0)
        elif self._serves_the_same(candidate, tried):
            assert self._before is not None
            outcome = replace(self._before[2], growth=self._growth_of(candidate))  # later records may lie between
        else:
            self._handle.reset_stats()
            flags, stats = texts.changed(what, self._handle), self._handle.stats()
            if stats["failures"]:
                raise TuningError(f"texts could not be served: {next(iter(stats['failures']))}", "mend that first")
            served = float(stats["hit_rate"])
            outcome = Outcome(int(flags.sum()), total, served, self._growth_of(candidate))
            self._before = candidate, tried, outcome
        texts.tell(what, total, total)
        return outcome

    def _growth_of(self, candidate: Candidate) -> float:
        return 1.0 if self._growth is None else self._growth(candidate.radii)

    def _serves_the_same(self, candidate: Candidate, tried: list[bool]) -> bool:
        """Whether the last run would be repeated: the gate tries the same batches, and no distance lies between."""
        if self._before is None or not tried or tried != self._before[1]:
            return False
        near = self._texts.distances
        radii = zip(candidate.radii, self._before[0].radii, strict=True)
        return all(np.array_equal(near <= now, near <= before) for now, before in radii)


def _candidates(
    options: TuneOptions, curves: Sequence[Calibration], policies: Sequence[Sequence[float]] | None
) -> list[Candidate]:
    """What is tested, the strictest first: nothing served, then policies or fixed values."""
    if options.lookup == "layer":
        return [
            Candidate(f"threshold {t:g}", (t,) * len(curves), tuple(curve.radius(t) for curve in curves))
            for t in THRESHOLDS
        ]
    reach = _reach(curves)
    found = [("the empty policy", [NEVER] * len(curves))]
    if policies is None:
        steps = range(math.floor(options.fineness * math.log2(MOST / LEAST)) + 1)
        radii = [LEAST * 2.0 ** (step / options.fineness) for step in steps]
        radii = [radius for radius in (*radii, reach) if radius <= reach]
        found += [(f"the distance {radius:.4g} for all layers", [radius] * len(curves)) for radius in radii]
    else:
        for policy in (policy for policy in policies if max(policy) >= 0.0):
            shown = ", ".join("never" if radius < 0.0 else f"{radius:.3g}" for radius in policy)
            found.append((f"the policy with radii {shown} by layer", list(policy)))
    candidates = []
    for name, radii in found:
        scores = (float(curve.predict(radius)) for curve, radius in zip(curves, radii, strict=True))
        thresholds = (EXACT if r < 0.0 else min(EXACT, score) for r, score in zip(radii, scores, strict=True))
        candidates.append(Candidate(name, tuple(thresholds), tuple(radii)))
    return candidates


def _reach(curves: Sequence[Calibration]) -> float:
    """The greatest calibrated distance: beyond it a score is unknown, and no record serves."""
    return min(float(curve.distances[-1]) for curve in curves)


def _policies(
    loaded: LoadedModel, database: Database, texts: _Texts, allowed: float
) -> tuple[list[list[int]], list[list[float]]]:
    """Groups of layers, and policies worth a test: a radius for each layer. From forced passes over these texts."""
    with _serving(loaded, database, "sequence") as handle:
        engine, planner = handle.engine, handle.planner
        groups = _groups(handle, texts)
        harmed = []
        for k in range(len(groups)):
            _serve_only(planner, [layer for group in groups[: k + 1] for layer in group])
            harmed.append(texts.changed(f"layers {k + 1}/{len(groups)}", handle))
        distances = np.where(texts.distances <= _reach(planner.index.curves), texts.distances, np.inf)
        gains = [float(len(group)) for group in groups]
        if planner.profile is not None:
            n = round(float(np.mean([len(item) for item in texts.tokens])))
            gains = [max(1e-6, sum(planner.profile.saving_ms(i, [n] * 32, n) for i in group)) for group in groups]
        found = []
        for radii in propose(distances, np.stack(harmed), gains, allowed):
            by_layer = {layer: radius for radius, group in zip(radii, groups, strict=True) for layer in group}
            found.append([by_layer[layer] for layer in range(engine.layers)])
        return groups, found


def _groups(handle: MapMemoization, texts: _Texts) -> list[list[int]]:
    """Layers in groups, from the most robust to the most sensitive, by the harm that serving each alone does."""
    rows = np.linspace(0, len(texts.tokens) - 1, min(PROBE, len(texts.tokens))).round().astype(int).tolist()
    prepared = prepare(texts.loaded, _numbered(texts.tokens[row] for row in rows), texts.options.batch_size)
    harms, layers = [], handle.engine.layers
    for layer in told(texts.tell, "sensitivity", range(layers)):
        _serve_only(handle.planner, [layer])
        given = ask(texts.loaded, prepared, before=_turn(handle, texts.before[rows]))
        harms.append(float(harm(texts.loaded.kind, texts.exact[rows], given).mean()))
    order = np.argsort(harms, kind="stable")
    return [part.tolist() for part in np.array_split(order, min(MOST_GROUPS, layers))]


def _serve_only(planner: MapPlanner, layers: Sequence[int]) -> None:
    """Serve every sequence that has a record in these layers, and none in the others."""
    reach = _reach(planner.index.curves)
    planner.set_radii([reach if layer in layers else NEVER for layer in range(planner.layers)])
