"""Attention over a shared key-value cache, for ragged batches of prefill and decode.

    from attmemo.fastseq.ops import multi_head_cache_attention

    output = multi_head_cache_attention(
        query, key, value,                                # [N, H, D], [N, Hk, D]: all sequences, one behind the other
        seqstarts, kvstarts, cachestarts, start_pos,      # where each sequence begins, here and in the cache
        decoding_batches, max_seqlen, max_kvlen,
        cache, scale, attn_mask,                          # cache and scale are updated in place
        num_heads=32, head_dim=128, num_kv_heads=8, quant_bit=8, cache_mode=1, page_size=16,
    )

Three implementations with one face: `reference` reads like the specification, `cpu` is fast, `triton` is for GPUs.
docs/attention-op.md says what each argument is and how every ambiguity of the specification was decided.
"""

from attmemo.fastseq.serving.ops.arguments import Arguments, check_arguments
from attmemo.fastseq.serving.ops.attention import choose_implementation, multi_head_cache_attention
from attmemo.fastseq.serving.ops.cache_layout import cache_shape, layer_planes, page_offsets, scale_shape
from attmemo.fastseq.serving.ops.cache_step import CacheStep
from attmemo.fastseq.serving.ops.kv_cache import CacheStats, KeyValueCache

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
