"""The papers' figures: every module runs, every number of the page is in a JSON, verdicts follow from numbers."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_data import SHARED

from attmemo.profiler import train

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS, DOCS = ROOT / "scripts", ROOT / "docs"
sys.path.insert(0, str(SCRIPTS))
from paper import exhaustive, frame, page, registry  # noqa: E402

sys.path.remove(str(SCRIPTS))

NEEDS_DATA = {
    "fig03": "sst2", "fig04": "sst2", "fig07": "sst2", "table3": "sst2", "fig11": "sst2", "fig12": "sst2",
    "table2": "both", "table5": "both", "fig10": "both", "table7": "both",
}  # fmt: skip
FILES = ("data/sst2/train.tsv", "data/loghub_2k", "models/minilm-sst2", "models/deberta-loghub")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[frame.Run]:
    """One work folder for all figures: databases are made once. Costs are measured of small batches alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "BATCHES", (1, 4))
        yield frame.Run(SHARED, tmp_path_factory.mktemp("paper"), toy=True)


@pytest.mark.parametrize("name", registry.NAMES)
def test_each_figure_runs_at_toy_size_and_can_be_written(name: str, run: frame.Run) -> None:
    missing = [file for file in FILES if name in NEEDS_DATA and not (SHARED / file).exists()]
    if missing:
        pytest.skip(f"../shared/{missing[0]} not present")
    one = registry.figure(name)
    found = json.loads(json.dumps(frame.measured(one, run)))
    assert {"figure", "conditions", "seconds"} <= found.keys()
    claims = one.claims(found)
    assert claims
    for claim in claims:
        assert all(text.strip() for text in (claim.what, claim.paper, claim.here))
    assert one.table(found).startswith("| ")
    for text in (one.caption(found), one.why(found)):
        assert text.rstrip().endswith((".", ":"))
    if one.draw is not None:
        assert one.draw(found).axes


def test_the_page_is_that_of_its_jsons() -> None:
    """So every number of docs/paper.md was measured, or is the paper's own."""
    assert (DOCS / "paper.md").read_text(encoding="utf-8") == page.text(DOCS / "paper")


def test_every_json_has_its_figure_and_conditions() -> None:
    files = sorted((DOCS / "paper").glob("*.json"))
    assert {file.stem for file in files} <= set(registry.NAMES)
    assert len(files) >= 20
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["figure"] == file.stem
        assert {"cores", "threads", "torch", "load"} <= found["conditions"].keys() or "threads" in found["conditions"]


def test_the_table_of_claims_has_forty_rows_each_with_a_json_and_a_verdict() -> None:
    text = (DOCS / "paper.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[^\]]+\]\((paper/\w+\.json)\) \|.*\| \*\*([^*]+)\*\*[^|]* \|$", text, re.MULTILINE)
    assert len(rows) >= 40
    assert all((DOCS / link).is_file() for link, _ in rows)
    assert {verdict for _, verdict in rows} == {"holds", "holds in part", "does not hold today", "not measured"}


@pytest.mark.parametrize(
    ("held", "verdict"),
    [([True, True], "holds"), ([True, False], "holds in part"), ([False], "does not hold today")],
)
def test_a_verdict_follows_from_what_held(held: list[bool], verdict: str) -> None:
    assert frame.judge(*held) == verdict


def test_a_part_is_measured_once_and_none_begins_when_the_time_is_over(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> dict[str, Any]:
        calls.append(1)
        return {"value": 3}

    run = frame.Run(tmp_path, tmp_path)
    first, second = run.part("one", make), run.part("one", make)
    assert first["value"] == second["value"] == 3
    assert "load" in second["conditions"]
    late = frame.Run(tmp_path, tmp_path, until=0.0)
    assert late.part("one", make)["value"] == 3
    with pytest.raises(frame.LaterError, match="two"):
        late.part("two", make)
    assert len(calls) == 1


def test_the_command_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPTS / "paper"), str(tmp_path), str(tmp_path / "out"), "--toy"]
    command += ["--work", str(tmp_path / "work")]
    cut = subprocess.run([*command, "table9", "sec53", "--seconds", "0"], capture_output=True, text=True, timeout=300)
    assert cut.returncode != 0
    assert "run the same command again" in cut.stderr
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["table9.json"]
    done = subprocess.run([*command, "sec53"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out/sec53.json").read_text())["records"] == 200
    wrong = subprocess.run([*command, "fig99"], capture_output=True, text=True, timeout=300)
    assert "no such figure: fig99; there are fig01" in wrong.stderr


def test_padded_search_gives_the_scores_of_equation_one_whatever_the_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, records = (torch.rand(count, 2, 8, 8, generator=generator) for count in (70, 90))
    queries[..., 5:], records[..., 6:] = 0.0, 0.0
    queries, records = (maps / maps.sum(-1, keepdim=True) for maps in (queries, records))
    best, place = exhaustive.best_padded(queries, records, block=32)
    expected = 1.0 - 0.5 * (queries[:, None] - records[None]).abs().sum(-1).mean((-1, -2))
    torch.testing.assert_close(best, expected.max(1).values)
    assert torch.equal(place, expected.argmax(1))


@pytest.fixture(scope="module", autouse=True)
def _path() -> Iterator[None]:
    """Figures import scripts when they are asked for. A process may come back here behind tests of other modules."""
    sys.path.insert(0, str(SCRIPTS))
    yield
    sys.path.remove(str(SCRIPTS))
