"""The long demo: a database of maps, the whole way from lines of a log to a measured model."""

from __future__ import annotations

import shutil
import time
from collections import deque
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final

from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.demo import BUDGET, FEWEST, LONGEST, model_path, prepare_folder
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.lines import read_log
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import greatest_length, load_model
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune
from attmemo.profiler.turns import Progress, silent

LINES: Final = 3500  # three to four minutes on two cores; a third is enough to certify the budget
_PARTS: Final = {"build": 0.47, "tune": 0.35, "ask": 0.18}


def run_maps_demo(log: Path | None, output: Path, tell: Progress = silent) -> dict[str, Any]:
    """Build, train, tune and evaluate on one log, the earlier lines for the database and the later ones asked.

    Of the user's log, one text a line and oldest first, the last `LINES` lines are used; without one, lines are
    invented. `output` takes the lines, the database and the report; it is made if absent, and emptied of an earlier
    demo's; files that are not a demo's are an `AttmemoError`. Gives, JSON-able, what the commands give.
    """
    start = time.monotonic()
    name = model_path()
    lines = list(generate_log(LINES, 0, ("login",)) if log is None else deque(read_log(log, FEWEST), maxlen=LINES))
    prepare_folder(output)
    database = output / "database"
    shutil.rmtree(database, ignore_errors=True)
    files = _split(lines, output)
    loaded = load_model(name)
    options = BuildOptions(max_length=min(LONGEST, greatest_length(loaded, None)), max_bytes=4 << 30)
    built = build_database(loaded, [files["build"]], database, options, partial(tell, "capturing"))
    training = train_database(database, progress=tell)
    # A short log cannot certify the budget. The threshold then follows the observed changes, and the sentence says so.
    tuning = tune(database, [files["tune"]], TuneOptions(budget=BUDGET, allow_uncertified=True), tell)
    evaluation = evaluate(database, [files["ask"]], EvaluateOptions(), tell)
    from attmemo.profiler.report import write_report

    report = write_report(evaluation, output / "report")[0]
    return {
        "lines": len(lines), "seconds": time.monotonic() - start, "build": asdict(built) | {"path": str(built.path)},
        "training": training, "tuning": tuning, "evaluation": evaluation, "report": str(report),
    }  # fmt: skip


def _split(lines: list[str], output: Path) -> dict[str, Path]:
    """The lines in their order, cut into those to store, those that choose the threshold and those to ask."""
    rest = iter(lines)
    parts = {part: list(islice(rest, round(share * len(lines)))) for part, share in _PARTS.items()}
    for part, own in (parts | {"service": lines}).items():
        (output / f"{part}.log").write_text("".join(f"{line}\n" for line in own), encoding="utf-8")
    return {part: output / f"{part}.log" for part in parts}
