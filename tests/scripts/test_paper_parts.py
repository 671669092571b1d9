"""Costs of parts: every variant gives the same maps, every number is there, and what does not fit is refused.

No test looks at how long something took: sizes are tiny and the machine is shared.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attmemo.errors import AttmemoError, StorageFullError
from attmemo.maps.source import multiply
from attmemo.mmap import Batch, MapFetcher, page_size
from attmemo.system.machine import conditions

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_families
from paper.parts import gather, layer
from paper.parts.gather import VARIANTS, CopyFetcher, bench_gather
from paper.parts.layer import bench_layer
from paper.parts.search import bench_search
from paper.parts.shapes import random_inputs, random_model

GATHER: dict[str, Any] = {"heads": 2, "length": 16, "batch": 3, "width": 4, "repeats": 2}
SEARCH: dict[str, Any] = {"records": 200, "dimension": 8, "queries": 5, "repeats": 2}
LAYER: dict[str, Any] = {"hidden": 32, "heads": 2, "length": 16, "batch": 3, "layers": 1, "repeats": 2}
FETCHED = ("copy", "copy_reused", "map")


@pytest.fixture(autouse=True)
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every benchmark leaves threads, random state and the folder for temporary files as they were."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    before = torch.get_num_threads(), torch.random.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
    yield
    assert torch.get_num_threads() == before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert str(np.random.get_state()) == before[2]  # noqa: NPY002
    assert not list(tmp_path.glob("attmemo-bench-*"))


def check(result: dict[str, Any], *positive: str) -> None:
    """JSON-able, with flat rows, conditions, and positive finite numbers under these names in every row."""
    json.dumps(result, allow_nan=False)
    assert result["conditions"].keys() >= conditions().keys()
    for row in result["rows"]:
        assert not any(isinstance(value, dict | list) for value in row.values())
        for name in positive:
            assert math.isfinite(row[name])
            assert row[name] > 0


def test_conditions_name_the_machine() -> None:
    found = conditions()
    json.dumps(found, allow_nan=False)
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["threads"] == torch.get_num_threads()
    assert found["torch"] == torch.__version__


@pytest.mark.parametrize("load", [0.0, 1e6])
def test_a_busy_machine_is_noted(load: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    notes = bench_search(**SEARCH, backends=("flat",))["notes"]
    assert any("machine was busy" in note for note in notes) == (load > 0)


# -- fetching maps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("length", [16, 32])  # slots padded to a page of 4 KiB; slots that fill it
def test_gather_has_a_row_for_every_variant(dtype: str, length: int) -> None:
    result = bench_gather(**(GATHER | {"length": length}), dtype=dtype)
    check(result, "fetch_matmul_ms")
    rows = {row["variant"]: row for row in result["rows"]}
    assert tuple(rows) == (*FETCHED, "direct", "contiguous") == VARIANTS
    for name in FETCHED:
        assert rows[name]["fetch_ms"] > 0
    assert rows["direct"]["fetch_ms"] is rows["contiguous"]["fetch_ms"] is None
    # Values in half precision are left to torch.
    assert result["fetcher"] in (("direct",) if dtype == "float32" else ("map", "view"))
    assert result["page_bytes"] >= result["window_page_bytes"] > 0
    one = GATHER["heads"] * length**2 * (4 if dtype == "float32" else 2)
    assert result["bytes"] == GATHER["batch"] * one
    assert any("padded" in note for note in result["notes"]) == (one % page_size() > 0)


def test_gather_unmaps_within_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or half of what a window costs would be paid by the next variant."""
    made: list[MapFetcher] = []

    def kept(**options: Any) -> MapFetcher:
        made.append(MapFetcher(**options))
        return made[-1]

    monkeypatch.setattr(gather, "MapFetcher", kept)
    result = bench_gather(**GATHER)
    assert [fetcher.strict for fetcher in made] == [True]
    assert made[0].fallbacks == 0, "a tensor was held at the end of a batch"
    assert not any("copied instead" in note for note in result["notes"])


def test_gather_refuses_a_product_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(arena: Any, slots: Any, *rest: Any) -> None:
        multiply(arena, np.roll(slots, 1), *rest)

    monkeypatch.setattr(gather, "multiply", wrong)
    with pytest.raises(AttmemoError, match="'direct' gave other products"):
        bench_gather(**GATHER)


