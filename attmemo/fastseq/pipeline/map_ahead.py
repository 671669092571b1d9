"""Stages of a pipeline that run in threads beside the caller's, with little waiting between them.

Threads, not processes: the tokenizers that matter are written in Rust and let go of the interpreter while they work,
as torch does. Measured on two cores: beside a fast tokenizer that encodes articles a thread of pure Python kept 62 %
of its speed, beside one that decodes 45 %, while the tokenizer's own threads were on both cores; a lock that was held
would have left nothing. A process would have to load torch again and send every batch through a pipe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Full, Queue
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_PATIENCE = 0.1  # seconds after which a thread that waits looks whether it is still needed


def map_ahead(function: Callable[[T], R], items: Iterable[T], *, workers: int = 1, ahead: int = 2) -> Iterator[R]:
    """`map` in threads, in order, with a few results ready before they are asked for.

    Parameters
    ----------
    function : callable
        Runs in `workers` threads.
    items : iterable
        Read in a thread of its own: a slow source delays only its own results.
    ahead : int
        At most this many results wait; then the threads do.

    Yields
    ------
    Result of each item. An error of `function` or of `items` is raised where its result would have come. Closing the
    iterator ends the threads.
    """
    waiting: Queue[Future[R] | None] = Queue(maxsize=ahead)
    stopped = threading.Event()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="ahead")

    def put(entry: Future[R] | None) -> bool:
        while not stopped.is_set():
            try:
                waiting.put(entry, timeout=_PATIENCE)
                return True
            except Full:
                continue
        return False

    def feed() -> None:
        try:
            for item in items:
                if stopped.is_set() or not put(pool.submit(function, item)):
                    return
        except BaseException as error:
            broken: Future[Any] = Future()
            broken.set_exception(error)
            put(broken)
        else:
            put(None)

    # A daemon: it may hang in a source that never answers, and must not keep the process alive then.
    feeder = threading.Thread(target=feed, name="ahead-feeder", daemon=True)
    feeder.start()
    try:
        while (result := waiting.get()) is not None:
            yield result.result()
    finally:
        stopped.set()
        pool.shutdown(wait=False, cancel_futures=True)
        feeder.join(timeout=1.0)
