"""Kinds of reuse: what a record supplies, and how a forward is served with it.

Each kind is one file with one class that follows `Reuse`. `maps` supplies attention probability matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from attmemo.adapters import Call, Site, Spans
from attmemo.plan import Share

Exact = Callable[..., Any]
"""The original `forward` of a module."""


class Reuse(Protocol):
    """One kind of reuse.

    The engine asks in this order: `read` a call of a module, then make the plan, then `serve`, then `join`.
    """

    name: ClassVar[str]
    """Value of ``reuse=`` that asks for this kind."""

    def read(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        """The call, or the reason why this call must stay exact."""

    def serve(self, site: Site, call: Call, spans: Spans, share: Share) -> Any:
        """Compute what the served sequences get; changes nothing outside, so that an error costs only time."""

    def join(
        self, site: Site, call: Call, share: Share, served: Any, exact: Exact, arguments: tuple[Any, Any]
    ) -> tuple[Any, float]:
        """Compute all other sequences by `exact`; what `forward` returns, and the seconds that `exact` took."""

    @staticmethod
    def slots(inputs: Sequence[Tensor], maps: Sequence[Tensor]) -> dict[str, Sequence[Tensor]]:
        """What a record keeps of one captured sequence: tensors of each kind of slot, by layer."""

    def close(self) -> None:
        """Give memory windows back."""
