"""Documents and what is read of them: commands, Python that runs, tables, and numbers at the printed precision."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import dropwhile
from pathlib import Path
from typing import Any

import typer

from attmemo.cli.app import app

REPOSITORY = Path(__file__).parents[2]
DOCS = REPOSITORY / "docs"
README = REPOSITORY / "README.md"
ISSUES = ".github/ISSUE_TEMPLATE"
BESIDE = (
    "README.md", "CONTRIBUTING.md", "ARCHITECTURE.md", "SECURITY.md", "attmemo/models/README.md", f"{ISSUES}/bug.md",
    f"{ISSUES}/family.md",
)  # fmt: skip
DOCUMENTS = [*(REPOSITORY / name for name in BESIDE), *sorted(DOCS.glob("**/*.md"))]
TEXTS = {path.relative_to(REPOSITORY).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
NUMBER = re.compile(r"(?<![\w.])[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+|(?<=\d))(?!\.?\d)(?!,\d{3})")
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^ *```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "shell", "console")
"""Languages of the blocks that a reader types."""
ENDS = {"|", "||", "&&", ";", ">", ">>", "<", "2>", "2>&1", "&"}
PROGRAMS = {
    "apt", "apt-get", "attmemo", "auditwheel", "bash", "cp", "curl", "docker", "git", "helm", "kubectl", "make",
    "mkdir", "mkdocs", "mypy", "numactl", "pip", "podman", "promtool", "pytest", "python", "python3", "ruff", "sudo",
    "systemctl", "tar", "taskset", "uv", "uvicorn", "wget",
}  # fmt: skip
"""What the text of a page tells a reader to run begins with one of these, or with the path of a program."""
ROOT: Any = typer.main.get_command(app)


def page(name: str) -> str:
    """The text of a page."""
    return (DOCS / name).read_text(encoding="utf-8")


def section(text: str, heading: str) -> str:
    """A section of a page, with those below it."""
    start = text.index(f"\n## {heading}\n") + 1
    end = text.find("\n## ", start)
    return text[start : len(text) if end < 0 else end + 1]


@cache
def measured(name: str) -> Any:
    """What a JSON file beside the pages holds."""
    return json.loads((DOCS / name).read_text(encoding="utf-8"))


# -- commands of any program


def split(command: str) -> list[str] | None:
    """The words of a command, without its comment; None while a quote is open."""
    try:
        return shlex.split(command, comments=True)
    except ValueError:
        return None


def typed(text: str) -> Iterator[str]:
    """The commands of all blocks of shell, without prompts; one that takes several lines is whole."""
    for language, block in FENCED.findall(text):
        begun = ""
        for line in block.replace("\\\n", " ").splitlines() if language in SHELL else ():
            begun = f"{begun}\n{line}" if begun else line.strip().removeprefix("$ ")
            words = split(begun)
            if words is None:
                continue
            if words:
                yield begun
            begun = ""
        assert not begun, f"a quote is not closed: {begun}"


def shell_lines(text: str) -> Iterator[str]:
    """Lines of all code blocks of shell or of no language, without prompts; continued lines are joined."""
    for language, block in FENCED.findall(text):
        if language in (*SHELL, "text"):
            for line in block.replace("\\\n", " ").splitlines():
                yield line.strip().removeprefix("$ ")
    for line in re.findall(r"^(?: {4}|\t)(attmemo .*)$", text, re.MULTILINE):
        yield line


def inline(text: str) -> Iterator[str]:
    """All code in single backticks, outside fenced blocks."""
    outside = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
    for code in re.findall(r"`([^`]+)`", outside):
        yield " ".join(code.split())


def is_command(code: str) -> bool:
    """Whether code is a program with words behind it, maybe with variables that are set in front."""
    words = list(dropwhile(lambda word: re.match(r"[A-Z_]+=", word), split(code) or ()))
    path = r"\.?/?(?:[\w.-]+/)*(?:bin/\w+|\w+\.(?:py|sh))"
    return len(words) > 1 and (words[0] in PROGRAMS or re.fullmatch(path, words[0]) is not None)


@cache
def every_command() -> dict[tuple[str, ...], str]:
    """The words of every command of the pages, in blocks and in the text, with a page that has it."""
    found: dict[tuple[str, ...], str] = {}
    for name, text in TEXTS.items():
        for command in (*typed(text), *filter(is_command, inline(text))):
            found.setdefault(tuple(split(command) or ()), name)
    return found


# -- calls of attmemo


def calls(lines: Iterator[str]) -> Iterator[list[str]]:
    """The arguments of every call of attmemo, without redirections and pipes."""
    for line in lines:
        if not re.search(r"\battmemo [a-z-]", line):
            continue
        words = split(line)
        call: list[str] | None = None
        for word in [*(words or ()), ";"]:
            ended = word in ENDS or word.endswith(";")
            if call is None:
                call = [] if word == "attmemo" else None
            elif ended:
                yield call + ([word[:-1]] if word not in ENDS else [])
                call = None
            else:
                call.append(word)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the other words."""
    command, rest = ROOT, list(words)
    while rest and rest[0] in getattr(command, "commands", {}):
        command = command.commands[rest.pop(0)]
    return command, rest


def check_options(words: list[str]) -> None:
    """The command exists and has every option; values may be missing, or be placeholders."""
    command, rest = command_of(words)
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help", "-h",
    }  # fmt: skip
    if hasattr(command, "commands"):
        assert not rest or rest[0].startswith("-"), f"no command {' '.join(words)!r}"
    for word in (word.strip("[]()") for word in rest):
        if re.match(r"--?[a-z]", word):
            assert word.split("=")[0] in known, f"attmemo {' '.join(words)}: no option {word}"


def check_parse(words: list[str]) -> None:
    """The command line accepts the call: every value has its type, nothing is missing and nothing is left."""
    command, rest = command_of(words)
    check_options(words)
    if {"--help", "-h", "--version"} & set(rest):
        return
    command.make_context("attmemo", rest).close()


# -- Python that runs, in order, in one namespace


def blocks(text: str) -> Iterator[tuple[str, str | None]]:
    """Every block of Python with the output that the page shows right behind it, if it shows one."""
    found = [(match[1], match[2], match.start(), match.end()) for match in BLOCK.finditer(text)]
    for i, (language, code, _, end) in enumerate(found):
        if language == "python":
            behind = found[i + 1] if i + 1 < len(found) else None
            shows = behind is not None and behind[0] == "text" and not text[end : behind[2]].strip()
            yield code, behind[1] if shows and behind is not None else None


def run(name: str, names: dict[str, Any], part: str | None = None, **other: str) -> list[tuple[str, str | None]]:
    """What each block of a page, or of one `part` of it, printed, and what the page shows.

    `names` are there before the first block. The code of the page is changed by `other` only: text by other text.
    """
    outputs = []
    text = page(name)
    for code, shown in blocks(text if part is None else section(text, part)):
        for before, after in other.items():
            code = code.replace(before, after)
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), names)
        outputs.append((printed.getvalue(), shown))
    return outputs


# -- tables


def table_rows(text: str, header_start: str) -> list[list[str]]:
    """Cells of the first table at or after the text `header_start`, without its head."""
    lines = text[text.index(header_start) :].splitlines()
    start = next(number for number, line in enumerate(lines) if re.fullmatch(r"\|[-:| ]+\|", line)) + 1
    rows = list[list[str]]()
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")])
    return rows


def numbers(text: str) -> list[str]:
    """All numbers of a text as they are printed: "1,800 ms, .35" has "1,800" and ".35"."""
    return NUMBER.findall(text)
