"""The windows of log lines that the reference model `deberta-loghub` classifies.

A window is a log line followed by up to three earlier lines of the same log, newest first, joined by " [SEP] "; its
label is `System:EventId` of the newest line. Logs are split in time: what asks comes from a later part than what is
stored or tuned on.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

LINES = 4


def windows(folder: Path, begin: float, end: float) -> list[dict[str, str]]:
    """All windows whose newest line lies between two shares of its log."""
    found = []
    for structured in sorted((folder / "structured").glob("*_2k.log_structured.csv")):
        system = structured.name.split("_")[0]
        labels = pd.read_csv(structured, dtype=str)["EventId"].tolist()
        text = (folder / f"{system}_2k.log").read_text(errors="replace").split("\n")[: len(labels)]
        for at in range(int(len(labels) * begin), int(len(labels) * end)):
            recent = [text[i].rstrip("\r") for i in range(at, max(at - LINES, -1), -1)]
            found.append({"text": " [SEP] ".join(recent), "label": f"{system}:{labels[at]}"})
    return found
