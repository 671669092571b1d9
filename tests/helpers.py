"""What tests of a builder that fails share: what it had published, and the system calls it fails at."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_db_tools import LENGTHS, Contents, contents, findings

SHORT = LENGTHS[:5]


@dataclass(frozen=True)
class Write:
    """A system call that changes a file, and was not made yet."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]

    def do(self) -> Any:
        return self.call(*self.arguments)

    def half(self) -> Any:
        """Of a `pwrite`: its first half."""
        fd, body, offset = self.arguments
        return self.call(fd, body[: len(body) // 2], offset)


def intercept_writes(patch: pytest.MonkeyPatch, instead: Callable[[Write], Any]) -> None:
    """From now on `instead` is called for every system call by which a builder changes a file."""

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: instead(Write(name, call, arguments))

    for name in ("pwrite", "fdatasync", "fsync", "ftruncate", "replace"):
        patch.setattr(os, name, wrapped(name, getattr(os, name)))


def check_published(path: Path, expected: Contents) -> int:
    """The database is the beginning of what was expected, and whole. The number of its records."""
    seen = contents(path)
    assert seen == {key: expected[key] for key in sorted(expected)[: len(seen)]}
    assert findings(path) == []
    return len(seen)
