"""Kinds of reuse: what a record supplies, and how a forward is served with it.

Each kind is one file with one class that follows `Reuse`. `maps` supplies attention probability matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor, nn

from attmemo.forward.context import Forward
from attmemo.forward.plan import Share
from attmemo.models import Call, Site, Spans

Exact = Callable[..., Any]
"""The original `forward` of a module."""


class Reuse(Protocol):
    """One kind of reuse.

    The engine asks in this order: `read` a call of a module, then make the plan, then `serve`, then `join`.
    """

    name: ClassVar[str]
    """Value of ``reuse=`` that asks for this kind."""
    whole: ClassVar[bool]
    """Whether one call does the work of all blocks."""
    failure: ClassVar[str]
    """What is said when a call could not be served."""

    def read(self, site: Site, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call | str:
        """The call, or the reason why this call must stay exact."""

    def watch(self, hooks: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> None:
        """Told which `forward` stands in front of which module."""

    def modules(self, site: Site) -> Sequence[nn.Module]:
        """The modules whose work a call of this site does."""

    def window(self, module: nn.Module) -> int | None:
        """How far a token sees by the module's mask; None: without a limit."""

    def spans(self, module: nn.Module, call: Call, given: Mapping[str, Any] | None) -> Spans | str:
        """Where the valid tokens lie, or the reason why the call must stay exact.

        `given` holds the arguments of the model's forward; None outside of a forward.
        """

    def serve(self, site: Site, call: Call, spans: Spans, share: Share, forward: Forward) -> Any:
        """Compute what the served sequences get.

        Sets the outcome of the forward at the end, and changes nothing else: an error costs only time.
        """

    def join(
        self, site: Site, call: Call, share: Share, served: Any, exact: Exact, arguments: tuple[Any, Any]
    ) -> tuple[Any, float]:
        """Compute all other sequences by `exact`; what `forward` returns, and the seconds that `exact` took."""

    def passed(self, hidden: Tensor) -> Any:
        """What a block returns whose work an earlier call has done, from the last hidden states."""

    def close(self) -> None:
        """Give memory windows back."""
