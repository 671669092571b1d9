"""A line on the terminal that is written anew while work goes on."""

from __future__ import annotations

import shutil
import sys
import time
from typing import Final

_EVERY: Final = 0.2  # seconds


class LiveLine:
    """The last line of standard error; nothing where it is no terminal.

    Parameters
    ----------
    quiet : bool
        Show nothing.
    """

    def __init__(self, quiet: bool) -> None:
        self._on = not quiet and sys.stderr.isatty()
        self._width, self._next = 0, 0.0

    def show(self, text: str) -> None:
        """Replace the line, cut to the terminal; too early after the last time, do nothing."""
        now = time.monotonic()
        if not self._on or now < self._next:
            return
        self._next = now + _EVERY
        text = text[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r{text:<{self._width}}")
        sys.stderr.flush()
        self._width = len(text)

    def close(self) -> None:
        """Take the line away."""
        if self._width:
            sys.stderr.write(f"\r{'':<{self._width}}\r")
            sys.stderr.flush()
            self._width = 0
