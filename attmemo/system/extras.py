"""Optional packages, and the command that installs them: attmemo itself is on no package index."""

from __future__ import annotations


def install(extra: str) -> str:
    """Return the command for an extra of ``pyproject.toml``, to be copied: the hint of an error."""
    return f"pip install '.[{extra}]'   # in a clone of attmemo"
