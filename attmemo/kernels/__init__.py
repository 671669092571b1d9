"""Bindings of the compute kernels in `native/`, each beside its plain torch oracle.

* `map_product`      A·V with attention maps read where they lie
* `cache_attention`  attention over a key-value cache, quantised or not
* `ngram`            scores of tokens that would repeat an n-gram
* `team`             the threads of torch, which all kernels share

Imports nothing of attmemo but the C extensions.
"""
