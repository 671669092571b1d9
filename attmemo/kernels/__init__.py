"""Bindings of the compute kernels in `native/`, each beside its plain torch oracle: A·V with maps read where they lie,
attention over a key-value cache, attention of packed sequences over fresh and stored rows, and scores of tokens that
would repeat an n-gram. They share the threads of torch.
"""
