"""All options of the service. Names and meanings are those of text-embeddings-inference (TEI) where it has them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

from attmemo.arguments import check_places, check_together
from attmemo.errors import ArgumentError
from attmemo.sizes import bytes_of

Pooling = Literal["mean", "cls", "last-token"]
ReuseName = Literal["auto", "maps", "rows", "none"]
DtypeName = Literal["float32", "bfloat16"]
LinearName = Literal["exact", "int8"]


@dataclass(frozen=True, slots=True)
class Settings:
    """What one service is told when it starts.

    Parameters
    ----------
    model : str
        Model directory, or name on the model hub.
    served_model_name : str, optional
        Name in answers of OpenAI's routes. Default: `model`.
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
        Sequences that are in the service at a time, at most; more are refused with status 429.
    max_client_batch_size : int
        Sequences in one request, at most.
    auto_truncate : bool
        Cut inputs that are too long, where a request does not say.
    payload_limit : int
        Bytes of a body, at most.
    client_seconds : float
        How long a body may take to arrive.
    tokenization_workers : int, optional
        Threads that turn texts into tokens. Default: a quarter of the cores, at least one.
    api_key : str, optional
        Requests must bring it; the state of the service is open to all.
    database, reuse, linear, budget, max_bytes, fill
        As in `attmemo.memoize`.
    drain_seconds : float
        After SIGTERM, how long ``/health`` says 503 while requests are still taken.
    stop_seconds : float
        After that, how long requests in work may take.
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
    database: str | None = None
    reuse: ReuseName = "auto"
    linear: LinearName = "exact"
    budget: float | None = 0.01
    max_bytes: int | str | None = None
    fill: bool | str = True
    drain_seconds: float = 1.0
    stop_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_batch_tokens", "max_concurrent_requests", "max_client_batch_size", "payload_limit"):
            _least(name, getattr(self, name), 1)
        for name in ("max_batch_requests", "tokenization_workers"):
            _least(name, getattr(self, name), 1)
        for name in ("client_seconds", "drain_seconds", "stop_seconds"):
            _least(name, getattr(self, name), 0)
        if self.default_prompt is not None and self.default_prompt_name is not None:
            raise ArgumentError("default_prompt and default_prompt_name were both given.", "give one of them")
        check_places(self.database, self.fill)
        check_together(
            reuse=self.reuse, database=self.database, fill=self.fill, budget=self.budget, linear=self.linear
        )  # fmt: skip
        bytes_of(self.max_bytes)
        if self.api_key is not None and not self.api_key.strip():
            raise ArgumentError("the API key is empty: every request would be refused.", "give a key, or none")

    @property
    def name(self) -> str:
        """The model's name in answers."""
        return self.served_model_name or self.model

    @property
    def workers(self) -> int:
        """Threads that turn texts into tokens."""
        return self.tokenization_workers or max(1, len(os.sched_getaffinity(0)) // 4)


APART: Final = 4
"""From so many cores on, one core in four is left to HTTP and to tokenization."""


def split_cores(cores: set[int]) -> tuple[set[int], set[int]]:
    """Cores of the model, and cores of all other work; with few cores both are all of them."""
    if len(cores) < APART:
        return cores, cores
    ordered = sorted(cores)
    rest = len(ordered) // 4
    return set(ordered[:-rest]), set(ordered[-rest:])


def _least(name: str, value: float | None, least: int) -> None:
    if value is not None and not value >= least:
        raise ArgumentError(f"{name} is {value}; expected {least} or more.", f"give {least} or more")
