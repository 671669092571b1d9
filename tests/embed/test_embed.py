"""The embedder, its calibration and its training: distances that mean what a threshold says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from databases import add_maps
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from attmemo.db import (
    KIND_INPUT,
    KIND_MAP,
    SEQUENCE,
    SPLIT_HELD_OUT,
    SPLIT_TRAIN,
    Database,
    DatabaseWriter,
    FlatIndex,
    ModelInfo,
    Provenance,
)
from attmemo.embed import stored as reading
from attmemo.embed.calibration import Calibration, fit_calibration
from attmemo.embed.indexing import build_indexes
from attmemo.embed.pairs import sampled_rows
from attmemo.embed.retrieval import Judge, Retrieved
from attmemo.embed.siamese import SiameseEmbedder, load_embedders, save_embedders
from attmemo.embed.similarity import similarity_score
from attmemo.embed.stored import embed_records, read_map_rows
from attmemo.embed.training import Trained, TrainOptions, train
from attmemo.errors import DatabaseCorruptError, DatabaseError

Floats = npt.NDArray[np.float64]
HIDDEN = 12
QUICK = settings(derandomize=True, deadline=None, max_examples=50)


def make_embedder(seed: int = 0, longest: int = 20, channels: int = 4, dimension: int = 8) -> SiameseEmbedder:
    draw = torch.Generator().manual_seed(seed)
    return SiameseEmbedder(
        torch.randn(HIDDEN, channels, generator=draw),
        torch.randn(channels, generator=draw),
        torch.randn(longest * channels, 6, generator=draw),
        torch.randn(6, dimension, generator=draw),
    )


class TestEmbedding:
    def test_is_three_linear_layers_over_tokens_positions_and_their_sum(self) -> None:
        embedder = make_embedder()
        hidden = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(1))
        channels = (hidden[0] @ embedder.token + embedder.bias).flatten()
        expected = channels @ embedder.position[: 5 * 4] @ embedder.output
        assert torch.allclose(embedder.embed(hidden, [5])[0], expected, atol=1e-4)
        assert (embedder.channels, embedder.longest, embedder.dimension) == (4, 20, 8)

    def test_of_equal_inputs_is_equal(self) -> None:
        hidden = torch.randn(1, 9, HIDDEN, generator=torch.Generator().manual_seed(2)).expand(6, -1, -1)
        vectors = make_embedder().embed(hidden, [9] * 6)
        assert torch.equal(vectors, vectors[:1].expand(6, -1))
        assert FlatIndex(vectors[:1].numpy()).search(vectors.numpy(), 1)[1].max() == 0.0

    @QUICK
    @given(
        lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), more=st.integers(0, 12), seed=st.integers(0, 99)
    )
    def test_does_not_depend_on_padding_or_on_the_rest_of_the_batch(
        self, lengths: list[int], more: int, seed: int
    ) -> None:
        embedder, draw = make_embedder(), torch.Generator().manual_seed(seed)
        # What lies behind a row's tokens is garbage, not zeros.
        hidden = 3 * torch.randn(len(lengths), max(lengths) + more, HIDDEN, generator=draw)
        together = embedder.embed(hidden, lengths)
        scale = float(together.abs().max())
        for row, n in enumerate(lengths):
            alone = embedder.embed(hidden[row : row + 1, :n], [n])[0]
            assert torch.allclose(together[row], alone, atol=1e-6 * scale)

    def test_garbage_that_is_not_a_number_behind_a_row_is_ignored(self) -> None:
        hidden = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(2))
        want = make_embedder().embed(hidden, [9, 4])
        hidden[1, 4:] = 1e30
        assert torch.allclose(make_embedder().embed(hidden, [9, 4]), want)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_of_another_precision_is_computed_in_float32(self, dtype: torch.dtype) -> None:
        hidden = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)
        vectors = make_embedder().embed(hidden, [9, 4])
        assert vectors.dtype == torch.float32
        assert torch.allclose(vectors, make_embedder().embed(hidden.float(), [9, 4]), atol=1e-4)

    def test_under_autocast_is_still_computed_in_float32(self) -> None:
        hidden = torch.randn(2, 9, HIDDEN, generator=torch.Generator().manual_seed(2))
        want = make_embedder().embed(hidden, [9, 4])
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(make_embedder().embed(hidden, [9, 4]), want)

    def test_bias_cancels_in_distances(self) -> None:
        embedder = make_embedder()
        shifted = SiameseEmbedder(embedder.token, embedder.bias + 3.0, embedder.position, embedder.output)
        hidden = torch.randn(2, 7, HIDDEN, generator=torch.Generator().manual_seed(4))
        a, b = (one.embed(hidden, [7, 7]) for one in (embedder, shifted))
        assert torch.allclose((a[0] - a[1]).norm(), (b[0] - b[1]).norm(), rtol=1e-4)


class TestEmbedderFile:
    def test_gives_back_what_was_written(self, tmp_path: Path) -> None:
        file = tmp_path / "e.safetensors"
        written = {layer: make_embedder(layer + 1) for layer in (-1, 0, 3)}
        save_embedders(written, file)
        read = load_embedders(file, HIDDEN)
        assert read.keys() == written.keys()
        for layer, embedder in written.items():
            for name, tensor in embedder.tensors().items():
                assert torch.equal(read[layer].tensors()[name], tensor)

    @pytest.mark.parametrize("damage", ["empty", "text", "cut", "missing"])
    def test_that_is_none_is_named(self, tmp_path: Path, damage: str) -> None:
        file = tmp_path / "e.safetensors"
        save_embedders({-1: make_embedder()}, file)
        if damage == "missing":
            file.unlink()
        else:
            file.write_bytes({"empty": b"", "text": b"not tensors", "cut": file.read_bytes()[:-9]}[damage])
        with pytest.raises(DatabaseCorruptError, match=r"e\.safetensors: not an embedder file") as caught:
            load_embedders(file, HIDDEN)
        assert "train-embedder" in str(caught.value)

    @pytest.mark.parametrize(
        "damage",
        [
            lambda t: t.pop("-1.output"),
            lambda t: t.update({"x.output": t["-1.output"].clone()}),
            lambda t: t.update({"-1.token": t["-1.token"][:-1].contiguous()}),  # another hidden size
            lambda t: t.update({"-1.bias": t["-1.bias"][:-1].contiguous()}),
            lambda t: t.update({"-1.position": t["-1.position"][:-1].contiguous()}),  # half a token
            lambda t: t.update({"-1.output": t["-1.output"][:-1].contiguous()}),
            lambda t: t.update({"-1.output": t["-1.output"].half()}),
            lambda t: t.update({"-1.output": t["-1.output"] * float("nan")}),
            lambda t: t.update({"-1.token": t["-1.token"].flatten()}),
            lambda t: t.update({"-1.token": t["-1.token"][:, :0].contiguous(), "-1.bias": t["-1.bias"][:0].clone()}),
        ],
    )
    def test_that_does_not_fit_is_refused(self, tmp_path: Path, damage: Callable[[dict[str, Tensor]], Any]) -> None:
        file = tmp_path / "e.safetensors"
        tensors = {f"-1.{name}": tensor for name, tensor in make_embedder().tensors().items()}
        damage(tensors)
        save_file(tensors, str(file))
        with pytest.raises(DatabaseCorruptError):
            load_embedders(file, HIDDEN)


def draw_pairs(count: int, seed: int) -> tuple[Floats, Floats]:
    """Distances and true scores of retrievals: farther is worse, and more uncertain."""
    generator = np.random.default_rng(seed)
    distances = generator.gamma(2.0, 0.08, count)
    scores = 1.0 - 0.9 * distances + generator.normal(0.0, 0.01 + 0.25 * distances)
    return distances, np.clip(scores, 0.0, 1.0)


curves = st.lists(
    st.tuples(st.floats(0.0, 3.0, allow_subnormal=False), st.floats(0.0, 1.0)), min_size=1, max_size=60
).map(lambda pairs: fit_calibration(*(np.array(column) for column in zip(*pairs, strict=True))))


class TestCalibration:
    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize("size", [40, 200, 1000])
    def test_predicts_a_lower_bound_as_often_as_promised(self, size: int, seed: int) -> None:
        curve = fit_calibration(*draw_pairs(size, seed), coverage=0.9)
        distances, scores = draw_pairs(5000, seed + 100)
        held = float((scores >= curve.predict(distances)).mean())
        assert held >= (0.85 if size >= 200 else 0.8)

    def test_does_not_give_everything_away_to_be_safe(self) -> None:
        curve = fit_calibration(*draw_pairs(1000, 0), coverage=0.9)
        distances, scores = draw_pairs(5000, 100)
        assert float((scores - curve.predict(distances)).mean()) < 0.12
        assert float((scores >= curve.predict(distances)).mean()) < 0.97

    def test_more_coverage_predicts_less(self) -> None:
        pairs = draw_pairs(500, 1)
        distances = np.linspace(0, 0.4, 30)
        careful, bold = (fit_calibration(*pairs, coverage=c).predict(distances) for c in (0.98, 0.6))
        assert (careful <= bold).all()
        assert float((bold - careful).mean()) > 0.02

    @QUICK
    @given(curves)
    def test_never_rises_and_stays_below_one(self, curve: Calibration) -> None:
        distances = np.concatenate([np.linspace(0.0, 4.0, 200), curve.distances])
        predicted = curve.predict(np.sort(distances))
        assert (np.diff(predicted) <= 0).all()
        assert (predicted >= 0.0).all()
        assert (predicted < 1.0).all(), "a threshold of 1 serves nothing"
        assert curve.radius(1.0) == -1.0

    @QUICK
    @given(curves, st.floats(0.0, 1.0))
    def test_radius_is_the_farthest_distance_that_reaches_the_threshold(
        self, curve: Calibration, threshold: float
    ) -> None:
        radius = curve.radius(threshold)
        if threshold == 0.0:
            assert radius == math.inf
        elif radius < 0:
            assert curve.predict(0.0) < threshold
        else:
            assert curve.predict(radius) >= threshold - 1e-9
            assert curve.predict(radius * (1 + 1e-3) + 1e-3) < threshold

    @QUICK
    @given(curves, st.floats(0.0, 3.0))
    def test_predict_is_the_inverse_of_radius(self, curve: Calibration, distance: float) -> None:
        assume(distance <= curve.distances[-1])
        score = float(curve.predict(distance))
        assert curve.radius(score) >= distance - 1e-6 * max(1.0, distance)
        assert curve.radius(min(1.0, score + 2e-3)) <= distance + 1e-9

    @QUICK
    @given(curves)
    def test_what_is_farther_than_anything_seen_is_predicted_to_share_nothing(self, curve: Calibration) -> None:
        beyond = float(curve.distances[-1]) * (1 + 1e-6) + 1e-6
        assert curve.predict([beyond, beyond + 1.0, 1e9, math.inf]).tolist() == [0.0, 0.0, 0.0, 0.0]
        assert curve.radius(1e-9) <= curve.distances[-1], "any threshold but 0 asks for something"

    def test_a_threshold_of_zero_accepts_everything(self) -> None:
        curve = fit_calibration(*draw_pairs(100, 0))
        assert curve.radius(0.0) == math.inf

    @QUICK
    @given(curves)
    def test_survives_being_written_as_json(self, curve: Calibration) -> None:
        again = Calibration.from_dict(json.loads(json.dumps(curve.to_dict(), allow_nan=False)), "here")
        assert np.array_equal(again.distances, curve.distances)
        assert np.array_equal(again.scores, curve.scores)

    def test_a_handful_of_pairs_is_not_trusted(self) -> None:
        distances, scores = draw_pairs(6, 0)
        assert (fit_calibration(distances, scores).predict(distances) <= scores).all()

    def test_perfect_retrievals_are_believed_but_not_beyond_doubt(self) -> None:
        curve = fit_calibration(np.zeros(200), np.ones(200))
        assert 0.99 < float(curve.predict(0.0)) < 1.0
        assert float(curve.predict(1e-3)) == 0.0

    @pytest.mark.parametrize(
        "data",
        [
            None,
            [],
            "curve",
            {},
            {"distances": [0.0, 1.0]},
            {"distances": [], "scores": []},
            {"distances": [0.0, 1.0], "scores": [0.5]},
            {"distances": [0.0, 0.0], "scores": [0.5, 0.4]},
            {"distances": [1.0, 0.0], "scores": [0.5, 0.4]},
            {"distances": [0.0, 1.0], "scores": [0.4, 0.5]},
            {"distances": [0.0, 1.0], "scores": [1.5, 0.5]},
            {"distances": [0.0, float("nan")], "scores": [0.5, 0.4]},
            {"distances": [0.0, 1.0], "scores": [0.5, float("nan")]},
            {"distances": [0.0, float("inf")], "scores": [0.5, 0.4]},
            {"distances": [[0.0, 1.0]], "scores": [[0.5, 0.4]]},
            {"distances": ["a"], "scores": ["b"]},
            {"distances": {"0": 1}, "scores": [0.1]},
            {"distances": 0.5, "scores": 0.5},
        ],
        ids=repr,
    )
    def test_what_is_not_a_curve_is_refused_by_name(self, data: Any) -> None:
        with pytest.raises(DatabaseCorruptError, match=r"calibration -1\.0: the (field|content)"):
            Calibration.from_dict(data, "calibration -1.0")


LAYERS, HEADS = 2, 2
PLANTED_HIDDEN = 24
TEMPLATES = 12
COPIES = 12
LENGTHS = (6, 9)


def planted_database(path: Path, *, held_out: bool = True, seed: int = 0) -> tuple[Database, npt.NDArray[np.int64]]:
    """Records of a few templates, and which template each is.

    A template decides the maps; of what enters a layer it decides a few weak directions among strong ones that mean
    nothing, so that the nearest input is not the most similar map and there is something to learn.
    """
    draw = torch.Generator().manual_seed(seed)
    info = ModelInfo(
        name="planted", family="bert", mask_kind="bidirectional", layers=LAYERS, heads=HEADS, hidden=PLANTED_HIDDEN,
        dtype="float32", max_length=max(LENGTHS), fingerprint="f" * 64, fields={}, tokenizer=None,
    )  # fmt: skip
    kinds: list[int] = []
    with DatabaseWriter(path, info, "float32") as writer:
        source = writer.add_source("planted.txt", "0" * 64)
        row = 0
        for length in LENGTHS:
            scores = 3.0 * torch.randn(TEMPLATES, LAYERS, HEADS, length, length, generator=draw)
            marks = torch.randn(TEMPLATES, LAYERS, length, 6, generator=draw)
            for template in range(TEMPLATES):
                for number in range(COPIES):
                    noise = 0.1 * torch.randn(LAYERS, HEADS, length, length, generator=draw)
                    maps = (scores[template] + noise).softmax(-1)
                    strong = 1.5 * torch.randn(LAYERS, length, 6, generator=draw)
                    weak = 0.01 * torch.randn(LAYERS, length, PLANTED_HIDDEN - 12, generator=draw)
                    inputs = torch.cat([marks[template], strong, weak], -1)
                    split = SPLIT_HELD_OUT if held_out and number % 4 == 3 else SPLIT_TRAIN
                    add_maps(writer, list(maps), list(inputs), Provenance(source, row, split))
                    kinds.append(template)
                    row += 1
        writer.publish()
    return Database(path), np.asarray(kinds)


OPTIONS = TrainOptions(steps=150, backend="flat")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Database, npt.NDArray[np.int64]]:
    return planted_database(tmp_path_factory.mktemp("planted") / "db")


@pytest.fixture(scope="module")
def trained(planted: tuple[Database, npt.NDArray[np.int64]]) -> Trained:
    return train(planted[0], OPTIONS)


def precision(database: Database, kinds: npt.NDArray[np.int64], layer: int, embedder: SiameseEmbedder) -> float:
    """Share of held-out records whose nearest training record is of their template."""
    splits, lengths = database.records.splits, database.records.lengths
    right = total = 0
    for length in LENGTHS:
        stored = np.flatnonzero((splits == SPLIT_TRAIN) & (lengths == length))
        asked = np.flatnonzero((splits == SPLIT_HELD_OUT) & (lengths == length))
        index = FlatIndex(*embed_records(database, layer, stored, [embedder]))
        order, _ = index.search(*embed_records(database, layer, asked, [embedder]), 1)
        right += int((kinds[stored[order[:, 0]]] == kinds[asked]).sum())
        total += len(asked)
    return right / total


class TestTraining:
    @pytest.mark.parametrize("layer", [SEQUENCE, 0, 1])
    def test_finds_the_planted_template_far_better_than_chance(
        self, planted: tuple[Database, npt.NDArray[np.int64]], trained: Trained, layer: int
    ) -> None:
        database, kinds = planted
        found = precision(database, kinds, layer, trained.layers[layer].embedder)
        draw = torch.Generator().manual_seed(0)
        random = SiameseEmbedder(
            torch.randn(PLANTED_HIDDEN, 12, generator=draw),
            torch.zeros(12),
            torch.randn(max(LENGTHS) * 12, 32, generator=draw),
            torch.eye(32),
        )
        assert found > 0.9
        assert found > precision(database, kinds, layer, random) + 0.1
        report = trained.layers[layer].report
        assert report["held_out"] == 72
        assert report["trained_kept"] in (0.0, 1.0)

    def test_distances_approach_one_minus_the_similarity(
        self, planted: tuple[Database, npt.NDArray[np.int64]], trained: Trained
    ) -> None:
        database, _ = planted
        same = np.flatnonzero(database.records.lengths == LENGTHS[0])[:60]
        vectors = torch.from_numpy(*embed_records(database, 0, same, [trained.layers[0].embedder]))
        distances, wanted = [], []
        for a, b in ((0, 1), (0, 2), (0, 13), (0, 25), (14, 30), (30, 31), (12, 40)):
            distances.append(float((vectors[a] - vectors[b]).norm()))
            maps = [database.slot(KIND_MAP, 0, int(same[i])) for i in (a, b)]
            wanted.append(1.0 - float(similarity_score(*maps)))
        assert np.corrcoef(distances, wanted)[0, 1] > 0.9
        assert np.abs(np.array(distances) - wanted).mean() < 0.12

    def test_predictions_for_held_out_records_are_lower_bounds(
        self, planted: tuple[Database, npt.NDArray[np.int64]], tmp_path: Path, trained: Trained
    ) -> None:
        """On records drawn anew from the same templates, which the calibration has not seen."""
        database, _ = planted
        splits, lengths = database.records.splits, database.records.lengths
        fresh, _ = planted_database(tmp_path / "db", held_out=False)
        with fresh:
            for layer in (SEQUENCE, 0):
                embedder = trained.layers[layer].embedder
                kept = lower = 0
                for length in LENGTHS:
                    stored = np.flatnonzero((splits == SPLIT_TRAIN) & (lengths == length))
                    asked = np.flatnonzero((splits == SPLIT_HELD_OUT) & (lengths == length))
                    index = FlatIndex(*embed_records(database, layer, stored, [embedder]))
                    order, near = index.search(*embed_records(database, layer, asked, [embedder]), 1)
                    for query, place, distance in zip(asked, order[:, 0], near[:, 0], strict=True):
                        maps = [database.slot(KIND_MAP, 0, int(r)) for r in (query, stored[place])]
                        predicted = float(trained.layers[layer].calibrations[0].predict(distance))
                        lower += float(similarity_score(*maps)) >= predicted
                        kept += 1
                assert lower / kept >= 0.85

    def test_the_same_seed_gives_the_same_weights(
        self, planted: tuple[Database, npt.NDArray[np.int64]], trained: Trained
    ) -> None:
        torch.rand(17)  # whatever was drawn before
        again = train(planted[0], OPTIONS)
        other = train(planted[0], TrainOptions(**OPTIONS.__dict__ | {"seed": 1}))
        for layer, found in trained.layers.items():
            assert torch.equal(found.embedder._folded, again.layers[layer].embedder._folded)
            assert found.held_scores == again.layers[layer].held_scores
            for key, curve in found.calibrations.items():
                assert curve.to_dict() == again.layers[layer].calibrations[key].to_dict()
        assert any(
            not torch.equal(found.embedder._folded, other.layers[layer].embedder._folded)
            for layer, found in trained.layers.items()
        )

    @pytest.mark.parametrize("held_out", [True, False])
    def test_no_record_is_asked_for_and_finds_itself(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_out: bool
    ) -> None:
        """Duplicates excepted, a query at distance 0 with similarity 1 would calibrate on nothing."""
        database, _ = planted_database(tmp_path / "db", held_out=held_out)
        seen: list[Retrieved] = []
        search = Judge._search

        def watched(judge: Judge, *args: Any) -> Retrieved:
            seen.append(search(judge, *args))
            if held_out:
                assert not set(judge.stored.tolist()) & set(judge.asked.tolist())
            assert (seen[-1].records != judge.asked[:, None]).all()
            return seen[-1]

        monkeypatch.setattr(Judge, "_search", watched)
        with database:
            train(database, TrainOptions(**OPTIONS.__dict__ | {"steps": 5}))
        assert len(seen) == 2 * (LAYERS + 1)
        for found in seen:
            assert (found.distances > 1e-4).all()
            assert (found.scores < 1.0 - 1e-4).all()

    def test_there_is_a_curve_for_every_layer_and_both_lookups(self, trained: Trained) -> None:
        assert set(trained.layers) == {SEQUENCE, 0, 1}
        assert set(trained.layers[SEQUENCE].calibrations) == {0, 1}
        for layer in (0, 1):
            assert set(trained.layers[layer].calibrations) == {layer}

    def test_held_out_scores_are_told_by_layer_and_length(self, trained: Trained) -> None:
        for lookup in ("layer", "sequence"):
            scores = trained.held_out_scores(lookup)  # type: ignore[arg-type]
            assert set(scores) == {(layer, length) for layer in range(LAYERS) for length in LENGTHS}
            assert all(len(values) == 36 for values in scores.values())
            assert all(-1.0 <= value < 1.0 for values in scores.values() for value in values)

    def test_an_index_holds_every_record_held_out_or_not(
        self, tmp_path: Path, planted: tuple[Database, npt.NDArray[np.int64]], trained: Trained
    ) -> None:
        database, _ = planted_database(tmp_path / "db")
        with database:
            ref = build_indexes(database, trained)
        assert ref.next_id == len(database)
        assert set(ref.indexes) == {"-1", "0", "1"}
        assert json.loads(json.dumps(ref.calibration)) == ref.calibration

    def test_too_few_records_are_refused_with_what_to_do(self, tmp_path: Path) -> None:
        info = ModelInfo(
            name="few", family="bert", mask_kind="bidirectional", layers=1, heads=1, hidden=4,
            dtype="float32", max_length=9, fingerprint="f" * 64, fields={}, tokenizer=None,
        )  # fmt: skip
        for name, lengths, match in (
            ("few", [4] * 7, "at least 8"),
            ("lone", list(range(2, 14)), "same token length"),
        ):
            with DatabaseWriter(tmp_path / name, info, "float32") as writer:
                source = writer.add_source("few.txt", "0" * 64)
                for row, n in enumerate(lengths):
                    add_maps(writer, [torch.full((1, n, n), 1 / n)], [torch.randn(n, 4)], Provenance(source, row))
                writer.publish()
            with Database(tmp_path / name) as database, pytest.raises(DatabaseError, match=match) as caught:
                train(database, TrainOptions(steps=1))
            assert "build" in str(caught.value)


class TestReadingRecords:
    @pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "uint8"])
    @pytest.mark.parametrize("mask", ["bidirectional", "causal"])
    def test_rows_of_a_stored_map_are_the_rows_of_the_whole_map(
        self, tmp_path: Path, storage: str, mask: str
    ) -> None:
        heads, n = 3, 7
        info = ModelInfo(
            name="rows", family="bert", mask_kind=mask, layers=1, heads=heads, hidden=4,
            dtype="float32", max_length=9, fingerprint="f" * 64, fields={}, tokenizer=None,
        )  # fmt: skip
        scores = torch.randn(heads, n, n, generator=torch.Generator().manual_seed(0))
        if mask == "causal":
            scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf)
        with DatabaseWriter(tmp_path / "db", info, storage) as writer:
            source = writer.add_source("rows.txt", "0" * 64)
            add_maps(writer, [scores.softmax(-1)], [torch.ones(n, 4)], Provenance(source, 0))
            writer.publish()
        rows = torch.tensor([[0, 3], [1, 6], [5, 2]])
        with Database(tmp_path / "db") as database:
            whole = database.map(0, 0).float()
            assert torch.equal(read_map_rows(database, 0, 0, rows), whole[torch.arange(heads)[:, None], rows])

    @pytest.mark.parametrize(("heads", "length"), [(1, 1), (2, 6), (12, 114), (12, 512), (16, 4096)])
    def test_sampled_rows_exist_and_are_spread_over_the_map(self, heads: int, length: int) -> None:
        rows = sampled_rows(heads, length)
        assert rows.shape[0] == heads
        assert rows.min() >= 0
        assert rows.max() < length
        assert abs(float(rows.float().mean()) - (length - 1) / 2) <= max(0.5, length / heads)
        assert len(rows.unique()) >= min(length, heads)

    def test_pages_that_were_read_are_let_go(
        self, planted: tuple[Database, npt.NDArray[np.int64]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the database holds, no more of it than one block stays mapped by a reading."""
        database, _ = planted
        monkeypatch.setattr(reading, "BLOCK", 2 * LENGTHS[0] * PLANTED_HIDDEN)
        records = np.arange(len(database))
        file = database.arena(KIND_INPUT, LENGTHS[0]).path.name

        def resident() -> int:
            found, inside = 0, False
            for line in Path("/proc/self/smaps").read_text().splitlines():
                if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                    inside = line.endswith(file)
                elif inside and line.startswith("Rss:"):
                    found += int(line.split()[1])
            return found

        for blocks, _ in reading.read_inputs(database, 0, records):
            assert len(blocks) <= 2
        assert resident() == 0
