"""How many texts fit in a batch: what a batch takes, what is free, and what to do when it was too many.

The size of the cached states is exact (it reproduces every cell of Table 2 of FastSeq, arXiv 2106.04718):

    stock       2 L W s (B M N + B M t)
    shared      2 L W s (B N + B M t)          keys and values of the source once per text, not per beam
    el          B N D s + 2 L W s B M t        one hidden state of the source for all layers
                L D s (B N + B M t)            of a decoder: hidden states of each layer, of its own tokens too

with L decoder layers, W = key/value heads times their width, D the model's width, s bytes a number, B texts, M beams,
N source tokens, t new tokens. Beside them a step holds several copies of the scores ``[B M, V]``, and the first pass
the activations of a layer; these are estimated, from above. Predicted and measured growth of the resident set, in MiB
(random weights of width 512 with 4 layers, float32, original generation, two cores; B, M, N, t):

    BART 8, 4, 512, 8       463  424        GPT-2 8, 4, 256, 8      544  531
    BART 16, 4, 128, 24     375  333        GPT-2 16, 1, 512, 6     544  535
    BART 32, 1, 512, 4      512  391        GPT-2 4, 4, 64, 60       83   79
    BART 2, 8, 64, 40        75   74

The estimate is one half; the other is `Guard`: a batch that ran out of memory is halved and done again, and no later
batch may be as large.
"""

from __future__ import annotations

import re
from typing import Final

import torch

from attmemo.fastseq.generate.shape import Mode, ModelShape
from attmemo.system.memory import free_memory

SHARE: Final = {"cpu": 0.5, "cuda": 0.9}
"""How much of what is free is planned with. On a CPU a process that takes too much is killed, with no error to catch,
and the page cache wants some of it."""

MOST: Final = 256
"""Larger batches gain nothing any more, and make a user wait for the first line."""

_SCORES = 12  # copies of the scores in float32 in a step of beam search, sorting included; measured: 5 to 11
_NO_MEMORY = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|not enough memory|out of memory|ALLOC_FAILED", re.IGNORECASE
)


def peak_bytes(shape: ModelShape, batch: int, beams: int, source: int, new: int, mode: Mode = "stock") -> int:
    """Bytes beside the weights at the worst moment, estimated from above: in the first pass or the last step."""
    rows = batch if shape.encoder or mode != "stock" else batch * beams
    # Activations of a layer; GPT-2's gelu, in plain torch, makes several of the inner width.
    first = rows * source * (8 * shape.width + 2 * shape.inner) * shape.item
    if not shape.encoder:
        first = rows * source * (10 * shape.width + 4 * shape.inner) * shape.item
        first += shape.cache_bytes(batch, beams, source, 0, mode)
    if shape.eager:
        first += 2 * rows * shape.heads * source * source * 4
    cache = shape.cache_bytes(batch, beams, source, new, mode)
    # The original re-indexes and appends to one layer's states after another: keys and values of one layer twice.
    moved = 2 * cache // shape.layers
    return max(first, cache + moved + _SCORES * batch * beams * shape.vocabulary * 4)


class BatchPlanner:
    """The largest batch that fits.

    Parameters
    ----------
    shape : ModelShape
    free : int, optional
        Bytes that may be used. Default: `SHARE` of what is free on `device` now.
    device : torch.device or str
    mode : {"stock", "shared", "el"}
        How the source's states are kept.
    most : int
        No batch is larger.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        free: int | None = None,
        device: torch.device | str = "cpu",
        mode: Mode = "stock",
        most: int = MOST,
    ) -> None:
        self.shape = shape
        self.free = int(free_memory(device) * SHARE.get(torch.device(device).type, 0.8)) if free is None else free
        self.mode: Mode = mode
        self.most = most

    def bytes(self, batch: int, beams: int, source: int, new: int) -> int:
        """What such a batch takes beside the model's weights, estimated from above."""
        return peak_bytes(self.shape, batch, beams, source, new, self.mode)

    def plan(self, source: int, new: int, beams: int = 1) -> int:
        """Texts in a batch, at least 1; above 8 a multiple of 8.

        Parameters
        ----------
        source : int
            Tokens of the longest text, N.
        new : int
            Tokens to generate at most, t.
        beams : int
            M: beams, or sequences sampled for each text.
        """
        # What a batch takes grows in proportion to it.
        fits = min(self.most, max(1, self.free // max(1, self.bytes(1, beams, source, new))))
        return fits if fits <= 8 else fits // 8 * 8


class Guard:
    """Keeps batches below the size that ran out of memory once.

    Sizes are counted in tokens, rows times columns of what a batch can become, so that a batch of shorter texts may
    have more of them.
    """

    def __init__(self) -> None:
        self.halvings = 0
        self._most: int | None = None

    def allowed(self, tokens: int) -> int:
        """How many texts of `tokens` tokens, source and new ones, may be in a batch; at least 1."""
        return 2**62 if self._most is None else max(1, self._most // tokens)

    def failed(self, batch: int, tokens: int) -> None:
        """A batch of so many texts ran out of memory: from now on at most half of it, for all that come."""
        self.halvings += 1
        self._most = max(1, batch // 2) * tokens


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: a GPU's, the CPU allocator's, or Python's own."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    # The CPU allocator raises a plain RuntimeError; only its words tell.
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error)))
