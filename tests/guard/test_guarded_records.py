"""Records that come and go while a guarded model serves, and kinds of tokens: no failure costs a request."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES
from guarded import (
    BASE,
    BOTH,
    FIRST,
    LENGTHS,
    NAMES,
    SECOND,
    Case,
    certify,
    done,
    field,
    guarded,
    rows_of,
    run,
    taught,
    trusting,
    variant,
    worst,
)
from packed_models import NEAR, Inputs, batch, gap

from attmemo.guard.confidence import KEY
from attmemo.guard.guard import ALIKE
from attmemo.handle.rows import NO_TOKENIZER
from attmemo.kernels.kinds import NO_KINDS
from attmemo.kernels.plan import Demand


@pytest.fixture(params=NAMES, scope="module", name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module", name="classifier")
def _classifier() -> Case:
    return Case("BERT classifier")


class Words:
    """A tokenizer of which every second token is a number."""

    all_special_ids = (0, 1, 2, 3, 4)

    def __len__(self) -> int:
        return 120

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [str(number) if number % 2 else f"word{'abcdefghij'[number % 10]}" for number in ids]


class TestKinds:
    def test_a_number_is_free_after_two_and_a_word_is_not(self, case: Case) -> None:
        words = Words()
        for by, served in ((2, True), (1, False)):
            base = BASE["input_ids"].clone()
            base[:, FIRST - 1], base[:, FIRST] = 40, 21  # a word, then a number
            first = BASE | {"input_ids": base}
            model = guarded(case.bare, tokenizer=words, min_cosine=-1.0)
            run(model, first)
            run(model, variant(FIRST, by=2, of=first))
            certify(model)
            before = done(model).get("reused", 0)
            run(model, variant(FIRST, by=4 * by + (by == 1), of=first))
            assert (done(model).get("reused", 0) > before) == served

    def test_no_tokenizer_is_warned_about(self, case: Case, caplog: pytest.LogCaptureFixture) -> None:
        guarded(case.bare)
        assert caplog.text.count(NO_TOKENIZER) == 1
        caplog.clear()
        guarded(case.bare, tokenizer=Words())
        assert NO_TOKENIZER not in caplog.text

    def test_without_a_tokenizer_only_what_was_verified_is_served(self, case: Case) -> None:
        model = guarded(case.bare, min_cosine=-1.0)
        for by in range(8):
            run(model, variant(FIRST, by=by))
        certify(model)
        unseen = variant(FIRST, by=50)
        assert worst(run(model, unseen), run(case.exact, unseen), unseen) <= NEAR
        assert "reused" not in done(model)

    def test_another_type_of_a_token_is_another_change(self) -> None:
        bare = FAMILIES["BERT"].make()
        model = guarded(bare, min_cosine=-1.0)
        types = torch.zeros_like(BASE["input_ids"])
        for inputs in (BASE, variant(FIRST)):
            run(model, inputs | {"token_type_ids": types})
        certify(model)
        other = types.clone()
        other[:, FIRST] = 1
        asked: Inputs = BASE | {"token_type_ids": other}
        assert worst(run(model, asked), run(bare, asked), asked) <= NEAR
        assert "reused" not in done(model)


def drop_all(store: Any) -> None:
    """What the store does when other records need the room."""
    store._learn(store.pool.remove(list(store.pool.records)))


def dropping(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on records are dropped after they were found, right before they are read."""
    own = store.fetch

    def fetch(records: Any) -> Any:
        drop_all(store)
        return own(records)

    monkeypatch.setattr(store, "fetch", fetch)


def find(model: Any, inputs: Inputs) -> list[int]:
    """The record of each sequence."""
    index = model.attmemo.engine.reuse.store.index
    found: list[int] = []
    for tokens in (row[:n].numpy().astype(np.int32) for row, n in zip(inputs["input_ids"], LENGTHS, strict=True)):
        near = index.candidates(tokens, np.array([0, len(tokens)]))
        rule = model.attmemo.planner.rule
        found += index.plan(tokens, np.array([0, len(tokens)]), near, rule, NO_KINDS, Demand()).record.tolist()
    return found


