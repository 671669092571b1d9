"""Micro-benchmarks of this machine, without the user's data: fetching maps, searching embeddings, one forward.

    bench_gather()                       # cost of a fetch: copy, window, view; alone and with the A·V that follows
    bench_search()                       # index backends: time and recall
    bench_layer(family="deberta-v2")     # a forward served from memory against the exact ones, everything included

Variants are measured in turns within one run, because machines drift. Each turn has inputs of its own, so that no
variant finds its data in the cache. Numbers are medians; the first turn does not count. Threads and generators of the
caller stay as they are.
"""

from attmemo.profiler.bench.gather import bench_gather
from attmemo.profiler.bench.layer import bench_layer
from attmemo.profiler.bench.search import bench_search

__all__ = ["bench_gather", "bench_layer", "bench_search"]
