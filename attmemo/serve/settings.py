"""All options of the service. Names and meanings are those of text-embeddings-inference (TEI) where it has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, NamedTuple

from attmemo.arguments import check_budget, check_places, check_together
from attmemo.errors import ArgumentError
from attmemo.system.machine import cores
from attmemo.system.sizes import bytes_of

Pooling = Literal["mean", "cls", "last-token"]
ReuseName = Literal["auto", "maps", "rows", "prefix", "local", "none"]
DtypeName = Literal["float32", "bfloat16"]
LinearName = Literal["auto", "exact", "int8"]

CONFIDENCE: Final = 0.95
MIN_COSINE: Final = 0.98
LEAST: Final = {
    0: ("near", "namespaces", "client_seconds", "drain_seconds", "stop_seconds"),
    1: ("max_batch_tokens", "max_concurrent_requests", "max_client_batch_size", "payload_limit", "max_batch_requests",
        "tokenization_workers"),
}  # fmt: skip
"""The least value of settings that are numbers."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What one service is told when it starts.

    Parameters
    ----------
    model : str
        Model directory, or name on the model hub.
    served_model_name : str, optional
        Name that clients see. Default: the name on the hub, or the last name of the folder; never a path.
    dtype : {"float32", "bfloat16"}
    pooling : {"mean", "cls", "last-token"}, optional
        How an embedding is made of hidden states. Default: as the model's own configuration says, else the mean.
    default_prompt, default_prompt_name : str, optional
        What stands before every text; at most one of the two.
    max_batch_tokens : int
        Rows that one forward computes, at most. Tokens whose rows come from a record do not count. A longer sequence
        has a forward of its own.
    max_batch_requests : int, optional
        Sequences in one forward, at most.
    max_concurrent_requests : int
        Sequences that are in the service at a time, at most; more are refused with status 429. Inputs of the
        tokenizer's own routes may take half of it.
    max_client_batch_size : int
        Sequences in one request, at most.
    auto_truncate : bool
        Cut inputs that are too long, where a request does not say.
    payload_limit : int
        Bytes of a body, at most.
    client_seconds : float
        How long a head may take to arrive, then a body, and how long a client may read nothing of its answer.
    tokenization_workers : int, optional
        Threads that turn texts into tokens. Default: a quarter of the cores, at least one.
    api_key : str, optional
        Requests must bring it; the state of the service is open to all.
    row_headers : bool
        Response headers say how many tokens were recomputed. This tells a client whether a similar text was there
        before.
    namespaces : int
        So many namespaces may be named by requests, in the header ``x-attmemo-namespace``. 0: the header is refused.
    database, reuse, linear, budget, confidence, min_cosine, threshold, near, max_bytes, fill, shadow, log_changes
        As in `attmemo.memoize`.
    drain_seconds : float
        After SIGTERM, how long ``/health`` says 503 while requests are still taken.
    stop_seconds : float
        After that, how long requests in work may take.

    Attributes
    ----------
    model_name : str
        Of the model on the hub, or the last name of its folder.
    """

    model: str
    served_model_name: str | None = None
    dtype: DtypeName = "float32"
    pooling: Pooling | None = None
    default_prompt: str | None = None
    default_prompt_name: str | None = None
    max_batch_tokens: int = 2048
    max_batch_requests: int | None = None
    max_concurrent_requests: int = 512
    max_client_batch_size: int = 1024
    auto_truncate: bool = True
    payload_limit: int = 2_000_000
    client_seconds: float = 30.0
    tokenization_workers: int | None = None
    api_key: str | None = None
    row_headers: bool = False
    database: str | None = None
    reuse: ReuseName = "auto"
    linear: LinearName = "auto"
    budget: float | None = 0
    confidence: float = CONFIDENCE
    min_cosine: float = MIN_COSINE
    threshold: float | Sequence[float] | Literal["auto"] = "auto"
    near: int | None = None
    max_bytes: int | str | None = None
    fill: bool | str = True
    shadow: bool = False
    log_changes: str | None = None
    namespaces: int = 0
    drain_seconds: float = 1.0
    stop_seconds: float = 30.0
    model_name: str = field(init=False)

    def __post_init__(self) -> None:
        folder = Path(self.model).expanduser()
        own = Path(os.path.abspath(folder)).name if folder.is_absolute() or folder.exists() else self.model
        object.__setattr__(self, "model_name", own)  # now: a folder may be moved while it is served
        for least, names in LEAST.items():
            for name in names:
                if (value := getattr(self, name)) is not None and not value >= least:
                    raise ArgumentError(f"{name} is {value}; expected {least} or more.", f"give {least} or more")
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ArgumentError("default_prompt and default_prompt_name were both given.", "give one of them")
        check_places(self.database, self.fill)
        check_budget(self.budget)
        linear = "exact" if self.linear == "auto" else self.linear
        check_together(
            reuse=self.reuse, database=self.database, fill=self.fill, budget=self.budget, linear=linear,
            threshold=self.threshold, near=self.near, shadow=self.shadow, log_changes=self.log_changes,
        )  # fmt: skip
        unguarded = self.reuse in ("none", "maps", "prefix", "local")
        if unguarded or not self.budget:
            why = f"reuse is {self.reuse}" if unguarded else f"budget is {self.budget}"
            for name, value, usual in (
                ("confidence", self.confidence, CONFIDENCE), ("min_cosine", self.min_cosine, MIN_COSINE)
            ):  # fmt: skip
                if value != usual:
                    what = f"{name} is {value}, and answers are not guarded: {why}."
                    raise ArgumentError(what, f"leave out {name}")
        bytes_of(self.max_bytes)
        if self.api_key is not None and not self.api_key.strip():
            raise ArgumentError("the API key is empty: every request would be refused.", "give a key, or none")

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.served_model_name or self.model_name

    @property
    def workers(self) -> int:
        """Threads that turn texts into tokens."""
        return self.tokenization_workers or max(1, cores() // 4)


APART: Final = 4
"""From so many cores on, one core in four is left to HTTP and to tokenization."""


class Split(NamedTuple):
    """How the model and all other work share the machine."""

    model: set[int]  # its cores
    threads: int  # of the model
    others: set[int]  # cores of HTTP and texts


def split_cores(allowed: set[int], count: int) -> Split:
    """Split the cores of the affinity, of which `count` may be busy (`attmemo.system.machine.cores`).

    With few cores both parts are all of them. So they are under a quota: a quota is of time, not of certain cores, and
    the services of many containers would choose the same ones.
    """
    rest = count // 4 if count >= APART else 0
    if not rest or count < len(allowed):
        return Split(allowed, count - rest, allowed)
    ordered = sorted(allowed)
    return Split(set(ordered[:-rest]), count - rest, set(ordered[-rest:]))
