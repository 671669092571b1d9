"""`attmemo.ray.Encoder`: answers beside their rows, in order, whatever lies in a batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sentence_transformers", reason="attmemo[serve] is not installed")

from hypothesis import given
from hypothesis import strategies as st
from services import tiny
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from attmemo.errors import ArgumentError, DatabaseNotFoundError, DataError, UnsupportedModelError
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model
from attmemo.ray import Encoder
from attmemo.ray.encoder import _forwards

READS: dict[str, Any] = {"budget": None, "gate": False}


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("classifier"), 3)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny(tmp_path_factory.mktemp("embedder"), None)


@pytest.fixture(scope="module")
def exact(classifier: str) -> Iterator[Encoder]:
    encoder = Encoder(classifier, reuse="none", forward_tokens=64)
    yield encoder
    encoder.close()


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of many lengths."""
    draw = np.random.default_rng(seed)
    return [" ".join(map(str, draw.integers(0, 100, draw.integers(1, 40)))) for _ in range(count)]


def batch(lines: list[Any], **more: Any) -> dict[str, Any]:
    return {"id": np.arange(len(lines)), "text": np.array(lines, object)} | more


def written(path: Path) -> list[tuple[str, int]]:
    """Files and when they were written, but for the one that readers of LMDB enter themselves in."""
    files = (file for file in path.rglob("*") if file.is_file() and file.name != "lock.mdb")
    return sorted((str(file), file.stat().st_mtime_ns) for file in files)


