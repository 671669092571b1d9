"""Training the embedders of a database, calibrating them, and building the indexes.

For each layer, and once for the whole sequence (target: the mean similarity over layers):

1. principal components of the tokens, then of the flattened channels: the linear map to 128 numbers that keeps
   Euclidean distances of the inputs best. It needs no gradient, and alone finds records within 0.02 of the mean
   similarity that exhaustive search reaches, where random projections lose 0.03.
2. Siamese training (R9): pairs of records of the same length, near and random ones, so that the distance of their
   embeddings approaches 1 - similarity (Eq. 1). Kept only if held-out queries then find records at least as similar.
3. calibration on held-out sequences, searched among the others only: never on sequences that find themselves.
4. one index per layer and length over all records.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from attmemo.db import (
    KIND_INPUT,
    SEQUENCE,
    SPLIT_HELD_OUT,
    SPLIT_TRAIN,
    Backend,
    Database,
    EmbedderRef,
    FileRef,
    FlatIndex,
    LayerIndex,
    file_digest,
    storing,
)
from attmemo.embed.calibration import Calibration, fit_calibration
from attmemo.embed.siamese import CHANNELS, DIMENSION, SiameseEmbedder, save_embedders
from attmemo.errors import DatabaseError
from attmemo.similarity import similarity_score

Progress = Callable[[str, int, int], None]
Ints = npt.NDArray[np.int64]

_LABEL_ITEMS = 16384  # numbers of a map that a training label looks at: rows are sampled, Eq. 1 is a mean over rows
_REDUCED = 64  # principal components of tokens that training works on
_NEIGHBOURS = 3  # retrievals per held-out query used for calibration
# One embedder serves every layer by default. Five times 300 steps took it from 66 to 75 % of the calls within one
# budget on windows of log lines, and more gained nothing.
_SEQUENCE_STEPS = 5
_TOKENS = 40000  # from which principal components are computed
_QUERIES = 500  # held-out records asked for calibration, at most


@dataclass
class TrainOptions:
    """What can be chosen; the defaults serve from a few hundred to some ten thousand records."""

    dimension: int = DIMENSION
    channels: int = CHANNELS
    steps: int = 300  # for a layer's embedder; the one for the whole sequence gets five times as many
    batch: int = 512
    rate: float = 3e-4
    near: int = 8
    random: int = 4
    most_records: int = 3000
    coverage: float = 0.9
    seed: int = 0
    backend: Backend = "faiss"


@dataclass
class TrainedLayer:
    """One embedder with what was learned about it on held-out sequences."""

    embedder: SiameseEmbedder
    calibrations: dict[int, Calibration]  # layer -> curve; the once-per-sequence embedder has one for every layer
    held_scores: dict[int, list[tuple[int, float]]]  # layer -> (length, predicted score or -1) of every held-out query
    report: dict[str, float] = field(default_factory=dict)


@dataclass
class Trained:
    """Everything `train` made, by layer (-1: once per sequence)."""

    layers: dict[int, TrainedLayer]
    options: TrainOptions

    @property
    def longest(self) -> int:
        """Greatest number of tokens that can be embedded: that of the longest training record."""
        return min(found.embedder.longest for found in self.layers.values())


def train(database: Database, options: TrainOptions | None = None, progress: Progress | None = None) -> Trained:
    """Train and calibrate all embedders of a database.

    Parameters
    ----------
    database : Database
        With at least two training records of one length.
    options : TrainOptions, optional
    progress : callable, optional
        Called with (what, done, total).

    Raises
    ------
    DatabaseError
        Too few records to learn from.
    """
    options = options or TrainOptions()
    tell = progress or (lambda what, done, total: None)
    layers = database.manifest.model.layers
    train_ids, held_ids = _splits(database)
    if len(train_ids) < 8:
        raise DatabaseError(
            f"{database.path} has {len(train_ids)} training records; at least 8 are needed.",
            "build from more data: attmemo build-database … --data MORE",
        )
    generator = np.random.default_rng(options.seed)
    with torch.random.fork_rng(devices=[]):  # the caller's generator is not ours to set
        torch.manual_seed(options.seed)
        chosen = _sample(database, train_ids, options.most_records, generator)
        held_ids = _sample(database, held_ids, _QUERIES, generator)
        pairs = _draw_pairs(database, chosen, options, generator)
        labels = _label_pairs(database, chosen, pairs, lambda done: tell("similarities", done, layers))  # [layers, P]
        trained = {}
        own = [SEQUENCE, *range(layers)] if database.manifest.layers_kept(KIND_INPUT) == layers else [SEQUENCE]
        for step, layer in enumerate(own):
            tell("embedders", step, len(own))
            wanted = labels.mean(0) if layer == SEQUENCE else labels[layer]
            trained[layer] = _train_one(database, layer, chosen, train_ids, held_ids, pairs, wanted, options)
        tell("embedders", len(own), len(own))
    return Trained(trained, options)


def build_indexes(database: Database, trained: Trained, progress: Progress | None = None) -> EmbedderRef:
    """Embed all records, build the indexes and write weights and indexes beside the arena.

    The files belong to no generation until the manifest names them.
    """
    tell = progress or (lambda what, done, total: None)
    path, generation = database.path, database.manifest.generation + 1
    weights = path / f"embedder-{generation:06d}.safetensors"
    folder = path / f"index-{generation:06d}"
    try:
        with storing(path):
            return _build_indexes(database, trained, weights, folder, tell)
    except BaseException:  # nobody will name them, and on a full disk they would be in the way
        shutil.rmtree(folder, ignore_errors=True)
        weights.unlink(missing_ok=True)
        raise


def _build_indexes(
    database: Database, trained: Trained, weights: Path, folder: Path, tell: Progress
) -> EmbedderRef:
    path = database.path
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    owner = {"database": database.manifest.uuid, "generation": str(database.manifest.generation + 1)}
    save_embedders({layer: found.embedder for layer, found in trained.layers.items()}, weights, owner)
    # Held-out records may be longer than any that trained: their last positions have no weights, so they cannot serve.
    longest = trained.longest
    reached = np.flatnonzero(database.records.lengths <= longest).astype(np.int64)
    indexes = {}
    for step, (layer, found) in enumerate(sorted(trained.layers.items())):
        tell("indexes", step, len(trained.layers))
        vectors = np.zeros((len(database), found.embedder.dimension), np.float32)
        vectors[reached] = embed_records(database, layer, reached, found.embedder)
        name = "sequence" if layer == SEQUENCE else f"layer-{layer:03d}"
        file = folder / f"{name}.safetensors"
        index = LayerIndex.build(vectors, database.records.lengths, trained.options.backend, longest)
        index.save(file, database.records.ids, owner)
        indexes[str(layer)] = FileRef(str(file.relative_to(path)), file_digest(file))
    tell("indexes", len(trained.layers), len(trained.layers))
    return EmbedderRef(
        weights=FileRef(weights.name, file_digest(weights)),
        backend=trained.options.backend,
        next_id=database.manifest.next_id,
        indexes=indexes,
        calibration={
            str(layer): {str(key): curve.to_dict() for key, curve in found.calibrations.items()}
            for layer, found in trained.layers.items()
        },
        report={
            "dimension": trained.options.dimension,
            "coverage": trained.options.coverage,
            "layers": {str(layer): found.report for layer, found in trained.layers.items()},
        },
    )


def remove_stale(path: Path, *keep: EmbedderRef | None) -> None:
    """Delete embedders and indexes that none of the generations to keep names.

    Keep the new generation and the one before: a reader may have opened that one and load its files only now.
    """
    kept = {ref.file.split("/")[0] for found in keep if found for ref in (found.weights, *found.indexes.values())}
    for entry in path.iterdir():
        if entry.name.startswith(("embedder-", "index-")) and entry.name not in kept:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()


def embed_records(database: Database, layer: int, records: Ints, embedder: SiameseEmbedder) -> npt.NDArray[np.float32]:
    """Embeddings ``[R, d]`` of stored records, from the hidden states kept beside their maps."""
    vectors = np.zeros((len(records), embedder.dimension), np.float32)
    for length, rows in _by_length(database, records).items():
        for part in np.array_split(rows, max(1, len(rows) * length // 65536)):
            if len(part):
                hidden = _inputs(database, layer, records[part])
                vectors[part] = embedder.embed(hidden, [length] * len(part)).numpy()
    return vectors


# -- inside


def _splits(database: Database) -> tuple[Ints, Ints]:
    splits = database.records.splits
    train_ids = np.flatnonzero(splits == SPLIT_TRAIN).astype(np.int64)
    held_ids = np.flatnonzero(splits == SPLIT_HELD_OUT).astype(np.int64)
    return train_ids, held_ids


def _sample(database: Database, ids: Ints, most: int, generator: np.random.Generator) -> Ints:
    """At most `most` of the records, the longest among them: what is not reached in training cannot be embedded."""
    if len(ids) <= most:
        return ids
    longest = ids[np.argmax(database.records.lengths[ids])]
    return np.unique(np.append(generator.choice(ids, most - 1, replace=False), longest))


def _by_length(database: Database, records: Ints) -> dict[int, Ints]:
    lengths = database.records.lengths[records]
    return {int(n): np.flatnonzero(lengths == n).astype(np.int64) for n in np.unique(lengths)}


def _inputs(database: Database, layer: int, records: Ints) -> Tensor:
    """Hidden states ``[m, n, H]`` float32 of records of one length."""
    at = max(layer, 0)  # the once-per-sequence lookup reads what enters the first layer
    return torch.stack([database.input(at, int(r)) for r in records])


def _draw_pairs(
    database: Database, chosen: Ints, options: TrainOptions, generator: np.random.Generator
) -> tuple[Ints, Ints]:
    """Positions in `chosen` of pairs of one length: each with its nearest by input, and random ones."""
    left, right = [], []
    reduced, _, _ = _reduce_tokens(database, SEQUENCE, chosen, options)
    for length, rows in _by_length(database, chosen).items():
        m = len(rows)
        if m < 2:
            continue
        near = min(options.near, m - 1)
        hidden = reduced[rows, :length, : options.channels].flatten(1)
        distance = torch.cdist(hidden, hidden)
        distance.fill_diagonal_(float("inf"))
        neighbours = distance.topk(near, largest=False).indices.numpy()
        others = generator.integers(0, m - 1, size=(m, min(options.random, m - 1)))
        others += others >= np.arange(m)[:, None]  # any row but itself
        both = np.concatenate([neighbours, others], 1)
        left.append(np.repeat(rows, both.shape[1]))
        right.append(rows[both.ravel()])
    if not left:
        raise DatabaseError(
            f"{database.path}: no two training records have the same token length, so none can serve another.",
            "build from more data, or with a smaller --max-length",
        )
    return np.concatenate(left), np.concatenate(right)


def _label_pairs(database: Database, chosen: Ints, pairs: tuple[Ints, Ints], told: Callable[[int], None]) -> Tensor:
    """Similarity of every pair in every layer, ``[layers, P]``; large maps are judged by a sample of their rows."""
    model = database.manifest.model
    left, right = pairs
    labels = torch.zeros(model.layers, len(left))
    groups = [(n, rows) for n, rows in _by_length(database, chosen).items()]
    place = np.zeros(len(chosen), np.int64)
    for layer in range(model.layers):
        for length, rows in groups:
            place[rows] = np.arange(len(rows))
            mine = np.flatnonzero(np.isin(left, rows))
            if not len(mine):
                continue
            keep = max(1, min(length, _LABEL_ITEMS // (model.heads * length)))
            sampled = torch.linspace(0, length - 1, keep).round().long()
            maps = torch.stack(
                [database.map(layer, int(chosen[r]))[:, sampled].float() for r in rows]
            )  # [m, heads, keep, n]
            flat = maps.flatten(1)
            for part in np.array_split(mine, max(1, len(mine) * flat.shape[1] // (1 << 24))):
                difference = (flat[place[left[part]]] - flat[place[right[part]]]).abs().sum(1)
                labels[layer, part] = 1.0 - difference / (2.0 * model.heads * keep)
        told(layer + 1)
    return labels


def _train_one(
    database: Database,
    layer: int,
    chosen: Ints,
    train_ids: Ints,
    held_ids: Ints,
    pairs: tuple[Ints, Ints],
    wanted: Tensor,
    options: TrainOptions,
) -> TrainedLayer:
    reduced, basis, mean = _reduce_tokens(database, layer, chosen, options)  # [m, N, q], [H, q], [H]
    start = _principal(reduced, basis, mean, options)
    start = _rescaled(start, reduced, basis, mean, pairs, wanted)
    # With no held-out records (a tiny database) training records query each other, themselves excluded.
    asked = held_ids if len(held_ids) >= 20 else train_ids
    candidates = {"principal": start}
    steps = _SEQUENCE_STEPS * options.steps if layer == SEQUENCE else options.steps
    if steps > 0:
        candidates["trained"] = _gradient(start, reduced, basis, mean, pairs, wanted, steps, options)
    outcomes = {name: _retrieve(database, layer, e, train_ids, asked) for name, e in candidates.items()}
    quality = {name: _mean_best(found) for name, found in outcomes.items()}
    best = max(quality, key=lambda name: (quality[name], name == "trained"))
    found = outcomes[best]
    calibrations, held = _calibrate(found, database.manifest.model.layers, layer, options.coverage)
    report = {f"held_out_similarity_{name}": value for name, value in quality.items()}
    held_out = len(held_ids) if asked is held_ids else 0
    report |= {"held_out": float(held_out), "trained_kept": float(best == "trained")}
    return TrainedLayer(candidates[best], calibrations, held, report)


def _reduce_tokens(
    database: Database, layer: int, chosen: Ints, options: TrainOptions
) -> tuple[Tensor, Tensor, Tensor]:
    """Training inputs in the principal components of their tokens: what training reads hundreds of times."""
    groups = _by_length(database, chosen)
    hidden_size, longest = database.manifest.model.hidden, max(groups)
    components = min(_REDUCED, hidden_size)
    share = min(1.0, 2.0 * _TOKENS / sum(n * len(rows) for n, rows in groups.items()))
    tokens = torch.cat(
        [
            _inputs(database, layer, chosen[rows][: math.ceil(share * len(rows))]).flatten(0, 1)
            for rows in groups.values()
        ]
    )
    if len(tokens) > _TOKENS:
        tokens = tokens[torch.randperm(len(tokens))[:_TOKENS]]
    mean = tokens.mean(0)
    covariance = (tokens - mean).T @ (tokens - mean)
    basis = torch.linalg.eigh(covariance).eigenvectors[:, -components:].flip(1).contiguous()  # [H, q]
    reduced = torch.zeros(len(chosen), longest, components)
    for length, rows in groups.items():
        for part in np.array_split(rows, max(1, len(rows) * length // 65536)):
            if len(part):
                reduced[part, :length] = (_inputs(database, layer, chosen[part]) - mean) @ basis
    return reduced, basis, mean


def _principal(reduced: Tensor, basis: Tensor, mean: Tensor, options: TrainOptions) -> SiameseEmbedder:
    """The embedder whose layers are principal components: of tokens, then of all channels together."""
    channels = min(options.channels, reduced.shape[-1])
    flat = reduced[..., :channels].flatten(1)
    spread = flat - flat.mean(0)
    wide = min(options.dimension, *spread.shape)
    _, _, components = torch.pca_lowrank(spread, q=wide, center=False, niter=3)
    position = torch.zeros(flat.shape[1], options.dimension)
    position[:, :wide] = components
    token = basis[:, :channels].contiguous()
    return SiameseEmbedder(token, -(mean @ token), position, torch.eye(options.dimension))


def _rescaled(
    embedder: SiameseEmbedder, reduced: Tensor, basis: Tensor, mean: Tensor, pairs: tuple[Ints, Ints], wanted: Tensor
) -> SiameseEmbedder:
    """The same directions, scaled so that distances fit 1 - similarity in the least squares."""
    flat = reduced[..., : embedder.channels].flatten(1) @ embedder.position
    distance = (flat[pairs[0]] - flat[pairs[1]]).norm(dim=1)
    scale = float((distance * (1.0 - wanted)).sum() / (distance * distance).sum().clamp_min(1e-12))
    return SiameseEmbedder(embedder.token, embedder.bias, embedder.position * scale, embedder.output)


def _gradient(
    start: SiameseEmbedder,
    reduced: Tensor,
    basis: Tensor,
    mean: Tensor,
    pairs: tuple[Ints, Ints],
    wanted: Tensor,
    steps: int,
    options: TrainOptions,
) -> SiameseEmbedder:
    """Siamese training with Adam and a one-cycle rate, smooth L1 between distance and 1 - similarity."""
    mixing = torch.eye(basis.shape[1], start.channels)
    weights = [mixing, start.position.clone(), start.output.clone()]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=options.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=steps)
    left, right = torch.from_numpy(pairs[0]), torch.from_numpy(pairs[1])
    for _ in range(steps):
        drawn = torch.randint(0, len(left), (options.batch,))
        used, where = torch.cat([left[drawn], right[drawn]]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        flat = (reduced[used] @ weights[0]).flatten(1) @ weights[1] @ weights[2]
        # index_select: the gradient of plain indexing is summed up in whatever order the threads arrive.
        first, second = flat.index_select(0, where[: options.batch]), flat.index_select(0, where[options.batch :])
        distance = ((first - second).square().sum(1) + 1e-9).sqrt()
        loss = F.smooth_l1_loss(distance, 1.0 - wanted[drawn], beta=0.05)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    token = (basis @ weights[0].detach()).contiguous()
    return SiameseEmbedder(token, -(mean @ token), weights[1].detach(), weights[2].detach())


@dataclass
class _Retrieved:
    """For every query: its length, and per neighbour rank the distance and the true similarity in every layer."""

    lengths: Ints  # [Q]
    distances: npt.NDArray[np.float32]  # [Q, k], inf where there is no record of that length
    scores: npt.NDArray[np.float32]  # [Q, k, layers used], -1 likewise


def _retrieve(database: Database, layer: int, embedder: SiameseEmbedder, stored: Ints, asked: Ints) -> _Retrieved:
    layers = list(range(database.manifest.model.layers)) if layer == SEQUENCE else [layer]
    vectors = embed_records(database, layer, stored, embedder)
    queries = embed_records(database, layer, asked, embedder)
    where = _by_length(database, stored)
    k = _NEIGHBOURS
    distances = np.full((len(asked), k), np.inf, np.float32)
    scores = np.full((len(asked), k, len(layers)), -1.0, np.float32)
    for length, rows in _by_length(database, asked).items():
        there = where.get(length)
        if there is None:
            continue
        order, near = FlatIndex(vectors[there]).search(queries[rows], k + 1)
        for row, positions, d in zip(rows, order, near, strict=True):
            query = int(asked[row])
            # A training record that queries finds itself first: skip it.
            kept = [(int(stored[there[p]]), x) for p, x in zip(positions, d, strict=True) if p >= 0]
            kept = [(r, x) for r, x in kept if r != query][:k]
            for rank, (record, x) in enumerate(kept):
                distances[row, rank] = x
                for column, at in enumerate(layers):
                    a, b = database.map(at, query), database.map(at, record)
                    scores[row, rank, column] = float(similarity_score(a, b))
    return _Retrieved(database.records.lengths[asked], distances, scores)


def _mean_best(found: _Retrieved) -> float:
    first = found.scores[:, 0]
    served = first[np.isfinite(found.distances[:, 0])]
    return float(served.mean()) if len(served) else 0.0


def _calibrate(
    found: _Retrieved, layers: int, layer: int, coverage: float
) -> tuple[dict[int, Calibration], dict[int, list[tuple[int, float]]]]:
    covered: Sequence[int] = range(layers) if layer == SEQUENCE else [layer]
    known = np.isfinite(found.distances)
    if not known.any():
        raise DatabaseError(
            "no held-out sequence has a training record of its length, so nothing can be calibrated.",
            "build from more data",
        )
    curves, held = {}, {}
    for column, at in enumerate(covered):
        # Farther neighbours too: each is the nearest in a database without the ones before it.
        curve = fit_calibration(found.distances[known], found.scores[..., column][known], coverage)
        curves[at] = curve
        first = found.distances[:, 0]
        predicted = np.where(np.isfinite(first), curve.predict(np.where(np.isfinite(first), first, 0.0)), -1.0)
        held[at] = [(int(n), float(p)) for n, p in zip(found.lengths, predicted, strict=True)]
    return curves, held


LookupName = Literal["layer", "sequence"]


def held_out_scores(trained: Trained, lookup: LookupName) -> dict[tuple[int, int], list[float]]:
    """Predicted scores of held-out queries by (layer, length), for the performance model's hit rates."""
    scores: dict[tuple[int, int], list[float]] = {}
    sources: list[Any] = (
        [trained.layers[SEQUENCE]] if lookup == "sequence" else [v for k, v in trained.layers.items() if k >= 0]
    )
    for found in sources:
        for layer, values in found.held_scores.items():
            for length, score in values:
                if length <= trained.longest:
                    scores.setdefault((layer, length), []).append(score)
    return scores
