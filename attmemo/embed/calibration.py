"""From a distance of embeddings to a lower bound of the similarity score (AttMEMO, arXiv 2301.09262, Eq. 1).

A threshold must mean the same for every model, layer and length, so it is a score. The index returns distances. From
held-out sequences, where both are known, each layer gets a decreasing curve ``mean(d) - q * spread(d)``: isotonic
regressions of true scores and of absolute residuals on distances, and a conformal quantile q of (mean - true) / spread
(split conformal prediction, arXiv 1604.04173). So the true score is at or above the prediction for the stated share of
held-out retrievals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attmemo.system.json_fields import Field

COVERAGE = 0.9
KNOTS = 64
_FOLDS = 5

Floats = npt.NDArray[np.float64]
Curve = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Calibration:
    """A decreasing piecewise-linear curve from distance to predicted similarity score.

    Beyond the last knot the curve predicts 0, since no score is below 0. Only a threshold of 0 accepts that.
    """

    distances: Floats  # [K], increasing
    scores: Floats  # [K], not increasing

    def predict(self, distances: npt.ArrayLike) -> Floats:
        """Lower bounds of the similarity score, for distances of embeddings."""
        return np.interp(np.asarray(distances, np.float64), self.distances, self.scores, right=0.0)

    def radius(self, threshold: float) -> float:
        """The greatest distance whose predicted score reaches the threshold; -1 if none does, inf for threshold 0."""
        if threshold <= 0.0:
            return math.inf
        reached = np.flatnonzero(self.scores >= threshold)
        if not len(reached):
            return -1.0
        last = int(reached[-1])
        if last + 1 == len(self.distances):
            return float(self.distances[-1])
        high, low = self.scores[last], self.scores[last + 1]
        share = (high - threshold) / (high - low)
        return float(self.distances[last] + share * (self.distances[last + 1] - self.distances[last]))

    def to_dict(self) -> dict[str, list[float]]:
        """JSON-able."""
        return {"distances": self.distances.tolist(), "scores": self.scores.tolist()}

    @classmethod
    def from_dict(cls, data: object, where: str) -> Calibration:
        """Read what `to_dict` wrote; DatabaseCorruptError if it is not a decreasing curve."""
        field = Field(data, where, "attmemo train-embedder DB")
        distances, scores = (np.array(field[name].numbers()) for name in ("distances", "scores"))
        fine = len(distances) == len(scores) > 0 and scores[0] <= 1.0
        if not (fine and (np.diff(distances) > 0).all() and (np.diff(scores) <= 0).all()):
            field.refuse("a decreasing curve of scores up to 1")
        return cls(distances, scores)


def fit_calibration(distances: npt.ArrayLike, scores: npt.ArrayLike, coverage: float = COVERAGE) -> Calibration:
    """Fit the curve to the distance and the true score of held-out retrievals (at least one).

    `coverage` is the share of retrievals whose true score must not be below the prediction.
    """
    d, y = np.asarray(distances, np.float64), np.asarray(scores, np.float64)
    order = np.argsort(d, kind="stable")
    d, y = d[order], y[order]
    mean, spread = _curves(d, y)
    # The margin is estimated on folds that the curves have not seen.
    ratios = np.empty_like(y)
    if len(d) >= 2 * _FOLDS:
        for fold in range(_FOLDS):
            held = np.arange(len(d)) % _FOLDS == fold
            m, s = _curves(d[~held], y[~held])
            ratios[held] = (m(d[held]) - y[held]) / s(d[held])
        level = min(1.0, math.ceil((len(d) + 1) * coverage) / len(d))
        margin = float(np.quantile(ratios, level, method="higher"))
    else:
        margin = 4.0  # a handful of pairs supports no quantile: stay far below
    knots = np.unique(np.concatenate([[0.0], np.quantile(d, np.linspace(0.0, 1.0, KNOTS))]))
    lower = mean(knots) - max(margin, 0.0) * spread(knots)
    # Isotonic curves have plateaus, on which a score would not tell distances apart: tilt them, downwards, so that a
    # threshold stands for one distance. The floor keeps scores of far records above 0, which accepts anything; the
    # ceiling keeps all scores below 1, since no bound is certain: a threshold of 1 serves nothing.
    tilt = 1e-3 * knots / max(float(knots[-1]), 1e-12)
    lower = np.minimum.accumulate(np.clip(lower, 0.0, 1.0 - 1e-6)) - tilt
    return Calibration(knots, np.maximum(lower, 2e-3 - tilt))


def _curves(d: Floats, y: Floats) -> tuple[Curve, Curve]:
    """The mean score at a distance, and how far scores are from it."""
    mean = _isotonic(d, y, increasing=False)
    residual = np.abs(mean(d) - y)
    spread = _isotonic(d, residual, increasing=True)
    floor = max(1e-3, 0.25 * float(residual.mean()))
    return mean, lambda x: np.maximum(spread(x), floor)


def _isotonic(x: Floats, y: Floats, *, increasing: bool) -> Curve:
    """The monotone curve nearest to the points, straight between them and level outside."""
    from sklearn.isotonic import IsotonicRegression  # takes a while to import, and serving only reads curves

    curve: Curve = IsotonicRegression(increasing=increasing, out_of_bounds="clip").fit(x, y).predict
    return curve
