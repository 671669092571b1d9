"""Run mypy over the package as it is installed: with `profiler/` as `attmemo.profiler`.

mypy reads folders, not setup.py's `package_dir`; so the tree is put together from symbolic links, in a temporary
folder, and checked there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "attmemo"
        package.mkdir()
        for entry in (ROOT / "attmemo").iterdir():
            (package / entry.name).symlink_to(entry)
        (package / "profiler").symlink_to(ROOT / "profiler")
        command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "-p", "attmemo"]
        return subprocess.run(
            [*command, "--cache-dir", str(ROOT / ".mypy_cache")],
            cwd=folder,
            env=os.environ | {"MYPYPATH": folder},
            check=False,
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
