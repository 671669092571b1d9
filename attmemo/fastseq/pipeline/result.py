"""What was generated for a text, and what a run did."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

JOINT: Final = "####"
"""Between the sequences of one text in a line of output, as FastSeq has it."""

_BREAKS = re.compile(r"\r\n|[\r\n]")


@dataclass(frozen=True)
class Result:
    """What was generated for one text.

    Attributes
    ----------
    row : int
        Which text of the input.
    texts : list of str
        ``num_return_sequences`` of them, best first; ``[""]`` for a blank text.
    scores : list of float or None
        Of each sequence, if they were asked for.
    truncated, blank : bool
        Whether the text was cut to what the model takes; whether there was none.
    """

    row: int
    texts: list[str]
    scores: list[float] | None = None
    truncated: bool = False
    blank: bool = False

    @property
    def line(self) -> str:
        """One line of an output file: sequences joined by `JOINT`, each followed by a tab and its score if it has one.

        Line breaks become spaces.
        """
        parts = [_BREAKS.sub(" ", text) for text in self.texts]
        if self.scores is not None:
            parts = [f"{part}\t{score:.6f}" for part, score in zip(parts, self.scores, strict=True)]
        return JOINT.join(parts)


def best_of(line: str, *, joined: bool = False, scored: bool = False) -> str:
    """The first sequence of a line of output, without its score."""
    best = line.split(JOINT)[0] if joined else line
    return best.rpartition("\t")[0] if scored else best


@dataclass
class Summary:
    """What a run did; counts are of lines."""

    lines: int = 0
    generated: int = 0
    blank: int = 0
    truncated: int = 0
    resumed: int = 0
    batches: int = 0
    largest_batch: int = 0
    halvings: int = 0
    seconds: float = 0.0
    stages: dict[str, float] = field(default_factory=dict)
