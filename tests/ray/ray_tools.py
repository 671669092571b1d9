"""A small Ray on this machine, and encoders that are killed."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sentence_transformers", reason="attmemo[serve] is not installed")

from attmemo.ray import Encoder


@contextmanager
def running(cpus: int = 3) -> Iterator[Any]:
    """Ray with a few processes; they can import the modules of tests."""
    ray = pytest.importorskip("ray", reason="attmemo[ray] is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            num_cpus=cpus, include_dashboard=False, object_store_memory=200 << 20, logging_level=logging.ERROR,
            log_to_driver=False,
        )  # fmt: skip
        try:
            yield ray
        finally:
            ray.shutdown()


class Mortal(Encoder):
    """An encoder whose process is killed in the middle of its third batch; only once in all."""

    def __init__(self, *given: Any, mark: str, **named: Any) -> None:
        super().__init__(*given, **named)
        self._mark, self._calls = Path(mark), 0

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        self._calls += 1
        answers = super().__call__(batch)
        if self._calls == 3:
            die_once(self._mark)
        return answers


def die_once(mark: Path) -> None:
    """Kill this process, if no other was killed for this mark."""
    try:
        os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
