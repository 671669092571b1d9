"""Make the windows of log lines that the reference model `deberta-loghub` classifies, as JSON lines.

A window is a log line followed by up to three earlier lines of the same log, newest first, joined by " [SEP] "; its
label is `System:EventId` of the newest line. Logs are split in time: `build.jsonl` and nothing else comes from the
first part, `tune.jsonl` from the next, `ask.jsonl` from the last.

    python scripts/loghub_windows.py ../shared/data/loghub_2k windows --model ../shared/models/deberta-loghub
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import pandas as pd


def windows(folder: Path, begin: float, end: float, lines: int = 4) -> list[dict[str, str]]:
    """All windows whose newest line lies between two shares of its log."""
    found = []
    for structured in sorted((folder / "structured").glob("*_2k.log_structured.csv")):
        system = structured.name.split("_")[0]
        labels = pd.read_csv(structured, dtype=str)["EventId"].tolist()
        text = (folder / f"{system}_2k.log").read_text(errors="replace").split("\n")[: len(labels)]
        for at in range(int(len(labels) * begin), int(len(labels) * end)):
            recent = [text[i].rstrip("\r") for i in range(at, max(at - lines, -1), -1)]
            found.append({"text": " [SEP] ".join(recent), "label": f"{system}:{labels[at]}"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the loghub_2k folder")
    parser.add_argument("output", type=Path)
    parser.add_argument("--model", type=Path, help="keep only windows whose label this model knows (not in build)")
    parser.add_argument("--build", type=int, default=1500, help="windows in build.jsonl")
    parser.add_argument("--tune-until", type=float, default=0.85, help="share of each log where asking begins")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    known = None
    if args.model:
        known = set(json.loads((args.model / "config.json").read_text())["label2id"])
    draw = random.Random(args.seed)
    parts = {
        "build": draw.sample(windows(args.folder, 0.0, 0.7), args.build),
        "tune": windows(args.folder, 0.7, args.tune_until),
        "ask": windows(args.folder, args.tune_until, 1.0),
    }
    args.output.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        kept = part if known is None or name == "build" else [w for w in part if w["label"] in known]
        (args.output / f"{name}.jsonl").write_text("".join(json.dumps(w) + "\n" for w in kept))
        print(f"{name}.jsonl: {len(kept)} windows")


if __name__ == "__main__":
    main()
