"""What tests of the profiler share: later lines of the same services."""

from __future__ import annotations

from pathlib import Path

import pytest

from attmemo.profiler.logs import generate_log


@pytest.fixture(scope="module")
def later(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Lines of the same services that are not in the database, to tune on and to ask."""
    folder = tmp_path_factory.mktemp("later")
    lines = list(generate_log(700, seed=5))
    files = {"tune": lines[300:420], "ask": lines[500:600]}
    for name, part in files.items():
        (folder / f"{name}.log").write_text("".join(f"{line}\n" for line in part))
    return {name: folder / f"{name}.log" for name in files}
