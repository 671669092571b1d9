"""Serving many requests from one key-value cache: the attention operator, a model on the cache, a server."""
