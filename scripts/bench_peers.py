"""attmemo beside other runtimes: models x streams, each pair as `attmemo bench peers` measures it.

    python scripts/bench_peers.py ../shared docs --pages                # what pages show: 90 minutes on two cores
    python scripts/bench_peers.py ../shared docs --first                # only the row of README.md: minutes
    python scripts/bench_peers.py ../shared docs --resume               # all pairs that are not there yet: hours
    python scripts/bench_peers.py ../shared docs --models minilm --streams OpenSSH HDFS
    python scripts/bench_peers.py ../shared docs --page                 # only peers.md and peers.png from peers.json

Every pair is one process of its own: a pair that fails is written down with its reason, and the others go on. The
result of a pair is in OUT_DIR/peers.json before the next one begins. Runtimes take part where they are installed. One
that wants other versions of packages is measured by a Python of its own, and joins the pairs that are there:

    /other/venv/bin/python scripts/bench_peers.py ../shared docs --pages --join stock,none,vllm
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import peers_page
from marked import replace_measured
from measured_at import commit, measured_at, processor_of
from peers_inputs import FIRST, MODELS, PAGES, SHAPES, STREAMS, Plan, place_of, plan_of, write_stream, write_texts

from attmemo.cli.files import write_whole
from attmemo.profiler.peers import stream as streams
from attmemo.profiler.peers.paths import CACHE, PATHS

FORMAT = "attmemo.peers-matrix/1"
PATIENCE = 1800  # seconds for one command
ATTMEMO = (sys.executable, "-c", "from attmemo.cli.app import main; main()")
STORED = 0.75  # of the first part: behind a database of maps; it is tuned on the others
SAME = "none"
"""The path that says how speeds of two runs compare: attmemo exact."""
QUICK = "stock,openvino-bf16,openvino-int8,onnx-int8,llama-f16,llama-q8,genai,none,none-int8,rows,rows-int8"
"""Paths of the first page: what is slow to begin, and was far behind, is left out."""
_PLACE = re.compile(r"(?:~|\.)?/(?:[\w.+~-]+/)+")


class Failed(Exception):
    """A command gave no result; the message says why in a line."""


def attmemo(*arguments: object) -> None:
    """Run a command in a process of its own."""
    try:
        done = subprocess.run([*ATTMEMO, *map(str, arguments)], capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise Failed(f"attmemo {arguments[0]} took more than {PATIENCE} s") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        known = said[-1].removeprefix("error: ") if said else f"it ended with {done.returncode}"
        raise Failed(f"attmemo {arguments[0]}: {known}")


def maps_of(model: Path, texts: list[str], plan: Plan, folder: Path, dtype: str) -> tuple[Path, float]:
    """A trained and tuned database of maps from the first part of the stream, and the seconds that it took."""
    first = texts[: min(streams.MOST_FIRST, round(streams.FIRST * len(texts)))][: round(plan.stored / STORED)]
    cut = round(STORED * len(first))
    build, tune, database = folder / "build.jsonl", folder / "tune.jsonl", folder / "maps"
    write_texts(first[:cut], build)
    write_texts(first[cut:], tune)
    start = time.monotonic()
    attmemo(
        "build-database", "--model", model, "--data", build, "--output", database, "--max-length", plan.max_length,
        "--model-dtype", dtype,
    )  # fmt: skip
    attmemo("train-embedder", database)
    attmemo("tune", database, "--data", tune, "--allow-uncertified")
    return database, time.monotonic() - start


def measure(shared: Path, work: Path, model: str, stream: str, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """One pair. Failed, or an OSError: there is no result."""
    place, at = place_of(model, shared, work), measured_at()
    with TemporaryDirectory(dir=work) as name:
        folder = Path(name)
        file, output = folder / f"{stream}.jsonl", folder / "result.json"
        texts = write_stream(shared, stream, plan.lines, file)
        given: list[object] = []
        why, seconds = "the weights are random: similar maps say nothing", 0.0
        if plan.stored and args.maps:
            try:
                database, seconds = maps_of(place, texts, plan, folder, args.dtype)
                given += ["--database", database]
            except Failed as error:
                why = f"no database: {error}"
        elif plan.stored:
            why = "no database was made: --no-maps"
        # model2vec computes every token of the vocabulary, for minutes: of random weights that says nothing.
        left = [name for name, route in PATHS.items() if route.other and model in SHAPES and not args.paths]
        if args.paths or left:
            given += ["--paths", args.paths or ",".join(name for name in (*PATHS, CACHE) if name not in left)]
        attmemo(
            "bench", "peers", place, file, "--output", output, "--quiet", "--batch", args.batch, "--dtype", args.dtype,
            "--lines", plan.lines, "--sample", plan.sample, "--max-length", plan.max_length, *given,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    found["model"] |= {"name": model, "random": model in SHAPES}
    for name in left:
        why_not = "the weights are random: its table says nothing"
        found["paths"][name] = {"title": PATHS[name].title, "left_out": why_not}
    found["stream"]["name"] = stream
    found["conditions"] |= {
        "version": at["commit"], "date": at["date"],
        "processor": processor_of(found["conditions"]["features"]),
    }  # fmt: skip
    maps = found["paths"].get("maps")
    if maps is not None and "loading_s" in maps:
        maps["converting_s"] = seconds
    elif maps is not None and not seconds:
        maps["left_out"] = why
    return found


def without_places(value: Any) -> Any:
    """A result without folders of this machine, and with five digits of each number."""
    if isinstance(value, dict):
        return {key: without_places(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.5g}")
    return _PLACE.sub("…/", value) if isinstance(value, str) else value


def write(file: Path, runs: list[dict[str, Any]]) -> None:
    """The JSON, with the pairs in the order of the page."""
    order = [(model, stream) for model in MODELS for stream in STREAMS]
    runs = sorted(runs, key=lambda run: order.index((run["model"]["name"], run["stream"]["name"])))
    text = json.dumps({"format": FORMAT, "runs": runs}, indent=1, ensure_ascii=False)
    write_whole("OUT_DIR", file, f"{text}\n".encode())


def read(file: Path) -> list[dict[str, Any]]:
    """The pairs that were measured before."""
    return list(json.loads(file.read_text(encoding="utf-8"))["runs"]) if file.exists() else []


def name_of(run: dict[str, Any]) -> tuple[str, str, str]:
    return run["model"]["name"], run["stream"]["name"], run["model"]["dtype"]


def pairs_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Models and streams that were asked for."""
    return [
        (model, stream) for model in args.models for stream in (PAGES.get(model, ()) if args.pages else args.streams)
    ]


