"""Logs, and a database that the commands made of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from command_line import succeed

from attmemo.profiler.logs import generate_log


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory, service_log: Path) -> dict[str, Path]:
    """Lines to build from, and later ones of the same services to tune on and to ask."""
    folder = tmp_path_factory.mktemp("logs")
    lines = list(generate_log(700, seed=5))
    files = {"build": service_log}
    for name, part in (("tune", lines[300:500]), ("ask", lines[500:])):
        files[name] = folder / f"{name}.log"
        files[name].write_text("".join(f"{line}\n" for line in part))
    return files


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_bert: str, logs: dict[str, Path]) -> Path:
    """A database that was built and trained; tests that change one take a copy."""
    path = tmp_path_factory.mktemp("database") / "db"
    out = succeed("build-database", "--model", tiny_bert, "--data", logs["build"], "--output", path)
    assert f"attmemo train-embedder {path}" in out
    out = succeed("train-embedder", path, "--steps", "0", "--backend", "flat", "--no-profile")
    assert f"attmemo tune {path}" in out
    return path


@pytest.fixture
def database(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained database."""
    return Path(shutil.copytree(trained, tmp_path / "db"))
