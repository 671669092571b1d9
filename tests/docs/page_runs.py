"""Runs of the commands that pages show: with tiny models, on small files, and a service that ends by itself."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable
from itertools import takewhile
from typing import Any, NamedTuple

import pytest
from command_line import succeed
from docs_tools import REPOSITORY, calls
from page_inputs import KINDS, MORE
from services import ask, until

SHORTER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("serve",): ("--port", "0"),
    ("advise",): ("--seconds", "0"),
    ("evaluate",): ("--repeats", "1"),
    ("train-embedder",): ("--steps", "2"),
    ("bench", "peers", "MODEL", "FILE", "--batch"): ("--lines", "40", "--sample", "16"),
    ("bench", "peers", "MODEL", "FILE"): (
        "--lines", "40", "--sample", "16", "--batch", "4", "--paths", "stock,none",
    ),
    ("generate",): ("--max-new-tokens", "6"),
}  # fmt: skip
"""Options that are given too, by how a command begins: the first that fits. A value that comes last counts."""


class Call(NamedTuple):
    """A command of a page: what stands behind `attmemo`, and the variables that are set in front of it."""

    words: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()


def calls_of(lines: Iterable[str]) -> list[Call]:
    """The calls of attmemo in lines, in their order."""
    found = []
    for line in lines:
        for words in calls(iter([line])):
            before = takewhile(lambda word: word != "attmemo", shlex.split(line, comments=True))
            variables = [word.partition("=") for word in before if "=" in word]
            found.append(Call(tuple(words), tuple((name, value) for name, _, value in variables)))
    return found


def serve_once(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Have `attmemo serve` end after two requests; the status of each is in what is returned, a pair for a service."""
    import uvicorn

    answered: list[tuple[int, int]] = []

    def run(server: Any, sockets: Any) -> None:
        thread = threading.Thread(target=uvicorn.Server.run, args=(server, sockets), daemon=True)
        thread.start()
        try:
            until(lambda: server.started or not thread.is_alive())
            url = f"http://127.0.0.1:{sockets[0].getsockname()[1]}"
            answered.append((ask(f"{url}/health", None).status, ask(f"{url}/", {"inputs": MORE[0]}).status))
        finally:
            server.should_exit = True
            thread.join(60)

    monkeypatch.setattr("attmemo.serve.server.Server.run", run)
    monkeypatch.setattr("attmemo.serve.logs.write_logs", lambda *_: None)  # it would stay so for other tests
    return answered


def run(call: Call, models: dict[str, str]) -> None:
    """Run a command of a page; it must succeed."""
    known = models | {"FILE": "FILE.log"}
    for word, kind in KINDS.items():
        if word in call.words:
            known["MODEL"] = models[kind]
    begins = (more for begin, more in SHORTER.items() if call.words[: len(begin)] == begin)
    words = [*(known.get(word, word) for word in call.words), *next(begins, ())]
    if not call.variables:
        succeed(*words)
        return
    done = subprocess.run(  # a variable may be read when a library is loaded
        [sys.executable, "-m", "attmemo", *words], env={**os.environ, **dict(call.variables)}, cwd=REPOSITORY,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
