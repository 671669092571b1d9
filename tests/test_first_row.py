"""A head that reads first rows alone gets them, and the last block computes no others; what may see more, gets all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import FAMILIES
from packed_tools import NEAR, batch, gap, last, rows_database
from torch import Tensor, nn

from attmemo import memoize
from attmemo.memoization import MEMORY
from attmemo.reuse import stack as stack_module

HEADS = {
    "BertForSequenceClassification": "BERT", "RobertaForSequenceClassification": "RoBERTa",
    "XLMRobertaForSequenceClassification": "XLM-RoBERTa", "CamembertForSequenceClassification": "CamemBERT",
    "ElectraForSequenceClassification": "ELECTRA", "DistilBertForSequenceClassification": "DistilBERT",
    "MPNetForSequenceClassification": "MPNet", "DebertaV2ForSequenceClassification": "DeBERTa-v3",
    "ModernBertForSequenceClassification": "ModernBERT",
}  # fmt: skip
READ_ALL = {
    "BertForMaskedLM": "BERT", "BertModel": "BERT", "MPNetForTokenClassification": "MPNet",
    "DistilBertForQuestionAnswering": "DistilBERT",
}  # fmt: skip


def head(kind: str, family: str, **settings: Any) -> Any:
    import transformers

    torch.manual_seed(3)
    config = FAMILIES[family].make().config
    labels = 2 if kind.endswith("QuestionAnswering") else 5
    config.update({"num_labels": labels, "classifier_pooling": "cls"} | settings)
    return getattr(transformers, kind)(config).eval()


@contextmanager
def seen_first_rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many rows the last block gave, of each forward that was asked for some alone."""
    counts: list[int] = []
    own = stack_module.put_first

    def counted(found: Tensor, asked: Any, *others: Any) -> Tensor:
        counts.append(len(asked))
        return own(found, asked, *others)

    with monkeypatch.context() as patch:
        patch.setattr("attmemo.reuse.stack.put_first", counted)
        patch.setattr("attmemo.reuse.rows.put_first", counted)
        yield counts


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(**inputs).logits
    return found


