"""A head that reads first rows alone gets them, and the last block computes no others; what may see more, gets all."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import SIZES, _make
from packed_models import HEADS, NEAR, batch, firsts, gap, head, last, rows_database
from torch import Tensor, nn

from attmemo import memoize, unmemoize
from attmemo.forward.hooks import Hook
from attmemo.memoization import MEMORY
from attmemo.packed.stack import put_first

READ_ALL = {
    "BertForMaskedLM": "BERT", "BertModel": "BERT", "MPNetForTokenClassification": "MPNet",
    "DistilBertForQuestionAnswering": "DistilBERT",
}  # fmt: skip


class Own(nn.Module):
    """A model with a head of the user's own."""

    def __init__(self, answer: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        model = head()
        self.base_model, self.config, self.answer = model.bert, model.config, answer

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.answer(self.base_model(input_ids, attention_mask)[0], input_ids)


def served(answer: Callable[[Tensor, Tensor], Any]) -> Any:
    return memoize(Own(answer).eval(), reuse="none")


def logits(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(**inputs).logits
    return found


def with_all_rows(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The logits, with all rows of the last block computed from now on."""
    handle, before = model.attmemo, firsts(model)
    handle.disable()
    handle.first_row = False
    handle.enable()
    found = logits(model, inputs)
    assert firsts(model) == before
    return found


@pytest.mark.parametrize(("kind", "family"), HEADS.items())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_classifier_gives_what_it_gives_with_all_rows(kind: str, family: str, dtype: torch.dtype) -> None:
    bare = head(kind, family).to(dtype)
    model = memoize(copy.deepcopy(bare), reuse="none")
    assert model.attmemo.stats()["first_row"]
    inputs, before = batch([9, 2, 30, 1], 4), firsts(model)
    seen = logits(model, inputs)
    assert firsts(model) == before + 1
    assert gap(seen, logits(bare, inputs)) <= (NEAR if dtype == torch.float32 else 5e-2)
    assert not model.attmemo.stats()["failures"]


@pytest.mark.parametrize("linear", ["exact", "int8"])
def test_all_rows_and_first_rows_alone_differ_by_rounding(linear: str) -> None:
    model = memoize(head(), reuse="none", linear=linear)
    inputs = batch([9, 2, 30, 9], 4)
    inputs["input_ids"][3, :9] = inputs["input_ids"][0, :9]  # twins
    before = firsts(model)
    first = logits(model, inputs)
    assert firsts(model) == before + 1
    assert torch.equal(first[0], first[3])
    assert gap(first, with_all_rows(model, inputs)) <= NEAR


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    "settings",
    [{}, {"conv_kernel_size": 3, "conv_act": "gelu"}, {"conv_kernel_size": 5, "conv_act": "tanh"},
     {"conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2}],
)
def test_few_blocks_and_what_is_added_behind_the_first_one_are_no_exception(
    layers: int, settings: dict[str, Any]
) -> None:
    sizes: dict[str, Any] = SIZES | {"num_hidden_layers": layers, "num_labels": 5}
    bare = _make("DebertaV2ForSequenceClassification", "DebertaV2Config", **sizes, **settings)()
    model, inputs = memoize(copy.deepcopy(bare), reuse="none"), batch([9, 2, 30])
    assert model.attmemo.stats()["first_row"]
    assert gap(logits(model, inputs), logits(bare, inputs)) <= NEAR
    assert not model.attmemo.stats()["failures"]


def test_first_rows_go_where_their_sequences_are_and_all_others_are_not_a_number() -> None:
    asked, firsts_of = np.array([0, 3, 4, 5, 9]), np.array([0, 3, 9])
    found = torch.arange(10.0).view(5, 2)
    seen = put_first(found, asked, firsts_of, np.array([2, 0, 3]), (4, 6)).view(4, 6, 2)
    assert seen[2, 0].tolist() == [0, 1]
    assert seen[0, 0].tolist() == [2, 3]
    assert seen[3, 0].tolist() == [8, 9]
    assert int(seen.isnan().sum()) == 4 * 6 * 2 - 6


class TestHeadsThatReadMore:
    @pytest.mark.parametrize(("kind", "family"), READ_ALL.items())
    def test_they_get_all_rows(self, kind: str, family: str) -> None:
        model = memoize(head(kind, family), reuse="none")
        assert not model.attmemo.stats()["first_row"]
        before = firsts(model)
        with torch.inference_mode():
            found = model(**batch([9, 2]))[0]
        assert firsts(model) == before
        assert torch.isfinite(found).all()

    @pytest.mark.parametrize(
        "answer",
        [
            lambda hidden, ids: {"logits": hidden.mean(1)},
            lambda hidden, ids: {"logits": hidden[torch.arange(len(ids)), (ids > 0).sum(1) - 1]},
            lambda hidden, ids: {"logits": hidden[:, 0], "tags": hidden[:, :, 0].nan_to_num().argmax(1)},
            lambda hidden, ids: {"logits": hidden[:, 0], "names": ["a"] * len(ids)},
            lambda hidden, ids: hidden.pooled,
        ],
        ids=["mean", "last token", "whole numbers", "names", "fails"],
    )
    def test_heads_of_ones_own_are_looked_at(self, answer: Any) -> None:
        assert not served(answer).attmemo.stats()["first_row"]
        assert served(lambda hidden, ids: (hidden[:, 0], None)).attmemo.stats()["first_row"]

    def test_a_head_that_refuses_the_small_batch_is_served_with_all_rows(self) -> None:
        def refuse(hidden: Tensor, ids: Tensor) -> Any:
            assert len(ids) == 1, "one text at a time"
            return hidden

        assert not served(refuse).attmemo.stats()["first_row"]

    @pytest.mark.parametrize("where", ["", "encoder", "pooler"])
    def test_what_was_not_tried_at_memoize_is_not_believed(self, where: str) -> None:
        """A hook that is there meanwhile has all rows computed: that proves nothing."""
        model = Own(lambda hidden, ids: {"logits": hidden.mean(1)}).eval()
        part = model.base_model.get_submodule(where)
        hook = part.register_forward_hook(lambda *_: None)
        memoize(model, reuse="none")
        hook.remove()
        assert not model.attmemo.stats()["first_row"]

    def test_a_head_that_is_replaced_gets_all_rows_from_its_first_call_on(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = served(lambda hidden, ids: {"logits": hidden[:, 0]})
        assert model.attmemo.stats()["first_row"]
        inputs = batch([9, 9])
        model.answer = lambda hidden, ids: {"logits": hidden.mean(1)}
        for _ in range(2):
            with torch.inference_mode():
                seen, expected = model(**inputs)["logits"], last(head(), inputs).mean(1)
            assert gap(seen, expected) <= NEAR
        assert sum("reads more than first rows" in one.message for one in caplog.records) == 1
        assert not model.attmemo.stats()["first_row"]

    def test_a_token_that_some_texts_have_is_found_in_all_rows(self) -> None:
        """The check has no text with this token, so the head read first rows there."""

        def at_token(hidden: Tensor, ids: Tensor) -> Any:
            return {"logits": hidden[torch.arange(len(ids)), (ids == 3).int().argmax(1)]}

        model, inputs = served(at_token), batch([9, 9])
        assert model.attmemo.stats()["first_row"]
        inputs["input_ids"][:, 4] = 3
        with torch.inference_mode():
            assert gap(model(**inputs)["logits"], last(head(), inputs)[:, 4]) <= NEAR


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


class TestSurroundings:
    @pytest.mark.parametrize(
        "put", [_hook, _hook_before_the_pooler, _hook_everywhere, _forward, _forward_around_the_base]
    )
    def test_what_looks_between_blocks_and_head_sees_all_rows(self, put: Callable[[Any], Callable[[], None]]) -> None:
        model, inputs = memoize(head(), reuse="none"), batch([9, 2])
        before, remove = firsts(model), put(model)
        logits(model, inputs)
        assert firsts(model) == before
        remove()
        logits(model, inputs)
        assert firsts(model) == before + 1

    def test_the_part_below_the_head_gives_all_rows_when_called_by_itself(self) -> None:
        bare = head()
        model, inputs = memoize(copy.deepcopy(bare), reuse="none"), batch([9, 9])
        before, expected = firsts(model), last(bare, inputs)
        assert gap(last(model, inputs), expected) <= NEAR
        with torch.inference_mode():
            hidden = model(**inputs, output_hidden_states=True).hidden_states[-1]
        assert gap(hidden, expected) <= NEAR
        assert firsts(model) == before

    def test_another_thread_gets_all_rows_while_the_head_runs(self) -> None:
        found: list[Tensor] = []
        inputs = batch([9, 2])

        def meanwhile(hidden: Tensor, ids: Tensor) -> Any:
            if found is not None and model is not None:
                thread = threading.Thread(target=lambda: found.append(last(model, inputs)))
                thread.start()
                thread.join()
            return {"logits": hidden[:, 0]}

        model: Any = None
        model = served(meanwhile)
        with torch.inference_mode():
            model(**inputs)
        assert torch.isfinite(found[0]).all()

    def test_a_loss_is_that_of_the_original(self) -> None:
        bare, inputs = head(), batch([9, 2]) | {"labels": torch.tensor([1, 4])}
        model = memoize(copy.deepcopy(bare), reuse="none")
        with torch.inference_mode():
            assert gap(model(**inputs).loss, bare(**inputs).loss) <= NEAR

    def test_a_copy_and_an_undone_model_are_bare(self) -> None:
        model, inputs = memoize(head(), reuse="none"), batch([3, 2])
        other = copy.deepcopy(model)
        unmemoize(model)
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert not any(isinstance(module.__dict__.get("forward"), Hook) for module in other.modules())
        for one in (model, other):
            assert gap(logits(one, inputs), logits(head(), inputs)) <= NEAR

    def test_a_compiled_classifier_answers_as_before(self) -> None:
        bare, inputs = head(), batch([9, 9])
        compiled: Any = torch.compile(memoize(copy.deepcopy(bare), reuse="none"))
        assert gap(logits(compiled, inputs), logits(bare, inputs)) <= NEAR


class TestRows:
    @staticmethod
    def changed(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same sequences with another token in the middle."""
        ids = inputs["input_ids"].clone()
        ids[:, 8] = 7
        return inputs | {"input_ids": ids}

    @pytest.mark.parametrize(("kind", "family"), HEADS.items())
    def test_served_classes_are_those_with_all_rows(self, kind: str, family: str, tmp_path: Path) -> None:
        bare, stored = head(kind, family), batch([24, 20, 22])
        path = rows_database(bare, [stored], tmp_path / "db")
        model = memoize(copy.deepcopy(bare), database=path, reuse="rows", budget=None)
        inputs, before = self.changed(stored), firsts(model)
        first = logits(model, inputs)
        assert firsts(model) == before + 1
        assert model.attmemo.stats()["reused"] == 3
        assert gap(first, with_all_rows(model, inputs)) <= NEAR

    @pytest.mark.parametrize(
        ("kind", "family", "dtype"),
        [("BertForSequenceClassification", "BERT", torch.float32),
         ("BertForSequenceClassification", "BERT", torch.bfloat16),
         ("ModernBertForSequenceClassification", "ModernBERT", torch.float32)],
    )  # fmt: skip
    def test_records_keep_all_last_hidden_states(self, kind: str, family: str, dtype: torch.dtype) -> None:
        """Also where few sequences of a batch become records, and of the others first rows are computed."""
        bare = head(kind, family).to(dtype)
        rows: dict[str, Any] = {"database": MEMORY, "budget": 0.05, "reuse": "rows", "gate": False}
        models = [memoize(copy.deepcopy(bare), **rows) for _ in range(2)]
        inputs = batch([24, 20, 22])
        mixed = self.changed(inputs)
        mixed["input_ids"][1] = batch([20], 8, padded=24)["input_ids"][0]
        before = firsts(models[0])
        with_all_rows(models[1], inputs)
        logits(models[0], inputs)
        for model in models:
            model.attmemo.flush()
            logits(model, mixed)
            model.attmemo.flush()
        assert firsts(models[0]) == before + 2
        seen, expected = (self.records(model) for model in models)
        assert seen.keys() == expected.keys()
        assert len(seen) >= 4
        assert tuple(mixed["input_ids"][1, :20].tolist()) in seen
        for tokens, row in seen.items():
            assert gap(row, expected[tokens]) <= (NEAR if dtype == torch.float32 else 5e-2)

    @staticmethod
    def records(model: Any) -> dict[tuple[int, ...], Tensor]:
        """Last hidden states of all records, by their tokens."""
        store, found = model.attmemo.engine.reuse.store, {}
        for number in range(len(store)):
            tokens = tuple(store.index.tokens_of(number).tolist())
            begins, dtype = store.fetch(np.array([number])).last()
            found[tokens] = _read(int(begins[0]), len(tokens), model.config.hidden_size, dtype)
        return found

    def test_guarded_answers_are_verified_through_first_rows(self) -> None:
        bare = head()
        model = memoize(copy.deepcopy(bare), database=MEMORY, budget=0.05, reuse="rows")
        inputs, before = batch([24, 20, 22]), firsts(model)
        for place in range(30):
            own = inputs | {"input_ids": inputs["input_ids"].clone()}
            own["input_ids"][:, 8] = 10 + place
            assert gap(logits(model, own), logits(bare, own)) <= NEAR, "nothing is served before changes are known"
            model.attmemo.flush()
        assert firsts(model) > before + 20
        stats = model.attmemo.stats()
        assert stats["guard"]["changes_known"] > 0
        assert not stats["failures"]


def _read(address: int, rows: int, size: int, dtype: torch.dtype) -> Tensor:
    octets = bytearray(ctypes.string_at(address, rows * size * dtype.itemsize))
    return torch.frombuffer(octets, dtype=dtype).view(rows, size)
