"""Lossless fast generation, and the attention operator for serving ragged batches from a cache.

Knows nothing of memoization, and imports nothing of attmemo but its errors.
"""
