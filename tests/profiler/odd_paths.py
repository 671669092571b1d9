"""Paths of a table that do what no path should. Processes of their own import them by name."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from torch import Tensor

from attmemo.profiler.models import Tokens, load_model
from attmemo.profiler.peers.paths import Order, Ready, Route, way_of


def permuted(order: Order) -> Ready:
    """Gives the answers of a batch in the wrong order."""
    way = way_of(load_model(order.model, order.dtype))
    return Ready(lambda texts: way(texts).flip(0))


def dying(order: Order) -> Ready:
    """Dies when it is asked for more than one text."""
    way = way_of(load_model(order.model, order.dtype))

    def ask(texts: Sequence[Tokens]) -> Tensor:
        if len(texts) > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return way(texts)

    return Ready(ask)


def raising(order: Order) -> Ready:
    """Raises when it is asked for more than one text."""
    way = way_of(load_model(order.model, order.dtype))

    def ask(texts: Sequence[Tokens]) -> Tensor:
        if len(texts) > 1:
            raise ValueError("one text at most")
        return way(texts)

    return Ready(ask)


def unready(order: Order) -> Ready:
    """Cannot be made ready."""
    raise RuntimeError("this model is too odd")


ODD = {
    "permuted": Route("permuted", permuted, by_length=False), "dying": Route("dying", dying),
    "raising": Route("raising", raising, exact=("float32",)), "unready": Route("unready", unready),
}  # fmt: skip
