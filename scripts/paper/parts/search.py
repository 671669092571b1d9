"""The cost of searching embeddings, and the share that is found: the index backends."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from attmemo.db import BACKENDS, FlatIndex
from attmemo.db.index import VectorIndex, build_index
from attmemo.profiler.turns import Job, interleave
from attmemo.system.machine import conditions
from paper.parts import limits


def bench_search(
    *, records: int = 10000, dimension: int = 128, queries: int = 64, backends: Sequence[str] = BACKENDS,
    repeats: int = 9,
) -> dict[str, Any]:  # fmt: skip
    """Cost and recall of the index backends on clustered random vectors, as template-heavy data gives.

    Vectors ``[records, dimension]`` lie in about ``sqrt(records)`` clusters; `queries` of them are searched at once,
    each near a stored one, others in each turn. ``search_ms`` is of a batch of queries, ``recall_at_1`` the share of
    queries whose nearest vector, by exact search, was found first, ``bytes`` those of the index as stored.
    StorageFullError: the memory has no room for it.
    """
    sizes = {"records": records, "dimension": dimension, "queries": queries}
    # Vectors here and in each index with its links, queries of all turns, distances and order of a flat search.
    vectors_bytes, asked_bytes = 4 * records * dimension, 4 * (1 + repeats) * queries * dimension
    limits.check_room((2 + 2 * len(backends)) * vectors_bytes + asked_bytes + 16 * records * queries)
    where = conditions()
    generator = np.random.default_rng(limits.SEED)
    centres = generator.standard_normal((math.isqrt(records - 1) + 1, dimension), np.float32)
    vectors = centres[generator.integers(len(centres), size=records)]
    vectors += 0.1 * generator.standard_normal((records, dimension), np.float32)
    asked = []
    for _ in range(1 + repeats):
        chosen = vectors[generator.integers(records, size=queries)]
        asked.append(chosen + 0.05 * generator.standard_normal((queries, dimension), np.float32))

    indexes: dict[str, VectorIndex] = {}
    build_seconds: dict[str, float] = {}
    wanted: list[Any] = list(dict.fromkeys(backends))
    with limits.threads_kept():  # one thread for faiss is one for torch: the two may share an OpenMP runtime
        for backend in wanted:
            build_index(vectors[:1], backend)  # imports the library
            start = time.perf_counter()
            indexes[backend] = build_index(vectors, backend)
            build_seconds[backend] = time.perf_counter() - start
        jobs = {name: _search_job(index, asked) for name, index in indexes.items()}
        found = interleave(jobs, repeats)
        exact = FlatIndex(vectors)
        truth = [exact.search(batch, 1)[1][:, 0] for batch in asked]
        rows = []
        for name, index in indexes.items():
            # By distance: of two records at the same place either is right.
            near = [index.search(batch, 1)[1][:, 0] <= best * 1.0001 for batch, best in zip(asked, truth, strict=True)]
            rows.append({
                "backend": name, **sizes, "build_seconds": build_seconds[name], "search_ms": found[name].ms,
                "us_per_query": 1e3 * found[name].ms / queries, "recall_at_1": float(np.mean(near)),
                "bytes": index.dump().nbytes,
            })  # fmt: skip
    return {"rows": rows, "conditions": where | sizes | {"repeats": repeats}, "notes": limits.busy(where)}


def _search_job(index: VectorIndex, asked: Sequence[npt.NDArray[np.float32]]) -> Job:
    return lambda turn: index.search(asked[turn], 1)
