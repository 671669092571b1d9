"""Completion of the command line in the user's shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ATTMEMO = Path(sys.executable).with_name("attmemo")


@pytest.mark.skipif(not ATTMEMO.exists(), reason="attmemo is not installed beside this Python")
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_completion_is_installed_for_the_shell_and_completes_the_names_of_commands(tmp_path: Path) -> None:
    home = os.environ | {"HOME": str(tmp_path)}
    # Two commands: of one alone bash becomes that command, and there is no shell to be found.
    subprocess.run(
        ["bash", "-c", f"'{ATTMEMO}' --install-completion && echo done"], env=home, check=True, capture_output=True,
        timeout=300,
    )  # fmt: skip
    written = [file.read_text(encoding="utf-8") for file in tmp_path.rglob("*") if file.is_file()]
    assert any("_ATTMEMO_COMPLETE=complete_bash" in text for text in written)
    asked = {"_ATTMEMO_COMPLETE": "complete_bash", "COMP_WORDS": "attmemo build-d", "COMP_CWORD": "1"}
    done = subprocess.run([ATTMEMO], env=home | asked, check=True, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["build-database"]
