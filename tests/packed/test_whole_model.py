"""Forwards of a whole model in few calls: the numbers of the hooked way, and where that way is taken."""

from __future__ import annotations

import copy
import inspect
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families import SIZES, _make
from packed_models import MODELS, Inputs, _deberta, batch, has_types, host_of
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from whole_calls import assert_same, hook_of, hooked, noted

from attmemo import memoize
from attmemo.forward.hooks import Hook

MAKE = MODELS | {
    "ELECTRA": _make("ElectraModel", "ElectraConfig", **SIZES, embedding_size=SIZES["hidden_size"]),
    "DeBERTa, positions alone": _deberta("c2p", "p2c", position_biased_input=True),
    "DeBERTa, positions before types": _deberta("c2p", "p2c", position_biased_input=True, type_vocab_size=2),
}
"""Models; ELECTRA without a layer between embeddings and blocks, as the larger ones are."""
WHOLE = [
    "BERT", "BERT classifier", "RoBERTa", "XLM-RoBERTa", "CamemBERT", "ELECTRA", "DistilBERT", "MPNet",
    "DeBERTa-v3", "DeBERTa, c2p", "DeBERTa, no buckets", "DeBERTa, positions alone",
]  # fmt: skip
"""Families whose embeddings are sums of tables."""

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


def served(name: str, dtype: torch.dtype = torch.float32) -> Any:
    model = MAKE[name]().to(dtype).eval()
    return memoize(model, reuse="none")


def takes_types(model: nn.Module) -> bool:
    """Whether a model takes types, read or not."""
    return "token_type_ids" in inspect.signature(type(host_of(model)).forward).parameters


def batches(model: nn.Module) -> Iterator[Inputs]:
    """One line, many, padding, twins, tokens of padding within, and types."""
    yield batch([1])
    yield batch([17], 1)
    yield batch([9, 2, 12, 9], 2)
    yield batch([30] * 4, 3)
    yield batch([5, 3], 4, padded=20)
    twins = batch([8, 8, 3, 8, 3], 5)
    twins["input_ids"][3], twins["input_ids"][4] = twins["input_ids"][0], twins["input_ids"][2]
    yield twins
    within = batch([11, 7], 6)
    within["input_ids"][:, 2] = getattr(model.config, "pad_token_id", 0) or 0
    yield within
    if takes_types(model):
        yield batch([9, 2], 9, types=True)
    if has_types(model):
        yield batch([9, 2, 12], 7, types=True)
        apart = batch([6, 6], 8, types=True)
        apart["input_ids"][1] = apart["input_ids"][0]  # no twins: their types differ
        yield apart


@DTYPES
@pytest.mark.parametrize("name", WHOLE)
def test_the_numbers_are_those_of_the_hooked_way_bit_by_bit(name: str, dtype: torch.dtype) -> None:
    model = served(name, dtype)
    with torch.inference_mode(), noted(model) as notes:
        for number, inputs in enumerate(batches(model)):
            seen = model(**inputs)
            with hooked(model):
                expected = model(**inputs)
            assert_same(seen, expected)
            assert len(notes) == number + 1
    assert all(notes)


@DTYPES
def test_a_call_without_a_mask_computes_all_tokens(dtype: torch.dtype) -> None:
    model, ids = served("BERT", dtype), batch([9, 9])["input_ids"]
    with torch.no_grad(), noted(model) as notes:
        seen, by_place = model(ids), model(ids, torch.ones_like(ids))
        with hooked(model):
            expected = model(ids)
    assert notes == [True, True]
    assert_same(seen, expected)
    assert_same(by_place, expected)


def test_both_ways_count_alike() -> None:
    model = served("BERT")
    counted = []
    with torch.inference_mode():
        for way in (noted, hooked):
            model.attmemo.reset_stats()
            with way(model):
                for inputs in batches(model):
                    model(**inputs)
            stats = model.attmemo.stats()
            assert stats["ms_blocks"] > 0
            counted.append({name: stats[name] for name in ("sequences", "tokens", "rows_computed", "ineligible")})
    assert counted[0] == counted[1]


def test_a_head_that_reads_first_rows_gets_no_others() -> None:
    model, inputs = served("BERT classifier"), batch([9, 2, 12, 2], 1)
    inputs["input_ids"][3] = inputs["input_ids"][1]  # a twin
    assert model.attmemo.first_row
    with torch.inference_mode(), noted(model) as notes:
        before = model.attmemo.engine.counters.done.firsts
        seen = model(**inputs).logits
        assert model.attmemo.engine.counters.done.firsts == before + 1
        with hooked(model):
            assert torch.equal(seen, model(**inputs).logits)
    assert notes == [True]


