"""Costs of the parts that maps are served with, of random models and records: a fetch, a search, a layer.

Variants are measured in turns within one run, because machines drift. Each turn has inputs of its own, so that no
variant finds its data in the cache. Numbers are medians; the first turn does not count. Threads and generators of the
caller stay as they are.
"""
