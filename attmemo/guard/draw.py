"""How many answers are drawn to be verified: fewer where records supply much.

A drawn request is computed whole. Where a record leaves few of its rows to compute, a fixed share of drawn requests
takes as long as many served ones. So fewer are drawn there. The price: the guard sees a drift after more requests, and
times with few rows to compute have fewer samples than others.
"""

from __future__ import annotations

from typing import Final

ADDED: Final = 0.05
"""Time that drawn requests may add, as a share of the time without them, if a row takes the same everywhere."""
TAKES: Final = 2.0
"""Rows' worth of time that a drawn token takes. One is its own row. The other: its record's rows are computed too, the
rest of the model runs again, and what was computed is stored. Measured with a classifier of six layers, lines of 65
tokens, 32 at once."""
LEAST: Final = 0.005
"""The share that is always drawn, whatever it adds. Where lines differ from records in a number only, a fixed share of
.02 took a third of the time more, 32 at once."""
FORGETS: Final = 1 << 16
"""Tokens after which older ones count half."""


class Draw:
    """The share of requests that are verified although they could be served.

    Parameters
    ----------
    most : float
        The highest share, in [0, 1].
    added : float
        Time that drawn requests may add, as a share of the time without them.
    """

    def __init__(self, most: float, added: float = ADDED) -> None:
        self.most, self._added = most, added
        self._rows = self._drawable = self._seen = 0.0

    @property
    def share(self) -> float:
        """The share now."""
        if not self._drawable:
            return self.most
        return min(self.most, max(LEAST, self._added * self._rows / (TAKES * self._drawable)))

    def note(self, rows: int, drawable: int, tokens: int) -> None:
        """A batch had so many tokens.

        Parameters
        ----------
        rows : int
            Those to compute if all is served that may be.
        drawable : int
            Tokens of the sequences that may be drawn.
        tokens : int
            All of the batch.
        """
        if self._seen >= FORGETS:
            self._rows, self._drawable, self._seen = self._rows / 2, self._drawable / 2, self._seen / 2
        self._rows += rows
        self._drawable += drawable
        self._seen += tokens
