"""The margin: how far the best class of a served answer must be ahead of the second best, or how near a vector must
be to the record's own answer.

An answer below the margin is computed again, exactly. These answers are samples too: they say what would have changed
below the margin, so they choose it. Answers in 8 bits have a margin, too (`attmemo.guard.linear_choice`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.special import gammaincinv  # type: ignore[import-untyped,unused-ignore]

Numbers = npt.NDArray[np.float64]

SHARE: Final = 0.5
"""Share of the budget that answers below the first margin may take, once they are served."""
SURENESS: Final = 0.9
"""How sure it must be that these take no more."""
SEEN: Final = 10
"""Answers from records between two steps that must be seen."""


@dataclass(frozen=True, slots=True)
class Scale:
    """What margins are, and which can be chosen.

    Attributes
    ----------
    name : str
        What the names of counts begin with.
    steps : tuple of float
        Margins that can be chosen, the lowest one first.
    first : int
        The step before anything is known.
    sure : float
        Least margin where words were never exchanged.
    seen : int
        Answers between two steps that must be seen before the margin is lowered to the lower step.
    """

    name: str
    steps: tuple[float, ...]
    first: int
    sure: float
    seen: int = SEEN

    @property
    def top(self) -> str:
        """Name of the highest step in use, among the counts."""
        return f"{self.name}_top"


CLASSES: Final = Scale("margin", (0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97), 3, 0.9)
"""How far the probability of the best class is ahead of the second best one's."""
VECTORS: Final = Scale("margin", (0.93, 0.95, 0.965, 0.975, 0.98, 0.985, 0.99, 0.995), 4, 0.0)
"""The cosine to the record's own answer. An answer that moved far from it was moved by rows that were computed, and
those that were not computed should have moved too."""
ROUNDED: Final = Scale("rounded", (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, math.inf), 7, 0.0, 0)
"""Of classes that 8-bit layers give; at the highest step all are computed exactly, at the lowest none."""


class Margin:
    """The least margin of a served answer.

    Parameters
    ----------
    budget : float
        Share of answers that may change.
    scale : Scale
    allows : callable, optional
        Whether answers may be served of which so many changed in so many requests. Default: they probably take their
        share of the budget at most.

    Attributes
    ----------
    least, least_freely : float
        The least margin; the same where a word was never exchanged for the record's.
    """

    def __init__(
        self, budget: float, scale: Scale = CLASSES, allows: Callable[[float, float], bool] | None = None
    ) -> None:  # fmt: skip
        self._budget, self.scale, self._allows = budget, scale, allows or self._is_likely
        self._steps, self._top, self._sure = np.array(scale.steps), scale.first, scale.sure
        # By the highest step that an answer reaches: answers seen, those that changed, and the requests in which an
        # answer there would have been seen.
        self._seen, self._changed, self._asked = np.zeros((3, len(self._steps)))
        self._take(self._top)

    def _take(self, step: int) -> None:
        """Ask for the margin of a step from now on."""
        self.least = float(self._steps[step])
        self.least_freely = max(self.least, self._sure)

    def request(self, below: float, above: float) -> None:
        """Count requests by how probably their answers would be seen below the margin, and above: sums of both."""
        least = int(np.searchsorted(self._steps, self.least))
        self._asked[:least] += below
        self._asked[least:] += above

    def sample(self, margin: float, changed: bool) -> None:
        """An answer with a verified change was computed exactly too."""
        step = int(np.searchsorted(self._steps, margin, side="right")) - 1
        if 0 <= step < self._top:
            self._seen[step] += 1
            self._changed[step] += changed
            self._choose()

    def _choose(self) -> None:
        """Lower the margin while the answers between it and the highest one change seldom enough.

        Answers above the margin are seen seldom, those below it always. So rates are compared, not counts: each step
        has requests of its own, and all rates are told in those of the step with the fewest.
        """
        step = self._top
        while step and self._seen[step - 1] >= self.scale.seen:
            asked = self._asked[step - 1 : self._top]
            fewest = asked.min()
            changed = (self._changed[step - 1 : self._top] * fewest / np.maximum(asked, 1)).sum()
            if not self._allows(changed, fewest):
                break
            step -= 1
        self._take(step)

    def _is_likely(self, changed: float, requests: float) -> bool:
        # The highest mean of a Poisson count of so many.
        return bool(gammaincinv(changed + 1, SURENESS) <= SHARE * self._budget * requests)

    def changed_from(self, margin: float) -> int:
        """Return how many answers changed that are so sure."""
        return int(self._changed[np.searchsorted(self._steps, margin) :].sum())

    def share_below(self, margin: float) -> float:
        """Return the share of the answers seen that are less sure."""
        return float(self._seen[self._steps < margin].sum() / max(self._seen.sum(), 1.0))

    def counts(self) -> dict[str, float]:
        """What was seen, by step."""
        return {
            f"{self.scale.name}_{name}_{step}": float(count)
            for name, column in self._columns()
            for step, count in enumerate(column)
        } | {self.scale.top: float(self._top)}

    def adopt(self, counts: Mapping[str, float]) -> None:
        """Go on from these counts."""
        for name, column in self._columns():
            column[:] = [counts.get(f"{self.scale.name}_{name}_{step}", 0.0) for step in range(len(self._steps))]
        self._top = int(counts.get(self.scale.top, self.scale.first))
        self._choose()

    def _columns(self) -> tuple[tuple[str, Numbers], ...]:
        return ("seen", self._seen), ("changed", self._changed), ("asked", self._asked)

    def rise(self) -> None:
        """Ask for more from now on: too many answers changed."""
        self._top = min(self._top + 1, len(self._steps) - 1)
        self._take(self._top)
        self._seen[:] = self._changed[:] = self._asked[:] = 0.0
