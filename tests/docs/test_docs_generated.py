"""Pages and tables that scripts make of JSON are what these scripts make of it today."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from docs_tools import REPOSITORY, measured, numbers, page

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
    assert page("fastseq-bench.md") == script("bench_fastseq").table(measured("fastseq-bench.json"))


def test_the_page_of_types_is_that_of_its_json(script: Scripts) -> None:
    assert page("fastseq-types.md") == script("bench_fastseq").table_of_types(measured("fastseq-types.json"))


def test_the_page_of_transformers_tests_is_that_of_its_json(script: Scripts) -> None:
    assert page("fastseq-upstream.md") == script("transformers_tests").table(measured("fastseq-upstream.json"))


@pytest.mark.parametrize(("name", "tables"), [("decoder", "tables"), ("pruned", "table")])
def test_the_tables_of_the_studies_are_those_of_their_json(name: str, tables: str, script: Scripts) -> None:
    marked, study = script("marked"), script(f"study_{name}")
    text = page(f"study-{name}.md").split(marked.BEGIN)[1].split(marked.END)[0]
    assert text.split() == getattr(study, tables)(measured(f"study-{name}.json")).split()


def test_the_table_of_workloads_is_that_of_its_json(script: Scripts) -> None:
    marked, bench = script("marked"), script("bench_workloads")
    text = page("workloads-measured.md").split(marked.BEGIN)[1].split(marked.END)[0]
    assert text.split() == bench.tables(REPOSITORY / "docs/workloads.json").split()


def test_the_tables_about_trust_are_those_of_their_json(script: Scripts) -> None:
    marked, study = script("marked"), script("study_trust")
    text = page("trust-measured.md").split(marked.BEGIN)[1].split(marked.END)[0]
    assert text.split() == study.tables(measured("trust.json")).split()


def test_numbers_of_the_first_page_and_of_the_benchmarks_are_those_of_their_json(script: Scripts) -> None:
    marked, first = script("marked"), script("first_page")
    for name, found in {
        "../README.md": first.readme(measured("peers.json"), measured("workloads-amx.json")),
        "measured.md": first.benchmarks(measured("peers.json"), measured("peers-avx512.json")),
    }.items():
        assert page(name).split(marked.BEGIN)[1].split(marked.END)[0].strip() == found.strip()


def test_the_run_of_the_first_page_names_its_commit_date_and_processor(script: Scripts) -> None:
    found = script("first_page").first_run(measured("peers.json"))["conditions"]
    assert {"version", "date", "processor"} <= found.keys()
    assert re.fullmatch(r"[0-9a-f]{7,40}", found["version"]), "measured with changed code, or without a commit"


def test_commands_and_variables_are_those_of_the_program(script: Scripts) -> None:
    marked, made = script("marked"), script("reference_pages")
    for name, found in {"commands.md": made.command_tables(), "environment.md": made.environment_tables()}.items():
        assert page(name).split(marked.BEGIN)[1].split(marked.END)[0].strip() == found.strip()


def test_the_page_of_tested_models_is_that_of_the_models(script: Scripts) -> None:
    assert "\n".join(script("tested_models").architectures()).strip() in page("tested-models.md")


def test_the_tables_of_local_encoders_are_those_of_their_json(script: Scripts) -> None:
    marked, bench = script("marked"), script("bench_local")
    text = page("local.md").split(marked.BEGIN)[1].split(marked.END)[0]
    assert text.split() == bench.table(measured("local.json")).split()


def test_the_tables_of_served_models_are_those_of_their_json(script: Scripts) -> None:
    marked, bench = script("marked"), script("bench_served_models")
    text = page("served-models.md").split(marked.BEGIN)[1].split(marked.END)[0]
    results = map(measured, ("served-models.json", "served-models-amx.json"))
    assert text.split() == " ".join(map(bench.tables, results)).split()


def test_every_variable_that_the_code_reads_is_on_the_page() -> None:
    files = [file for place in ("attmemo", "profiler", "native") for file in (REPOSITORY / place).rglob("*")]
    text = "".join(file.read_text("utf-8") for file in files if file.suffix in (".py", ".c", ".h"))
    found = re.findall(r'(?:environ\.get|getenv|environ\.setdefault)\("([A-Z_]+)"|"(ATTMEMO_[A-Z_]+)"', text)
    names = {name for pair in found for name in pair if name}
    assert len(names) > 15
    assert not [name for name in names if f"`{name}`" not in page("environment.md")]


def test_the_table_of_prefixes_is_that_of_its_json(script: Scripts) -> None:
    marked, bench = script("marked"), script("bench_prefix")
    text = page("prefix.md").split(marked.BEGIN)[1].split(marked.END)[0]
    assert text.split() == bench.table(measured("prefix.json")).split()


@pytest.mark.parametrize("name", ["ngram", "ngram-gpu"])
def test_the_tables_of_ngrams_are_those_of_their_json(name: str, script: Scripts) -> None:
    text = page("fastseq-measured.md").split(f"[{name}.json]")[1].split(".json]")[0]
    assert script("bench_ngram").table(measured(f"{name}.json")["cases"]) in text


def test_the_tables_of_a_cpu_are_those_of_the_json(script: Scripts) -> None:
    bench, rows = script("bench_attention_op"), measured("attention-op.json")["rows"]
    for kind in ("float32", "bfloat16"):
        assert bench.table([row for row in rows if row["queries"] == kind]) in page("attention-op.md")
    assert bench.table_of_means(bench.mean_speedups(rows)) in page("attention-op.md")


@pytest.mark.parametrize("name", COPIES)
def test_what_a_figure_took_from_other_records_is_still_there(name: str, script: Scripts) -> None:
    run = script("paper.frame").Run(Path(), Path())
    found = json.loads(json.dumps(script("paper.registry").figure(name).measure(run)))
    kept = measured(f"paper/{name}.json")
    assert found == {key: kept[key] for key in found}
