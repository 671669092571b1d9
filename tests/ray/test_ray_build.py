"""`examples/ray_build.py`: a job that loses a worker gives the database of one build."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="attmemo[ray] is not installed")

from stored_rows import StoredRows

from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import load_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_build.py"


def tokens(path: Path) -> list[bytes]:
    return sorted(StoredRows(path).records())


def kill_a_builder(scratch: Path, job: subprocess.Popen[str]) -> int:
    """Kill the first process that has begun to write a shard; its number."""
    while job.poll() is None:
        for lock in scratch.glob("*/builder.lock"):
            with suppress(OSError, ValueError):
                if any((lock.parent / "segments").iterdir()):
                    process = int(lock.read_text())
                    os.kill(process, signal.SIGKILL)
                    return process
        time.sleep(0.005)
    raise AssertionError("no worker was seen at work")


@pytest.mark.slow
def test_a_job_that_loses_a_worker_gives_the_database_of_one_build(tiny_bert: str, tmp_path: Path) -> None:
    log, scratch, output = tmp_path / "all.log", tmp_path / "scratch", tmp_path / "db"
    log.write_text("\n".join(generate_log(3000, seed=5)) + "\n")
    words = [
        "--model", tiny_bert, "--data", str(log), "--output", str(output), "--shared", str(tmp_path / "shared"),
        "--scratch", str(scratch), "--shards", "3",
    ]  # fmt: skip
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
    job = subprocess.Popen([sys.executable, EXAMPLE, *words], text=True, stdout=subprocess.PIPE, env=environment)
    try:
        kill_a_builder(scratch, job)
        said, _ = job.communicate(timeout=250)
    finally:
        job.terminate()
        job.wait()
    assert job.returncode == 0
    assert "3 of 3 shards are built" in said
    build_database(load_model(tiny_bert), [log], tmp_path / "one", BuildOptions(reuse="rows"))
    assert tokens(output) == tokens(tmp_path / "one")
    assert not list(scratch.iterdir()), "what is whole was moved"
    assert not list((tmp_path / "shared").glob("*.part"))
