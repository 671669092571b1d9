"""What the forwards of one thread did, sequence by sequence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Observed:
    """Work of the forwards that one thread made while it was observed.

    Forwards that the original code computed are not in it.

    Attributes
    ----------
    tokens : list of int
        Valid tokens of each sequence, in the order of the batches.
    rows : list of int
        Rows computed for each sequence. A row holds the hidden states of one token in all layers.
    extra : int
        Rows computed beside these, to verify answers or to make an unsure answer exact.
    """

    tokens: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    extra: int = 0

    def see(self, lengths: Iterable[int], rows: Iterable[int], again: bool, beside: int = 0) -> None:
        """One forward: tokens and computed rows of each sequence; `again`: a part of a forward that was seen.

        `beside`: rows that were computed to verify answers.
        """
        self.extra += beside
        if again:
            self.extra += sum(rows)
        else:
            self.tokens += lengths
            self.rows += rows
