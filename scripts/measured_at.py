"""The commit, the day and the class of processor of a measurement, which every JSON of numbers names."""

from __future__ import annotations

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

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


def processor_of(features: list[str]) -> str:
    """The class of a processor, by what it has for matrices."""
    kinds = {
        "amx_bf16": "x86-64 with AMX", "avx512_bf16": "x86-64 with AVX-512 and bfloat16",
        "avx512f": "x86-64 with AVX-512", "avx2": "x86-64 with AVX2", "bf16": "arm64 with bfloat16",
    }  # fmt: skip
    return next((kind for name, kind in kinds.items() if name in features), "other")


def write_record(file: Path, found: dict[str, Any]) -> None:
    """Write a JSON of numbers, with ``measured``: commit, day, class of processor and versions of each measurement.

    What `found` keeps of earlier measurements stays beside those of now.
    """
    from attmemo.system.machine import conditions

    where = conditions()
    versions = {name: where[name] for name in ("python", "torch", "transformers")}
    now = measured_at() | {"processor": processor_of(where["features"])} | versions
    before = found.get("measured", [])
    before = before if isinstance(before, list) else [before]
    write_json(file, found | {"measured": [*(one for one in before if one != now), now]})


def write_json(file: Path, found: dict[str, Any]) -> None:
    """Write a JSON as it is."""
    file.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def gathered(parts: dict[str, dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], list[dict[str, Any]]]:
    """Parts that `write_record` wrote, without their measurements; and these, each one once."""
    stamps: list[dict[str, Any]] = []
    for part in parts.values():
        stamps += [one for one in part.get("measured", []) if one not in stamps]
    bare = {name: {key: value for key, value in part.items() if key != "measured"} for name, part in parts.items()}
    return bare, stamps
