"""Every family through the whole engine: what misses is untouched, what hits is the model's own map at work."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from memoized_families import NEAR, Case, gap, output
from torch import Tensor

from attmemo import unmemoize
from attmemo.db import Database
from attmemo.models import ADAPTERS, adapter_for, check_adapter


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
    """Each model that an adapter names has a test model, and each family is in docs/tested-models.md."""
    page = (Path(__file__).parents[2] / "docs" / "tested-models.md").read_text()
    for adapter in ADAPTERS:
        assert f"| {adapter.family} |" in page
        for name in adapter.models if adapter.has_maps else ():
            row = FAMILIES.get(name.removesuffix(" (v1)"))
            assert row is not None, name
            assert row.adapter == adapter.family, name


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