def test_gather_refuses_variants_that_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of a fetch that reads other records would be worthless."""

    class Wrong(CopyFetcher):
        def fetch(self, arena: Any, slots: Any) -> Batch:
            return super().fetch(arena, np.roll(slots, 1))

    monkeypatch.setattr(gather, "CopyFetcher", Wrong)
    with pytest.raises(AttmemoError, match="'copy' gave other maps"):
        bench_gather(**GATHER)


def test_gather_tells_when_the_window_was_not_to_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attmemo.mmap.fetch.max_map_count", lambda: 1)
    result = bench_gather(**GATHER)
    assert any("'map' were copied instead" in note for note in result["notes"])


# -- searching embeddings


def test_search_has_a_row_for_every_backend() -> None:
    result = bench_search(**SEARCH)
    check(result, "build_seconds", "search_ms", "us_per_query", "bytes", "recall_at_1")
    rows = {row["backend"]: row for row in result["rows"]}
    assert tuple(rows) == ("faiss", "hnswlib", "flat")
    assert rows["flat"]["recall_at_1"] == 1.0
    assert rows["flat"]["bytes"] == 4 * SEARCH["records"] * SEARCH["dimension"]
    assert all(0.9 <= row["recall_at_1"] <= 1.0 for row in rows.values())
    assert not any("left out" in note for note in result["notes"])


def test_search_of_a_single_record() -> None:
    result = bench_search(records=1, dimension=1, queries=1, repeats=1, backends=["flat", "faiss", "flat"])
    assert [row["recall_at_1"] for row in result["rows"]] == [1.0, 1.0]


# -- one forward


@pytest.mark.parametrize(("family", "dtype"), [("bert", "float32"), ("deberta-v2", "bfloat16")])
def test_layer_serves_every_row(family: Any, dtype: str) -> None:
    result = bench_layer(family=family, dtype=dtype, **LAYER)
    check(result, "ms", "speedup")
    rows = {row["variant"]: row for row in result["rows"]}
    assert tuple(rows) == ("exact", "memoized-sequence", "memoized-layer", "ceiling")
    assert rows["exact"]["speedup"] == 1.0
    assert rows["exact"]["attention"] == ("sdpa" if family == "bert" else "eager")
    for name in ("memoized-sequence", "memoized-layer"):
        assert rows[name]["hit_rate"] == 1.0
        assert rows[name]["lookup_ms_per_layer"] > 0
        assert rows[name]["serve_ms_per_layer"] > 0
        share = rows[name]["share_of_ceiling"]
        assert (share is None) == (rows["ceiling"]["ms"] >= rows["exact"]["ms"])
    assert rows["ceiling"]["hit_rate"] is None
    assert result["conditions"]["storage_dtype"] == ("float16" if dtype == "float32" else "bfloat16")
    assert result["conditions"]["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(("family", "there"), [("bert", True), ("deberta-v2", False)])
def test_layer_times_eager_attention_only_where_the_exact_model_has_another(family: Any, there: bool) -> None:
    rows = {row["variant"]: row for row in bench_layer(**LAYER, family=family, eager=True, lookups=[])["rows"]}
    assert ("exact-eager" in rows) == there
    assert rows["exact"]["attention"] == ("sdpa" if there else "eager")
    if there:
        assert rows["exact-eager"]["attention"] == "eager"
        assert rows["exact-eager"]["attention_ms_per_layer"] > 0


def test_layer_twins_share_weights_and_leave_the_model_alone() -> None:
    with torch.random.fork_rng(devices=[]):
        model = random_model("bert", 32, 2, 16, 1, "float32")
    inputs = random_inputs("bert", torch.Generator().manual_seed(1), 3, 16, "float32")
    with torch.inference_mode():
        before = model(**inputs).last_hidden_state
        twin = layer._ceiling_model(model, inputs)
        after = model(**inputs).last_hidden_state
        served = twin(**inputs).last_hidden_state
    assert torch.equal(before, after)
    torch.testing.assert_close(served, before, rtol=1e-4, atol=1e-5)
    assert not torch.equal(served, before * 0)
    theirs = dict(twin.named_parameters())
    assert all(theirs[name] is parameter for name, parameter in model.named_parameters())
    assert "forward" not in model.get_submodule("encoder.layer.0.attention.self").__dict__


def test_layer_refuses_a_ceiling_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    right = layer._hit_only

    def wrong(adapter: Any, module: Any, maps: Any) -> Any:
        return right(adapter, module, [apm.flip(-1) for apm in maps])

    monkeypatch.setattr(layer, "_hit_only", wrong)
    with pytest.raises(AttmemoError, match="another output"):
        bench_layer(**LAYER)


def test_layer_maps_are_neither_flat_nor_one_hot() -> None:
    """Else the times would be those of a degenerate softmax, full of zeros or subnormal numbers."""
    from attmemo.models import adapter_for
    from attmemo.profiler.map_recorder import Capture

    with torch.random.fork_rng(devices=[]):
        model = random_model("deberta-v2", 128, 2, 32, 2, "float32")
    with Capture(model, *adapter_for(model)) as capture:
        maps = capture.run(random_inputs("deberta-v2", torch.Generator().manual_seed(1), 4, 32, "float32")).maps
    for apm in maps:
        highest = float(apm.max(-1).values.mean())
        assert 3 / 32 < highest < 0.9


# -- too large


def test_sizes_beyond_any_machine_are_refused_at_once() -> None:
    large: Any = {bench_gather: {"batch": 10**7}, bench_layer: {"length": 10**6}, bench_search: {"records": 10**10}}
    for call, sizes in large.items():
        with pytest.raises(StorageFullError, match="MiB of memory are free"):
            call(**sizes)


def test_a_full_disk_is_said_before_anything_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 10

    monkeypatch.setattr("shutil.disk_usage", lambda _path: Usage)
    with pytest.raises(StorageFullError, match="0 MiB on the disk are free"):
        bench_gather(**GATHER)


# -- all families


class TestAllFamilies:
    def test_every_family_has_a_shape_to_measure(self) -> None:
        from attmemo.models import ADAPTERS, adapter_for, check_adapter

        for adapter in ADAPTERS:
            length = 10 if adapter.family == "clip-vision" else 12  # of a square of patches
            with torch.random.fork_rng(devices=[]):
                model = random_model(adapter.family, 32, 4, length, 2, "float32")
            found, sites = adapter_for(model)
            assert found.family == adapter.family
            assert len(sites) == 2
            if found.has_maps:
                assert check_adapter(found, model, sites) <= 1e-5
            inputs = random_inputs(adapter.family, torch.Generator().manual_seed(0), 2, length, "float32")
            with torch.inference_mode():
                assert found.host(model)(**inputs).last_hidden_state.shape[:2] == (2, length), adapter.family

    def test_a_row_for_each_case_that_fits_and_a_note_for_each_that_does_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        common: dict[str, Any] = {"hidden": 32, "heads": 4, "batches": (1, 2), "dtypes": ("float32",), "repeats": 1}
        found = bench_families.bench_families(families=["t5", "llama"], lengths=(8,), long_lengths=(16,), **common)
        shapes = [(row["family"], row["length"], row["batch"]) for row in found["rows"]]
        assert shapes == [
            ("t5", 8, 1), ("t5", 8, 2), ("llama", 8, 1), ("llama", 8, 2), ("llama", 16, 1), ("llama", 16, 2)
        ]  # fmt: skip
        for row in found["rows"]:
            assert row["speedup"] == pytest.approx(row["exact_ms"] / row["served_ms"])
            assert row["ceiling"] == pytest.approx(row["exact_ms"] / row["ceiling_ms"])
        assert {row["attention"] for row in found["rows"] if row["family"] == "llama"} == {"sdpa"}
        assert bench_families.draw_families(found).startswith(b"\x89PNG")
        json.dumps(found)
        monkeypatch.setattr("paper.parts.limits.available_memory", lambda: 10)
        nothing = bench_families.bench_families(families=["t5"], lengths=(8,), **common)
        assert not nothing["rows"]
        left_out = [note.split(" is left out")[0] for note in nothing["notes"]]
        assert left_out == ["t5, float32, 1 x 8", "t5, float32, 2 x 8"]
