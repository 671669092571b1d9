"""Why a request is refused: the kinds and status codes of text-embeddings-inference."""

from __future__ import annotations

from typing import Final, Literal

Kind = Literal["unhealthy", "backend", "overloaded", "tokenizer", "validation", "empty"]

STATUS: Final[dict[str, int]] = {
    "unhealthy": 503, "backend": 424, "overloaded": 429, "tokenizer": 422, "validation": 422, "empty": 400,
}  # fmt: skip


class Refusal(Exception):
    """A request that is not answered.

    Parameters
    ----------
    kind : str
        ``error_type`` of the body, there with a capital letter: so TEI sends it, whatever its examples show.
    text : str
        ``error`` of the body; it goes to the client alone, never to a log.
    status : int, optional
        Default: that of the kind.
    reason : str, optional
        A word for logs and metrics. Default: the kind.
    """

    def __init__(self, kind: Kind, text: str, status: int | None = None, reason: str | None = None) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text
        self.status = STATUS[kind] if status is None else status
        self.reason = reason or kind


def overloaded() -> Refusal:
    """There is no room for more sequences."""
    return Refusal("overloaded", "Model is overloaded")


def cannot(what: str) -> Refusal:
    """The model cannot do this."""
    return Refusal("backend", what, reason="model_type")
