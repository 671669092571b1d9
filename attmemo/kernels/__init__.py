"""Bindings of the compute kernels in `native/`, each beside its plain torch oracle.

* `map_product`  A·V with attention maps read where they lie
* `team`         the threads of torch, which all kernels share

Imports nothing of attmemo but the C extensions.
"""
