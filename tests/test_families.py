"""Every family through the whole engine: what misses is untouched, what hits is the model's own map at work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Family, inputs_of
from torch import Tensor, nn

from attmemo import memoize, unmemoize
from attmemo.db import Database
from attmemo.embed.training import TrainOptions
from attmemo.models import ADAPTERS, adapter_for, check_adapter
from attmemo.profiler.build import build_from_inputs
from attmemo.profiler.train import train_database

STORED = [9, 12, 9, 7, 12, 16, 9, 12, 7, 16]  # valid tokens of the records
NEAR = 1e-5


def output(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """What the attention layers' part of the model gives, ``[B, L, H]``."""
    with torch.inference_mode():
        found: Tensor = adapter_for(model)[0].host(model)(**inputs).last_hidden_state
    return found


def gap(seen: Tensor, expected: Tensor) -> float:
    """Greatest difference, relative to the range."""
    return float((seen - expected).abs().max() / expected.abs().max())


class Case:
    """A model of a family, a database of a batch of inputs, and another batch that is not in it."""

    def __init__(self, name: str, folder: Path, storage: str = "float32", dtype: torch.dtype = torch.float32) -> None:
        self.family: Family = FAMILIES[name]
        self.model = self.family.make().to(dtype)
        self.stored = self._inputs(STORED, 0, dtype)
        self.other = self._inputs([9, 12, 7], 5, dtype)
        self.path = build_from_inputs(
            self.model, (self.rows(self.stored, [row]) for row in range(len(STORED))), folder / "db",
            storage=storage, inputs="all" if storage != "uint8" else "auto", held_out=0.0,
        )  # fmt: skip
        train_database(self.path, TrainOptions(steps=5), profile=False)

    def _inputs(self, lengths: list[int], seed: int, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = inputs_of(self.family, lengths, seed)
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}

    def rows(self, inputs: dict[str, Tensor], rows: list[int]) -> dict[str, Tensor]:
        """Some rows, with no more padding than they need."""
        taken = {name: value[rows] for name, value in inputs.items()}
        if self.family.kind == "tokens":
            longest = int(taken["attention_mask"].sum(1).max())
            taken = {name: value[:, :longest] for name, value in taken.items()}
        return taken

    def lengths(self, inputs: dict[str, Tensor]) -> list[int]:
        if self.family.kind == "tokens":
            return [int(n) for n in inputs["attention_mask"].sum(1)]
        whole = output(self.model, inputs)
        return [whole.shape[1]] * len(whole)

    def serve(self, threshold: float | list[float] = 0.0, **options: Any) -> Any:
        memoize(self.model, threshold=threshold, database=self.path, gate=False, **options)
        return self.model.attmemo

    def mixed(self) -> tuple[dict[str, Tensor], list[int]]:
        """Two stored sequences and one of a length that no record has (tokens), or a new image between stored ones."""
        if self.family.kind == "tokens":
            own = inputs_of(self.family, [12, 11, 9], 9)
            for row, record in ((0, 1), (2, 2)):
                n = STORED[record]
                own["input_ids"][row, :n] = self.stored["input_ids"][record, :n]
            return own, [0, 2]
        name = next(iter(self.stored))
        return {name: torch.cat([self.stored[name][1:2], self.other[name][:1], self.stored[name][2:3]])}, [0, 2]


