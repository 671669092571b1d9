"""The commit and the day of a measurement, which every JSON of numbers names."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def commit() -> str:
    """Return the commit that is measured, with ``-dirty`` where code differs from it; results and pages may differ."""
    given = ["git", "describe", "--always", "--exclude", "*"]
    changed = ["git", "status", "--porcelain", "-uno", "attmemo", "native", "profiler", "scripts"]
    try:
        found, dirty = (
            subprocess.run(one, capture_output=True, text=True, check=True, cwd=ROOT).stdout
            for one in (given, changed)
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.strip() + ("-dirty" if dirty.strip() else "")


def measured_at() -> dict[str, str]:
    """Return ``commit`` and ``date`` (UTC), JSON-able."""
    return {"commit": commit(), "date": datetime.datetime.now(datetime.UTC).date().isoformat()}