def _asked(model: Any, inputs: Inputs) -> dict[str, Any]:
    """Calls that go through the model's modules, by what they ask for."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return {
        "output_hidden_states": inputs | {"output_hidden_states": True},
        "output_attentions": inputs | {"output_attentions": True},
        "a tuple": inputs | {"return_dict": False},
        "inputs_embeds": {"inputs_embeds": model.get_input_embeddings()(ids), "attention_mask": mask},
        "position_ids": inputs | {"position_ids": torch.arange(ids.shape[1])[None]},
        "another mask": inputs | {"attention_mask": mask.flip(1)},
        "a mask of numbers": inputs | {"attention_mask": mask.float()},
        "a mask with gaps": inputs | {"attention_mask": torch.tensor([[1, 0, 1] * 4] * 3)},
        "an empty row": inputs | {"attention_mask": mask * torch.tensor([[1], [0], [1]])},
        "ids of 32 bits": inputs | {"input_ids": ids.int()},
    }


@pytest.mark.parametrize("name", ["BERT", "RoBERTa"])
def test_other_calls_go_through_the_models_modules_and_answer_as_before(name: str) -> None:
    bare, inputs = MODELS[name]().eval(), batch([9, 2, 12])
    model = memoize(copy.deepcopy(bare), reuse="none")
    with torch.inference_mode(), noted(model) as notes:
        for what, given in _asked(model, inputs).items():
            seen, expected = model(**given), bare(**given)
            assert type(seen) is type(expected)
            valid = inputs["attention_mask"].bool() & (given["attention_mask"] != 0)
            assert torch.allclose(seen[0][valid], expected[0][valid], atol=1e-4), what
    assert not any(notes)


@pytest.mark.parametrize("ids", [[[5, 98, 99, 7]], [[5, -1, 7, 7]]])
def test_a_token_that_no_table_has_is_refused_as_before(ids: list[list[int]]) -> None:
    model = served("BERT")
    wrong = torch.tensor(ids) * (model.config.vocab_size if ids[0][2] == 99 else 1)
    with torch.inference_mode(), pytest.raises(IndexError):
        model(input_ids=wrong)


def test_more_tokens_than_positions_are_refused_as_before() -> None:
    model = served("BERT")
    with torch.inference_mode(), pytest.raises((IndexError, RuntimeError)):
        model(**batch([model.config.max_position_embeddings + 1]))


def test_a_hook_anywhere_is_called() -> None:
    model, inputs = served("BERT"), batch([9, 2])
    parts = [model.embeddings, model.embeddings.LayerNorm, model.encoder, model.pooler, model.pooler.activation]
    for part in parts:
        seen: list[Any] = []
        handle = part.register_forward_hook(lambda *given, seen=seen: seen.append(given[2]))
        with torch.inference_mode(), noted(model) as notes:
            model(**inputs)
            handle.remove()
            model(**inputs)
        assert len(seen) == 1
        assert notes == [False, True]
    everywhere: list[Any] = []
    handle = nn.modules.module.register_module_forward_hook(lambda *given: everywhere.append(given))
    try:
        with torch.inference_mode():
            model(**inputs)
    finally:
        handle.remove()
    assert len(everywhere) > len(parts)


def test_a_forward_around_a_part_is_called() -> None:
    model, inputs, seen = served("BERT"), batch([9, 2]), []
    own = model.embeddings.forward

    def around(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(1)
        return own(*args, **kwargs)

    model.embeddings.forward = around
    with torch.inference_mode(), noted(model) as notes:
        model(**inputs)
    assert (seen, notes) == ([1], [False])


def test_tensors_of_other_kinds_are_answered_as_before() -> None:
    bare, ids = MODELS["BERT"]().eval(), batch([4, 4, 4])["input_ids"]
    model = memoize(copy.deepcopy(bare), reuse="none")

    def ask(one: Any) -> Tensor:
        return torch.func.vmap(lambda row: one(row[None])[0])(ids)

    with torch.no_grad():
        assert torch.allclose(ask(model), ask(bare), atol=1e-4)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert isinstance(model(ids)[0], FakeTensor)


def test_gradients_dropout_and_autocast_go_through_the_models_modules() -> None:
    model, inputs = served("BERT"), batch([9, 2])
    with noted(model) as notes:
        assert model(**inputs).last_hidden_state.requires_grad
        with torch.inference_mode():
            model.embeddings.dropout.train()
            one, other = model(**inputs)[0], model(**inputs)[0]
            assert not torch.equal(one, other)
            model.eval()
            with torch.autocast("cpu", torch.bfloat16):
                model(**inputs)
            assert notes == [False] * 4
            model(**inputs)
    assert notes[-1]


def test_a_configuration_that_asks_for_more_is_heard() -> None:
    model, inputs = served("BERT"), batch([9, 2])
    with torch.inference_mode(), noted(model) as notes:
        model.config.output_hidden_states = True
        assert model(**inputs).hidden_states is not None
        model.config.output_hidden_states = False
        assert model(**inputs).hidden_states is None
        model.config.name_of_my_own = 1
        model(**inputs)
    assert notes == [False, True, True]


def test_a_new_pooler_is_the_one_that_pools() -> None:
    model, inputs = served("BERT"), batch([9, 2])
    with torch.inference_mode():
        model.pooler.dense.weight.zero_()
        model.pooler.dense.bias.fill_(0.5)
        assert torch.equal(model(**inputs).pooler_output, torch.full((2, model.config.hidden_size), 0.5).tanh())
        model.pooler.dense = nn.Linear(model.config.hidden_size, 3)
        assert model(**inputs).pooler_output.shape == (2, 3)


def test_changed_embeddings_are_read() -> None:
    bare, inputs = MODELS["BERT"]().eval(), batch([9, 2])
    model = memoize(copy.deepcopy(bare), reuse="none")
    with torch.inference_mode(), noted(model) as notes:
        for one in (bare, model):
            one.embeddings.word_embeddings.weight.add_(1.0)
        assert torch.allclose(model(**inputs)[0], bare(**inputs)[0], atol=1e-4)
    assert notes == [False]


def test_weights_that_moved_are_read_where_they_lie() -> None:
    model, inputs = served("BERT"), batch([9, 2])
    with torch.inference_mode(), noted(model) as notes:
        expected = model(**inputs)
        model.share_memory()
        assert_same(model(**inputs), expected)
    assert notes == [True, True]


def test_observers_see_what_a_forward_computes() -> None:
    model, inputs = served("BERT"), batch([9, 2])
    with torch.inference_mode(), noted(model) as notes, model.attmemo.observe() as observed:
        model(**inputs)
    assert notes == [True]
    assert (observed.tokens, observed.rows, observed.extra) == ([9, 2], [9, 2], 0)


def test_an_error_leaves_a_forward_exact_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    bare, inputs = MODELS["BERT"]().eval(), batch([9, 2])
    model = memoize(copy.deepcopy(bare), reuse="none")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("no memory for rows")

    monkeypatch.setattr(model.attmemo.packed, "run", broken)
    with torch.inference_mode():
        assert torch.equal(model(**inputs)[0], bare(**inputs)[0])
    stats = model.attmemo.stats()
    assert (stats["sequences"], stats["failed"]) == (0, 2)


def test_copies_and_undone_models_are_bare() -> None:
    model, inputs = served("BERT"), batch([9, 2])
    with torch.inference_mode():
        expected = model(**inputs)[0]
        for one in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert not isinstance(one.forward, Hook)
            assert torch.allclose(one(**inputs)[0][0, :9], expected[0, :9], atol=1e-4)
        model.attmemo.disable()
        assert "forward" not in model.__dict__
        model.attmemo.enable()
        with noted(model) as notes:
            assert torch.equal(model(**inputs)[0], expected)
    assert notes == [True]


def test_threads_get_their_own_answers() -> None:
    model = served("BERT", torch.bfloat16)
    given = [batch([9 + seed, 2 + seed], seed) for seed in range(4)]
    with torch.inference_mode():
        expected = [model(**inputs) for inputs in given]
    wrong: list[int] = []

    def ask(number: int) -> None:
        with torch.inference_mode():
            for _ in range(20):
                if not torch.equal(model(**given[number])[0], expected[number][0]):
                    wrong.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(given))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_embeddings_of_another_form_go_through_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["BERT"]().eval()
    own = type(model.embeddings).forward
    monkeypatch.setattr(type(model.embeddings), "forward", lambda *given, **named: own(*given, **named) * 2)
    memoize(model, reuse="none")
    assert hook_of(model).whole is None


def test_other_families_go_through_their_modules() -> None:
    assert hook_of(served("ModernBERT")).whole is None
    mixed = served("DeBERTa, positions before types")
    assert hook_of(mixed).whole is None, "a sum of three has an order"
    assert hook_of(memoize(MODELS["ELECTRA"]().eval(), reuse="none")).whole is None  # a layer behind its embeddings
