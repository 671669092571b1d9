"""What a guard has proven holds under the rules that it was proven under."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from families import FAMILIES
from guarded import BASE, guarded, run

from attmemo import unmemoize
from attmemo.guard.margin import Scale
from attmemo.guard.rules import digest_of_rules


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [("guard.known_changes", "NUMBERS", 3), ("guard.known_changes", "WORDS", 5), ("guard.known_changes", "PENALTY", 1),
     ("guard.guard", "TRIED", 5), ("guard.guard", "DRAWN", 0.02), ("rows.index", "TRIED", 9),
     ("guard.margin", "VECTORS", Scale("margin", (0.9, 0.95), 1, 0.0)),
     ("guard.certificate", "_PARTS", np.geomspace(0.1, 0.9, 24)), ("rows.serve", "DRIFT", 0.5),
     ("kernels.align", "LONG", 4), ("", "__version__", "0.0.0+another")],
)  # fmt: skip
def test_another_rule_or_version_begins_a_certificate_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, value: Any
) -> None:
    bare = FAMILIES["BERT"].make()

    def requests() -> int:
        model = guarded(bare, None, fill=tmp_path, max_bytes=1 << 24)
        before = model.attmemo.stats()["guard"]["requests"]
        run(model, BASE)
        unmemoize(model)
        return int(before)

    assert requests() == 0
    with monkeypatch.context() as patched:
        patched.setattr(f"attmemo.{module}.{name}".replace("..", "."), value)
        assert requests() == 0
        assert requests() == 6
    assert requests() == 6, "what was learned under the former rules is there"


def test_the_rules_have_the_same_digest_in_every_process() -> None:
    code = "from attmemo.guard.rules import digest_of_rules; print(digest_of_rules())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert told.stdout.strip() == digest_of_rules()
