"""Build a database on many machines: each task of Ray builds a shard, and all shards become one database.

    python examples/ray_build.py --model MODEL --data monday.log tuesday.log --shards 8 --shared /shared --output DB

Every node must see the model and the data at the same path, and the directory --shared. A shard is built on the disk
of its node, and copied to --shared when it is whole. Ray starts the task of a lost worker or node again; on the same
node the task goes on with what was published. Only whole copies are merged, and no record twice.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

import ray
import torch
import xxhash

from attmemo.db.pools.merging import merge_prepared
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.data import digest
from attmemo.profiler.models import load_model
from attmemo.ray import ensure_local


def build_shard(
    model: str, files: list[str], scratch: Path, shared: Path, options: BuildOptions, threads: int
) -> Path:
    """The task: build a shard, and copy it to where all nodes see it."""
    torch.set_num_threads(threads)
    words = repr([model, *map(digest, files), options])
    place = scratch / f"shard-{xxhash.xxh3_64_hexdigest(words.encode())}"  # a task that is started again finds it
    build_database(load_model(model), files, place, options)
    copy = ensure_local(place, shared)
    shutil.rmtree(place)
    return copy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="PATH_OR_NAME")
    parser.add_argument("--data", required=True, nargs="+", metavar="FILE")
    parser.add_argument("--output", required=True, type=Path, metavar="DB")
    parser.add_argument("--shared", required=True, type=Path, metavar="DIR", help="a directory that all nodes see")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="on the disk of each node; default: in /tmp")
    parser.add_argument("--shards", type=int, default=8, metavar="N")
    parser.add_argument("--cpus", type=int, default=1, metavar="N", help="cores, and threads, of a task")
    parser.add_argument("--reuse", choices=["rows", "maps"], default="rows")
    given = parser.parse_args()
    scratch = given.scratch or Path(tempfile.gettempdir()) / "attmemo-shards"

    ray.init()  # the cluster that RAY_ADDRESS names, or one on this machine
    task = ray.remote(num_cpus=given.cpus, max_retries=-1)(build_shard)  # -1: without a limit
    waiting = []
    for number in range(1, given.shards + 1):
        options = BuildOptions(reuse=given.reuse, shard=(number, given.shards))
        waiting.append(task.remote(given.model, given.data, scratch, given.shared, options, given.cpus))
    shards = []
    while waiting:
        ready, waiting = ray.wait(waiting)
        shards += ray.get(ready)
        print(f"{len(shards)} of {given.shards} shards are built: {shards[-1]}", flush=True)
    done = merge_prepared(given.output, sorted(shards))
    print(f"{given.output}: {done.records:,} records; {done.doubled:,} texts were in more than one shard")


if __name__ == "__main__":
    main()
