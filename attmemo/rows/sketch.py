"""Vectors of token sequences that need no training: sequences that share tokens have vectors that point the same way.

A vector is a sum of random ones: one for each token, and two times one for each pair of neighbours. Pairs count more
because a token is only reused beside neighbours that are reused. On seven streams of log lines, the best of four
records found left 0.015 of the rows more to compute than the best of all; 0.020 if pairs count half. Triples, and a
vector of its own for each repetition of a pair, gain nothing more. 512 dimensions instead of 256: 0.012.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attmemo.kernels.align import sketch

Vectors = npt.NDArray[np.float32]


class Sketch:
    """Turns token sequences into vectors of length 1; those of empty sequences are zero.

    The product of two vectors is their similarity with an error of about ``1 / sqrt(dimensions)``. The random vectors
    come from a hash of the token ids: there is no table, and every machine gets the same bits.
    """

    dimensions = 256

    def __call__(self, tokens: npt.NDArray[np.int32], starts: npt.NDArray[np.int64]) -> Vectors:
        """Vectors, float32 ``[B, dimensions]``, of sequences that lie one behind the other.

        `tokens` is int32 ``[n]``, `starts` int64 ``[B + 1]``: where each sequence starts, and n. ValueError if not.
        """
        return sketch(tokens, starts, self.dimensions)
