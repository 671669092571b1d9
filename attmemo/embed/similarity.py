"""The similarity score of two attention maps: AttMEMO (arXiv 2301.09262), Eq. 1, after arXiv 2110.06821.

A score is one minus the total variation distance of two rows, averaged over heads and rows: 1 for equal maps, 0 for
maps with disjoint support. The paper does not define the normaliser; here it is the number of rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attmemo.errors import ArgumentError


def similarity_score(a: Tensor, b: Tensor) -> Tensor:
    """Similarity score of attention maps, Eq. 1.

    Parameters
    ----------
    a, b : Tensor
        Attention probability matrices, shape ``[..., heads, n, n]``, over valid tokens only: rows of padding are
        alike in all maps and would raise the score. Leading dimensions broadcast.

    Returns
    -------
    Tensor
        Scores in [0, 1], shape ``[...]``, float32. ArgumentError if the maps are not square or their shapes differ.
    """
    if a.shape[-3:] != b.shape[-3:] or a.dim() < 3 or a.shape[-1] != a.shape[-2]:
        raise _shapes(a, b)
    distance = (a.float() - b.float()).abs().sum(-1).mul(0.5)  # [..., heads, n]: total variation of each row
    return (1.0 - distance.mean(dim=(-1, -2))).clamp_min(0.0)  # rounded rows may sum to a little more than 1


def similarity_matrix(queries: Tensor, records: Tensor) -> Tensor:
    """Scores ``[q, r]``, float32, of maps ``[q, heads, n, n]`` and ``[r, heads, n, n]``: an exhaustive search."""
    if queries.shape[1:] != records.shape[1:]:
        raise _shapes(queries, records)
    rows = queries.shape[1] * queries.shape[2]
    # torch.cdist(p=1) streams both operands: no temporary of q x r x n x n, 3-4 G differences a second on two cores.
    distance = torch.cdist(queries.flatten(1).float(), records.flatten(1).float(), p=1.0)
    return (1.0 - distance / (2.0 * rows)).clamp_min(0.0)


def _shapes(a: Tensor, b: Tensor) -> ArgumentError:
    what = f"maps must share [heads, n, n]; seen {tuple(a.shape)} and {tuple(b.shape)}."
    return ArgumentError(what, "cut both to the same valid tokens")
