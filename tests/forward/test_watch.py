"""Weights and dropout that change after memoize: maps of the old ones are never served."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from memoized_families import Case
from packed_models import batch
from torch import Tensor, nn

from attmemo import memoize, unmemoize
from attmemo.forward.watch import CHANGED, Watch


def other_weights(model: nn.Module) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(9)
    return {
        name: value + 0.1 * torch.rand(value.shape, generator=generator) if value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }


def load(model: nn.Module) -> None:
    model.load_state_dict(other_weights(model))


def assign(model: nn.Module) -> None:
    model.load_state_dict(other_weights(model), assign=True)


def point_elsewhere(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 1.1


def write_unseen(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data.mul_(1.1)


def convert(model: nn.Module) -> None:
    model.to(torch.bfloat16)


def step(model: Any, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model.train()
    model(input_ids=torch.arange(12).view(2, 6)).last_hidden_state.sum().backward()
    optimizer(model.parameters(), lr=0.1).step()
    model.zero_grad()
    model.eval()


def step_each(model: nn.Module) -> None:
    step(model, lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, foreach=False))


def step_together(model: nn.Module) -> None:
    step(model, lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, foreach=True))


def step_fused(model: nn.Module) -> None:
    step(model, lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr, fused=True))


def attach(model: nn.Module, *parts: str) -> None:
    import peft

    torch.manual_seed(2)
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=list(parts), init_lora_weights=False))
    model.eval()


def attach_to_queries(model: nn.Module) -> None:
    attach(model, "query", "value")


def attach_before_attention(model: nn.Module) -> None:
    attach(model, "word_embeddings")


def embed_otherwise(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_input_embeddings().weight[7:9] += 0.5  # type: ignore[operator]


def prune(model: nn.Module) -> None:
    from torch.nn.utils import prune

    base: Any = model
    prune.l1_unstructured(base.encoder.layer[1].attention.self.key, "weight", 0.5)


def drop_a_bias(model: nn.Module) -> None:
    base: Any = model
    base.encoder.layer[1].attention.self.key.bias = None


CHANGES = [
    drop_a_bias, load, assign, point_elsewhere, write_unseen, convert, step_each, step_together, step_fused,
    attach_to_queries, attach_before_attention, embed_otherwise, prune,
]  # fmt: skip


@pytest.fixture(scope="module", name="case")
def _case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("BERT", tmp_path_factory.mktemp("watched"))


@pytest.fixture(name="model")
def _model(case: Case) -> Iterator[Any]:
    model = copy.deepcopy(case.model)
    yield model
    unmemoize(model)


def output(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        found: Tensor = model(**inputs).last_hidden_state
    return found


def serve(case: Case, model: Any, **options: Any) -> Any:
    memoize(model, threshold=0.0, database=case.path, gate=False, **options)
    return model.attmemo


@pytest.mark.parametrize("lookup", ["sequence", "layer"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_new_weights_are_never_served_old_maps(
    case: Case, model: Any, change: Callable[[nn.Module], None], lookup: str, caplog: pytest.LogCaptureFixture
) -> None:
    handle = serve(case, model, lookup=lookup)
    output(model, case.stored)
    assert handle.stats()["hit_rate"] == 1.0
    change(model)
    handle.reset_stats()
    with caplog.at_level(logging.WARNING, "attmemo"):
        seen = [output(model, case.stored) for _ in range(2)]
    stats = handle.stats()
    assert (stats["hits"], set(stats["ineligible"])) == (0, {CHANGED})
    assert caplog.text.count("weights or settings changed") <= 1, "said once, be it in training or afterwards"
    handle.disable()
    assert torch.equal(seen[1], output(model, case.stored))


def test_weights_that_count_no_versions_are_never_served_old_maps(case: Case) -> None:
    """Those of a model that was made in inference mode."""
    with torch.inference_mode():
        model: Any = FAMILIES["BERT"].make()
        assert model.encoder.layer[0].attention.self.key.weight.is_inference()
        handle = serve(case, model)
        output(model, case.stored)
        assert handle.stats()["hit_rate"] == 1.0
        load(model)
        handle.reset_stats()
        output(model, case.stored)
    assert set(handle.stats()["ineligible"]) == {CHANGED}
    unmemoize(model)


def test_a_change_of_weights_is_said_once(case: Case, model: Any, caplog: pytest.LogCaptureFixture) -> None:
    serve(case, model)
    load(model)
    with caplog.at_level(logging.WARNING, "attmemo"):
        for _ in range(2):
            output(model, case.stored)
    assert caplog.text.count("the model stays exact: its weights or settings changed since memoize") == 1


def test_a_change_while_switched_off_is_remembered(case: Case, model: Any) -> None:
    handle = serve(case, model)
    handle.disable()
    load(model)
    handle.enable()
    output(model, case.stored)
    assert set(handle.stats()["ineligible"]) == {CHANGED}


def test_a_layer_driven_by_hand_is_never_served_old_maps(case: Case, model: Any) -> None:
    handle = serve(case, model, lookup="layer")
    module = model.encoder.layer[1].attention.self
    hidden = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        module(hidden)
        assert handle.stats()["layers"][1]["sequences"] == 1
        load(model)
        module(hidden)
    assert handle.stats()["ineligible"] == {CHANGED: 1}


def test_the_same_weights_are_never_taken_for_new_ones(case: Case, model: Any, tmp_path: Path) -> None:
    """What people do to a model beside changing it; and what comes behind the last map counts for nothing."""
    handle = serve(case, model)
    model.train()
    model(**case.stored).last_hidden_state.sum().backward()
    model.zero_grad()
    model.eval().requires_grad_(False).float().cpu()
    model.tie_weights()
    model.save_pretrained(tmp_path / "saved")
    copy.deepcopy(model)
    with torch.no_grad():
        model.pooler.dense.weight.add_(1.0)
    handle.disable()
    handle.enable()
    handle.reset_stats()
    output(model, case.stored)
    assert handle.stats()["hit_rate"] == 1.0


def share(model: nn.Module) -> None:
    model.share_memory()


def lie_elsewhere(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def leave_the_type_and_return(model: nn.Module) -> None:
    model.to(torch.float64).to(torch.float32)


def stay(model: nn.Module) -> None:
    model.to(torch.float32).to("cpu")


MOVES = [share, lie_elsewhere, leave_the_type_and_return, stay]


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_weights_that_moved_are_compared_once_and_served_on(
    case: Case, model: Any, move: Callable[[nn.Module], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, read = serve(case, model), list[int]()
    own = Watch._checksum
    monkeypatch.setattr(Watch, "_checksum", lambda watch: read.append(1) or own(watch))
    for turn in range(1, 3):
        move(model)
        handle.reset_stats()
        for _ in range(3):
            output(model, case.stored)
        assert handle.stats()["hit_rate"] == 1.0
        assert not handle.stats()["ineligible"]
        assert len(read) == {stay: 0, share: 1}.get(move, turn), "what is shared already stays"
    write_unseen(model)
    handle.reset_stats()
    output(model, case.stored)
    assert set(handle.stats()["ineligible"]) == {CHANGED}, "they are watched where they lie now"


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
@pytest.mark.parametrize("name", ["BERT", "ModernBERT", "DeBERTa-v3"])
def test_packed_blocks_read_weights_that_moved_where_they_lie(name: str, move: Callable[[nn.Module], None]) -> None:
    model, inputs = memoize(FAMILIES[name].make(), reuse="none"), batch([20, 9])
    with torch.inference_mode():
        expected = model(**inputs)[0].clone()
        move(model)
        held = [torch.full((1 << 12,), float("nan")) for _ in range(200)]  # what was freed is written by others
        for _ in range(2):
            assert torch.equal(model(**inputs)[0], expected)
    assert len(held) == 200
    assert model.attmemo.stats()["sequences"] == 6
    assert not model.attmemo.stats()["ineligible"]


@pytest.mark.parametrize("place", [0, 5, -1])
def test_a_number_that_changed_while_weights_moved_is_noticed(case: Case, model: Any, place: int) -> None:
    handle = serve(case, model)
    weight = model.encoder.layer[1].output.dense.weight
    other = weight.data.clone()
    other.view(-1)[place] += 1e-3
    weight.data = other
    output(model, case.stored)
    assert set(handle.stats()["ineligible"]) == {CHANGED}


def norm_of(model: Any) -> Any:
    return model.encoder.layer[1].output.LayerNorm


SETTINGS = [
    (lambda model: model.embeddings.LayerNorm, "eps"), (norm_of, "eps"),
    (lambda model: model.encoder.layer[0].attention.self, "scaling"),
]  # fmt: skip


@pytest.mark.parametrize(("part", "name"), SETTINGS)
@pytest.mark.parametrize("reuse", ["maps", "none"])
def test_another_number_of_a_module_is_noticed(
    case: Case, model: Any, part: Callable[[Any], Any], name: str, reuse: str
) -> None:
    bare = copy.deepcopy(model)
    handle = serve(case, model) if reuse == "maps" else memoize(model, reuse="none").attmemo
    output(model, case.stored)
    assert not handle.stats()["ineligible"]
    for one in (model, bare):
        setattr(part(one), name, 8.0 * getattr(part(one), name))
    assert torch.equal(output(model, case.stored), output(bare, case.stored))
    assert set(handle.stats()["ineligible"]) == {CHANGED}


def test_another_dropout_is_no_other_number(case: Case, model: Any) -> None:
    handle = serve(case, model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    output(model, case.stored)
    assert handle.stats()["hit_rate"] == 1.0


def test_a_model_with_a_new_head_is_served(case: Case) -> None:
    torch.manual_seed(1)
    model: Any = FAMILIES["BERT classifier"].make()
    model.bert.load_state_dict(case.model.state_dict())
    handle = serve(case, model)
    with torch.no_grad():
        model.classifier.weight.add_(1.0)
        model(**case.stored)
    assert handle.stats()["hit_rate"] == 1.0
    unmemoize(model)


@pytest.mark.parametrize("lookup", ["sequence", "layer"])
def test_monte_carlo_dropout_keeps_its_noise(case: Case, model: Any, lookup: str) -> None:
    """Only the dropouts are in training mode, as those do who draw answers from them."""
    handle = serve(case, model, lookup=lookup)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    first, second = output(model, case.stored), output(model, case.stored)
    assert not torch.equal(first, second)
    assert (handle.stats()["hits"], set(handle.stats()["ineligible"])) == (0, {"dropout in training mode"})
