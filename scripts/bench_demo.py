"""The demo as a newcomer gets it: a fresh clone, set-up and demo timed apart. Or once more, in this environment.

    python scripts/bench_demo.py OUT.json "bfloat16"                          # a fresh clone of HEAD
    python scripts/bench_demo.py OUT.json "bfloat16, peers installed" --here  # what is installed here
    python scripts/bench_demo.py OUT.json "float32" --here -- --dtype float32

The run is written into the JSON under its name, the others stay. A fresh clone compiles and installs everything. pip
may have packages in its cache: then no number here says how long a download takes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from attmemo.cli.files import write_whole

REPOSITORY = Path(__file__).parents[1]
LEFT = ("laps", "plot")  # every batch, and a place on this machine
ATTMEMO = (sys.executable, "-c", "from attmemo.cli.app import main; main()")


def short(value: Any) -> Any:
    """Six digits are enough, and what is too long or of this machine alone is left out."""
    if isinstance(value, dict):
        return {name: short(item) for name, item in value.items() if name not in LEFT}
    if isinstance(value, list):
        return [short(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def timed(*words: str | Path, folder: Path) -> float:
    """Seconds that a program takes; CalledProcessError if it fails."""
    start = perf_counter()
    subprocess.run([*map(str, words)], cwd=folder, check=True)
    return perf_counter() - start


def result(output: Path) -> dict[str, Any]:
    """What a demo has written."""
    found: dict[str, Any] = json.loads((output / "demo.json").read_text(encoding="utf-8"))
    return found


def fresh(more: list[str]) -> dict[str, Any]:
    """The demo of a fresh clone, with the seconds of set-up and of the whole demo, start of programs included."""
    if more:
        raise SystemExit("a fresh clone runs make demo as it is: give --here for other arguments")
    with TemporaryDirectory() as folder:
        clone = Path(folder) / "attmemo"
        timed("git", "clone", "--quiet", REPOSITORY, clone, folder=Path(folder))
        set_up = timed("make", ".venv/.library", folder=clone)
        demo = timed("make", "demo", folder=clone)
        found = result(clone / "demo-output")
    return found | {"set_up_seconds": round(set_up, 1), "demo_seconds": round(demo, 1)}


def here(more: list[str]) -> dict[str, Any]:
    """The demo in this environment."""
    with TemporaryDirectory() as folder:
        output = Path(folder) / "demo-output"
        timed(*ATTMEMO, "demo", "--output", output, *more, folder=REPOSITORY)
        return result(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="JSON that gets the run")
    parser.add_argument("name", help="of the run in it")
    parser.add_argument("--here", action="store_true", help="no clone: this Python; behind -- arguments of the demo")
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    args, more = parser.parse_args(words[:at]), words[at + 1 :]
    found = here(more) if args.here else fresh(more)
    runs = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    runs[args.name] = short(found)
    write_whole("the JSON", args.out, f"{json.dumps(runs, indent=1, ensure_ascii=False)}\n".encode())


if __name__ == "__main__":
    main()
