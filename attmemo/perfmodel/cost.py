"""How long a piece of work takes, as a function of the lengths of the sequences in the batch.

AttMEMO (arXiv 2301.09262, section 5.4, Eq. 3) scales times linearly with the number of tokens. Attention is quadratic
in the length, so a quadratic term stands beside the linear one: ``milliseconds = a * sum(L) + b * sum(L^2) + c``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from attmemo.system.json_fields import Field

_HUBER = 1.345  # residuals up to this many standard deviations count in full (95 % efficiency on Gaussian noise)
_CUT = 3.0  # residuals beyond this many standard deviations are dropped before the last fit
_MAD_TO_SIGMA = 1.4826  # median absolute deviation -> standard deviation, for Gaussian noise
_NOISE = 0.01  # relative error below which a timing is never called an outlier
_TIE = 1e-9  # root mean square relative errors closer than this are equal: the simpler model wins
_ROUNDS = 25  # of reweighting; it settles in a handful

# Column subsets of (tokens, squares, constant), simplest first, per-token before quadratic before constant.
_SUBSETS = tuple(subset for size in (1, 2, 3) for subset in combinations(range(3), size))


@dataclass(frozen=True, slots=True)
class CostModel:
    """Milliseconds of one kind of work: ``a * sum(L) + b * sum(L**2) + c``, each coefficient finite and >= 0.

    >>> CostModel(a=0.01, b=0.0001, c=0.5).estimate_lengths([100, 100])
    4.5
    """

    a: float  # per token
    b: float  # per squared token
    c: float  # per call

    def estimate(self, tokens: float, squares: float) -> float:
        """Milliseconds for a batch with `tokens` = sum(L) and `squares` = sum(L**2)."""
        return self.a * tokens + self.b * squares + self.c

    def estimate_lengths(self, lengths: Sequence[int]) -> float:
        """Milliseconds for a batch of sequences of these token lengths."""
        return self.estimate(sum(lengths), sum(n * n for n in lengths))

    @classmethod
    def fit(cls, samples: Sequence[tuple[Sequence[int], float]]) -> CostModel:
        """Fit the coefficients to timed batches: token lengths (padded ones, if computed so) and milliseconds.

        Non-negative least squares on the *relative* error: an error of 1 ms is nothing at 500 ms and everything at
        2 ms. A batch that the operating system interrupted does not decide: errors are Huber-weighted until they
        settle, then samples beyond three standard deviations (from the median absolute error, at least 1 % each) are
        dropped and the rest is fitted once more.

        Samples that cannot tell the terms apart (one length only, one batch only) are explained by the simplest terms
        that fit equally well, per-token cost first. For other lengths this is a guess, the paper's.
        """
        # rows: [samples, 3] = (sum L, sum L^2, 1) / ms, so that a perfect model gives 1 for every row
        rows = np.empty((len(samples), 3), dtype=np.float64)
        for i, (lengths, milliseconds) in enumerate(samples):
            if not (math.isfinite(milliseconds) and milliseconds > 0.0):
                raise ValueError(f"sample {i}: a time must be finite and > 0 ms, got {milliseconds!r}")
            rows[i] = float(sum(lengths)), float(sum(n * n for n in lengths)), 1.0
            rows[i] /= float(milliseconds)

        weights = np.ones(len(rows))
        for _ in range(_ROUNDS):
            errors = np.abs(rows @ _non_negative(rows, weights) - 1.0)
            sigma = max(_MAD_TO_SIGMA * float(np.median(errors)), _NOISE)
            renewed = np.minimum(1.0, _HUBER * sigma / np.maximum(errors, 1e-12))
            settled = bool(np.allclose(renewed, weights, rtol=0.0, atol=1e-6))
            weights = renewed
            if settled:
                break
        kept = rows[errors <= _CUT * sigma]  # at least half of them: the median error lies within one sigma
        a, b, c = _non_negative(kept, np.ones(len(kept)))
        return cls(float(a), float(b), float(c))

    @classmethod
    def read(cls, field: Field) -> CostModel:
        """Read the coefficients; DatabaseCorruptError names a malformed coefficient."""
        return cls(field["a"].number(low=0.0), field["b"].number(low=0.0), field["c"].number(low=0.0))


def _non_negative(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative theta of shape [3] that minimises ``sum(weights * (rows @ theta - 1)**2)``."""
    # The optimum is the plain least-squares solution on the columns it uses: all seven subsets are tried, the first of
    # equals wins. With `scipy.optimize.nnls` rounding would decide where columns are collinear (one length only).
    root = np.sqrt(weights)
    weighted = rows * root[:, None]
    scale = np.max(weighted, axis=0)  # sum(L^2) is thousands of times the constant; solve in comparable units
    columns = weighted / scale
    found: list[tuple[float, NDArray[np.float64]]] = []
    for subset in _SUBSETS:
        solution = np.linalg.lstsq(columns[:, subset], root, rcond=None)[0]
        if bool(np.all(solution >= 0.0)):
            error = float(np.sqrt(np.mean((columns[:, subset] @ solution - root) ** 2)))
            theta = np.zeros(3)
            theta[list(subset)] = solution / scale[list(subset)]
            found.append((error, theta))
    # Never empty: every entry and the target are positive, so each single column has a positive solution.
    best = min(error for error, _ in found)
    return next(theta for error, theta in found if error <= best + _TIE)
