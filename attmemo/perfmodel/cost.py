"""How long a piece of work takes, as a function of the lengths of the sequences in the batch.

Equation 3 of the paper (seed 004_17cf05913cb31f45.txt, section 5.4) needs T_attention and T_overhead for a batch that
was never timed. The paper scales both linearly with the total number of tokens. Attention is quadratic in the
sequence length, so that estimate is wrong as soon as the served lengths differ from the profiled ones: one sequence
of 512 tokens and four of 128 have the same total and not the same cost. Here a quadratic term is fitted beside it:

    milliseconds = a * sum(L) + b * sum(L^2) + c

`a` holds projections and everything else done per token, `b` the score matrix, `c` what a call costs by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from attmemo.fields import Field

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
    """Milliseconds of one kind of work: ``a * sum(L) + b * sum(L**2) + c``.

    Parameters
    ----------
    a : float
        Milliseconds per token, >= 0.
    b : float
        Milliseconds per squared token, >= 0.
    c : float
        Milliseconds per call, >= 0.

    Raises
    ------
    ValueError
        A coefficient is negative or not finite. Negative ones would fit noise a little better and then predict
        negative milliseconds for a length outside the profiled ones.

    Notes
    -----
    Source: paper Eq. 3 (seed 004_17cf05913cb31f45.txt, section 5.4), with the quadratic term added.

    Examples
    --------
    >>> CostModel(a=0.01, b=0.0001, c=0.5).estimate_lengths([100, 100])
    4.5
    """

    a: float
    b: float
    c: float

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"cost coefficient {name} must be finite and >= 0, got {value!r}")

    def estimate(self, tokens: float, squares: float) -> float:
        """Milliseconds for a batch with `tokens` = sum(L) and `squares` = sum(L**2)."""
        return self.a * tokens + self.b * squares + self.c

    def estimate_lengths(self, lengths: Sequence[int]) -> float:
        """Milliseconds for a batch of sequences of these token lengths."""
        return self.estimate(float(sum(lengths)), float(sum(n * n for n in lengths)))

    @classmethod
    def fit(cls, samples: Sequence[tuple[Sequence[int], float]]) -> CostModel:
        """Fit the coefficients to timed batches.

        Non-negative least squares on the *relative* error: an error of 1 ms is nothing at 500 ms and everything at
        2 ms, and the gate asks about short batches as often as about long ones. A batch that the operating system
        interrupted does not decide: errors are Huber-weighted until they settle, then whatever lies beyond three
        standard deviations (estimated from the median absolute error, at least 1 % each) is dropped and the rest
        fitted once more.

        Samples that cannot tell the terms apart (one length only, one batch only) are explained by the simplest
        terms that fit equally well, per-token cost first. Inside what was measured that makes no difference;
        outside it is a guess, and it is the paper's.

        Parameters
        ----------
        samples : sequence of (lengths, milliseconds)
            `lengths` are the token lengths that the work was done at: the padded length for every row when the
            batch is padded.

        Returns
        -------
        CostModel

        Raises
        ------
        ValueError
            No sample, a batch without sequences, a length < 1, or a time that is not finite and > 0.
        """
        if len(samples) == 0:
            raise ValueError("cannot fit a cost model to no samples")
        # rows: [samples, 3] = (sum L, sum L^2, 1) / ms, so that a perfect model gives 1 for every row
        rows = np.empty((len(samples), 3), dtype=np.float64)
        for i, (lengths, milliseconds) in enumerate(samples):
            if len(lengths) == 0 or min(lengths) < 1:
                raise ValueError(f"sample {i}: a batch needs sequences of at least one token, got {list(lengths)!r}")
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

    def to_dict(self) -> dict[str, float]:
        """The coefficients, JSON-able."""
        return {"a": self.a, "b": self.b, "c": self.c}

    @classmethod
    def read(cls, field: Field) -> CostModel:
        """Read what `to_dict` wrote; DatabaseCorruptError names a malformed coefficient."""
        return cls(field["a"].number(low=0.0), field["b"].number(low=0.0), field["c"].number(low=0.0))


def _non_negative(rows: NDArray[np.float64], weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Non-negative theta of shape [3] that minimises ``sum(weights * (rows @ theta - 1)**2)``.

    The optimum is the plain least-squares solution on the columns it uses, so with three columns it is found by
    trying all seven subsets. `scipy.optimize.nnls` finds one too, but when columns are collinear (one length only)
    which one depends on rounding; here the order of the subsets decides.
    """
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
