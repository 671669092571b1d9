"""Forwards that a guard cannot follow stay exact; arguments that make no sense are refused, and nothing is changed."""

from __future__ import annotations

import copy
import io
import logging
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from families import FAMILIES, SIZES, _bias
from guarded import (  # fmt: skip
    BASE,
    BOTH,
    FIRST,
    Case,
    Pairs,
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
from packed_models import NEAR, batch, gap, last, rows_database, valid

from attmemo import AdapterCheckError, memoize, unmemoize
from attmemo.errors import AnswerError
from attmemo.forward.hooks import ModelHook
from attmemo.guard.answer_hook import AnswerHook


@pytest.fixture(params=["BERT", "BERT classifier", "DeBERTa-v3"], scope="module", name="case")
def _case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


@pytest.fixture(scope="module", name="classifier")
def _classifier() -> Case:
    return Case("BERT classifier")


def at_the_end(model: Any) -> tuple[int, int]:
    """Answers that came from records, and requests of the guard."""
    stats = model.attmemo.stats()
    return stats["served"], stats["guard"]["requests"]


def is_bare(model: Any) -> bool:
    return "attmemo" not in model.__dict__ and not any("forward" in module.__dict__ for module in model.modules())


class TestForms:
    def test_padding_on_the_left_is_exact(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        before = at_the_end(model)
        inputs = batch([9, 20, 14], 4, left=True)
        for _ in range(2):
            assert worst(run(model, inputs), run(case.bare, inputs), inputs) <= NEAR
        assert at_the_end(model) == before

    def test_more_padding_changes_nothing(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        wider = {name: torch.nn.functional.pad(value, (0, 7)) for name, value in BASE.items()}
        assert worst(run(model, wider), run(case.exact, wider), wider) <= NEAR
        assert done(model)["repeated"] == 6

    def test_a_tuple_is_a_tuple_and_exact(self, case: Case) -> None:
        model = guarded(case.bare)
        for _ in range(2):
            seen, expected = run(model, BASE, return_dict=False), run(case.exact, BASE, return_dict=False)
            assert type(seen) is tuple
            assert len(seen) == len(expected)
            for one, other in zip(seen, expected, strict=True):
                assert gap(one, other, valid(BASE) if one.dim() == 3 else None) <= NEAR

    def test_hidden_states_in_a_tuple_are_served(self) -> None:
        model = taught(FAMILIES["BERT"].make(), min_cosine=-1.0)
        run(model, BOTH, return_dict=False)
        assert done(model)["reused"] == 6

    def test_arguments_by_place_are_served(self, classifier: Case) -> None:
        model = taught(classifier.bare)
        with torch.inference_mode():
            seen = model(BASE["input_ids"], BASE["attention_mask"]).logits
        assert gap(seen, run(classifier.bare, BASE).logits) <= NEAR
        assert done(model)["repeated"] == 6


class TestExact:
    def test_a_loss_is_the_originals_and_nothing_is_served(self, classifier: Case) -> None:
        model = taught(classifier.bare)
        before = at_the_end(model)
        labels = torch.tensor([0, 1, 1, 0, 1, 0])
        for inputs in (BASE, BOTH):
            for place in (False, True):
                with torch.inference_mode():
                    given = [inputs["input_ids"], inputs["attention_mask"], None, None, None, labels]
                    seen = model(*given) if place else model(**inputs, labels=labels)
                expected = run(classifier.bare, inputs, labels=labels)
                assert gap(seen.loss, expected.loss) <= NEAR
                assert gap(seen.logits, expected.logits) <= NEAR
        assert at_the_end(model) == before

    def test_a_loss_of_other_labels_is_the_originals(self) -> None:
        torch.manual_seed(1)
        bare = _bias(hf.BertForQuestionAnswering(hf.BertConfig(**SIZES)))
        model = taught(bare, answer=lambda output: output.start_logits, min_cosine=-1.0)
        places = {name: torch.tensor([2, 3, 4, 5, 6, 7]) for name in ("start_positions", "end_positions")}
        packed = memoize(copy.deepcopy(bare), reuse="none")  # its outputs of padding are zero, and count in this loss
        assert gap(run(model, BOTH, **places).loss, run(packed, BOTH, **places).loss) <= NEAR

    def test_training_mode_is_the_originals(self, case: Case) -> None:
        model, bare = taught(case.bare, min_cosine=-1.0), copy.deepcopy(case.bare)
        before = at_the_end(model)
        found = []
        for one in (model, bare):
            one.train()
            torch.manual_seed(5)
            found.append(field(run(one, BOTH)))
            one.eval()
        assert torch.equal(*found)
        assert gap(found[0], field(run(case.exact, BOTH))) > NEAR, "dropout"
        assert at_the_end(model) == before

    @pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
    def test_inner_states_are_the_originals(self, case: Case, wanted: str) -> None:
        model, bare = taught(case.bare, min_cosine=-1.0), copy.deepcopy(case.bare)
        model.set_attn_implementation("eager")
        bare.set_attn_implementation("eager")
        before = at_the_end(model)
        seen, expected = (run(one, BOTH, **{wanted: True}) for one in (model, bare))
        name = wanted.removeprefix("output_")
        assert len(seen[name]) == len(expected[name]) > 0
        assert all(map(torch.equal, seen[name], expected[name]))
        assert torch.equal(field(seen), field(expected))
        assert at_the_end(model) == before

    def test_gradients_are_the_originals(self, case: Case) -> None:
        model, bare = taught(case.bare, min_cosine=-1.0), copy.deepcopy(case.bare)
        before = at_the_end(model)
        for one in (model, bare):
            field(one(**BOTH)).square().sum().backward()
        for seen, expected in zip(model.parameters(), bare.parameters(), strict=True):
            assert (seen.grad is None) == (expected.grad is None)
            assert seen.grad is None or torch.equal(seen.grad, expected.grad)
        assert at_the_end(model) == before

    def test_the_inner_model_is_served_nothing(self, classifier: Case) -> None:
        model = taught(classifier.bare)
        before, records = at_the_end(model), model.attmemo.stats()["records"]
        for inputs in (BASE, BOTH, variant(FIRST, by=9)):
            assert gap(last(model, inputs), last(classifier.exact, inputs), valid(inputs)) <= NEAR
        stats = model.attmemo.stats()
        assert at_the_end(model) == before
        assert stats["records"] == records
        assert stats["not_looked_up"] == {"not_through_the_model": 18}

    def test_a_forward_that_runs_the_blocks_twice_is_served_nothing(self, classifier: Case) -> None:
        """A record served the first run; the answer of both runs has no margin that tells whether it may be given."""
        bare = Pairs(classifier.bare.config).eval()
        bare.load_state_dict(classifier.bare.state_dict())
        model, other = taught(bare), variant(FIRST, by=7)["input_ids"]
        before = model.attmemo.stats()
        for inputs in (BASE, BOTH):
            expected = run(bare, inputs, other_ids=other).logits
            assert gap(run(model, inputs, other_ids=other).logits, expected) <= NEAR
        stats = model.attmemo.stats()
        assert stats["records"] == before["records"]
        assert stats["guard"]["verified"] == before["guard"]["verified"]
        run(model, BOTH)
        assert model.attmemo.stats()["reused"] > stats["reused"], "one run is served as ever"

    @pytest.mark.filterwarnings("ignore")
    def test_a_traced_model_is_the_original(self, classifier: Case) -> None:
        given = (BASE["input_ids"], BASE["attention_mask"])
        traced = []
        model = taught(classifier.bare)
        before = at_the_end(model)
        for one in (classifier.bare, model):
            try:
                with torch.inference_mode():
                    traced.append(torch.jit.trace(one, given, strict=False, check_trace=False))
            except (RuntimeError, TypeError, ValueError, AttributeError) as error:
                if one is not classifier.bare:
                    raise
                pytest.skip(f"this model cannot be traced here: {error}")
        with torch.inference_mode():
            seen, expected = (one(BOTH["input_ids"], BOTH["attention_mask"])["logits"] for one in traced)
        assert gap(seen, expected) <= NEAR
        assert at_the_end(model) == before

    @pytest.mark.skipif(not hasattr(torch.compiler, "is_exporting"), reason="transformers cannot be compiled without")
    @pytest.mark.parametrize("name", ["BERT", "BERT classifier"])
    def test_a_compiled_model_is_served_nothing(self, name: str) -> None:
        torch.compiler.reset()
        case = Case(name)
        model = taught(case.bare, min_cosine=-1.0)
        before = at_the_end(model)
        compiled: Any = torch.compile(model, backend="eager")
        for inputs in (BASE, BOTH):
            assert worst(run(compiled, inputs), run(case.exact, inputs), inputs) <= NEAR
        assert at_the_end(model) == before
        torch.compiler.reset()

    def test_after_a_request_that_fails_the_next_is_served(self, case: Case) -> None:
        model = guarded(case.bare)
        run(model, BASE)
        wrong = rows_of(BASE, 0) | {"input_ids": torch.full((1, 33), 10_000)}
        with pytest.raises(IndexError):
            run(model, wrong)
        assert worst(run(model, BASE), run(case.exact, BASE), BASE) <= NEAR
        assert done(model) == {"whole": 6, "repeated": 6}

    def test_weights_that_change_leave_the_model_exact(self, case: Case) -> None:
        model, bare = taught(case.bare, min_cosine=-1.0), copy.deepcopy(case.bare)
        for one in (model, bare):
            with torch.no_grad():
                one.get_input_embeddings().weight.mul_(1.5)
        for inputs in (BASE, BOTH):
            assert torch.equal(field(run(model, inputs)), field(run(bare, inputs)))


class Bad:
    """An answer that is right while the model is memoized, and goes wrong later."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error, self.calls = error, 0
        self.fails_at: Sequence[int] = ()

    def __call__(self, output: Any) -> torch.Tensor:
        self.calls += 1
        if self.calls in self.fails_at:
            raise self.error("no answer")
        return field(output).flatten(1)


ERRORS = [RuntimeError, ValueError, KeyError, TypeError, MemoryError, OSError, AttributeError, AssertionError]


class TestAnswersThatFail:
    """They cost time, and never a request."""

    @pytest.mark.parametrize("error", ERRORS)
    @pytest.mark.parametrize("at", [1, 2], ids=["the answer", "the verification"])
    def test_a_request_is_answered_exactly(self, classifier: Case, error: type[BaseException], at: int) -> None:
        answer = Bad(error)
        model = guarded(classifier.bare, answer=answer)
        run(model, BASE)
        parts = [BASE, variant(FIRST), BASE, variant(FIRST), batch([30] * 6, 9), BASE]
        mixed = {name: torch.stack([part[name][row, :30] for row, part in enumerate(parts)]) for name in BASE}
        answer.fails_at = (answer.calls + at,)
        assert gap(run(model, mixed).logits, run(classifier.exact, mixed).logits) <= NEAR
        stats = model.attmemo.stats()
        assert (stats["failed"], list(stats["failures"].values())) == (1, [1])
        assert stats["guard"]["says"].endswith("; errors left 1 sequences exact or unchecked: see failures")
        assert not len(model.attmemo.guarded.guard.verified), "nothing was learned"
        assert gap(run(model, mixed).logits, run(classifier.exact, mixed).logits) <= NEAR

    def test_an_error_that_stays_is_told_again(self, classifier: Case, caplog: pytest.LogCaptureFixture) -> None:
        answer = Bad(ZeroDivisionError)
        model = guarded(classifier.bare, answer=answer)
        answer.fails_at = range(answer.calls, 1 << 30)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "attmemo"):
            for _ in range(12):
                run(model, BASE)
        told = [record.getMessage() for record in caplog.records]
        assert told == [f"attmemo: an answer could not be read: no answer ({count} so far)" for count in (1, 10)]
        assert model.attmemo.stats()["failed"] == 12

    def test_an_answer_that_cannot_be_read_is_not_served(self, classifier: Case) -> None:
        answer = Bad(ValueError)
        model = taught(classifier.bare, answer=answer, min_cosine=-1.0)
        answer.fails_at = (answer.calls + 1,)
        assert gap(run(model, BOTH).logits, run(classifier.exact, BOTH).logits) <= NEAR

    def test_answers_that_lose_the_batch_are_no_answers(self, classifier: Case) -> None:
        model = guarded(classifier.bare, answer=lambda output: output.logits.argmax(-1).squeeze())
        for inputs in (rows_of(BASE, 0), rows_of(variant(FIRST), 0), BASE, BOTH):
            for _ in range(2):
                assert gap(run(model, inputs).logits, run(classifier.exact, inputs).logits) <= NEAR

    def test_a_model_that_cannot_run_a_part_of_its_batch_is_not_served_below_the_margin(
        self, classifier: Case
    ) -> None:
        bare = copy.deepcopy(classifier.bare)
        with torch.no_grad():
            bare.classifier.weight.mul_(1e-4)
        model = trusting(taught(bare))

        def whole_batch(module: Any, args: Any) -> None:
            if len(args[0]) not in (2, 6):
                raise RuntimeError("only in pairs")

        model.classifier.register_forward_pre_hook(whole_batch)
        one = [BASE, BASE, BOTH, BASE, BASE, BASE]
        mixed = {name: torch.stack([part[name][row] for row, part in enumerate(one)]) for name in BASE}
        assert gap(run(model, mixed).logits, run(bare, mixed).logits) <= NEAR
        assert len(model.attmemo.stats()["failures"]) == 1


class Noisy(hf.BertForSequenceClassification):  # type: ignore[misc]
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = super().forward(*args, **kwargs)
        found.logits = 10 * torch.randn_like(found.logits)
        return found


def _headed(kind: str, **settings: Any) -> Callable[[], Any]:
    def make() -> Any:
        torch.manual_seed(1)
        return getattr(hf, kind)(hf.BertConfig(**SIZES, **settings)).eval()

    return make


HEADS = {
    "a number": _headed("BertForSequenceClassification", num_labels=1, problem_type="regression"),
    "words": _headed("BertForMaskedLM"),
    "spans": _headed("BertForQuestionAnswering"),
    "choice": _headed("BertForMultipleChoice"),
    "spans in a tuple": _headed("BertForQuestionAnswering", return_dict=False),
}
"""Heads whose output has no class and no vector of a sequence."""

HEADS_SAID = {
    "a number": "logits (2, 1) are no classes", "choice": "a small batch cannot be run",
    "words": f"logits (2, 11, {SIZES['vocab_size']}) are no classes", "spans": "holds no hidden states to pool",
    "spans in a tuple": "holds no hidden states to pool",
}  # fmt: skip


class TestRefused:
    @pytest.mark.parametrize(
        "answer",
        [
            lambda output: None,
            lambda output: "yes",
            lambda output: output.logits[:, 0],
            lambda output: output.logits[:1],
            lambda output: output.logits[None],
            lambda output: output.logits.sum(),
            lambda output: output.logits[:0],
            lambda output: output.logits.repeat(2, 1),
            lambda output: output.logits.numpy(),
            "best",
            None,
            3,
        ],
        ids=["nothing", "a text", "a float each", "one", "3 dimensions", "a number", "none", "two each", "an array",
             "no rule", "None", "a whole number"],
    )  # fmt: skip
    def test_a_wrong_answer_is_refused_by_name(self, classifier: Case, answer: Any) -> None:
        model = copy.deepcopy(classifier.bare)
        with pytest.raises((ValueError, AdapterCheckError), match="answer"):
            memoize(model, database=":memory:", answer=answer, budget=0.01)
        assert is_bare(model)

    @pytest.mark.parametrize("error", [KeyError, AttributeError, ZeroDivisionError])
    def test_a_function_that_fails_is_refused_by_name(self, classifier: Case, error: type[Exception]) -> None:
        def broken(output: Any) -> Any:
            raise error("embedding")

        with pytest.raises((ValueError, AdapterCheckError), match="answer"):
            memoize(copy.deepcopy(classifier.bare), database=":memory:", answer=broken, budget=0.01)

    def test_a_function_that_fails_leaves_the_model_as_it_was(self, classifier: Case) -> None:
        model = copy.deepcopy(classifier.bare)
        with pytest.raises(ValueError, match="answer"):
            memoize(model, database=":memory:", answer=lambda output: output["no such field"], budget=0.01)
        assert is_bare(model)

    def test_an_earlier_memoization_stays(self, classifier: Case) -> None:
        model = guarded(classifier.bare)
        handle = model.attmemo
        with pytest.raises(ValueError, match="answer"):
            memoize(model, database=":memory:", answer=lambda output: None, budget=0.01)
        assert model.attmemo is handle
        assert handle.enabled
        run(model, BASE)
        run(model, BASE)
        assert done(model)["repeated"] == 6

    def test_a_random_head_is_refused(self) -> None:
        torch.manual_seed(1)
        model = Noisy(hf.BertConfig(**SIZES, num_labels=1000)).eval()
        with pytest.raises(AdapterCheckError, match="contradicts itself"):
            memoize(model, database=":memory:", budget=0.01)
        assert is_bare(model)

    @pytest.mark.parametrize("given", [{"reuse": "rows"}, {"answer": "class"}, {"answer": "mean"}])
    @pytest.mark.parametrize("head", HEADS)
    def test_a_head_that_cannot_be_read_is_refused_where_rows_or_an_answer_are_asked_for(
        self, head: str, given: dict[str, Any], tmp_path: Path
    ) -> None:
        model = HEADS[head]()
        for place in ({}, {"database": ":memory:"}, {"fill": tmp_path / "own"}, {"database": tmp_path / "new"}):
            with pytest.raises(AnswerError) as caught:
                memoize(model, **place, **given, budget=0.01)
            assert caught.value.hint
        assert is_bare(model)
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("place", ["nowhere", "memory", "new folder", "new database", "folder", "prepared"])
    @pytest.mark.parametrize("head", HEADS)
    def test_a_head_that_cannot_be_read_runs_packed_where_rows_are_not_asked_for_by_name(
        self, head: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path / "cache"))
        bare, own = HEADS[head](), tmp_path / "own"
        if place == "folder":
            unmemoize(memoize(copy.deepcopy(bare.base_model), fill=own, budget=0.01))
        if place == "prepared":
            rows_database(bare.base_model, [BASE], own)
        given: dict[str, Any] = {
            "nowhere": {}, "memory": {"database": ":memory:"}, "new folder": {"fill": own},
            "new database": {"database": own}, "folder": {"database": own}, "prepared": {"database": own},
        }[place]  # fmt: skip
        before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
        caplog.clear()
        model = memoize(copy.deepcopy(bare), **given, budget=0.01)
        (told,) = [record.getMessage() for record in caplog.records]
        assert "nothing is reused, the model's blocks run without padding: " in told
        assert HEADS_SAID[head] in told
        assert model.attmemo.reuse == "none"
        inputs = BASE if head != "choice" else {name: value[:, None] for name, value in BASE.items()}
        seen, expected = run(model, inputs), run(bare, inputs)
        assert type(seen) is type(expected)
        assert gap(seen[0], expected[0], valid(BASE) if expected[0].shape[:2] == valid(BASE).shape else None) <= NEAR
        assert model.attmemo.stats()["sequences"] == len(BASE["input_ids"])
        after = {file for file in tmp_path.rglob("*") if file.is_file()}
        assert {file for file in after if file.name != "lock.mdb"} == {
            file for file, held in before.items() if file.name != "lock.mdb" and file.read_bytes() == held
        }

    @pytest.mark.parametrize(
        ("head", "answer"),
        [
            ("a number", lambda output: (output.logits[:, 0] > 0).long()),
            ("spans", lambda output: 4096 * output.start_logits.argmax(-1) + output.end_logits.argmax(-1)),
        ],
    )
    def test_with_a_function_rows_serve_such_a_head(self, head: str, answer: Any) -> None:
        model = guarded(HEADS[head](), answer=answer)
        for _ in range(2):
            run(model, BASE)
        assert done(model)["repeated"] == 6

    @pytest.mark.parametrize(
        ("name", "value"),
        [(name, value) for name in ("budget", "confidence") for value in (0, 1, -0.1, 1.5, float("nan"), True, "1%")]
        + [("confidence", None)]
        + [("min_cosine", value) for value in (1.1, -1.1, float("nan"), "high", None)]
        + [("max_bytes", value) for value in (-1, 1.5, float("nan"), "high", True)],
    )  # fmt: skip
    def test_a_wrong_number_is_refused_by_name(self, classifier: Case, name: str, value: Any) -> None:
        model = copy.deepcopy(classifier.bare)
        with pytest.raises(ValueError, match=name):
            memoize(model, database=":memory:", **{"budget": 0.01} | {name: value})
        assert is_bare(model)

    def test_memory_keeps_guarded_rows_alone(self, classifier: Case) -> None:
        model = copy.deepcopy(classifier.bare)
        for options, told in (({"reuse": "maps"}, "maps"), ({"budget": None}, "budget"), ({"reuse": "none"}, "none")):
            with pytest.raises(ValueError, match=told):
                memoize(model, database=":memory:", **{"budget": 0.01} | options)  # type: ignore[arg-type]
        assert is_bare(model)


class TestHooks:
    def test_undone_and_disabled_it_is_the_original(self, case: Case) -> None:
        model, expected = guarded(case.bare), field(run(case.bare, BASE))
        run(model, BASE)
        handle = model.attmemo
        for _ in range(2):
            handle.disable()
            assert not any("forward" in module.__dict__ for module in model.modules())
            assert torch.equal(field(run(model, BASE)), expected)
            handle.enable()
            before = done(model).get("repeated", 0)
            run(model, BASE)
            assert done(model)["repeated"] == before + 6
        assert unmemoize(model) is model
        assert is_bare(model)
        assert torch.equal(field(run(model, BASE)), expected)

    def test_the_answer_is_read_around_everything(self, case: Case) -> None:
        model = guarded(case.bare)
        host = model.attmemo.host
        assert isinstance(model.forward, AnswerHook)
        inner = model.forward.__wrapped__ if host is model else host.forward
        assert isinstance(inner, ModelHook)
        assert (host is model) == isinstance(model.forward.__wrapped__, ModelHook)

    @pytest.mark.parametrize("by", ["deepcopy", "pickle", "torch.save"])
    def test_a_copy_is_a_bare_model(self, case: Case, by: str) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        before = at_the_end(model)
        if by == "deepcopy":
            other = copy.deepcopy(model)
        elif by == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        assert getattr(other, "attmemo", None) is None
        for inputs in (BASE, BOTH):
            assert torch.equal(field(run(other, inputs)), field(run(case.bare, inputs)))
        assert at_the_end(model) == before
        certify(memoize(other, database=":memory:", gate=False, budget=0.01))
        assert worst(run(other, BASE), run(case.exact, BASE), BASE) <= NEAR

    def test_saved_weights_are_the_models_own(self, case: Case) -> None:
        seen, expected = taught(case.bare).state_dict(), case.bare.state_dict()
        assert list(seen) == list(expected)
        assert all(torch.equal(seen[name], expected[name]) for name in expected)

    def test_memoizing_again_begins_anew(self, case: Case) -> None:
        model = taught(case.bare, min_cosine=-1.0)
        memoize(model, database=":memory:", gate=False, min_cosine=-1.0, budget=0.01)
        assert model.attmemo.stats()["guard"]["state"] == "learning"
        assert worst(run(model, BOTH), run(case.exact, BOTH), BOTH) <= NEAR
        memoize(model, reuse="none")
        assert model.attmemo.stats()["guard"] is None
        assert worst(run(model, BOTH), run(case.exact, BOTH), BOTH) <= NEAR
