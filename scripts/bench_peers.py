"""attmemo beside other runtimes: models x streams, each pair as `attmemo bench peers` measures it.

    python scripts/bench_peers.py ../shared docs                        # all pairs, three to four hours on two cores
    python scripts/bench_peers.py ../shared docs --resume               # the pairs that are not there yet
    python scripts/bench_peers.py ../shared docs --models minilm --streams OpenSSH HDFS
    python scripts/bench_peers.py ../shared docs --page                 # only peers.md and peers.png from peers.json

Every pair is one process of its own: a pair that fails is written down with its reason, and the others go on. The
result of a pair is in OUT_DIR/peers.json before the next one begins. Runtimes take part where they are installed.
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
from peers_inputs import MODELS, SHAPES, STREAMS, Plan, place_of, plan_of, write_stream, write_texts

from attmemo.cli.files import write_whole
from attmemo.profiler.peers.stream import FIRST, MOST_FIRST

FORMAT = "attmemo.peers-matrix/1"
PATIENCE = 1800  # seconds for one command
ATTMEMO = (sys.executable, "-c", "from attmemo.cli.app import main; main()")
STORED = 0.75  # of the first part: behind a database of maps; it is tuned on the others
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
    first = texts[: min(MOST_FIRST, round(FIRST * len(texts)))][: round(plan.stored / STORED)]
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


def version() -> str:
    """The commit that is measured."""
    given = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(given, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def measure(shared: Path, work: Path, model: str, stream: str, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """One pair. Failed, or an OSError: there is no result."""
    place, commit = place_of(model, shared, work), version()
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
        if args.paths:
            given += ["--paths", args.paths]
        attmemo(
            "bench", "peers", place, file, "--output", output, "--quiet", "--batch", args.batch, "--dtype", args.dtype,
            "--lines", plan.lines, "--sample", plan.sample, "--max-length", plan.max_length, *given,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    found["model"] |= {"name": model, "random": model in SHAPES}
    found["stream"]["name"] = stream
    found["conditions"]["version"] = commit
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


def write(out: Path, runs: list[dict[str, Any]]) -> None:
    """The JSON, with the pairs in the order of the page."""
    order = [(model, stream) for model in MODELS for stream in STREAMS]
    runs = sorted(runs, key=lambda run: order.index((run["model"]["name"], run["stream"]["name"])))
    text = json.dumps({"format": FORMAT, "runs": runs}, indent=1, ensure_ascii=False)
    write_whole("OUT_DIR", out / "peers.json", f"{text}\n".encode())


def read(out: Path) -> list[dict[str, Any]]:
    """The pairs that were measured before."""
    file = out / "peers.json"
    return list(json.loads(file.read_text(encoding="utf-8"))["runs"]) if file.exists() else []


def name_of(run: dict[str, Any]) -> tuple[str, str, str]:
    return run["model"]["name"], run["stream"]["name"], run["model"]["dtype"]


def run_all(args: argparse.Namespace) -> None:
    """Every pair that was asked for, one after the other."""
    with TemporaryDirectory() as work:
        for model in args.models:
            for stream in args.streams:
                runs, pair = read(args.out), (model, stream, args.dtype)
                if args.resume and any(name_of(run) == pair and "failed" not in run for run in runs):
                    continue
                plan = plan_of(model, stream)
                plan = plan._replace(sample=args.sample or plan.sample, lines=args.lines or plan.lines)
                start = time.monotonic()
                try:
                    found = measure(args.shared, Path(work), model, stream, plan, args)
                    said = " ".join(peers_page.sentences(found))
                except (Failed, OSError) as error:
                    said = f"failed: {error}"
                    found = {
                        "model": {"name": model, "dtype": args.dtype}, "stream": {"name": stream}, "failed": str(error)
                    }  # fmt: skip
                found["seconds"] = time.monotonic() - start
                write(args.out, [run for run in runs if name_of(run) != pair] + [without_places(found)])
                print(f"{model} x {stream}, {found['seconds']:.0f} s: {said}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shared", type=Path)
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), default=tuple(MODELS))
    parser.add_argument("--streams", nargs="+", choices=STREAMS, default=STREAMS)
    parser.add_argument("--sample", type=int, metavar="N", help="texts that every path answers, of every pair")
    parser.add_argument("--lines", type=int, metavar="N", help="texts that are read, of every pair")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--paths", help="as of attmemo bench peers")
    parser.add_argument("--no-maps", dest="maps", action="store_false", help="make no databases of maps")
    parser.add_argument("--resume", action="store_true", help="leave out pairs that have a result")
    parser.add_argument("--page", action="store_true", help="measure nothing")
    args = parser.parse_args()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    args.out.mkdir(parents=True, exist_ok=True)
    if not args.page:
        run_all(args)
    found = json.loads((args.out / "peers.json").read_text(encoding="utf-8"))
    (args.out / "peers.md").write_text(peers_page.text(found), encoding="utf-8")
    (args.out / "peers.png").write_bytes(peers_page.draw(found))


if __name__ == "__main__":
    main()