@pytest.fixture(params=FAMILIES, scope="module", name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(request.param, tmp_path_factory.mktemp("family"))
    yield case
    unmemoize(case.model)


@pytest.fixture(autouse=True)
def _left_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "case" in request.fixturenames:
        unmemoize(request.getfixturevalue("case").model)


def near(seen: Tensor, expected: Tensor, lengths: list[int]) -> None:
    """Equal over valid tokens, within what the order of sums may change."""
    for row, n in enumerate(lengths):
        assert gap(seen[row, :n], expected[row, :n]) <= NEAR, f"row {row}"


def test_the_adapter_is_the_one_of_the_family_and_passes_its_check(case: Case) -> None:
    adapter, sites = adapter_for(case.model)
    assert adapter.family == case.family.adapter
    assert [site.layer for site in sites] == list(range(len(sites)))
    assert check_adapter(adapter, case.model, sites) <= NEAR


def test_an_input_without_a_near_record_is_exact_bit_by_bit(case: Case) -> None:
    expected = output(case.model, case.other)
    handle = case.serve(1.0)
    assert torch.equal(output(case.model, case.other), expected)
    assert handle.stats()["hits"] == 0
    assert not handle.stats()["ineligible"]


@pytest.mark.parametrize("lookup", ["sequence", "layer"])
def test_a_hit_on_the_models_own_map_gives_the_models_own_output(case: Case, lookup: str) -> None:
    expected = output(case.model, case.stored)
    handle = case.serve(lookup=lookup)
    near(output(case.model, case.stored), expected, case.lengths(case.stored))
    stats = handle.stats()
    assert stats["hit_rate"] == 1.0, stats
    assert not stats["failures"]


@pytest.mark.parametrize("lookup", ["sequence", "layer"])
def test_sequences_of_a_mixed_batch_are_as_they_are_alone(case: Case, lookup: str) -> None:
    inputs, hits = case.mixed()
    lengths = case.lengths(inputs)
    threshold = 0.0
    if case.family.kind != "tokens":  # all have one length, so only distance keeps the new one out
        case.serve(0.0, lookup=lookup)
        with_all = case.model.attmemo.engine  # type: ignore[union-attr]
        with_all.planner.set_radii([1e-3] * with_all.layers)
    else:
        case.serve(threshold, lookup=lookup)
    expected = [output(case.model, case.rows(inputs, [row])) for row in range(3)]
    handle: Any = case.model.attmemo
    handle.reset_stats()
    seen = output(case.model, inputs)
    for row, n in enumerate(lengths):
        assert gap(seen[row, :n], expected[row][0, :n]) <= NEAR, f"row {row}"
    stats = handle.stats()
    assert stats["hits"] == len(hits) * len(stats["layers"])
    assert not stats["failures"]


@pytest.mark.parametrize("wanted", ["output_attentions", "output_hidden_states"])
def test_calls_for_maps_or_hidden_states_are_exact(case: Case, wanted: str) -> None:
    host = adapter_for(case.model)[0].host(case.model)
    configs: list[Any] = [module.config for module in host.modules() if hasattr(module, "config")]
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            if wanted == "output_attentions":
                config._attn_implementation = "eager"
        with torch.inference_mode():
            expected = host(**case.stored, **{wanted: True})
            case.serve()
            seen = host(**case.stored, **{wanted: True})
    finally:
        for config, implementation in zip(configs, before, strict=True):
            config._attn_implementation = implementation
    assert torch.equal(seen.last_hidden_state, expected.last_hidden_state)
    name = wanted.removeprefix("output_")
    assert len(seen[name]) == len(expected[name]) > 0
    assert all(torch.equal(a, b) for a, b in zip(seen[name], expected[name], strict=True))
    assert case.model.attmemo.stats()["hits"] == 0  # type: ignore[union-attr,operator]


def test_every_model_said_to_work_is_tested() -> None:
    """Each model that an adapter names has a test model, and is in docs/models.md."""
    table = (Path(__file__).parents[1] / "docs" / "models.md").read_text().split("`attmemo families`")[0]
    for adapter in ADAPTERS:
        for name in adapter.models:
            row = FAMILIES.get(name.removesuffix(" (v1)"))
            assert row is not None, name
            assert row.adapter == adapter.family, name
            assert name.split("-v")[0].removesuffix(" (v1)") in table, name


def test_training_is_exact(case: Case) -> None:
    case.serve()
    case.model.train()
    try:
        found = adapter_for(case.model)[0].host(case.model)(**case.stored).last_hidden_state
        found.sum().backward()
    finally:
        case.model.eval()
        case.model.zero_grad()
    stats: Any = case.model.attmemo.stats()  # type: ignore[union-attr,operator]
    assert stats["hits"] == 0
    assert set(stats["ineligible"]) == {"training mode"}


def test_unmemoize_gives_the_bare_model_back(case: Case) -> None:
    expected = output(case.model, case.stored)
    case.serve()
    output(case.model, case.stored)
    unmemoize(case.model)
    assert torch.equal(output(case.model, case.stored), expected)


def test_threads_that_share_a_model_get_their_own_answers(case: Case) -> None:
    """Each thread has its own count of layers and its own lookup."""
    asked = [case.rows(case.stored, [row]) for row in range(6)]
    handle = case.serve()
    alone = [output(case.model, inputs) for inputs in asked]
    handle.reset_stats()
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(lambda inputs: output(case.model, inputs), asked * 2))
    for seen, expected in zip(together, alone * 2, strict=True):
        assert gap(seen, expected) <= NEAR
    assert handle.stats()["hit_rate"] == 1.0


def test_maps_of_decoders_are_stored_as_lower_triangles(case: Case) -> None:
    with Database(case.path) as database:
        n = next(iter(database.lengths))
        heads = database.manifest.model.heads
        causal = adapter_for(case.model)[0].causal
        assert database.arena("map", n).layout.shape == ((heads, n * (n + 1) // 2) if causal else (heads, n, n))
