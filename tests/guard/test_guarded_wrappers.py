"""Wrappers around a guarded model: what they give back is what is verified, and a tokenizer is found in them."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from guarded import certify, flush
from packed_models import NEAR

from attmemo import memoize, unmemoize
from attmemo.handle.rows import NO_TOKENIZER
from attmemo.kernels.kinds import NUMBER, WORD
from attmemo.profiler.models import LoadedModel, load_model

LINES = [f"service {name} closed the session of user {name} on port {{}} after a request" for name in ("a", "b", "c")]
FIRST, SECOND, THIRD = ([line.format(port) for line in LINES] for port in (11, 25, 37))
OPTIONS: dict[str, Any] = {"batch_size": 4, "truncation": True, "max_length": 64}


@pytest.fixture(name="loaded")
def _loaded(tiny_bert: str) -> LoadedModel:
    return load_model(tiny_bert)


def done(handle: Any) -> dict[str, int]:
    found: dict[str, int] = handle.stats()["guard"]["done"]
    return {name: count for name, count in found.items() if count}


class TestPipeline:
    @pytest.fixture(name="pipe")
    def _pipe(self, loaded: LoadedModel) -> Any:
        from transformers import pipeline

        with torch.no_grad():
            loaded.model.classifier.weight.mul_(50.0)  # type: ignore[operator, union-attr]
        parts = {"model": loaded.model, "tokenizer": loaded.tokenizer}
        return pipeline("text-classification", **parts, device="cpu", top_k=None)

    @pytest.mark.parametrize("inside", [False, True], ids=["the pipeline", "its model"])
    def test_a_guarded_pipeline_answers_as_before(
        self, pipe: Any, inside: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        texts = [FIRST, SECOND, FIRST, THIRD]
        expected = [pipe(part, **OPTIONS) for part in texts]
        memoize(pipe.model if inside else pipe, database=":memory:", reuse="rows", gate=False, budget=0.01)
        assert NO_TOKENIZER not in caplog.text
        kinds = pipe.model.attmemo.planner.kinds
        known = pipe.tokenizer.get_vocab()
        assert len(kinds) == len(pipe.tokenizer)
        assert kinds[known["1"]] == NUMBER
        assert kinds[known["[SEP]"]] == WORD
        for part, right in zip(texts, expected, strict=True):
            for ours, theirs in zip(pipe(part, **OPTIONS), right, strict=True):
                assert [one["label"] for one in ours] == [one["label"] for one in theirs]
                assert np.allclose([one["score"] for one in ours], [one["score"] for one in theirs], atol=1e-4)
            flush(pipe.model)
        found = done(pipe.model.attmemo)
        assert found["repeated"] == 3, "the same texts again"
        assert sum(found.values()) == 12
        assert not pipe.model.attmemo.stats()["failures"]
        unmemoize(pipe.model if inside else pipe)
        assert "forward" not in pipe.model.__dict__
        assert not hasattr(pipe.model, "attmemo")

    def test_numbers_that_are_free_are_served(self, pipe: Any) -> None:
        memoize(pipe, database=":memory:", reuse="rows", gate=False, answer=lambda output: output.logits,
                min_cosine=-1.0, budget=0.01)  # fmt: skip
        for part in (FIRST, SECOND):
            pipe(part, **OPTIONS)
            flush(pipe.model)
        certify(pipe.model)
        before = done(pipe.model.attmemo).get("reused", 0)
        pipe(THIRD, **OPTIONS)
        assert done(pipe.model.attmemo)["reused"] == before + 3

    @pytest.mark.parametrize(("near", "beside"), [(None, 0), (0, 0), (1, 2), (2, 4)])
    def test_of_classes_a_number_that_changed_has_no_neighbours_computed_by_default(
        self, pipe: Any, near: int | None, beside: int
    ) -> None:
        memoize(pipe, database=":memory:", reuse="rows", gate=False, near=near, tokenizer=pipe.tokenizer, budget=0.01)
        for part in (FIRST, SECOND):
            pipe(part, **OPTIONS)
            flush(pipe.model)
        tokens = pipe.tokenizer(THIRD[0])["input_ids"]
        certify(pipe.model)
        pipe.model.attmemo.guarded.guard.serves = lambda cover: True
        (rows,) = pipe.model.attmemo.rows_to_compute([np.array(tokens, np.int32)])
        assert rows == 1 + beside + 2, "the number, its neighbours, the first token and the last"

    @pytest.mark.parametrize("pooled", ["a mean", "a function"])
    def test_a_class_that_is_read_from_a_mean_keeps_the_neighbours(self, pipe: Any, pooled: str) -> None:
        options: dict[str, Any] = {}
        if pooled == "a mean":
            pipe.model.config.classifier_pooling = "mean"  # as ModernBERT has it
        else:
            options["answer"] = lambda output: output.logits.argmax(1)
        memoize(pipe, database=":memory:", reuse="rows", gate=False, **options, budget=0.01)
        assert pipe.model.attmemo.planner.rule.near_where(words=False) == 1


class TestSentenceTransformer:
    @pytest.fixture(params=["mean", "cls"], name="embedder")
    def _embedder(self, tiny_bert: str, request: pytest.FixtureRequest) -> Any:
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer

        modules = [Transformer(tiny_bert, max_seq_length=64), Pooling(32, pooling_mode=request.param)]
        return SentenceTransformer(modules=modules, device="cpu").eval()

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    def test_unverified_texts_get_their_exact_embedding(
        self, embedder: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        texts = [FIRST, SECOND, FIRST, THIRD, FIRST[:1]]
        expected = [embedder.encode(part) for part in texts]
        memoize(embedder, database=":memory:", reuse="rows", gate=False, min_cosine=1 - 1e-10, budget=0.01)
        assert NO_TOKENIZER not in caplog.text
        assert len(embedder.attmemo.planner.kinds) == len(embedder.tokenizer)
        certify(embedder)
        for part, right in zip(texts, expected, strict=True):
            assert np.abs(embedder.encode(part) - right).max() <= NEAR * np.abs(right).max()
            flush(embedder)
        assert done(embedder.attmemo)["repeated"] == 4, "the same texts again"
        assert not embedder.attmemo.stats()["failures"]
        assert len(embedder.attmemo.guarded.guard.verified.state()["harm"]), "no embedding stayed just as it was"

    @pytest.mark.parametrize("near", [None, 1])
    def test_a_number_that_changed_has_neighbours_computed(self, embedder: Any, near: int | None) -> None:
        memoize(embedder, database=":memory:", reuse="rows", gate=False, near=near, budget=0.01)
        assert embedder.attmemo.planner.rule.near_where(words=False) == 1

    def test_the_answer_is_the_embedding_that_is_given_back(self, embedder: Any) -> None:
        memoize(embedder, database=":memory:", reuse="rows", gate=False, budget=0.01)
        answers = embedder.attmemo.guarded.answers
        own, seen = answers.read, []

        def read(output: Any, mask: Any) -> Any:
            seen.append(own(output, mask))
            return seen[-1]

        answers.read = read
        embedder.encode(FIRST)
        flush(embedder)
        seen.clear()  # no text had a record; all became records, whose answers are remembered
        given = embedder.encode(SECOND)
        assert len(seen) == 2, "the exact answer, and the one from records"
        order = np.argsort([-len(text) for text in SECOND], kind="stable")
        assert np.abs(seen[0].values.numpy() - given[order]).max() <= NEAR * np.abs(given).max()
        assert seen[0].margins is None

    def test_verified_texts_are_served(self, embedder: Any) -> None:
        bare = copy.deepcopy(embedder)
        memoize(embedder, database=":memory:", reuse="rows", gate=False, min_cosine=-1.0, budget=0.01)
        for part in (FIRST, SECOND):
            embedder.encode(part)
            flush(embedder)
        certify(embedder)
        seen, exact = embedder.encode(THIRD), bare.encode(THIRD)
        assert done(embedder.attmemo)["reused"] == 3
        assert np.abs(seen - exact).max() > NEAR * np.abs(exact).max()
        normal = embedder.encode(THIRD, normalize_embeddings=True)
        assert np.allclose(np.linalg.norm(normal, axis=1), 1.0, atol=1e-5)

    def test_the_model_inside_is_served_nothing(self, embedder: Any) -> None:
        memoize(embedder, database=":memory:", reuse="rows", gate=False, budget=0.01)
        for _ in range(2):
            embedder.encode(FIRST)
            flush(embedder)
        inner = embedder[0].auto_model
        tokens = embedder.tokenizer(FIRST, padding=True, return_tensors="pt")
        before = inner.attmemo.stats()
        with torch.inference_mode():
            seen = inner(**tokens).last_hidden_state
        after = inner.attmemo.stats()
        assert (after["reused"], after["repeated"]) == (before["reused"], before["repeated"])
        assert after["guard"]["requests"] == before["guard"]["requests"]
        unmemoize(embedder)
        with torch.inference_mode():
            expected = inner(**tokens).last_hidden_state
        valid = tokens["attention_mask"].bool()
        assert float((seen - expected)[valid].abs().max()) <= NEAR * float(expected.abs().max())

    def test_features_of_the_caller_stay_as_they_were(self, embedder: Any) -> None:
        memoize(embedder, database=":memory:", reuse="rows", gate=False, budget=0.01)
        tokens = dict(embedder.tokenizer(FIRST, padding=True, return_tensors="pt"))
        names = set(tokens)
        with torch.inference_mode():
            for _ in range(2):
                assert "sentence_embedding" in embedder(tokens)
                flush(embedder)
        assert set(tokens) == names
        assert done(embedder.attmemo) == {"whole": 3, "repeated": 3}

    def test_undone_and_copied_it_is_bare(self, embedder: Any) -> None:
        expected = embedder.encode(FIRST)
        names = list(embedder.state_dict())
        memoize(embedder, database=":memory:", reuse="rows", gate=False, budget=0.01)
        embedder.encode(FIRST)
        assert list(embedder.state_dict()) == names
        other = copy.deepcopy(embedder)
        assert getattr(other, "attmemo", None) is None
        assert np.array_equal(other.encode(FIRST), expected)
        unmemoize(embedder)
        assert not any("forward" in module.__dict__ for module in embedder.modules())
        assert np.array_equal(embedder.encode(FIRST), expected)

    def test_another_min_cosine_is_another_answer(self, embedder: Any) -> None:
        for least, harm in ((1 - 1e-10, True), (-1.0, False)):
            memoize(embedder, database=":memory:", reuse="rows", gate=False, min_cosine=least, budget=0.01)
            for part in (FIRST, SECOND):
                embedder.encode(part)
                flush(embedder)
            assert bool(len(embedder.attmemo.guarded.guard.verified.state()["harm"])) is harm


class TestCrossEncoder:
    @pytest.fixture(name="cross")
    def _cross(self, tiny_bert: str) -> Any:
        pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
        from sentence_transformers import CrossEncoder

        return CrossEncoder(tiny_bert, device="cpu", num_labels=5)

    @pytest.mark.parametrize("inside", [False, True], ids=["the cross encoder", "its model"])
    def test_a_cross_encoder_of_classes_is_guarded_by_its_class(self, cross: Any, inside: bool) -> None:
        pairs = list(zip(FIRST, SECOND, strict=True))
        expected = cross.predict(pairs, convert_to_numpy=True)
        if inside:
            memoize(cross.model, database=":memory:", reuse="rows", gate=False, budget=0.01)
        else:
            memoize(cross, database=":memory:", reuse="rows", gate=False, budget=0.01)
        for _ in range(2):
            assert np.allclose(cross.predict(pairs, convert_to_numpy=True), expected, atol=1e-4)
            flush(cross.model)
        handle = cross.model.attmemo
        assert done(handle) == {"whole": 3, "repeated": 3}
        assert not handle.stats()["failures"]
