"""Types in docstrings stay as written: griffe takes ``path-like`` for a difference, and drops words behind ``}``."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

CHOICES = re.compile(r"^( *[\w, ]+ : )\{([^}\n]*)\}(.*)$", re.MULTILINE)


class Types(Extension):
    """Writes such types in a way that is no Python, so that they are shown as words."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            text = CHOICES.sub(r"\1one of \2\3", obj.docstring.value)
            obj.docstring.value = text.replace("path-like", "path\N{NON-BREAKING HYPHEN}like")
