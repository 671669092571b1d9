"""The product with the vocabulary: all logits, or the greatest one by way of a product in 8 bits.

A step reads the vocabulary's weights once, as it does all others: 10 to 25 % of what it reads. Greedy search wants one
word. So a copy of the weights in 8 bits, a quarter of the bytes, gives rough logits, and how far each may be from the
right one; the words that can still be the greatest are few, and theirs are computed from the weights themselves.

THE BOUND.  A row x is multiplied in two parts, each rounded to 8 bits: itself, and what that rounding left. With x'
for what both parts stand for, and w' for a rounded column,

    |x w - x' w'|  <=  |x - x'| |w| + |x'| |w - w'|

Lengths of w and w - w' are known from the start. Sums in float32 add a part of |x| |w|. A bias is a column's last
weight. The bound holds for any weights; how many words it leaves depends on them. CPU ms of a step, greedy, one row,
one thread: BART-large 56.8 in place of 63.8, T5-base 31.1 in place of 36.0.

ROAD NOT TAKEN.  In bfloat16, whose weights are half as large, a step of BART-large took as long (33.9 and 33.4 ms).

Beams and sampling divide by the sum over all words, so they take all logits: a rough sum would move scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from attmemo.fastseq.generate.decoder_stack import FEWEST
from attmemo.fastseq.generate.refusal import Refusal
from attmemo.kernels.linear8 import Linear8, rounded, rounded_rows
from attmemo.kernels.linear16 import Linear16
from attmemo.kernels.linear32 import Linear32
from attmemo.kernels.packed_weights import Panels
from attmemo.kernels.pages import Slab

Weights = Literal["int8"] | None
LINEAR: Final = ("Linear", "Conv1D")
MOST_ROWS: Final = 4  # with eight, 86.7 in place of 76.0 ms: every row is two, and the product waits for arithmetic
_LEAST: Final = 1 << 22  # weights: of fewer, choosing takes as long as reading all
_SHARE: Final = 32  # if more than this part of the words can be the greatest, all are computed
_AT_ONCE: Final = 1 << 22  # weights whose rounding is measured at a time


@dataclass(frozen=True)
class Linears:
    """Linear layers that are computed together: weights `[out, in]` and biases of each."""

    weights: list[Tensor]
    biases: list[Tensor | None]
    modules: tuple[nn.Module, ...]

    @classmethod
    def of(cls, *modules: nn.Module) -> Linears:
        """From `nn.Linear`, or GPT-2's `Conv1D`. Refusal: it is another module, or its weights are no plain ones."""
        weights, biases = [], []
        for module in modules:
            name = type(module).__name__
            weight: Any = getattr(module, "weight", None)
            if name not in LINEAR or type(weight) is not nn.Parameter or weight.device.type != "cpu":
                raise Refusal(f"a decoder with a layer of {name} on {getattr(weight, 'device', None)}")
            weights.append(weight.detach().t().contiguous() if name == "Conv1D" else weight.detach())
            bias: Any = module.bias
            biases.append(None if bias is None else bias.detach())
        return cls(weights, biases, modules)


@dataclass(frozen=True)
class Rough:
    """Logits ``[R, V]`` from 8 bits, before processors saw them; how far each may be off; and the rows they are of."""

    logits: Tensor
    distances: Tensor
    hidden: Tensor


