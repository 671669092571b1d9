"""Each command of a page is run by a test, or is tried as far as a test can, or is left out for a reason given here.

A new command on a page belongs to none of the three, and fails until one is chosen for it.
"""

from __future__ import annotations

import re
from itertools import chain

import pytest
from docs_tools import FENCED, PROGRAMS, REPOSITORY, SHELL, TEXTS, every_command, is_command, split, typed

RUN: dict[str, str] = {
    r"(?:\w+=.+ )?attmemo .+": "docs/test_commands_run.py::test_every_command_of_a_page_runs_behind_those_before_it",
    r"python -m attmemo": "docs/test_commands_run.py::test_every_command_of_a_page_runs_behind_those_before_it",
    r"curl .+": "docs/test_docs_commands.py::test_calls_of_curl_get_an_answer_from_a_service",
    r"MODEL=\$\(python -c .+\)": "docs/test_docs_commands.py::test_the_tutorial_finds_the_model_of_the_package",
    r"make help": "docs/test_docs_make.py::test_make_help_lists_every_job",
    r"python scripts/(?:reference_pages|result_pages|tested_models)\.py": (
        "docs/test_docs_generated.py::test_the_command_that_makes_pages_changes_none"
    ),
    r"python scripts/audit_service\.py URL N": (
        "docs/test_docs_commands.py::test_an_audit_of_a_service_on_this_machine_runs_as_the_page_says"
    ),
    r"python examples/continuous_batching\.py FOLDER": (
        "fastseq/test_ops_serving.py::test_the_example_says_what_it_measured"
    ),
}  # fmt: skip
"""Commands that a test runs, with the test."""

TRIED: dict[str, tuple[str, str]] = {
    r"make [a-z-]+": (
        "docs/test_docs_make.py::test_the_shell_of_a_job_can_be_read", "jobs take minutes, download, or run this test"
    ),
    r"python scripts/\S+(?: .+)?": (
        "docs/test_docs_scripts.py::test_a_script_takes_the_words_that_a_page_gives_it",
        "it measures for minutes or hours, on texts and models that are not in the repository",
    ),
    r"\.venv/bin/python -m pytest .+": (
        "docs/test_docs_scripts.py::test_a_call_of_pytest_finds_tests", "these tests run anyway, or take minutes"
    ),
    r"\.venv/bin/python setup\.py build_ext --inplace": (
        "docs/test_docs_scripts.py::test_the_command_that_compiles_in_place_has_its_options",
        "it would write over the modules that the tests have loaded",
    ),
    r"python -m build": (
        "house/test_wheel.py::test_the_source_distribution_has_every_file_that_is_compiled",
        "it downloads; the same backend makes both there, without a network",
    ),
    r"pip install \.(?:\[[a-z,]+\])?": (
        "docs/test_docs_commands.py::test_what_pip_installs_is_an_extra_of_the_project",
        "it downloads; house/test_wheel.py installs what has no dependencies",
    ),
}
"""Commands of which a test runs a part, with the test, and why no more."""

NOT_RUN: dict[str, str] = {
    r"pip install torch --index-url \S+": "it downloads torch",
    r"pip install openvino nncf onnxruntime onnx onnxscript": "it downloads other runtimes",
    r"CMAKE_ARGS=.+ pip install llama-cpp-python gguf": "it downloads and compiles another runtime",
    r"pip wheel hnswlib": "it downloads and compiles another package",
    r"apt-get install build-essential": "it needs root and a network",
    r"auditwheel repair": "a name in a sentence; make wheel gives it its options, and downloads it",
    r"docker build -f deploy/Dockerfile -t attmemo \.": "it downloads; test_deploy_runs.py runs what the image starts",
    r"MODEL=\S+ docker compose -f deploy/compose\.yaml up": (
        "it builds the image; house/test_serve_deploy.py has docker read the file"
    ),
    r"kubectl apply -f deploy/kubernetes\.yaml": "it needs a cluster; test_deploy_runs.py runs what a pod starts",
    r"kubectl create secret generic attmemo --from-literal=key=…": "it needs a cluster",
}
"""Commands that no test runs, with the reason."""


def commands_of_deploy() -> dict[str, str]:
    """Commands in the comments of deploy/, with the file."""
    pattern = re.compile(r"^#.*?((?:[A-Z_]+=\S+ )*(?:docker|helm|kubectl|systemctl) .+)$", re.MULTILINE)
    files = sorted((REPOSITORY / "deploy").iterdir())
    return {line: file.name for file in files for line in pattern.findall(file.read_text(encoding="utf-8"))}


COMMANDS = {" ".join(words): page for words, page in every_command().items()} | commands_of_deploy()


def rule_of(command: str) -> str | None:
    """The first pattern that a command fits."""
    return next((rule for rule in chain(RUN, TRIED, NOT_RUN) if re.fullmatch(rule, command, re.DOTALL)), None)


def test_every_command_is_run_or_has_a_reason_why_it_is_not() -> None:
    assert len(COMMANDS) > 80
    unknown = {command: page for command, page in COMMANDS.items() if rule_of(command) is None}
    assert not unknown, "run each in a test and name that test in RUN or TRIED, or give a reason in NOT_RUN"


def test_no_rule_outlives_its_commands() -> None:
    assert {*RUN, *TRIED, *NOT_RUN} == {rule_of(command) for command in COMMANDS}


def test_the_tests_that_run_commands_are_there() -> None:
    for place in (*RUN.values(), *(place for place, _ in TRIED.values())):
        file, test = place.split("::")
        assert f"def {test}(" in (REPOSITORY / "tests" / file).read_text(encoding="utf-8"), place


def test_a_block_is_shell_that_is_typed_or_python_that_runs_or_what_they_print() -> None:
    for page, text in TEXTS.items():
        for language, block in FENCED.findall(text):
            assert language in (*SHELL, "python", "text"), page
            first = {line.split()[0] for line in block.splitlines() if language == "text" and line.strip()}
            assert not first & PROGRAMS, f"{page}: a command stands in a block of text"


@pytest.mark.parametrize(
    "text", [
        "```sh\nattmemo doctor\nfrobnicate --all\n```", "```\n$ docker ps   # all\n```", "Type `pip install numpy`.",
        "See `X=1 scripts/new.py --fast`.", "`./tools/run.sh now`", "`git push`",
    ]
)  # fmt: skip
def test_a_new_command_is_found(text: str) -> None:
    code = [*typed(text), *filter(is_command, re.findall(r"(?<!`)`([^`]+)`(?!`)", text))]
    assert [command for command in code if rule_of(" ".join(split(command) or ())) is None]


@pytest.mark.parametrize("code", ["pip", "docs/install.md", "kill -9", "make_cache(model)", "a 'quote", "N=8", "…"])
def test_names_and_numbers_are_no_commands(code: str) -> None:
    assert not is_command(code)
