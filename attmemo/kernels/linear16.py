"""One linear layer in bfloat16, by a matrix unit (AMX) or AVX-512's sums of products: `native/linear.c`.

Its oracle is `torch.nn.functional.linear`.

THE LIMIT of many rows is the matrix unit, where there is one: 3.8e12 operations a second and core here, as long as all
that it reads lies in the first cache. What comes from the second cache comes at half of this pace. So rows are laid
out as tiles once, 32 of them stay in the first cache, weights are read past it, and while the unit multiplies, the
vector units finish the sums before. Of few rows the limit is reading the weights once: they are asked for two tiles
ahead, into the second cache; of many rows, while the weights before are multiplied.

oneDNN, which torch calls, uses one core only for some sizes. The four layers of a block, eight blocks one behind the
other, on two cores, how many times as fast as `attmemo.kernels.linear.Linear`:

    rows            16     64    128    300    512   1024   4096
    width 384      1.3    1.1   0.92    1.6    1.4    1.1   0.98
    width 768      1.2    1.1    1.0    1.2    1.6    1.6    1.2

WITHOUT A MATRIX UNIT the limit is arithmetic: rows are read where they lie, twelve of them and 32 columns of sums stay
in registers, and tiles of weights are read one behind the other. Whole exact models, two cores with avx512_bf16, how
many times as fast as with `Linear`:

    sequences x tokens      1x15   1x45   8x45   32x45   1x128   8x128   32x128
    MiniLM, width 384        1.5    1.3    1.1     1.1                      1.1
    DeBERTa, width 256       1.6    1.4    1.1                              1.1
    BERT-base, width 768     1.0                           1.0     1.0

Six rows and 64 columns were as fast within noise. Tasks of 48 rows, as in float32, were slower from 100 rows on.

A single short text reads all weights for a few rows. A panel is asked for while the one before meets its rows, else
memory waits for arithmetic and arithmetic for memory. Whole exact models of one text, two cores of an AMD EPYC
without a matrix unit; how many times as fast as without any of it:

    tokens                                   12     16     47
    BERT-base     the panel behind          1.37   1.47   1.14
                  tasks of neighbours       1.46   1.56   1.17
                  the next layer's, too     1.51   1.61   1.20
    Qwen3-0.6B    the panel behind          1.50   1.54   1.18
                  tasks of neighbours       1.53   1.58   1.18
                  the next layer's, too     1.58   1.63   1.21
    MiniLM        all of it                 1.15   1.34   1.17

ROADS NOT TAKEN, with a matrix unit: rows read where they lie (16 rows from 16 places at each step: 1.4e12 in place of
2.2e12 operations a second); asking for tiles some steps before they are needed, into the first cache (slower), or a
panel ahead (with 32 rows 6.3 in place of 4.8 ms for 170 MiB of weights).
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from attmemo.kernels.packed_weights import LINE, PANEL, ExactPanels, Weights, columns_of

_EMPTY = np.zeros(0, np.float32)
_MUCH = 8 << 20  # bytes between two layers: fewer stay in a cache anyway, and larger chunks of rows want fewer weights
_GATED_MUCH = 4 * _MUCH  # of a gated layer the weights are twice as many
_MANY = 128  # rows of a thread: with fewer, threads that share rows and not columns wait for weights
_WIDE = 1536  # inputs: of wider layers, too few rows of a chunk fit into the second cache beside their weights
_SIDE = 16  # columns of a tile, and pairs of its inputs


class Linear16(ExactPanels):
    """``activation(x @ weight.T + bias)`` in bfloat16, summed in float32. See `Panels`."""

    arithmetic: ClassVar[int] = 2
    taken = torch.bfloat16

    def _pack(self, weight: Tensor, bias: Tensor | None) -> Weights:
        bias = columns_of(weight.new_zeros(len(weight)) if bias is None else bias, self.gated).float()
        tiles = _in_tiles(columns_of(weight, self.gated)).view(torch.int16)
        return tiles.numpy(), _EMPTY, bias.numpy(), _EMPTY

    def are_two_calls(self, rows: int, threads: int) -> bool:
        if self.gated:
            return rows * self.outputs * self.dtype.itemsize < _GATED_MUCH
        if self.instruction_sets()[0] == "amx":
            return rows < _MANY * threads or max(self.inputs, self.outputs) > _WIDE
        return rows * self.outputs * self.dtype.itemsize < _MUCH


def _in_tiles(weight: Tensor) -> Tensor:
    """``[columns / 64, 2, inputs / 32, 2, 16, 16, 2]``, missing inputs filled with zeros: see native/linear.h."""
    columns, inputs = weight.shape
    weight = F.pad(weight, (0, -inputs % (LINE // weight.itemsize)))
    halves = weight.view(columns // PANEL, 2, 2, _SIDE, -1, _SIDE, 2)  # panel, half, tile, column, step, pair, input
    return halves.permute(0, 1, 4, 2, 5, 3, 6).contiguous()
