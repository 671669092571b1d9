"""Ray Data over lines of a log: two actors give what one process gives, also when one of them is killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray.data", reason="attmemo[ray] is not installed")
pytest.importorskip("sentence_transformers", reason="attmemo[serve] is not installed")

import ray.data
from ray_tools import Mortal, running

from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import load_model
from attmemo.ray import Encoder

OUTPUTS = {"class": "class", "score": "score", "rows": "rows", "tokens": "tokens"}
READS: dict[str, Any] = {"budget": None, "gate": False, "threshold": 0.3, "outputs": OUTPUTS, "text": "line"}


@pytest.fixture(scope="module", autouse=True)
def _ray() -> Iterator[None]:
    with running():
        yield


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str, service_log: Path) -> str:
    path = tmp_path_factory.mktemp("ray") / "db"
    build_database(load_model(tiny_bert), [service_log], path, BuildOptions(storage="float32", reuse="rows"))
    return str(path)


def mapped(encoder: type[Encoder], lines: list[str | None], blocks: int, batch_size: int, **named: Any) -> Any:
    """The table behind two actors, in its order."""
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False
    data = ray.data.from_items(
        [{"id": place, "line": line} for place, line in enumerate(lines)], override_num_blocks=blocks
    )
    return data.map_batches(
        encoder, fn_constructor_kwargs=named, batch_size=batch_size, num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=2),
    )  # fmt: skip


def check_same(found: Any, expected: dict[str, Any]) -> None:
    """All rows once and in order; classes equal, numbers up to rounding."""
    np.testing.assert_array_equal(found["id"].to_numpy(), expected["id"])
    assert found["line"].fillna("").tolist() == [line or "" for line in expected["line"].tolist()]
    np.testing.assert_allclose(found["score"], expected["score"], atol=1e-5)
    sure = np.nan_to_num(expected["score"]) > 0  # rows without a text have no class
    assert found["class"][sure].tolist() == expected["class"][sure].tolist()
    assert found["class"][~sure].isna().all()


def compare(tiny_bert: str, database: str, lines: list[str | None], tmp_path: Path, blocks: int, size: int) -> None:
    encoder = Encoder(tiny_bert, database=database, **READS)
    expected = encoder({"id": np.arange(len(lines)), "line": np.array(lines, object)})
    mark = tmp_path / "killed"
    found = mapped(Mortal, lines, blocks, size, model=tiny_bert, database=database, mark=str(mark), **READS)
    check_same(found.to_pandas(), expected)
    assert mark.exists(), "no actor was killed"
    assert expected["rows"].sum() < 0.9 * expected["tokens"].sum(), "records served"


def test_two_actors_of_which_one_is_killed_give_what_one_process_gives(
    tiny_bert: str, database: str, tmp_path: Path
) -> None:
    lines: list[str | None] = list(generate_log(2000, seed=2))
    lines[500] = None
    lines[1800:] = [None] * 200  # a block without any text
    compare(tiny_bert, database, lines, tmp_path, 10, 100)


@pytest.mark.slow
def test_a_hundred_thousand_lines_with_a_killed_actor_are_those_of_one_process(
    tiny_bert: str, database: str, tmp_path: Path
) -> None:
    compare(tiny_bert, database, list(generate_log(100_000, seed=3)), tmp_path, 50, 1000)


@pytest.mark.slow
def test_a_missing_column_ends_the_job_with_a_clear_word(tiny_bert: str) -> None:
    lines: list[str | None] = ["a", "b"]
    with pytest.raises(Exception, match=r"the data has no column 'texts'; its columns: 'id', 'line'"):
        mapped(Encoder, lines, 1, 2, model=tiny_bert, reuse="none", text="texts").materialize()
