"""Training the embedders of a database and calibrating them.

For each layer, and once for the whole sequence (target: the mean similarity over layers): principal components of the
inputs, scaled so that distances fit 1 - similarity; Siamese training on pairs of one length (arXiv 2301.09262, the
section on embedding), kept only if held-out queries then find records at least as similar; calibration on held-out
sequences. Everything is linear, so a step works on differences of pairs, in `components.WIDTH` components. A step over
the tokens of both sequences takes about seven times the CPU time, and 300 of them found nothing better.

Memory: ``4 d`` bytes a record, of one layer at a time, and by default up to 300 MB at 128 tokens, 600 MB at 512.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from attmemo.db import KIND_INPUT, SEQUENCE, SPLIT_HELD_OUT, SPLIT_TRAIN, Backend, Database
from attmemo.embed.calibration import COVERAGE, Calibration
from attmemo.embed.components import Components, find_components
from attmemo.embed.lookup import LookupName
from attmemo.embed.pairs import Pairs, draw_pairs, label_pairs
from attmemo.embed.retrieval import Judge, calibrate, layers_of
from attmemo.embed.siamese import CHANNELS, DIMENSION, SiameseEmbedder
from attmemo.embed.stored import sample
from attmemo.errors import DatabaseError

Progress = Callable[[str, int, int], None]

_QUERIES = 500  # held-out records asked for calibration, at most
_MOST_RECORDS = 3000  # that are learned from
_NEAR, _RANDOM = 8, 4  # records that each one makes a pair with
_BATCH = 512  # pairs of a step
_RATE = 3e-3  # of weights that begin as the identity
_FEWEST_QUERIES = 20  # with fewer held-out records, training records query each other


@dataclass
class TrainOptions:
    """What can be chosen; the defaults serve from a few hundred to some ten thousand records."""

    steps: int = 300
    seed: int = 0
    backend: Backend = "faiss"


@dataclass
class TrainedLayer:
    """One embedder with what was learned about it on held-out sequences."""

    embedder: SiameseEmbedder
    calibrations: dict[int, Calibration]  # layer -> curve; the once-per-sequence embedder has one for every layer
    held_scores: dict[int, list[tuple[int, float]]]  # layer -> (length, predicted score or -1) of every held-out query
    report: dict[str, float]


@dataclass
class Trained:
    """Everything `train` made, by layer (-1: once per sequence)."""

    layers: dict[int, TrainedLayer]
    options: TrainOptions

    @property
    def longest(self) -> int:
        """Greatest number of tokens that can be embedded: that of the longest training record."""
        return min(found.embedder.longest for found in self.layers.values())

    def held_out_scores(self, lookup: LookupName) -> dict[tuple[int, int], list[float]]:
        """Predicted scores of held-out queries by (layer, length), for the performance model's hit rates."""
        scores: dict[tuple[int, int], list[float]] = {}
        for found in (found for key, found in self.layers.items() if (key == SEQUENCE) == (lookup == "sequence")):
            for layer, values in found.held_scores.items():
                for length, score in values:
                    if length <= self.longest:
                        scores.setdefault((layer, length), []).append(score)
        return scores


def train(database: Database, options: TrainOptions | None = None, progress: Progress | None = None) -> Trained:
    """Train and calibrate all embedders of a database; `progress` is called with (what, done, total).

    DatabaseError: fewer than 8 training records, or no two of one length.
    """
    options = options or TrainOptions()
    tell = progress or (lambda what, done, total: None)
    layers = database.manifest.model.layers
    splits = database.records.splits
    train_ids, held_ids = (np.flatnonzero(splits == s).astype(np.int64) for s in (SPLIT_TRAIN, SPLIT_HELD_OUT))
    if len(train_ids) < 8:
        raise DatabaseError(
            f"{database.path} has {len(train_ids)} training records; at least 8 are needed.",
            "build from more data: attmemo build-database … --data MORE",
        )
    generator = np.random.default_rng(options.seed)
    with torch.random.fork_rng(devices=[]):  # the caller's generator is not ours to set
        torch.manual_seed(options.seed)
        chosen = sample(database, train_ids, _MOST_RECORDS, generator)
        held_ids = sample(database, held_ids, _QUERIES, generator)
        enough = len(held_ids) >= _FEWEST_QUERIES
        judge = Judge(database, train_ids, held_ids if enough else train_ids)
        first = find_components(database, SEQUENCE, chosen, CHANNELS, generator)
        pairs = draw_pairs(database, chosen, first.coordinates, _NEAR, _RANDOM, generator)
        labels = label_pairs(database, chosen, pairs, lambda done: tell("similarities", done, layers))  # [layers, P]
        own = [SEQUENCE, *range(layers)] if database.manifest.layers_kept(KIND_INPUT) == layers else [SEQUENCE]
        trained = {}
        for step, layer in enumerate(own):
            tell("embedders", step, len(own))
            inputs = first if layer <= 0 else find_components(database, layer, chosen, CHANNELS, generator)
            wanted = 1.0 - (labels.mean(0) if layer == SEQUENCE else labels[layer])
            candidates = {"principal": _siamese(inputs, pairs, wanted, 0)}
            if options.steps > 0:
                candidates["trained"] = _siamese(inputs, pairs, wanted, options.steps)
            with _one_thread():
                best, found, quality = judge.retrieve(layer, candidates)
            curves, scores = calibrate(found, layers_of(database, layer), COVERAGE)
            report = {f"held_out_similarity_{name}": value for name, value in quality.items()}
            report |= {"held_out": float(enough * len(held_ids)), "trained_kept": float(best == "trained")}
            trained[layer] = TrainedLayer(candidates[best], curves, scores, report)
        tell("embedders", len(own), len(own))
    return Trained(trained, options)


def _siamese(inputs: Components, pairs: Pairs, wanted: Tensor, steps: int) -> SiameseEmbedder:
    """Siamese training with Adam and a one-cycle rate, smooth L1 between distance and 1 - similarity.

    It begins with the scaled principal components, and with no steps it ends there.
    """
    left, right = map(torch.from_numpy, pairs)
    near = inputs.coordinates[:, : DIMENSION]
    distance = (near[left] - near[right]).norm(dim=1)
    # By this factor distances fit 1 - similarity in the least squares.
    scale = float((distance * wanted).sum() / (distance * distance).sum().clamp_min(1e-12))
    coordinates = scale * inputs.coordinates
    weights = [torch.eye(coordinates.shape[1], DIMENSION), torch.eye(DIMENSION)]
    for weight in weights:
        weight.requires_grad_()
    optimizer = torch.optim.Adam(weights, lr=_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=max(1, steps))
    with _one_thread():
        for _ in range(steps):
            drawn = torch.randint(0, len(left), (_BATCH,))
            embedded = (coordinates[left[drawn]] - coordinates[right[drawn]]) @ weights[0] @ weights[1]
            distance = (embedded.square().sum(1) + 1e-9).sqrt()
            loss = F.smooth_l1_loss(distance, wanted[drawn], beta=0.05)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
    position, output = (weight.detach() for weight in weights)
    return inputs.embedder(scale * position, output)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch in one thread: for thousands of operations of some microseconds each.

    A team of threads spins at the end of each one until its last member is done, also if another process has its core.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
