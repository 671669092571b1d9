"""How many answers are drawn to be verified, so that verifying never slows requests down by much.

A drawn request is computed whole, where a record would leave few of its rows to compute. Where records supply nearly
everything, a fixed share of such requests would take most of the time. So fewer are drawn there, and the guard sees a
drift after more requests.
"""

from __future__ import annotations

from typing import Final

ADDED: Final = 0.05
"""Rows that drawn requests may add, for each row that is computed without them. Verified answers take time beside
their rows too: the rest of the model runs again for them."""
LEAST: Final = 0.002
"""The share that is drawn whatever the rows: without samples a drift is not seen."""
FORGETS: Final = 1 << 16
"""Tokens after which older ones count half."""


class Draw:
    """The share of the answers to be served that are verified instead.

    Parameters
    ----------
    most : float
        The highest share, in [0, 1].
    added : float
        Rows that drawn requests may add, for each row that is computed without them.
    """

    def __init__(self, most: float, added: float = ADDED) -> None:
        self.most, self._added = most, added
        self._rows = self._tokens = 0.0

    @property
    def share(self) -> float:
        """The share now."""
        allowed = self._added * self._rows
        return self.most if self.most * self._tokens <= allowed else min(max(allowed / self._tokens, LEAST), self.most)

    def note(self, rows: int, tokens: int) -> None:
        """So many rows of a batch have to be computed if nothing is drawn; so many tokens are of what could be."""
        if self._tokens >= FORGETS:
            self._rows, self._tokens = self._rows / 2, self._tokens / 2
        self._rows += rows
        self._tokens += tokens
