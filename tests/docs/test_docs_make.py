"""Jobs of make on the pages: the list is that of the Makefile, and what a job would run holds together."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

import pytest
from docs_tools import REPOSITORY, calls, check_parse, every_command

JOBS = sorted(set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)))
SETTINGS = {"LOG", "MAKEFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MFLAGS", "OUTPUT", "PYTHON"}
"""Variables of a make that runs these tests: they are not handed on."""
GIVEN = {"LOG=": [], "LOG=my.log": ["my.log"], "LOG=-": ["--stdin"]}
"""What `make demo` gives the program, by the setting."""


def make(*words: str) -> str:
    """What make prints in the repository."""
    program = shutil.which("make")
    if program is None:
        pytest.skip("make is not installed")
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS} | {"LC_ALL": "C"}
    done = subprocess.run(
        [program, "--no-print-directory", *words], cwd=REPOSITORY, env=kept, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_that_a_page_names_is_in_the_makefile() -> None:
    found = {words[1:]: page for words, page in every_command().items() if words[0] == "make"}
    assert len(found) > 5
    assert not [(page, job) for job, page in found.items() if len(job) != 1 or job[0] not in JOBS]


def test_make_help_lists_every_job() -> None:
    _, *lines = make("help").splitlines()
    assert sorted(line.split()[0] for line in lines) == JOBS
    assert all(len(line.split()) > 1 for line in lines)


@pytest.mark.parametrize("job", JOBS)
def test_the_shell_of_a_job_can_be_read(job: str) -> None:
    printed = make("--dry-run", job)
    read = subprocess.run(["bash", "-n"], input=printed, capture_output=True, text=True, timeout=60, check=False)
    assert read.returncode == 0, read.stderr


@pytest.mark.parametrize("job", JOBS)
def test_tests_that_a_job_names_are_there(job: str) -> None:
    named = re.findall(r"\btests/[\w/]+\.py\b", make("--dry-run", job))
    assert named or job not in ("sanitize", "sanitize-threads", "test-oldest", "test-slow")
    assert not [file for file in named if not (REPOSITORY / file).is_file()]


@pytest.mark.parametrize("setting", GIVEN)
def test_the_demo_of_make_is_a_call_that_attmemo_takes(setting: str) -> None:
    printed = make("--dry-run", "demo", setting)
    (call,) = calls(f"attmemo {rest}" for rest in re.findall(r"^\S+/attmemo (.+)$", printed, re.MULTILINE))
    check_parse(call)
    assert call == ["demo", *GIVEN[setting], "--output", "demo-output"]
