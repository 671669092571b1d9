"""Every command of attmemo on the pages runs: with tiny models, on small files, in the pages' order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from command_line import succeed
from demos import make_small
from docs_tools import REPOSITORY, TEXTS, blocks, command_of, inline, shell_lines
from page_inputs import FILES, KINDS
from page_runs import SHORTER, Call, calls_of, run, serve_once

from attmemo import memoize, unmemoize
from attmemo.profiler.models import collate, load_model, tokenize

COMMANDS = {name: found for name, text in TEXTS.items() if (found := calls_of(shell_lines(text)))}
IN_BLOCKS = {call for found in COMMANDS.values() for call in found}


def is_on_another_page(name: str) -> bool:
    """Whether one other page has all commands of this one; of two equal pages the first one is run."""
    own = set(COMMANDS[name])
    return any(own < set(found) or (own == set(found) and other < name) for other, found in COMMANDS.items())


# -- commands in the text

ELSEWHERE = {
    ("drill", "MODEL"): "serve/test_drill.py", ("changes", "FILE"): "serve/test_serve_shadow.py",
    ("--install-completion",): "cli/test_completion.py",
}  # fmt: skip
"""Commands of the text that another test runs, with the test."""

NOT_RUN = {
    ("serve", "--dtype", "auto"): "an option, without the model that it is for; README.md has both",
    ("forget", "DB"): "refused without an option that says what goes; docs/privacy.md has each",
}
"""Commands of the text that are not run, with the reason. A new one runs, or gets a reason here."""


def is_form(call: Call) -> bool:
    """Whether it says what may be given, and is not to be typed."""
    return any(mark in word for word in call.words for mark in ("…", "...", "["))


def is_name(call: Call) -> bool:
    """Whether it names a command that cannot be run without more words."""
    command, rest = command_of(list(call.words))
    return not rest and (hasattr(command, "commands") or any(one.required for one in command.params))


def commands_in_the_text() -> dict[Call, str]:
    """Commands that a reader could type, and no block has; with the first page of each."""
    found: dict[Call, str] = {}
    for name, text in TEXTS.items():
        for call in calls_of(inline(text)):
            if call not in IN_BLOCKS and not is_form(call) and not is_name(call):
                found.setdefault(call, name)
    return found


IN_TEXT = commands_in_the_text()
RUN_HERE = [call for call in IN_TEXT if call.words not in (*ELSEWHERE, *NOT_RUN)]

# -- what is there before

NEEDS = {
    "docs/fastseq.md": ("sacrebleu",), "docs/paper.md": ("rouge_score",), "docs/peers.md": ("matplotlib",),
    "docs/use.md": ("jinja2", "matplotlib", "sklearn"),
}  # fmt: skip
"""Packages of extras without which a page cannot run."""


def fill(model: str, database: str, lines: list[str], namespace: str | None = None) -> None:
    """Have a served model begin a database that fills itself, with a namespace in it if that has a name."""
    loaded = load_model(model)
    served: Any = loaded.model
    memoize(served, database=database, budget=0.01, tokenizer=loaded.tokenizer, gate=False)
    inputs = collate(loaded, tokenize(loaded, lines, 48))
    with torch.no_grad():
        served(**inputs)
        if namespace is not None:
            with served.attmemo.namespace(namespace):
                served(**inputs)
    assert served.attmemo.flush()
    unmemoize(served)


def prepare_privacy(model: str, lines: list[str]) -> None:
    fill(model, "DB", [*lines[:20], "user jane doe logged in"], "tenant-a")
    fill(model, "OTHER", lines[10:30])


def prepare_tutorial(model: str, lines: list[str]) -> None:
    fill(model, "sshd-rows", lines[:20])


def prepare_scale(model: str, _: list[str]) -> None:
    """The other machines do what the page shows for the first one."""
    for number in (2, 3):
        succeed(
            "build-database", "--reuse", "rows", "--model", model, "--data", "year.log", "--shard", f"{number}/8",
            "--output", f"SHARD-{number}",
        )  # fmt: skip


PREPARED: dict[str, Callable[[str, list[str]], None]] = {
    "docs/privacy.md": prepare_privacy, "docs/tutorial.md": prepare_tutorial, "docs/scale.md": prepare_scale,
}  # fmt: skip
"""What is there before the first command of a page: databases that services, the page's Python, or others made."""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("page", [name for name in COMMANDS if not is_on_another_page(name)])
def test_every_command_of_a_page_runs_behind_those_before_it(
    page: str, models: dict[str, str], log_lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS.get(page, ()):
        pytest.importorskip(package)
    make_small(monkeypatch, models["/models/minilm"])
    answered = serve_once(monkeypatch)
    if page in PREPARED:
        PREPARED[page](models["MODEL"], log_lines)
    for call in COMMANDS[page]:
        run(call, models)
        if call.words[0] == "serve":
            assert answered.pop() == (200, 200), call
    assert not answered


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("call", RUN_HERE, ids=lambda call: " ".join(call.words))
def test_a_command_in_the_text_of_a_page_runs(
    call: Call, models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in NEEDS.get(IN_TEXT[call], ()):
        pytest.importorskip(package)
    answered = serve_once(monkeypatch)
    run(call, models)
    assert answered == [(200, 200)] * (call.words[0] == "serve")


def test_no_command_is_left_out() -> None:
    assert {call for name in COMMANDS if not is_on_another_page(name) for call in COMMANDS[name]} == IN_BLOCKS
    assert len(IN_BLOCKS) >= 25
    assert Call(("doctor",), (("ATTMEMO_WITHOUT", "amx avx512"),)) in IN_BLOCKS
    assert len(RUN_HERE) >= 8


def test_commands_of_the_text_that_are_not_run_here_still_stand_there() -> None:
    words = {call.words for call in IN_TEXT}
    assert ELSEWHERE.keys() | NOT_RUN.keys() <= words
    assert not ELSEWHERE.keys() & NOT_RUN.keys()
    for command, test in ELSEWHERE.items():
        text = (REPOSITORY / "tests" / test).read_text(encoding="utf-8")
        assert f'succeed("{command[0]}", ' in text or f"{{ATTMEMO}}' {command[0]} " in text, test


def test_what_is_replaced_or_added_still_stands_on_a_page(models: dict[str, str]) -> None:
    """Names that no page has any more would hide that a page names something else by now."""
    every = [call.words for call in (*IN_BLOCKS, *IN_TEXT)]
    words = {word for call in every for word in call}
    code = "".join(code for text in TEXTS.values() for code, _ in blocks(text))
    named = {*FILES, *models, *KINDS} - set(KINDS.values())
    assert not [name for name in sorted(named) if name not in words and name not in code]
    assert not [begin for begin in SHORTER if not any(call[: len(begin)] == begin for call in every)]
    assert PREPARED.keys() <= COMMANDS.keys()
    assert NEEDS.keys() <= COMMANDS.keys() | set(IN_TEXT.values())
