"""Real texts and trained models beside the repository, or a skip that names what is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[2].parent / "shared"


def shared(relative: str) -> Path:
    """A file or folder of the shared data, or a skip that names it."""
    path = SHARED / relative
    if not path.exists():
        pytest.skip(f"../shared/{relative} not present")
    return path
