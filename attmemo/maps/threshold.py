"""The threshold: a record may serve a layer if the layer's predicted similarity score reaches the threshold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Curve(Protocol):
    """From distances of embeddings to predicted similarity scores, decreasing."""

    def predict(self, distances: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Predicted scores."""

    def radius(self, threshold: float) -> float:
        """Greatest distance with a predicted score of at least `threshold`; -1 if there is none."""


class Threshold:
    """One threshold for each layer, held as a radius: the greatest distance that the layer accepts.

    Parameters
    ----------
    curves : sequence of Curve
        One for each layer.
    scores : sequence of float
        Similarity score in [0, 1] that a hit needs, one for each layer.
    radii : sequence of float, optional
        The same as distances, where they are known (`attmemo tune` stores them).
    """

    def __init__(self, curves: Sequence[Curve], scores: Sequence[float], radii: Sequence[float] | None = None) -> None:
        self._curves = curves
        self.scores = [float(score) for score in scores]
        if radii is None:
            radii = [curve.radius(score) for curve, score in zip(curves, self.scores, strict=True)]
        self.radii = [float(radius) for radius in radii]

    def near(self, layer: int, distances: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
        """Places in `distances` whose record may serve the layer. NaN is a miss."""
        return np.flatnonzero(np.isfinite(distances) & (distances <= self.radii[layer]))

    def predicted(self, layer: int, distances: npt.NDArray[np.float32]) -> float:
        """Sum of the predicted similarity scores."""
        return float(self._curves[layer].predict(distances).sum())
