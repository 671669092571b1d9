"""Measure every row of the table of maps in docs/measured.md, from the shared data and models.

    python scripts/reproduce.py ../shared results            # all cases, about an hour on two cores
    python scripts/reproduce.py ../shared results openssh    # one of them
    python scripts/reproduce.py ../shared results --page     # gather results/maps.json, and print the table

Each case builds a database, trains and profiles it, tunes it for a budget of 1 % changed answers on data that is not
asked, and evaluates the tuned thresholds; logs are also evaluated at a fixed threshold. Of a log the first 40 % train
the embedder; the next 45 % are added then, and tuned on in the order of time; the last 15 % are asked. Of 300 lines
tuned on none may change, and 900 allow two. Beside it: the cost of memoization where it serves nothing. Results are
written as JSON with a report.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pandas as pd
import torch
from loghub_windows import windows
from measured_at import gathered, write_json, write_record

from attmemo import memoize
from attmemo.db import Database
from attmemo.profiler.answers import prepare
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.demo import model_path
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.models import answers, load_model
from attmemo.profiler.open import open_model, open_texts
from attmemo.profiler.report import write_report
from attmemo.profiler.train import train_database
from attmemo.profiler.tune import TuneOptions, tune
from attmemo.profiler.turns import interleave

TRAINED, TUNED = 0.4, 0.85  # of the lines of a log: where tuning begins, and asking
WINDOWS = 4000  # stored


@dataclass(frozen=True)
class Case:
    """One row: the texts to build from, to tune on and to ask, and the threshold."""

    model: str
    threshold: float | None  # None: only tuned
    build: list[dict[str, Any]]
    tune: list[dict[str, Any]]
    ask: list[dict[str, Any]]
    max_length: int
    labels: bool = False
    compile: bool = False
    joins: bool = False  # whether the texts to tune on are added to the database after the training


def log_case(shared: Path, system: str, threshold: float) -> Case:
    """Lines of a log, divided in time."""
    lines = (shared / f"data/loghub_2k/{system}_2k.log").read_text(errors="replace").split("\n")
    rows = [{"text": line} for line in lines if line.strip()]
    first, middle = int(TRAINED * len(rows)), int(TUNED * len(rows))
    return Case(model_path(), threshold, rows[:first], rows[first:middle], rows[middle:], 256, joins=True)


def deberta_case(shared: Path) -> Case:
    """Windows of log lines classified by a DeBERTa-v2, whose attention has no fused kernel."""
    folder, model = shared / "data/loghub_2k", shared / "models/deberta-loghub"
    known = set(json.loads((model / "config.json").read_text())["label2id"])
    asked = [[w for w in windows(folder, a, b) if w["label"] in known] for a, b in ((0.7, 0.85), (0.85, 1.0))]
    stored = pd.DataFrame(windows(folder, 0.0, 0.7)).sample(WINDOWS, random_state=0).to_dict("records")
    return Case(str(model), None, stored, asked[0], asked[1], 128, labels=True, compile=True)


CASES: dict[str, Callable[[Path], Case]] = {
    "openssh": lambda shared: log_case(shared, "OpenSSH", 0.9),
    "hdfs": lambda shared: log_case(shared, "HDFS", 0.8),
    "bgl": lambda shared: log_case(shared, "BGL", 0.8),
    "deberta": deberta_case,
}


def overhead(database: Path, ask: Path, texts: int = 96, repeats: int = 15) -> dict[str, float]:
    """Time over that of the bare model: memoization disabled, and enabled where nothing is near enough.

    By batch size. Paths take turns on every batch; each batch counts with its median over the turns. Bare is the very
    same model with everything of attmemo taken off it: a copy differs by up to 3 %, for where it lies in memory.
    """
    with Database(database) as opened:
        loaded = open_model(opened.manifest.model)
        asked = open_texts(loaded, opened, [ask], "text", None, texts)
        model = memoize(loaded.model, 1.0, opened)
        handle: Any = model.attmemo

        def bare() -> None:
            handle.disable()
            model.__dict__.pop("attmemo", None)

        def disabled() -> None:
            handle.disable()
            model.__dict__["attmemo"] = handle

        def no_hits() -> None:
            handle.enable()
            model.__dict__["attmemo"] = handle

        paths: dict[str, Callable[[], None]] = {"bare": bare, "disabled": disabled, "no hits": no_hits}
        found = {}
        with torch.inference_mode():
            for size in (1, 32):
                spent = dict.fromkeys(paths, 0.0)
                for _, inputs in prepare(loaded, asked.tokens, size):
                    jobs = dict.fromkeys(paths, lambda _, inputs=inputs: answers(loaded, inputs))  # type: ignore[misc]
                    for name, times in interleave(jobs, repeats - 1, ready=lambda name: paths[name]()).items():
                        spent[name] += times.ms
                for name in ("disabled", "no hits"):
                    found[f"{name}, batch {size}"] = spent[name] / spent["bare"]
        found["hit rate"] = handle.stats()["hit_rate"]
        return found


def save(rows: list[dict[str, Any]], file: Path) -> Path:
    """Write rows as JSON lines."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def run(name: str, case: Case, output: Path, keep: bool = False) -> dict[str, Any]:
    """All measurements of a case."""
    folder = output / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build, tuning = save(case.build, folder / "build.jsonl"), save(case.tune, folder / "tune.jsonl")
    ask = save(case.ask, folder / "ask.jsonl")
    database = folder / "database"
    label = "label" if case.labels else None

    def told(what: str) -> Callable[[str, int, int], None]:
        start = time.monotonic()

        def tell(part: str, done: int, total: int) -> None:
            if done == total:
                print(f"  {name}: {what}: {part} ({time.monotonic() - start:.0f} s)", file=sys.stderr, flush=True)

        return tell

    built = BuildOptions(max_length=case.max_length, text_column="text", max_bytes=8 << 30)
    print(" ", build_database(load_model(case.model), [build], database, built), file=sys.stderr)
    train_database(database, progress=told("train"))
    if case.joins:
        print(" ", build_database(load_model(case.model), [tuning], database, built), file=sys.stderr)
    tuned = tune(database, [tuning], TuneOptions(text_column="text", allow_uncertified=True), told("tune"))
    (folder / "tune.json").write_text(json.dumps(tuned, indent=1))
    print("  " + tuned["sentence"], file=sys.stderr)
    common: dict[str, Any] = {"text_column": "text", "label_column": label, "compile": case.compile, "sweep": False}
    found: dict[str, Any] = {"stored": len(case.build) + tuned["in_time"], "trained": len(case.build)}
    if case.threshold is not None:
        fixed = EvaluateOptions(threshold=case.threshold, **common)
        result = evaluate(database, [ask], fixed, told(f"threshold {case.threshold}"))
        write_report(result, folder / "fixed")
        found["fixed"] = summary(result)
    auto = EvaluateOptions(threshold="auto", **common)
    result = evaluate(database, [ask], auto, told("auto"))
    write_report(result, folder / "auto")
    told_of = ("judged", "total", "in_time", "growth", "observed", "upper_bound", "certified", "served")
    found["tune"] = {key: tuned[key] for key in told_of}
    found |= {"tuned": summary(result), "overhead": overhead(database, ask)}
    if not keep:
        shutil.rmtree(database)
    return found


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """What the page shows of an evaluation, with its conditions."""
    times = ("exact_ms", "best_exact", "memoized_ms", "speedup", "speedup_low", "speedup_high")
    return {
        "threshold": result["threshold"],
        "asked": result["data"]["sequences"],
        "in_database": result["data"]["in_database"],
        "served": result["hit_rate"],
        "exhaustive": result.get("exhaustive_hit_rate"),
        "time": {key: result["time"][key] for key in times},
        "quality": result["quality"],
        "controls": result.get("controls", []),
        "conditions": result["conditions"],
    }