def plain_logits(model: str, lines: list[Any]) -> torch.Tensor:
    """Logits of the model as it is, one text at a time."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    bare = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.inference_mode():
        pairs = [line if isinstance(line, tuple) else (line,) for line in lines]
        return torch.cat([bare(**tokenizer(*pair, truncation=True, return_tensors="pt")).logits for pair in pairs])


def test_classes_stand_beside_their_rows_and_other_columns_stay(exact: Encoder, classifier: str) -> None:
    lines = texts(60)
    given_batch = batch(lines, note=np.array([f"n{n}" for n in range(60)], object))
    for column in given_batch.values():
        column.flags.writeable = False  # so Ray hands columns over where they lie in its store
    found = exact(given_batch)
    assert list(found) == ["id", "text", "note", "class", "score"]
    assert found["id"].tolist() == list(range(60))
    assert found["text"].tolist() == lines
    shares = plain_logits(classifier, lines).softmax(1)
    assert found["class"].tolist() == [f"LABEL_{place}" for place in shares.argmax(1).tolist()]
    np.testing.assert_allclose(found["score"], shares.amax(1).numpy(), atol=1e-5)


def test_columns_have_the_names_that_the_caller_gives(classifier: str) -> None:
    outputs = {"scores": "all", "class": "event", "tokens": "n", "rows": "computed"}
    encoder = Encoder(classifier, text="line", outputs=outputs, reuse="none")
    lines = texts(5)
    found = encoder({"line": np.array(lines, object)})
    assert list(found) == ["line", "all", "event", "n", "computed"]
    np.testing.assert_allclose(found["all"], plain_logits(classifier, lines).softmax(1).numpy(), atol=1e-5)
    assert found["n"].tolist() == found["computed"].tolist() == [len(line.split()) + 2 for line in lines]


def test_embeddings_are_those_of_sentence_transformers(embedder: str) -> None:
    from sentence_transformers import SentenceTransformer

    lines = texts(30)
    expected = SentenceTransformer(embedder, device="cpu").encode(lines, normalize_embeddings=True)
    found = Encoder(embedder, reuse="none")(batch(lines))["embedding"]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-5)
    longer = Encoder(embedder, reuse="none", normalize=False, prompt="alpha beta ")(batch(lines[:2]))["embedding"]
    bare = SentenceTransformer(embedder, device="cpu").encode([f"alpha beta {line}" for line in lines[:2]])
    np.testing.assert_allclose(longer, bare, atol=1e-5)


def test_a_reranker_scores_pairs_of_two_columns(tmp_path: Path) -> None:
    model = tiny(tmp_path / "reranker", 1)
    first, second = texts(12), texts(12, seed=1)
    encoder = Encoder(model, text=("query", "text"), reuse="none")
    found = encoder({"query": np.array(first, object), "text": np.array([*second[:-1], None], object)})
    expected = plain_logits(model, list(zip(first, second, strict=True))).sigmoid()[:, 0].numpy()
    np.testing.assert_allclose(found["score"][:-1], expected[:-1], atol=1e-5)
    assert np.isnan(found["score"][-1])


def test_a_row_without_a_text_has_no_answer_and_moves_no_other(exact: Encoder) -> None:
    lines: list[Any] = texts(20)
    whole = exact(batch(lines))
    for place in (0, 7, 19):
        lines[place] = None
    lines[8] = float("nan")
    found = exact(batch(lines))
    missing = [0, 7, 8, 19]
    assert [place for place, name in enumerate(found["class"].tolist()) if name is None] == missing
    assert np.flatnonzero(np.isnan(found["score"])).tolist() == missing
    rest = np.setdiff1d(np.arange(20), missing)
    np.testing.assert_allclose(found["score"][rest], whole["score"][rest], atol=1e-5)
    nothing = exact(batch([None, None]))
    assert nothing["class"].tolist() == [None, None]
    assert np.isnan(nothing["score"]).all()


def test_an_empty_batch_has_the_columns_of_others(embedder: str, exact: Encoder) -> None:
    found = Encoder(embedder, reuse="none")(batch([]))["embedding"]
    assert (found.shape, found.dtype) == ((0, 64), np.float32)
    assert [exact(batch([]))[name].shape for name in ("class", "score")] == [(0,), (0,)]


@given(lengths=st.lists(st.integers(0, 90), max_size=60), most=st.integers(1, 200))
def test_forwards_hold_each_sequence_once_by_length_and_within_the_limit(lengths: list[int], most: int) -> None:
    parts = list(_forwards(np.array(lengths, np.int64), most))
    order = [place for part in parts for place in part]
    assert sorted(order) == [place for place, length in enumerate(lengths) if length]
    assert [lengths[place] for place in order] == sorted(length for length in lengths if length)
    assert all(len(part) == 1 or sum(lengths[place] for place in part) <= most for part in parts)


def test_a_prepared_database_serves_and_is_not_written(classifier: str, tmp_path: Path) -> None:
    log, lines = tmp_path / "before.log", texts(40)
    log.write_text("\n".join(lines) + "\n")
    options = BuildOptions(storage="float32", reuse="rows")
    build_database(load_model(classifier), [log], tmp_path / "db", options)
    before = written(tmp_path / "db")
    encoder = Encoder(
        classifier, database=str(tmp_path / "db"), outputs={"class": "class", "rows": "rows", "tokens": "tokens"},
        **READS,
    )  # fmt: skip
    changed = [line.rsplit(" ", 1)[0] + " 5" for line in lines]
    found = encoder(batch([*lines, *changed]))
    assert found["rows"].sum() < 0.5 * found["tokens"].sum()
    logits = plain_logits(classifier, lines)
    assert found["class"][:40].tolist() == [f"LABEL_{place}" for place in logits.argmax(1).tolist()]
    encoder.close()
    assert written(tmp_path / "db") == before


def test_a_node_fills_a_database_of_its_own_in_its_cache_directory(classifier: str, tmp_path: Path) -> None:
    encoder = Encoder(
        classifier, outputs={"rows": "rows", "tokens": "tokens"}, database="auto", budget=0.01,
        cache=str(tmp_path / "replicas"),
    )  # fmt: skip
    encoder(batch(texts(10)))
    encoder.close()
    assert list((tmp_path / "cache").rglob("FILLING.json"))
    assert not (tmp_path / "replicas").exists()


def test_a_database_that_does_not_exist_is_begun_and_fills_itself(classifier: str, tmp_path: Path) -> None:
    place = tmp_path / "new"
    with pytest.raises(DatabaseNotFoundError, match="new does not exist"):
        Encoder(classifier, database=str(place))
    for records in (0, 10):
        encoder = Encoder(classifier, database=str(place), budget=0.01)
        assert encoder.stats["records"] == records
        encoder(batch(texts(10)))
        encoder.close()
    assert (place / "FILLING.json").exists()


def test_without_a_budget_every_row_is_computed_and_nothing_is_written(
    classifier: str, exact: Encoder, tmp_path: Path
) -> None:
    lines = texts(10)
    encoder = Encoder(classifier, forward_tokens=64)
    for _ in range(2):
        found, expected = encoder(batch(lines)), exact(batch(lines))
        assert found["class"].tolist() == expected["class"].tolist()
        assert np.array_equal(found["score"], expected["score"])
    assert encoder.stats["rows_computed"] == encoder.stats["tokens"]
    encoder.close()
    assert not (tmp_path / "cache").exists()


def test_bfloat16_gives_float32_columns(embedder: str) -> None:
    lines = texts(8)
    found = Encoder(embedder, reuse="none", dtype="bfloat16")(batch(lines))["embedding"]
    whole = Encoder(embedder, reuse="none")(batch(lines))["embedding"]
    assert found.dtype == np.float32
    assert ((found * whole).sum(1) > 0.99).all()


def test_bad_columns_are_named(exact: Encoder) -> None:
    with pytest.raises(DataError, match=r"no column 'text'; its columns: 'id', 'line'"):
        exact({"id": np.arange(2), "line": np.array(["a", "b"], object)})
    with pytest.raises(DataError, match=r"column 'text', row 1 of a batch .*holds int, expected text"):
        exact(batch(["1", 2]))
    with pytest.raises(ArgumentError, match="'class' already"):
        exact(batch(["1"]) | {"class": np.array(["x"], object)})
    with pytest.raises(DataError, match="batch_format='numpy'"):
        exact([1, 2])  # type: ignore[arg-type]


def test_bad_arguments_are_named(classifier: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"'embedding'; this model gives class, score, scores, tokens, rows"):
        Encoder(classifier, outputs={"embedding": "e"}, reuse="none")
    with pytest.raises(ArgumentError, match="one name of a column for each"):
        Encoder(classifier, outputs={"class": "c", "score": "c"}, reuse="none")
    with pytest.raises(ArgumentError, match="forward_tokens=0"):
        Encoder(classifier, forward_tokens=0)
    with pytest.raises(ArgumentError, match="one or two columns"):
        Encoder(classifier, text=("a", "b", "c"))
    with pytest.raises(UnsupportedModelError, match="nothing is pooled"):
        Encoder(classifier, pooling="cls")
