"""What an evaluation asks of a kind of reuse."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from attmemo.profiler.models import Tokens
from attmemo.profiler.timing import Path
from attmemo.profiler.turns import Progress


class Trial(Protocol):
    """One kind of reuse under measurement. `serve` memoizes the model; the model stays memoized."""

    @property
    def reuse(self) -> str:
        """Its name."""

    @property
    def kind(self) -> str:
        """The kind of slots that serve."""

    @property
    def sweep(self) -> Sequence[float]:
        """Thresholds to try."""

    @property
    def controls(self) -> Sequence[str]:
        """What is served in place of the records."""

    @property
    def settings(self) -> dict[str, Any]:
        """How it serves, for the conditions of the report."""

    def serve(self) -> Any:
        """Memoize the model as the user asked; its handle."""

    def serve_at_will(self) -> Any:
        """Memoize the model without a gate, to be asked at several thresholds; its handle."""

    def set_threshold(self, handle: Any, threshold: float) -> None:
        """Serve at this threshold from now on."""

    def paths(self, handle: Any) -> dict[str, Path]:
        """All ways of asking that are timed; ``"memoized"`` and exact ones."""

    def parts_ms(self, handle: Any) -> dict[str, float]:
        """Milliseconds by part since the counters were reset."""

    def rates(self, handle: Any) -> dict[str, float]:
        """How much was served since the counters were reset."""

    def counts(self, handle: Any) -> dict[str, Any]:
        """All that the result says of the counters."""

    def ceiling(
        self, handle: Any, tokens: Sequence[Tokens], sample: int, result: dict[str, Any], tell: Progress
    ) -> None:
        """Add to the result what the best record there is would give, if it can be known."""

    def control(self, handle: Any, name: str) -> AbstractContextManager[None]:
        """Serve a control's records in place of the ones that were found; lookups stay real."""

    def live(self, tokens: Sequence[Tokens], exact: Tensor, tell: Progress) -> dict[str, Any] | None:
        """What the guard would have done with these texts, in the order of the data; None: there is no guard.

        `exact` has the exact answers in the order of rows. The model is bare afterwards.
        """

    def verdict(self, result: dict[str, Any]) -> str:
        """One honest sentence."""