def row(name: str, one: dict[str, Any]) -> str:
    """One line of the table."""
    speed, quality, shown = one["time"], one["quality"], one["threshold"]
    exhaustive = "" if one["exhaustive"] is None else f" ({100 * one['exhaustive']:.0f} %)"
    answers = f"{100 * quality['changed']:.1f} % changed"
    if quality["accuracy_exact"] is not None:
        answers += f"; accuracy {quality['accuracy_exact']:.3f} → {quality['accuracy_memoized']:.3f}"
    else:
        answers += f"; cosine mean {quality['cosine_mean']:.3f}, 1st percentile {quality['cosine_p1']:.3f}"
    cells = [
        name,
        f"{shown:g}" if isinstance(shown, float) else "tuned, 1 %",
        f"{100 * one['served']:.0f} %{exhaustive}",
        f"{speed['speedup']:.2f} ({speed['speedup_low']:.2f}–{speed['speedup_high']:.2f})",
        answers,
    ]
    return "| " + " | ".join(cells) + " |"


def rows(name: str, case: dict[str, Any]) -> str:
    """The lines of a case."""
    return "\n".join(row(name, case[kind]) for kind in ("fixed", "tuned") if kind in case)


def page(output: Path) -> None:
    """Gather the cases of `output` into maps.json, and print the table."""
    files = {name: output / f"{name}.json" for name in CASES}
    found, stamps = gathered({name: json.loads(file.read_text()) for name, file in files.items() if file.exists()})
    write_json(output / "maps.json", found | {"measured": stamps})
    print("| data | threshold | calls reused (exhaustive search) | speed | answers |")
    print("|---|---|---|---|---|")
    for name, case in found.items():
        print(rows(name, case))


def main() -> None:
    """Measure the cases that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--keep", action="store_true", help="leave the databases, several GiB, where they are")
    parser.add_argument("--page", action="store_true", help="measure nothing; gather what was measured")
    args = parser.parse_args()
    if args.page:
        page(args.output)
        return
    for name in args.cases:
        found = run(name, CASES[name](args.shared), args.output, args.keep)
        write_record(args.output / f"{name}.json", found)
        print(rows(name, found), flush=True)


if __name__ == "__main__":
    main()
