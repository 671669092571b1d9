"""The margin: how far the best class of a served answer must be ahead of the second best, or how near a vector must
be to the record's own answer.

An answer below the margin is computed again, exactly. These answers are samples too: they say what would have changed
below the margin, so they choose it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np
from scipy.special import gammaincinv  # type: ignore[import-untyped,unused-ignore]

STEPS: Final = (0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97)
"""Margins between probabilities that can be chosen."""
FIRST: Final = 3
"""The step before anything is known: 0.5."""
SURE: Final = 0.9
"""Least margin where a word stands in a free slot."""
COSINES: Final = (0.93, 0.95, 0.965, 0.975, 0.98, 0.985, 0.99, 0.995)
"""Cosines to the record's own answer that can be chosen."""
FIRST_COSINE: Final = 3
"""The step before anything is known: 0.975."""
SHARE: Final = 0.5
"""Share of the budget that answers below the first margin may take, once they are served."""
SURENESS: Final = 0.9
"""How sure it must be that these take no more."""
SEEN: Final = 10
"""Answers between two steps that must be seen before the margin is lowered to the lower step."""
TOP: Final = "margin_top"
"""Name of the highest step in use, among the counts."""


class Margin:
    """The least margin of a served answer.

    Parameters
    ----------
    budget : float
        Share of answers that may change.
    vectors : bool
        Whether answers are vectors. Then the margin is the cosine to the record's own answer: an answer that moved far
        from it was moved by rows that were computed, and those that were not computed should have moved too.
    """

    def __init__(self, budget: float, vectors: bool = False) -> None:
        self._budget = budget
        self._steps = np.array(COSINES if vectors else STEPS)
        self._first = self._top = FIRST_COSINE if vectors else FIRST
        self._sure = 0.0 if vectors else SURE
        self._seen, self._changed = np.zeros((2, len(self._steps)), np.int64)  # by the highest step that is reached
        self.least = float(self._steps[self._top])

    def least_for(self, freely: bool) -> float:
        """The least margin; `freely`: a word stands in a free slot."""
        return max(self.least, self._sure) if freely else self.least

    def sample(self, margin: float, changed: bool, requests: int) -> None:
        """An answer below the margin was computed again; `requests` were made so far."""
        step = int(np.searchsorted(self._steps, margin, side="right")) - 1
        if step < 0:
            return
        self._seen[step] += 1
        self._changed[step] += changed
        self._choose(requests)

    def _choose(self, requests: int) -> None:
        allowed = SHARE * self._budget * requests
        step = self._top
        while step and self._seen[step - 1] >= SEEN:
            changed = int(self._changed[step - 1 : self._top].sum())
            if gammaincinv(changed + 1, SURENESS) > allowed:  # the highest mean of a Poisson count of so many
                break
            step -= 1
        self.least = float(self._steps[step])

    def counts(self) -> dict[str, float]:
        """What was seen, by step."""
        return {
            f"margin_{name}_{step}": float(count)
            for name, column in (("seen", self._seen), ("changed", self._changed))
            for step, count in enumerate(column)
        } | {TOP: float(self._top)}

    def adopt(self, counts: Mapping[str, float], requests: int) -> None:
        """Go on from these counts."""
        for name, column in (("seen", self._seen), ("changed", self._changed)):
            for step in range(len(self._steps)):
                column[step] = int(counts.get(f"margin_{name}_{step}", 0))
        self._top = int(counts.get(TOP, self._first))
        self._choose(requests)

    def rise(self) -> None:
        """Ask for more from now on: too many answers changed."""
        self._top = min(self._top + 1, len(self._steps) - 1)
        self.least = float(self._steps[self._top])
        self._seen[:] = self._changed[:] = 0
