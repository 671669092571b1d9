"""What an evaluation asks of a kind of reuse."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar

from torch import Tensor, nn

from attmemo.profiler.models import LoadedModel, Tokens
from attmemo.profiler.turns import Progress

Path = Callable[[], nn.Module | None]  # switches a way on, and returns the model to ask; None: the one that was loaded


class Trial(ABC):
    """One kind of reuse under measurement. `serve` memoizes the model; the model stays memoized."""

    reuse: ClassVar[str]
    sweep: ClassVar[Sequence[float]]  # thresholds to try
    controls: ClassVar[Sequence[str]]  # what is served in place of the records
    storage: str  # of the database
    bytes: int  # of all its records
    lengths: list[int]  # in tokens, of its records

    def __init__(self, loaded: LoadedModel, options: Any) -> None:
        self._loaded, self._options = loaded, options

    def notes(self, files: Sequence[Any]) -> list[str]:
        """What a reader must know of how it serves, or of these data."""
        return []

    @property
    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """How it serves, for the conditions of the report."""

    @abstractmethod
    def serve(self) -> Any:
        """Memoize the model as the user asked; its handle."""

    @abstractmethod
    def serve_at_will(self) -> Any:
        """Memoize the model without a gate, to be asked at several thresholds; its handle."""

    @abstractmethod
    def set_threshold(self, handle: Any, threshold: float) -> None:
        """Serve at this threshold from now on."""

    @abstractmethod
    def paths(self, handle: Any) -> dict[str, Path]:
        """All ways of asking that are timed; ``"memoized"`` and exact ones."""

    @abstractmethod
    def parts_ms(self, handle: Any) -> dict[str, float]:
        """Milliseconds by part since the counters were reset."""

    @abstractmethod
    def rates(self, handle: Any) -> dict[str, float]:
        """How much was served since the counters were reset."""

    @abstractmethod
    def counts(self, handle: Any) -> dict[str, Any]:
        """All that the result says of the counters."""

    def ceiling(self, handle: Any, tokens: Sequence[Tokens], counts: dict[str, Any], tell: Progress) -> dict[str, Any]:
        """What the best record there is would give, if it can be known, beside what `counts` gave."""
        return {}

    @abstractmethod
    def control(self, handle: Any, name: str) -> AbstractContextManager[None]:
        """Serve a control's records in place of the ones that were found; lookups stay real."""

    def live(self, tokens: Sequence[Tokens], exact: Tensor, tell: Progress) -> dict[str, Any] | None:
        """What the guard would have done with these texts, in the order of the data; None: there is no guard.

        `exact` has the exact answers in the order of rows. The model is bare afterwards.
        """
        return None

    @abstractmethod
    def verdict(self, result: dict[str, Any]) -> str:
        """One honest sentence."""


def same_answers(quality: Mapping[str, Any]) -> str:
    """How many answers are those of the exact model, in words."""
    language = "perplexity_exact" in quality
    same = f"{100 * quality['agreement']:.1f} % of the {'first tokens' if language else 'answers'} are those of the "
    same += "exact model"
    if language:
        same += f", perplexity {quality['perplexity_memoized']:.4g} (exact {quality['perplexity_exact']:.4g})"
    return same
