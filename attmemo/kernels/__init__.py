"""Bindings of the compute kernels in `native/`, each beside its plain torch oracle: A·V with maps read where they lie,
attention over a key-value cache or over packed sequences and records, and scores of tokens that would repeat an n-gram.
They share the threads of torch.
"""