def joined(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """An earlier result with the paths of a later one in place of its own.

    Speeds are over the original model, which takes another time with other versions of its packages. So where both
    have attmemo exact, speeds of the later one are those over it times its speed in the earlier one. What holds for
    the later one alone is beside it, in ``joined``.
    """
    kept = {"stock", SAME} & old["paths"].keys()
    names = [name for name in new["paths"] if name not in kept]
    scales = {}
    for size in old["batch"]:
        own, other = (peers_page.cell_of(run, SAME, size) for run in (old, new))
        if own and other:
            scales[size] = own["speed"] / other["speed"]
    cells = [cell for cell in old["cells"] if cell["path"] not in names]
    cells += [scaled(cell, scales.get(cell["batch"], 1.0)) for cell in new["cells"] if cell["path"] in names]
    paths = old["paths"] | {name: new["paths"][name] for name in names}
    return old | {
        "paths": paths,
        "cells": cells,
        "joined": [*old.get("joined", []), new["conditions"] | {"paths": names, "scales": scales}],
    }


def scaled(cell: dict[str, Any], scale: float) -> dict[str, Any]:
    """A cell with so many times its speeds."""
    found = {key: scale * cell[key] for key in ("speed", "late_speed") if cell.get(key) is not None}
    return cell | found | {"speeds": [scale * speed for speed in cell.get("speeds", [])]}


def run_all(args: argparse.Namespace) -> None:
    """Every pair that was asked for, one after the other."""
    if args.pages and not args.join:  # a page shows one commit
        write(args.file, [run for run in read(args.file) if run.get("conditions", {}).get("version") == commit()])
    with TemporaryDirectory() as work:
        for model, stream in pairs_of(args):
            runs, pair = read(args.file), (model, stream, args.dtype)
            known = [run for run in runs if name_of(run) == pair and "failed" not in run]
            if known if args.resume or (args.pages and not args.join) else args.join and not known:
                continue
            plan = plan_of(model, stream)
            plan = plan._replace(sample=args.sample or plan.sample, lines=args.lines or plan.lines)
            start = time.monotonic()
            try:
                found = measure(args.shared, Path(work), model, stream, plan, args)
                if args.join:
                    found = joined(known[0], found)
                said = " ".join(peers_page.sentences(found))
            except (Failed, OSError) as error:
                said = f"failed: {error}"
                found = known[0] if args.join else {
                    "model": {"name": model, "dtype": args.dtype}, "stream": {"name": stream}, "failed": str(error)
                }  # fmt: skip
            found["seconds"] = found.get("seconds", 0.0) * bool(args.join) + time.monotonic() - start
            write(args.file, [run for run in runs if name_of(run) != pair] + [without_places(found)])
            print(f"{model} x {stream}, {found['seconds']:.0f} s: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--name", default="peers", help="of the JSON, the page and the picture (default: peers)")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=STREAMS)
    parser.add_argument("--sample", type=int, metavar="N", help="texts that every path answers, of every pair")
    parser.add_argument("--lines", type=int, metavar="N", help="texts that are read, of every pair")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--paths", help="as of attmemo bench peers")
    parser.add_argument("--join", metavar="PATHS", help="measure these, and add them to the pairs that are there")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--pages", action="store_true", help="the pairs that pages show, bfloat16; of other commits: none"
    )
    chosen.add_argument("--first", action="store_true", help="the pair that README.md shows")
    parser.add_argument("--no-maps", dest="maps", action="store_false", help="make no databases of maps")
    parser.add_argument("--resume", action="store_true", help="leave out pairs that have a result")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if args.pages or args.first:
        args.dtype, args.maps, args.paths = FIRST[2], False, args.paths or (None if args.pages else QUICK)
    if args.first:
        args.models, args.streams = FIRST[:1], FIRST[1:2]
    args.paths = args.join or args.paths
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.out.mkdir(parents=True, exist_ok=True)
    args.file = args.out / f"{args.name}.json"
    if not args.page:
        run_all(args)
    found, picture = json.loads(args.file.read_text(encoding="utf-8")), args.file.with_suffix(".png")
    replace_measured(args.file.with_suffix(".md"), peers_page.text(found, picture.name))
    picture.write_bytes(peers_page.draw(found))


if __name__ == "__main__":
    main()
