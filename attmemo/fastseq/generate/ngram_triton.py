"""`attmemo.fastseq.generate.ngram.ban_ngrams` on a GPU. Needs Triton; imported only where it is.

A program is a block of n-grams of one row. It compares the first n-1 tokens of each with the row's suffix and stores
-inf at the last token of those that are equal. Two that ban the same token store the same bits, so that no order is
needed. FastSeq's CUDA kernel has a thread for every n-gram in one block, which can't launch for rows of more than a
thousand tokens; a grid of blocks takes any length.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


# Parameters have no types: an annotation that names a type of Python does not compile.
@triton.jit  # type: ignore[untyped-decorator]
def _ban(  # type: ignore[no-untyped-def]
    scores,
    tokens,
    text,
    columns,
    known,
    windows,
    group,
    score_stride,
    token_stride,
    text_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # rows times vocabulary may be more than 2^31
    window = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first = text + (row // group) * text_stride + window
    suffix = tokens + row * token_stride + known - (SIZE - 1)
    matches = window < windows
    for place in tl.static_range(SIZE - 1):
        matches = matches & (tl.load(first + place, mask=matches, other=-1) == tl.load(suffix + place))
    banned = tl.load(first + (SIZE - 1), mask=matches, other=-1)
    tl.store(scores + row * score_stride + banned, -float("inf"), mask=matches & (banned >= 0) & (banned < columns))


def ban_ngrams(scores: Tensor, tokens: Tensor, text: Tensor, size: int) -> None:
    """Write -inf into `scores` ``[R, V]`` after `tokens` ``[R, T]`` for the n-grams of `text` ``[R / k, S]``.

    `attmemo.fastseq.generate.ngram.ban_ngrams` has checked the arguments.
    """
    windows = text.shape[1] - size + 1
    if scores.shape[0] == 0 or tokens.shape[1] < size - 1 or windows < 1:
        return
    whole = scores if scores.stride(1) == 1 or scores.shape[1] == 1 else scores.contiguous()
    tokens, text = tokens.contiguous(), text.contiguous()
    _ban[(scores.shape[0], triton.cdiv(windows, BLOCK))](
        whole,
        tokens,
        text,
        scores.shape[1],
        tokens.shape[1],
        windows,
        scores.shape[0] // text.shape[0],
        whole.stride(0),
        tokens.stride(0),
        text.stride(0),
        SIZE=size,
        BLOCK=BLOCK,
    )
    if whole is not scores:
        scores.copy_(whole)
