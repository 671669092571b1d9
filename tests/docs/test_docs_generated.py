"""Pages and tables that scripts make of JSON are what these scripts make of it today."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from docs_tools import DOCS, README, REPOSITORY, measured, numbers, page

COPIES = ("fig15", "table8", "fastseq_table1", "fastseq_table3", "fastseq_table4", "el_table2", "el_table3")
"""Files of docs/paper that copy other records. Every number of paper.md is in one of docs/paper: test_paper.py."""
Scripts = Callable[[str], ModuleType]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """Imports a script of the repository by its name."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "scripts"))
    return importlib.import_module


@pytest.mark.parametrize("name", ["bench-families", "bench-twelve-layers"])
def test_the_pages_of_families_are_those_of_their_json(
    name: str, script: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families = script("bench_families")
    monkeypatch.setattr(families, "draw_families", lambda found: b"")
    families.write(measured(f"{name}.json"), tmp_path / name)
    texts = page(f"{name}.md"), (tmp_path / f"{name}.md").read_text(encoding="utf-8")
    lines = ([line for line in text.splitlines() if line.startswith(("|", "Conditions"))] for text in texts)
    assert next(lines) == next(lines)
    assert numbers(texts[0]) == numbers(texts[1])  # the words of notes were edited, their numbers were not


def test_the_page_of_fastseq_is_that_of_its_json(script: Scripts) -> None:
    assert page("fastseq-bench.md") == script("fastseq_tables").table(measured("fastseq-bench.json"))


def test_the_page_of_types_is_that_of_its_json(script: Scripts) -> None:
    assert page("fastseq-types.md") == script("fastseq_tables").table_of_types(measured("fastseq-types.json"))


def test_the_page_of_transformers_tests_is_that_of_its_json(script: Scripts) -> None:
    assert page("fastseq-upstream.md") == script("transformers_tests").table(measured("fastseq-upstream.json"))


@pytest.mark.parametrize(("name", "function", "files"), [
    ("study-decoder.md", "study_decoder.tables", ["study-decoder.json"]),
    ("study-pruned.md", "study_pruned.table", ["study-pruned.json"]),
    ("trust-measured.md", "study_trust.tables", ["trust.json"]),
    ("local.md", "bench_local.table", ["local.json"]),
    ("prefix.md", "bench_prefix.table", ["prefix.json"]),
    ("served-models.md", "bench_served_models.tables", ["served-models.json", "served-models-amx.json"]),
])  # fmt: skip
def test_the_tables_of_a_page_are_those_of_its_json(
    name: str, function: str, files: list[str], script: Scripts
) -> None:  # fmt: skip
    bench, tables = function.split(".")
    made = " ".join(getattr(script(bench), tables)(measured(file)) for file in files)
    assert script("marked").marked(page(name)).split() == made.split()


def test_the_table_of_workloads_is_that_of_its_json(script: Scripts) -> None:
    made = script("bench_workloads").tables(REPOSITORY / "docs/workloads.json")
    assert script("marked").marked(page("workloads-measured.md")).split() == made.split()


MAKERS = {"first_page": "DOCS", "reference_pages": "ROOT", "result_pages": "DOCS", "tested_models": "ROOT"}
"""Scripts that make pages of what was measured or of the program, with the name that they have for the folder."""
VERSIONS = re.compile(r"^With transformers \S+ and torch \S+:$", re.MULTILINE)


@pytest.mark.parametrize("name", MAKERS)
def test_the_command_that_makes_pages_changes_none(
    name: str, script: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs on a copy of the pages as they are. The first measures before; that is left out."""
    shutil.copytree(DOCS, tmp_path / "docs", ignore=shutil.ignore_patterns("*.png", "paper"))
    shutil.copyfile(README, tmp_path / "README.md")
    maker = script(name)
    monkeypatch.setattr(maker, MAKERS[name], tmp_path / "docs" if MAKERS[name] == "DOCS" else tmp_path)
    monkeypatch.setattr(maker, "measure", lambda *_, **__: None, raising=False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *(["--measure", "../shared"] if name == "first_page" else [])])
    written, write = list[Path](), maker.replace_measured

    def noted(file: Path, *words: str) -> None:
        written.append(file)
        write(file, *words)

    monkeypatch.setattr(maker, "replace_measured", noted)
    maker.main()
    assert written
    for file in written:
        places = (root / file.relative_to(tmp_path) for root in (REPOSITORY, tmp_path))
        before, made = (VERSIONS.sub("", place.read_text(encoding="utf-8")) for place in places)
        assert made == before


def test_a_mark_that_no_script_knows_stands_on_no_page(script: Scripts) -> None:
    known = {(name, mark) for name, tables in script("result_pages").PAGES.items() for mark in tables}
    found = {(file.name, mark) for file in DOCS.glob("*.md")
             for mark in re.findall(r"<!-- measured (.+): begin -->", file.read_text(encoding="utf-8"))}  # fmt: skip
    assert found == known


def test_short_numbers_are_rounded_once(script: Scripts) -> None:
    short = script("results.files").short
    assert [short(value) for value in (3.14, 9.96, 37.49, 66.51, 156.5, 1290.4)] == [
        "3.1", "10", "37", "67", "156", "1,290"
    ]  # fmt: skip


def test_every_table_of_a_page_of_results_is_made_of_its_json() -> None:
    """A number typed by hand could be another one than was measured."""
    tables = re.compile(r"<!-- measured[^>]*: begin -->.*?<!-- measured[^>]*: end -->", re.DOTALL)
    pages = [file.name for file in DOCS.glob("*measured*.md")]
    assert len(pages) > 9
    for name in pages:
        assert not re.search(r"^\|", tables.sub("", page(name)), re.MULTILINE), name


def test_every_number_of_the_papers_in_short_stands_among_the_figures() -> None:
    found = set(numbers(re.sub(r"\]\([^)]*\)", "]", page("papers.md"))))
    assert len(found) > 50
    assert found <= set(numbers(page("paper.md")))


def test_a_guard_kept_its_budget_over_all_lines_and_nearly_in_each_log() -> None:
    for case in ("lines", "near", "windows", "embeddings"):
        runs = measured("guard.json")[case]["guard"].values()
        assert sum(run["changed"] for run in runs) <= 0.01 * sum(run["lines"] for run in runs)
        assert max(run["changed"] / run["lines"] for run in runs) <= 0.02


def test_no_adversary_was_served_before_it_was_verified() -> None:
    kinds = measured("guard.json")["adversaries"].values()
    assert sum(kind["asked"] for kind in kinds) > 0
    assert sum(kind["served"] for kind in kinds) == 0


def test_the_run_of_the_first_page_names_its_commit_date_and_processor(script: Scripts) -> None:
    found = script("first_page").first_run(measured("peers.json"))["conditions"]
    assert {"version", "date", "processor"} <= found.keys()
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["version"]), "measured with changed code, or without a commit"


def test_every_variable_that_the_code_reads_is_on_the_page() -> None:
    files = [file for place in ("attmemo", "profiler", "native") for file in (REPOSITORY / place).rglob("*")]
    text = "".join(file.read_text("utf-8") for file in files if file.suffix in (".py", ".c", ".h"))
    found = re.findall(r'(?:environ\.get|getenv|environ\.setdefault)\("([A-Z_]+)"|"(ATTMEMO_[A-Z_]+)"', text)
    names = {name for pair in found for name in pair if name}
    assert len(names) > 15
    assert not [name for name in names if f"`{name}`" not in page("environment.md")]


@pytest.mark.parametrize("name", COPIES)
def test_what_a_figure_took_from_other_records_is_still_there(name: str, script: Scripts) -> None:
    run = script("paper.frame").Run(Path(), Path())
    found = json.loads(json.dumps(script("paper.registry").figure(name).measure(run)))
    kept = measured(f"paper/{name}.json")
    assert found == {key: kept[key] for key in found}
