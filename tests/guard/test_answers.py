"""Answers: classes and vectors are read from any output, or refused by name; what differs is another answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.svm import LinearSVC
from torch import Tensor

from attmemo.errors import AnswerError, ArgumentError
from attmemo.guard.answers import SCORE_STEP, Answers, Read


def one_of(answers: Answers, a: Any, b: Any) -> bool:
    """Whether two answers differ."""
    return answers.differ(Read(torch.tensor(a)[None], None), 0, Read(torch.tensor(b)[None], None), 0)


class TestClasses:
    @pytest.mark.parametrize("rule", ["auto", "class"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_the_best_logit_is_the_answer(self, rule: Any, dtype: torch.dtype) -> None:
        logits = torch.tensor([[1.0, 3.0, 2.0], [4.0, 0.0, 0.0]], dtype=dtype)
        for output in ({"logits": logits}, SimpleNamespace(logits=logits)):
            read = Answers(rule, 0.9).read(output, None)
            assert read.values.tolist() == [1, 0]

    def test_the_margin_lies_between_the_probabilities_of_the_two_best(self) -> None:
        odds = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5], [0.4, 0.2, 0.4]])
        read = Answers("class", 0.9).read({"logits": odds.log()}, None)
        assert [read.margin(place) for place in range(3)] == pytest.approx([0.5, 0.25, 0.0], abs=1e-6)

    def test_logits_that_are_no_numbers_have_no_margin_above_any_bound(self) -> None:
        logits = torch.tensor([[float("nan"), 1.0], [float("inf"), 1.0]])
        margins = Answers("class", 0.9).read({"logits": logits}, None)
        assert not any(margins.margin(place) >= 0.0 for place in range(2))  # type: ignore[operator]

    @pytest.mark.parametrize("shape", [(2, 1), (2, 5, 3), (2,)])
    def test_logits_that_are_no_classes_of_sequences_are_refused(self, shape: tuple[int, ...]) -> None:
        for rule in ("auto", "class"):
            with pytest.raises(ValueError, match=r"no classes of sequences\.\n  Next: give answer="):
                Answers(rule, 0.9).read({"logits": torch.zeros(shape)}, None)  # type: ignore[arg-type]

    def test_class_needs_logits(self) -> None:
        with pytest.raises(ValueError, match="needs a model with logits"):
            Answers("class", 0.9).read({"last_hidden_state": torch.zeros(2, 3, 4)}, None)

    def test_another_class_is_another_answer(self) -> None:
        answers = Answers("auto", -1.0)
        assert one_of(answers, 1, 2)
        assert not one_of(answers, 2, 2)
        assert one_of(answers, [0, 1, 1], [0, 1, 0])  # several labels
        assert not one_of(answers, [0, 1, 1], [0, 1, 1])


class Model:
    """What answers look at of a model."""

    def __init__(self, **config: Any) -> None:
        self.config = SimpleNamespace(**config)


class TestScores:
    steps = (0.3, 0.3 + 0.99 * SCORE_STEP, 0.3 + 1.01 * SCORE_STEP, 1e-6, 1 - 1e-6)

    @pytest.mark.parametrize("rule", ["auto", "score"])
    def test_scores_that_moved_are_other_answers(self, rule: Any) -> None:
        answers = Answers(rule, 0.9)
        answers.meet(Model(num_labels=1))
        for output in ({"logits": torch.logit(torch.tensor(self.steps))[:, None]},
                       (torch.logit(torch.tensor(self.steps))[:, None],)):  # fmt: skip
            read = answers.read(output, None)
            assert [answers.differ(read, 0, read, place) for place in range(5)] == [False, False, True, True, True]
            assert answers.differ(read, 3, read, 4)

    def test_vectors_of_a_model_with_one_label_are_compared_as_vectors(self) -> None:
        answers = Answers("auto", 0.999)
        answers.meet(Model(num_labels=1))  # as configurations of some embedders have it
        read = answers.read({"last_hidden_state": torch.tensor([[[1.0, 0.0]], [[0.99, 0.14]]])}, None)
        assert answers.differ(read, 0, read, 1)
        assert not read.are_scores

    def test_a_number_on_a_scale_of_its_own_is_no_score(self) -> None:
        answers = Answers("auto", 0.98)
        answers.meet(Model(num_labels=1, problem_type="regression"))
        with pytest.raises(AnswerError, match="no classes of sequences"):
            answers.read({"logits": torch.zeros(2, 1)}, None)

    @pytest.mark.parametrize("output", [{"logits": torch.zeros(2, 3)}, {"last_hidden_state": torch.zeros(2, 3, 4)}])
    def test_an_output_without_one_logit_is_refused(self, output: Any) -> None:
        with pytest.raises(AnswerError, match="score"):
            Answers("score", 0.98).read(output, None)


@pytest.fixture(name="hidden")
def _hidden() -> Tensor:
    return torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(1))


MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])


class TestVectors:
    def test_the_mean_is_that_of_valid_tokens(self, hidden: Tensor) -> None:
        expected = torch.stack([hidden[row][MASK[row].bool()].mean(0) for row in range(3)])
        for mask in (MASK, MASK.bool(), MASK.float()):
            for rule in ("mean", "auto"):
                read = Answers(rule, 0.9).read({"last_hidden_state": hidden}, mask)  # type: ignore[arg-type]
                torch.testing.assert_close(read.values, expected)
                assert read.margins is None
                assert read.margin(0) is None

    def test_without_a_mask_all_tokens_are_valid(self, hidden: Tensor) -> None:
        read = Answers("mean", 0.9).read((hidden,), None)
        torch.testing.assert_close(read.values, hidden.mean(1))

    def test_a_mask_without_padding_is_as_none(self, hidden: Tensor) -> None:
        read = Answers("mean", 0.9).read((hidden,), torch.ones(3, 5, dtype=torch.int64))
        assert torch.equal(read.values, Answers("mean", 0.9).read((hidden,), None).values)

    def test_a_mask_of_any_type_weighs_tokens(self, hidden: Tensor) -> None:
        mask = torch.linspace(0.5, 1.5, 15).reshape(3, 5)
        for own in (mask, mask.bfloat16(), mask.clone().requires_grad_()):
            weights = own.detach().float()[:, :, None]
            read = Answers("mean", 0.9).read((hidden,), own)
            torch.testing.assert_close(read.values.detach(), (hidden * weights).sum(1) / weights.sum(1))

    def test_no_valid_token_is_no_division_by_zero(self, hidden: Tensor) -> None:
        read = Answers("mean", 0.9).read((hidden,), torch.zeros(3, 5))
        assert torch.equal(read.values, torch.zeros(3, 4))

    def test_cls_is_the_first_token(self, hidden: Tensor) -> None:
        for output in ({"last_hidden_state": hidden}, SimpleNamespace(last_hidden_state=hidden), (hidden, None),
                       {"token_embeddings": hidden}):  # fmt: skip
            assert torch.equal(Answers("cls", 0.9).read(output, MASK).values, hidden[:, 0])

    def test_a_sentence_embedding_is_the_answer_itself(self, hidden: Tensor) -> None:
        output = {"token_embeddings": hidden, "sentence_embedding": hidden[:, 2].bfloat16()}
        values = Answers("auto", 0.9).read(output, MASK).values
        assert torch.equal(values, hidden[:, 2].bfloat16().float())
        assert torch.equal(Answers("cls", 0.9).read(output, MASK).values, hidden[:, 0])

    def test_logits_come_before_vectors(self, hidden: Tensor) -> None:
        output = {"logits": torch.eye(3), "sentence_embedding": hidden[:, 0], "last_hidden_state": hidden}
        assert Answers("auto", 0.9).read(output, MASK).values.tolist() == [0, 1, 2]

    @pytest.mark.parametrize("output", [{}, (), None, torch.zeros(2, 3, 4), {"last_hidden_state": torch.zeros(2, 3)},
                                        (None,), {"last_hidden_state": "text"}])  # fmt: skip
    def test_an_output_without_hidden_states_is_refused(self, output: Any) -> None:
        for rule in ("auto", "mean", "cls"):
            with pytest.raises(ValueError, match=r"holds no hidden states to pool\.\n  Next: give answer="):
                Answers(rule, 0.9).read(output, None)  # type: ignore[arg-type]

    @pytest.mark.parametrize(("rule", "name"), [("mean", "last_hidden_state"), ("cls", "last_hidden_state"),
                                                ("auto", "sentence_embedding")])  # fmt: skip
    def test_what_was_read_stays_when_the_output_is_written(self, rule: Any, name: str, hidden: Tensor) -> None:
        """The caller may write into an output."""
        output = hidden if name == "last_hidden_state" else hidden[:, 0]
        read = Answers(rule, 0.9).read({name: output}, None)
        before = read.values.clone()
        output.zero_()
        assert torch.equal(read.values, before)
        assert bool(before.any())


class TestFunctions:
    @pytest.mark.parametrize("values", [torch.tensor([1, 0]), torch.ones(2, 3), torch.ones(2, 3, dtype=torch.long),
                                        torch.tensor([True, False])])  # fmt: skip
    def test_classes_and_vectors_are_taken_as_they_are(self, values: Tensor) -> None:
        seen: list[Any] = []

        def rule(output: Any) -> Tensor:
            seen.append(output)
            return values

        read = Answers(rule, 0.9).read("whatever", None)
        assert seen == ["whatever"]
        assert torch.equal(read.values, values)
        assert read.values.data_ptr() != values.data_ptr()
        assert read.margins is None

    @pytest.mark.parametrize(
        "values", [None, [1, 2], 3, torch.tensor(1), torch.zeros(2, 3, 4), torch.zeros(0, 3), torch.zeros(0).long()]
    )
    def test_what_is_neither_is_refused_by_the_name_of_the_function(self, values: Any) -> None:
        def own_rule(output: Any) -> Any:
            return values

        with pytest.raises(ValueError, match=r"own_rule must return a tensor \[B\] of classes or \[B, H\]; got"):
            Answers(own_rule, 0.9).read({}, None)

    def test_one_number_a_sequence_is_refused(self) -> None:
        with pytest.raises(ValueError, match="returned one number a sequence"):
            Answers(lambda output: torch.zeros(3), 0.9).read({}, None)

    def test_errors_of_a_function_are_its_own(self) -> None:
        with pytest.raises(KeyError, match="nothing"):
            Answers(lambda output: output["nothing"], 0.9).read({}, None)


class Nearest:
    """A classifier that says how sure it is in no way."""

    def __init__(self, centres: Tensor) -> None:
        self.centres, self.classes_ = centres.numpy(), np.array(["high", "low"])

    def predict(self, vectors: Any) -> Any:
        return self.classes_[np.square(vectors[:, None] - self.centres).sum(-1).argmin(1)]


class TestClassifiers:
    """Vectors that end in a classifier are guarded by its classes."""

    centres = torch.tensor([[1.0, 0.0, 0.0], [-1.0, 0.0, 0.0]])

    def vectors(self, seed: int, count: int = 40) -> tuple[Tensor, Any]:
        own = torch.arange(count) % 2
        found = self.centres[own] + 0.3 * torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
        return found, np.where(own.numpy() == 0, "high", "low")

    def classifiers(self) -> list[Any]:
        vectors, labels = self.vectors(0)
        own = [LogisticRegression(), LinearSVC(), Nearest(self.centres)]
        return [one.fit(vectors.numpy(), labels) if hasattr(one, "fit") else one for one in own]

    @pytest.mark.parametrize("number", range(3))
    def test_its_class_is_the_answer_whatever_the_model_gives_out(self, number: int) -> None:
        classifier, (vectors, labels) = self.classifiers()[number], self.vectors(1, 8)
        answers, hidden = Answers(classifier, 0.98), vectors[:, None].repeat(1, 5, 1)
        expected = [0 if label == "high" else 1 for label in labels]
        for output in ({"sentence_embedding": vectors}, {"last_hidden_state": hidden}, (hidden,)):
            read = answers.read(output, None)
            assert read.values.tolist() == expected
            assert not read.are_vectors
        assert answers.differ(read, 0, read, 1)
        assert not answers.differ(read, 0, read, 2)

    def test_the_margin_is_as_sure_as_the_classifier_says(self) -> None:
        regression, machine, nearest = self.classifiers()
        output = {"sentence_embedding": torch.tensor([[2.0, 0.0, 0.0], [0.05, 0.0, 0.0]])}
        shares = regression.predict_proba(output["sentence_embedding"].numpy())
        read = Answers(regression, 0.98).read(output, None)
        assert read.margin(0) == pytest.approx(abs(shares[0, 0] - shares[0, 1]), abs=1e-6)
        assert Answers(nearest, 0.98).read(output, None).margins is None
        for classifier in (regression, machine):
            found = Answers(classifier, 0.98).read(output, None)
            assert 1.0 >= found.margin(0) > 0.5 > found.margin(1) >= 0.0  # type: ignore[operator]

    def test_it_has_the_name_of_its_class(self) -> None:
        assert Answers(self.classifiers()[0], 0.98).name == "LogisticRegression"

    @pytest.mark.parametrize("wrong", [LogisticRegression(), LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])])
    def test_what_is_not_fitted_and_no_classifier_is_refused(self, wrong: Any) -> None:
        with pytest.raises(ArgumentError, match=f"answer={type(wrong).__name__} has no classes_"):
            Answers(wrong, 0.98)

    def test_an_output_without_vectors_is_refused(self) -> None:
        with pytest.raises(AnswerError, match="holds no hidden states to pool"):
            Answers(self.classifiers()[0], 0.98).read({"logits": torch.zeros(2, 3)}, None)


class TestRules:
    @pytest.mark.parametrize("rule", ["max", "", None, 3, ["mean"]])
    def test_another_rule_is_refused(self, rule: Any) -> None:
        with pytest.raises(ValueError, match="of auto, class, spans, score, mean, cls, a function, or a classifier"):
            Answers(rule, 0.9)

    @pytest.mark.parametrize("bound", [1.01, -1.01, float("nan"), float("inf"), "0.9", None])
    def test_a_bound_that_is_no_cosine_is_refused(self, bound: Any) -> None:
        with pytest.raises(ValueError, match="min_cosine must be a number in"):
            Answers("auto", bound)

    def test_a_rule_has_a_name(self) -> None:
        assert Answers("mean", 0.9).name == "mean"
        assert "lambda" in Answers(lambda output: output, 0.9).name
        assert Answers(torch.nn.Identity(), 0.9).name == "function"


class TestCosine:
    def test_vectors_below_the_bound_differ(self) -> None:
        for angle, differ in ((0.0, False), (0.44, False), (0.46, True), (3.0, True)):
            turned = [float(torch.cos(torch.tensor(angle))), float(torch.sin(torch.tensor(angle)))]
            bound = float(torch.cos(torch.tensor(0.45)))
            assert one_of(Answers("mean", bound), [1.0, 0.0], turned) is differ

    def test_length_does_not_matter(self) -> None:
        assert not one_of(Answers("mean", 0.999), [1.0, 2.0, 3.0], [100.0, 200.0, 300.0])
        assert one_of(Answers("mean", 0.999), [1.0, 2.0, 3.0], [-1.0, -2.0, -3.0])

    def test_half_precision_is_compared_in_full(self) -> None:
        one = torch.full((1, 4096), 200.0, dtype=torch.float16)  # the sum of squares is beyond float16
        assert not Answers("mean", 0.999).differ(Read(one, None), 0, Read(one, None), 0)

    @pytest.mark.parametrize("number", [float("nan"), float("inf")])
    def test_vectors_that_are_no_numbers_differ_also_from_themselves(self, number: float) -> None:
        assert one_of(Answers("mean", -1.0), [1.0, number], [1.0, 2.0])
        assert one_of(Answers("mean", -1.0), [1.0, number], [1.0, number])

    def test_places_of_two_batches_are_compared(self) -> None:
        batch, other = Read(torch.eye(3), None), Read(torch.eye(3)[[2, 0]], None)
        answers = Answers("mean", 0.5)
        found = [[answers.differ(batch, a, other, b) for b in range(2)] for a in range(3)]
        assert found == [[True, False], [True, True], [False, True]]

    @pytest.mark.parametrize(("share", "differ"), [(1.0, False), (0.6, False), (0.4, True), (0.25, True)])
    def test_vectors_may_be_asked_to_be_nearer(self, share: float, differ: bool) -> None:
        one, other = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.99, (1 - 0.99**2) ** 0.5]])
        assert Answers("mean", 0.98).differ(Read(one, None), 0, Read(other, None), 0, share) is differ

    def test_equal_vectors_never_differ(self) -> None:
        vectors = Read(torch.randn(100, 32, generator=torch.Generator().manual_seed(0)), None)
        assert not any(Answers("mean", 1.0).differ(vectors, place, vectors, place) for place in range(100))

    def test_equal_vectors_of_zeros_do_not_differ(self) -> None:
        assert not one_of(Answers("mean", 0.9), [0.0, 0.0], [0.0, 0.0])