class Vocabulary:
    """From hidden states to logits.

    Parameters
    ----------
    head : Linears
    dtype : torch.dtype
    weights : "int8" or None
    scale : float
        Hidden states are multiplied with it before.
    bias : Tensor or None
        Is added to the logits; it is rounded for itself.

    Attributes
    ----------
    panels : Panels
        What all logits are computed with.
    """

    def __init__(
        self, head: Linears, dtype: torch.dtype, weights: Weights, *, scale: float = 1.0, bias: Tensor | None = None
    ) -> None:
        # In 8 bits, logits are float32: they are not rounded once more.
        self._wide = weights == "int8"
        wide = replace(head, weights=[part.float() for part in head.weights]) if self._wide else head
        self._head, self._scale, self._bias, self._dtype = head, scale, bias, torch.float32 if self._wide else dtype
        self._few = "vnni16" if "vnni16" in Linear8.instruction_sets() else ""
        self.panels = kind_of(self._dtype, weights).of(wide.weights, wide.biases)
        (weight,) = head.weights
        self._rough: Linear8 | None = None
        plain = (dtype, weights) == (torch.float32, None)
        if plain and weight.numel() >= _LEAST and Linear8.instruction_sets()[0] != "generic":
            self._rough = Linear8.of([weight], [None])
            biases = [part for part in (*head.biases, bias) if part is not None]
            self._added = torch.stack(biases).sum(0) if biases else None
            self._lengths = _lengths(weight)
            for part in biases:
                self._lengths[0] += part.abs()
            move_to_slab([self._rough])
        move_to_slab([self.panels])

    @property
    def nbytes(self) -> int:
        """Bytes kept beside the model's own weights."""
        return self.panels.nbytes + (0 if self._rough is None else self._rough.nbytes + self._lengths.nbytes)

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, V]` float32, of hidden states `[R, hidden]`."""
        return self._through(self.panels, self._bias, hidden)

    @property
    def is_rough(self) -> bool:
        """Whether there are 8 bits of it beside what logits are computed with."""
        return self._rough is not None

    def likely(self, hidden: Tensor) -> Tensor:
        """The words `[R]` with the greatest logits in 8 bits, of hidden states `[R, hidden]`. No word is certain."""
        if self._rough is None:
            return self.logits(hidden).argmax(-1)
        logits = self._rough(hidden * self._scale, isa=self._few if len(hidden) <= FEWEST else "")
        return (logits if self._added is None else logits.add_(self._added)).argmax(-1)

    def rough(self, hidden: Tensor) -> Rough | None:
        """As `logits`, in 8 bits; None where that does not pay."""
        if self._rough is None or len(hidden) > MOST_ROWS:
            return None
        wide = hidden * self._scale
        codes, scales = rounded_rows(wide)
        rest = wide - codes * scales
        rest_codes, rest_scales = rounded_rows(rest)
        left = rest - rest_codes * rest_scales
        # The kernel may round a number that is between two codes, or at the end of the codes, to the other one.
        unsure = ((wide / scales - codes).abs() > 0.499) | (codes >= codes.amax(1, keepdim=True))
        other_code = unsure.sum(1, keepdim=True).sqrt() * scales + wide.shape[1] ** 0.5 * rest_scales
        both = torch.cat((wide, rest))
        one, other = self._rough(both, isa=self._few if len(both) <= FEWEST else "").chunk(2)
        logits = one + other if self._added is None else one + other + self._added
        length = wide.norm(dim=1, keepdim=True) + (0 if self._added is None else 1)
        inexact = left.norm(dim=1, keepdim=True) + other_code
        ways = torch.cat((inexact + wide.shape[1] * 2.0**-22 * length, length + inexact), 1)
        return Rough(logits, ways @ self._lengths, hidden)

    def greatest(self, rough: Rough, scores: Tensor) -> Tensor | None:
        """The words with the greatest logits `[R]`; `scores` is `rough.logits` with some at minus infinity.

        None: it takes all logits to find out.
        """
        least = (scores - rough.distances).amax(1, keepdim=True)
        words = (scores + rough.distances >= least).any(0).nonzero().flatten()
        if not bool(least.isfinite().all()) or len(words) * _SHARE > scores.shape[1]:
            return None
        bias = None if self._bias is None else self._bias[words]
        exact = self._through(self._of_words(words), bias, rough.hidden)
        return words[exact.masked_fill_(scores[:, words] == -torch.inf, -torch.inf).argmax(1)]

    def _of_words(self, words: Tensor) -> Panels:
        (weight,), (bias,) = self._head.weights, self._head.biases
        return kind_of(self._dtype, None).of([weight[words]], [None if bias is None else bias[words]])

    def _through(self, panels: Panels, bias: Tensor | None, hidden: Tensor) -> Tensor:
        if self._scale != 1.0:
            hidden = hidden * self._scale
        isa = self._few if self._wide and len(hidden) <= FEWEST else ""
        found = panels(hidden.float() if self._wide else hidden, isa=isa)
        return (found if bias is None else found + bias).float()


def _lengths(weight: Tensor) -> Tensor:
    """Of a weight's columns, and of what rounding them to 8 bits changes: ``[2, out]``, not too short."""
    found = []
    for part in torch.split(weight, max(1, _AT_ONCE // weight.shape[1])):
        codes, scales = rounded(part)
        found.append(torch.stack((part.norm(dim=1), (part - codes * scales[:, None]).norm(dim=1))))
    return torch.cat(found, 1) * 1.0001


def move_to_slab(layers: list[Any]) -> None:
    """Keep the weights of layers in huge pages, where there are any: they are read whole at every step."""
    slab = Slab(sum(layer.slab_bytes for layer in layers))
    for layer in layers:
        layer.move(slab)


def kind_of(dtype: torch.dtype, weights: Weights) -> type[Panels]:
    """The kernels of a type."""
    if weights == "int8":
        return Linear8
    return Linear32 if dtype == torch.float32 else Linear16
