"""Embeddings, or classes, of every line of a file, on all nodes of a cluster.

    python examples/ray_encode.py --model MODEL --data year.log --output out --database s3://bucket/db --budget 0.01

The lines keep their order and get a number. Every node copies the database once, see `attmemo.ray.ensure_local`.
Without --database and --budget every answer is computed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import ray.data

from attmemo.ray import Encoder


def lines_of(file: str, block: int) -> Any:
    """A table of the lines of a file, with their numbers."""
    with open(file, encoding="utf-8") as stream:
        lines = np.array(stream.read().splitlines(), object)
    blocks = max(1, round(len(lines) / block))
    return ray.data.from_items(
        [{"id": place, "text": line} for place, line in enumerate(lines.tolist())], override_num_blocks=blocks
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="PATH_OR_NAME")
    parser.add_argument("--data", required=True, metavar="FILE")
    parser.add_argument("--output", required=True, metavar="DIR", help="Parquet files go here")
    parser.add_argument("--database", metavar="PATH_OR_URI", help="auto: each node fills one of its own")
    parser.add_argument(
        "--budget", type=float, default=0, metavar="SHARE", help="of the answers that may change; 0: all are computed"
    )
    parser.add_argument("--actors", type=int, default=2, metavar="N")
    parser.add_argument("--cpus", type=int, default=1, metavar="N", help="cores, and threads, of an actor")
    parser.add_argument("--batch-size", type=int, default=2048, metavar="N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    given = parser.parse_args()

    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True  # without this, blocks come as they are done
    start = time.perf_counter()
    table = lines_of(given.data, given.batch_size).map_batches(
        Encoder,
        fn_constructor_kwargs={
            "model": given.model, "database": given.database, "budget": given.budget, "dtype": given.dtype,
        },
        compute=ray.data.ActorPoolStrategy(size=given.actors),
        batch_size=given.batch_size,
        batch_format="numpy",
        num_cpus=given.cpus,
    )
    table.write_parquet(given.output)
    print(f"{given.output}: {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    main()
