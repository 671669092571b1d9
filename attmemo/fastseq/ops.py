"""The public names of `attmemo.fastseq.serving.ops`: attention over a shared key-value cache.

from attmemo.fastseq.ops import KeyValueCache, multi_head_cache_attention
"""

from attmemo.fastseq.serving.ops import (
    Arguments,
    CacheStats,
    CacheStep,
    KeyValueCache,
    cache_shape,
    check_arguments,
    choose_implementation,
    layer_planes,
    multi_head_cache_attention,
    page_offsets,
    scale_shape,
)

__all__ = [
    "Arguments",
    "CacheStats",
    "CacheStep",
    "KeyValueCache",
    "cache_shape",
    "check_arguments",
    "choose_implementation",
    "layer_planes",
    "multi_head_cache_attention",
    "page_offsets",
    "scale_shape",
]
