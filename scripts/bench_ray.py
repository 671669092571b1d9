"""Lines a second of one actor of Ray Data and of two, one thread each, over the same lines and the same database.

    python scripts/bench_ray.py ../shared OUT.json [LINES]

Time is counted from when the last actor begins its first batch. Lines are the later half of OpenSSH_2k.log, again and
again with other numbers; the database holds the first half.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray.data

from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import load_model
from attmemo.ray import Encoder


class Timed(Encoder):
    """Notes when each batch began and ended."""

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        begin = time.time()
        found = super().__call__(batch)
        size = len(batch["id"])
        notes = {"begin": begin, "end": time.time(), "process": os.getpid()}
        return found | {name: np.full(size, value) for name, value in notes.items()}


def lines_of(log: list[str], count: int) -> list[str]:
    """Lines with other numbers in the place of those of five digits."""
    draw = random.Random(0)
    return [re.sub(r"\d{5}", lambda _: str(draw.randrange(10_000, 100_000)), log[n % len(log)]) for n in range(count)]


def run(model: str, database: str, lines: list[str], actors: int) -> dict[str, Any]:
    """Lines a second, once all actors are at work."""
    data = ray.data.from_items([{"id": n, "text": line} for n, line in enumerate(lines)], override_num_blocks=40)
    named = {"model": model, "database": database, "budget": None, "gate": False,
             "outputs": {"class": "class", "rows": "rows", "tokens": "tokens"}}  # fmt: skip
    table = data.map_batches(
        Timed, fn_constructor_kwargs=named, compute=ray.data.ActorPoolStrategy(size=actors), batch_size=500,
        num_cpus=1,
    ).to_pandas()  # fmt: skip
    table = table.sort_values("id")
    starts = table.groupby("process")["begin"].min()
    assert len(starts) == actors
    first = starts.max()
    counted = table[table["begin"] >= first]
    seconds = float(table["end"].max() - first)
    return {
        "actors": actors, "lines": len(counted), "seconds": seconds, "lines_per_second": len(counted) / seconds,
        "share": float(table["rows"].sum() / table["tokens"].sum()), "classes": table["class"].tolist(),
    }  # fmt: skip


def main() -> None:
    shared, output = Path(sys.argv[1]), Path(sys.argv[2])
    count = int(sys.argv[3]) if len(sys.argv) > 3 else 20_000
    model = str(shared / "models" / "deberta-loghub")
    log = (shared / "data" / "loghub_2k" / "OpenSSH_2k.log").read_text(encoding="utf-8").splitlines()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "first.log").write_text("\n".join(log[:1000]) + "\n", encoding="utf-8")
        database = Path(folder, "db")
        options = BuildOptions(reuse="rows", storage="float32", admit=0.6)
        build_database(load_model(model), [Path(folder, "first.log")], database, options)
        lines = lines_of(log[1000:], count)
        ray.init(num_cpus=3, include_dashboard=False, object_store_memory=300 << 20, logging_level=logging.ERROR)
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order, context.enable_progress_bars = True, False
        found = [run(model, str(database), lines, actors) for actors in (1, 2)]
        ray.shutdown()
    same = found[0].pop("classes") == found[1].pop("classes")
    result = {"runs": found, "same": same, "speed": found[1]["lines_per_second"] / found[0]["lines_per_second"]}
    output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