class TestDropped:
    def test_a_change_is_not_verified_by_a_record_that_was_dropped(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, asked = guarded(case.bare, min_cosine=-1.0), variant(FIRST)
        run(model, BASE)
        guard = model.attmemo.guarded.guard
        with monkeypatch.context() as patched:
            dropping(model.attmemo.engine.reuse.store, patched)
            assert worst(run(model, asked), run(case.exact, asked), asked) <= NEAR
        assert done(model)["learned"] == 6, "there were records to learn from"
        assert not any(len(part) for part in guard.verified.state().values()), "nothing was verified"
        run(model, BASE)
        assert len(guard.verified.state()["values"]), "else nothing could have been"


class TestThreads:
    @pytest.mark.parametrize("few", [False, True], ids=["all fit", "dropped while they serve"])
    def test_all_answers_are_exact_and_counters_add_up(self, classifier: Case, few: bool) -> None:
        room = 24 * (1 << 14)  # not all records of one batch have room
        model = guarded(classifier.bare, max_bytes=room if few else None, budget=1e-6)  # never saved up for an answer
        batches = [BASE, variant(FIRST), variant(SECOND), BOTH, batch([9, 12, 17], 8), rows_of(BASE, 4, 2)]
        expected = [run(classifier.bare, inputs).logits for inputs in batches]
        apart: list[float] = []
        errors: list[BaseException] = []

        def serve(number: int) -> None:
            try:
                for turn in range(20):
                    own = (number + turn) % len(batches)
                    apart.append(gap(run(model, batches[own]).logits, expected[own]))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=serve, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert len(apart) == 80
        assert max(apart) <= NEAR, "nothing is certified: only the very inputs are served"
        asked = sum(len(batches[(number + turn) % 6]["input_ids"]) for number in range(4) for turn in range(20))
        stats = model.attmemo.stats()
        assert stats["guard"]["requests"] == asked == sum(stats["guard"]["done"].values())
        assert stats["record_bytes"] <= room if few else not stats["failures"]
        assert (model.attmemo.engine.reuse.store.pool.counts.get("evicted", 0) > 0) == few
        assert done(model)["repeated"] > 0

    def test_a_record_that_is_dropped_before_it_is_read_does_not_cost_the_request(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = guarded(case.bare)
        run(model, BASE)
        dropping(model.attmemo.engine.reuse.store, monkeypatch)
        assert worst(run(model, BASE), run(case.exact, BASE), BASE) <= NEAR
        assert sum(model.attmemo.stats()["failures"].values()) == 6

    def test_one_record_that_is_dropped_leaves_the_others_of_its_batch_served(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = guarded(case.bare)
        run(model, BASE)
        store = model.attmemo.engine.reuse.store
        own, gone = store.fetch, find(model, BASE)[2]

        def fetch(records: Any) -> Any:
            if (records == gone).any() and gone in store.index:
                store._learn(store.pool.remove([gone - store._first]))
            return own(records)

        monkeypatch.setattr(store, "fetch", fetch)
        with model.attmemo.observe() as seen:
            assert worst(run(model, BASE), run(case.exact, BASE), BASE) <= NEAR
        assert [rows == tokens for rows, tokens in zip(seen.rows, seen.tokens, strict=True)] == [
            place == 2 for place in range(6)
        ]
        assert sum(model.attmemo.stats()["failures"].values()) == 1
        stats = model.attmemo.stats()
        assert stats["repeated"] == stats["guard"]["repeated"] == done(model)["repeated"] == 5
        assert done(model)["whole after all"] == 1

    def test_only_what_was_read_is_verified(self, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
        model, asked = guarded(case.bare, min_cosine=-1.0), variant(FIRST)
        run(model, BASE)
        store, guard = model.attmemo.engine.reuse.store, model.attmemo.guarded.guard
        gone = find(model, BASE)[:5]
        own = store.fetch

        def fetch(records: Any) -> Any:
            if np.isin(records, gone).any():
                raise OSError("the disk")
            return own(records)

        with monkeypatch.context() as patched:
            patched.setattr(store, "fetch", fetch)
            assert worst(run(model, asked), run(case.exact, asked), asked) <= NEAR
        one = len(guard.verified.state()["values"])
        for _ in range(2):
            run(model, rows_of(variant(SECOND), 5))
        assert 0 < one < len(guard.verified.state()["values"])
        assert len(guard.verified.state()["changes"]) == 2, "one of each verification that could be made"

    def test_a_record_that_dies_while_it_is_compared_is_not_taken_for_the_very_input(
        self, case: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = guarded(case.bare)
        run(model, BASE)
        index = model.attmemo.engine.reuse.store.index
        own = index.plan

        def plan(*given: Any) -> Any:
            found = own(*given)
            for record in found.record.tolist():
                if record in index:
                    index.remove(record)  # as far as another thread has come that makes room
            return found

        monkeypatch.setattr(index, "plan", plan)
        seen = run(model, variant(FIRST))
        assert worst(seen, run(case.exact, variant(FIRST)), BASE) <= NEAR
        assert "reused" not in done(model)

    @pytest.mark.parametrize("where", ["pool", "index"])
    def test_a_record_that_cannot_be_kept_leaves_the_others_their_own_rows(
        self, case: Case, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        model, other, own = guarded(case.bare), batch([20] * 4, 50), batch([20] * 4, 51)
        store = model.attmemo.engine.reuse.store

        def fail(*given: Any) -> Any:
            raise MemoryError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(*((store.pool, "add") if where == "pool" else (store.index, "extend")), fail)
            assert worst(run(model, other), run(case.exact, other), other) <= NEAR
        assert model.attmemo.stats()["offered"]["MemoryError"] == 4
        for _ in range(2):
            assert worst(run(model, own), run(case.exact, own), own) <= NEAR
        assert done(model)["repeated"] == 4
        assert worst(run(model, other), run(case.exact, other), other) <= NEAR


class TestVectors:
    """A vector that a record moved far from the record's own answer is computed again."""

    def test_an_answer_far_from_its_records_is_replaced(self, case: Case) -> None:
        model = guarded(case.bare, min_cosine=-1.0)
        for inputs in (BASE, variant(FIRST)):
            run(model, inputs)
        certify(model)
        guard = model.attmemo.guarded.guard
        asked = variant(FIRST, by=1)
        guard.margin.least = 2.0  # no cosine is as high
        assert worst(run(model, asked), run(case.exact, asked), asked) <= NEAR


    def test_answers_of_records_are_kept_with_them(self, case: Case) -> None:
        model = guarded(case.bare, answer=lambda output: field(output).flatten(1))
        store = model.attmemo.engine.reuse.store
        for one in (BASE, rows_of(variant(FIRST), 2)):
            answers = field(run(model, one)).flatten(1)
            for row, answer in enumerate(answers):
                tokens = one["input_ids"][row][one["attention_mask"][row].bool()].int().numpy()
                (kept,) = [kept for kept in store.pool.records.values() if np.array_equal(kept.tokens, tokens)]
                assert kept.note[:KEY] == model.attmemo.guarded.sureness.key
                assert np.array_equal(np.frombuffer(kept.note[KEY:], np.float32), answer.numpy())

    def test_an_answer_is_compared_with_its_records_and_never_with_that_of_another_head(self, case: Case) -> None:
        options: dict[str, Any] = {"answer": lambda output: field(output).flatten(1), "min_cosine": -1.0}
        for key, compared in ((None, True), (bytes(KEY), False)):
            model = taught(case.bare, **options)
            model.attmemo.guarded.sureness.key = key or model.attmemo.guarded.sureness.key
            guard = model.attmemo.guarded.guard
            guard.margin.least = 2.0  # no cosine is as high
            seen = run(model, BOTH)
            assert (worst(seen, run(case.exact, BOTH), BOTH) <= NEAR) == compared
            assert ("below the margin" in done(model)) == compared
            assert not model.attmemo.stats()["failures"]


class TestFlood:
    def test_what_never_comes_again_takes_no_place_of_a_record_and_what_comes_again_does(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("attmemo.rows.throttle.Pace.share", 1.0)  # a full store takes what it stores in time
        model = guarded(classifier.bare, max_bytes=1 << 17, budget=0.5)
        store = model.attmemo.engine.reuse.store

        def ask(seed: int) -> int:
            """How many records a batch brings."""
            before = store.kept["kept"]
            run(model, batch([30] * 8, seed))
            assert model.attmemo.flush()
            return int(store.kept["kept"] - before)

        seed = 0
        while store.has_room:
            assert ask(seed) == 8, "while there is room all are kept"
            seed += 1
        assert sum(ask(100 + number) for number in range(10)) == 0, "a flood"
        assert ask(109) == 8, "it comes again"


class TestGrowth:
    """Texts that go on: of 64 tokens and more, a quarter longer than the record that serves them."""

    TEXT, MORE, TIMES = 46, 18, 8

    def grown(self, seed: int) -> Inputs:
        """The text and something behind it, and a closing token as before."""
        text, more = batch([self.TEXT], 7)["input_ids"], batch([self.MORE], seed)["input_ids"]
        ids = torch.cat([text[:, :-1], more, text[:, -1:]], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def model(self, classifier: Case, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A model that has seen the text go on, and has a record of the text alone."""
        model = guarded(classifier.bare, tokenizer=Words())
        run(model, batch([self.TEXT], 7))
        with monkeypatch.context() as kept:
            kept.setattr(model.attmemo.engine.reuse.store, "admit", lambda lengths: 0)
            kept.setattr(model.attmemo.guarded.answers, "differ", lambda *_: False)  # random weights
            for seed in range(self.TIMES):
                run(model, self.grown(seed))
        assert model.attmemo.stats()["records"] == 1
        return trusting(certify(model))

    def test_where_there_are_pauses_a_grown_text_is_served_and_becomes_a_record_in_one(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, inputs = self.model(classifier, monkeypatch), self.grown(100)
        monkeypatch.setattr(model.attmemo.planner, "learns_at_once", lambda asking: False)
        verified = model.attmemo.stats()["guard"]["verified"]
        with torch.inference_mode():
            seen = model(**inputs)
        assert done(model)["reused"] == 1
        assert worst(seen, run(classifier.exact, inputs), inputs) > NEAR, "an answer of the record"
        assert len(model.attmemo.deferred) == 1
        assert model.attmemo.flush()
        assert model.attmemo.stats()["records"] == 2
        assert model.attmemo.stats()["guard"]["verified"] == verified, "it was not drawn by chance: it is no sample"
        again = run(model, inputs)
        assert done(model)["repeated"] == 1
        assert worst(again, run(classifier.exact, inputs), inputs) <= NEAR, "the record is exact"
        assert not model.attmemo.stats()["failures"]

    def test_where_there_are_none_it_is_answered_exactly_and_becomes_a_record_at_once(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, inputs = self.model(classifier, monkeypatch), self.grown(100)
        seen = run(model, inputs)
        assert "reused" not in done(model)
        assert worst(seen, run(classifier.exact, inputs), inputs) <= NEAR
        assert model.attmemo.stats()["records"] == 2

    def test_a_drawn_answer_is_a_sample_and_its_text_a_record(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.model(classifier, monkeypatch)
        model.attmemo.guarded.guard.drawn = 1.0
        monkeypatch.setattr(model.attmemo.planner, "learns_at_once", lambda asking: False)
        verified = model.attmemo.stats()["guard"]["verified"]
        with torch.inference_mode():
            model(**self.grown(100))
        assert len(model.attmemo.deferred) == 1
        assert model.attmemo.flush()
        assert model.attmemo.stats()["records"] == 2
        assert model.attmemo.stats()["guard"]["verified"] == verified + 1

    def test_in_shadow_mode_they_become_records_once_they_would_be_served(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = guarded(classifier.bare, tokenizer=Words(), shadow=True)
        monkeypatch.setattr(model.attmemo.guarded.answers, "differ", lambda *_: False)
        run(model, batch([self.TEXT], 7))
        for seed in range(self.TIMES):
            run(trusting(model), self.grown(seed))
        assert model.attmemo.stats()["records"] == 1
        run(certify(model), self.grown(100))
        assert model.attmemo.stats()["records"] == 2

    def test_a_text_that_was_asked_twice_before_the_pause_is_computed_once(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model, inputs = self.model(classifier, monkeypatch), self.grown(100)
        monkeypatch.setattr(model.attmemo.planner, "learns_at_once", lambda asking: False)
        with torch.inference_mode():
            model(**rows_of(inputs, 0, 0))
            model(**inputs)
        assert len(model.attmemo.deferred) == 2, "equal inputs of a batch are one"
        before = model.attmemo.stats()["rows_afterwards"]
        assert model.attmemo.flush()
        assert model.attmemo.stats()["rows_afterwards"] - before == inputs["input_ids"].shape[1]

    def test_where_no_record_can_be_made_grown_texts_are_reused_all_the_same(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = self.model(classifier, monkeypatch)
        monkeypatch.setattr(model.attmemo.engine.reuse.store, "fills", False)
        run(model, self.grown(100))
        assert done(model)["reused"] == 1
        assert model.attmemo.stats()["records"] == 1

    def test_where_all_are_verified_a_grown_text_leaves_none_out(
        self, classifier: Case, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With ``gate=False`` many unknown changes are all tried beside it."""
        model, grown = self.model(classifier, monkeypatch), self.grown(100)
        count, text = 3 * ALIKE, batch([self.TEXT], 7)["input_ids"]
        ids, mask = torch.zeros(2, count + 1, grown["input_ids"].shape[1], dtype=torch.long)
        ids[0], mask[0] = grown["input_ids"][0], 1
        ids[1:, : self.TEXT], mask[1:, : self.TEXT] = text, 1
        for row in range(count):
            place = 5 + row  # another word, at another place each
            ids[1 + row, place] = 5 + (ids[1 + row, place] - 5 + 1) % 100
        before = done(model)["learned"]
        run(model, {"input_ids": ids, "attention_mask": mask})
        assert "reused" not in done(model), "the grown one is computed whole"
        assert done(model)["learned"] == before + count