@pytest.mark.parametrize(("kind", "family"), HEADS.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_classifier_gives_what_it_gives_with_all_rows(
    kind: str, family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = head(kind, family).to(dtype)
    model = memoize(copy.deepcopy(bare), reuse="none")
    assert model.attmemo.stats()["first_row"]
    inputs = batch([9, 2, 30, 1], 4)
    with seen_first_rows(monkeypatch) as counts:
        seen = logits(model, inputs)
    assert counts == [4]
    assert gap(seen, logits(bare, inputs)) <= (NEAR if dtype == torch.float32 else 5e-2)
    assert not model.attmemo.stats()["failures"]


@pytest.mark.parametrize("linear", ["exact", "int8"])
def test_all_rows_and_first_rows_alone_differ_by_rounding(linear: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = memoize(head("BertForSequenceClassification", "BERT"), reuse="none", linear=linear)
    inputs = batch([9, 2, 30, 9], 4)
    inputs["input_ids"][3, :9] = inputs["input_ids"][0, :9]  # twins
    with seen_first_rows(monkeypatch) as counts:
        first = logits(model, inputs)
    assert counts == [3]
    handle = model.attmemo
    handle.disable()
    handle.first_row = False
    handle.enable()
    assert gap(first, logits(model, inputs)) <= NEAR
    assert torch.equal(first[0], first[3])


@pytest.mark.parametrize(("kind", "family"), READ_ALL.items())
def test_heads_that_read_more_get_all_rows(kind: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = memoize(head(kind, family), reuse="none")
    assert not model.attmemo.stats()["first_row"]
    with seen_first_rows(monkeypatch) as counts, torch.inference_mode():
        found = model(**batch([9, 2]))[0]
    assert not counts
    assert torch.isfinite(found).all()


def test_a_mean_over_all_rows_and_a_head_that_looks_for_a_token_get_all_rows() -> None:
    mean = head("ModernBertForSequenceClassification", "ModernBERT", classifier_pooling="mean")
    assert not memoize(mean, reuse="none").attmemo.stats()["first_row"]

    class Ends(nn.Module):
        """Reads the last token of each sequence."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.base_model = model.bert
            self.config = model.config
            self.classifier = model.classifier

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            hidden = self.base_model(input_ids, attention_mask)[0]
            ends = attention_mask.sum(1) - 1
            return {"logits": self.classifier(hidden[torch.arange(len(ends)), ends])}

    model = memoize(Ends(head("BertForSequenceClassification", "BERT")).eval(), reuse="none")
    assert not model.attmemo.stats()["first_row"]


def _hook(model: Any) -> Callable[[], None]:
    return model.bert.encoder.register_forward_hook(lambda *_: None).remove  # type: ignore[no-any-return]


def _hook_before_the_pooler(model: Any) -> Callable[[], None]:
    return model.bert.pooler.register_forward_pre_hook(lambda *_: None).remove  # type: ignore[no-any-return]


def _hook_everywhere(_: Any) -> Callable[[], None]:
    return nn.modules.module.register_module_forward_hook(lambda *_: None).remove


def _forward(model: Any) -> Callable[[], None]:
    pooler = model.bert.pooler
    pooler.forward = lambda hidden, own=pooler.forward: own(hidden)
    return lambda: delattr(pooler, "forward")


def _forward_around_the_base(model: Any) -> Callable[[], None]:
    before = model.bert.forward
    model.bert.forward = lambda *args, **kwargs: before(*args, **kwargs)
    return lambda: setattr(model.bert, "forward", before)


@pytest.mark.parametrize("put", [_hook, _hook_before_the_pooler, _hook_everywhere, _forward, _forward_around_the_base])
def test_what_looks_between_blocks_and_head_sees_all_rows(
    put: Callable[[Any], Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs = memoize(head("BertForSequenceClassification", "BERT"), reuse="none"), batch([9, 2])
    with seen_first_rows(monkeypatch) as counts:
        remove = put(model)
        logits(model, inputs)
        assert not counts
        remove()
        logits(model, inputs)
        assert counts == [2]


def test_the_part_below_the_head_gives_all_rows_when_called_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = head("BertForSequenceClassification", "BERT")
    model, inputs = memoize(copy.deepcopy(bare), reuse="none"), batch([9, 9])
    with seen_first_rows(monkeypatch) as counts:
        assert gap(last(model, inputs), last(bare, inputs)) <= NEAR
        with torch.inference_mode():
            hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        assert gap(hidden, last(bare, inputs)) <= NEAR
    assert not counts


def test_disabling_leaves_nothing_in_front_of_the_model() -> None:
    model = memoize(head("BertForSequenceClassification", "BERT"), reuse="none")
    assert "forward" in model.__dict__
    model.attmemo.disable()
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.isfinite(logits(model, batch([3, 2]))).all()


class TestRows:
    @staticmethod
    def changed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same sequences with another token in the middle."""
        ids = inputs["input_ids"].clone()
        ids[:, 8] = 7
        return inputs | {"input_ids": ids}

    @pytest.mark.parametrize(("kind", "family"), HEADS.items())
    def test_served_classes_are_those_with_all_rows(
        self, kind: str, family: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        bare, stored = head(kind, family), batch([24, 20, 22])
        path = rows_database(bare, [stored], tmp_path / "db")
        model = memoize(copy.deepcopy(bare), database=path, reuse="rows", budget=None)
        inputs = self.changed(stored)
        with seen_first_rows(monkeypatch) as counts:
            first = logits(model, inputs)
        assert counts == [3]
        assert model.attmemo.stats()["served"] == 3
        handle = model.attmemo
        handle.disable()
        handle.first_row = False
        handle.enable()
        assert gap(first, logits(model, inputs)) <= NEAR

    def test_records_of_a_classifier_that_fills_itself_are_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What becomes a record keeps all last hidden states, beside sequences of which first rows are computed."""
        bare = head("BertForSequenceClassification", "BERT")
        model = memoize(copy.deepcopy(bare), database=MEMORY, budget=0.05, reuse="rows")
        assert model.attmemo.first_row
        inputs = batch([24, 20, 22])
        with seen_first_rows(monkeypatch) as counts:
            logits(model, inputs)
            assert counts == [66], "all of them become records"
            model.attmemo.flush()
            for _ in range(3):
                logits(model, self.changed(inputs))
            assert min(counts) < 66
        store = model.attmemo.engine.reuse.store
        expected = last(bare, inputs)
        for record, (row, n) in enumerate(zip(expected, (24, 20, 22), strict=True)):
            fetched = store.fetch(torch.tensor([record]).numpy())
            begins, dtype = fetched.last()
            kept = _read(int(begins[0]), n, row.shape[1], dtype)
            assert gap(kept, row[:n]) <= NEAR

    def test_guarded_answers_are_verified_through_first_rows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        bare = head("BertForSequenceClassification", "BERT")
        model = memoize(copy.deepcopy(bare), database=MEMORY, budget=0.05, reuse="rows")
        inputs = batch([24, 20, 22])
        with seen_first_rows(monkeypatch) as counts:
            for place in range(30):
                own = inputs | {"input_ids": inputs["input_ids"].clone()}
                own["input_ids"][:, 8] = 10 + place
                assert gap(logits(model, own), logits(bare, own)) <= NEAR, "nothing is served before changes are known"
                model.attmemo.flush()
        assert counts
        stats = model.attmemo.stats()
        assert stats["guard"]["changes_known"] > 0
        assert not stats["failures"]


def _read(address: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    import ctypes

    octets = bytearray(ctypes.string_at(address, rows * size * dtype.itemsize))
    return torch.frombuffer(octets, dtype=dtype).view(rows, size)
