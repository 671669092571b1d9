"""Optional packages, and the command that installs them: attmemo itself is on no package index."""

from __future__ import annotations

from importlib.util import find_spec

from attmemo.errors import AttmemoError


def install(extra: str) -> str:
    """Return the command for an extra of ``pyproject.toml``, to be copied: the hint of an error."""
    return f"pip install '.[{extra}]'   # in a clone of attmemo"


def check_installed(extra: str, *packages: str) -> None:
    """Refuse what needs a package that is not there: an AttmemoError that names its extra. Nothing is loaded."""
    for name in packages:
        if find_spec(name) is None:
            raise AttmemoError(f"{name} is not installed.", install(extra))
