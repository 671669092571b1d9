"""Bugs to put into the attention operator's reference, one at a time: would the tests notice?

A plugin for pytest: with SEEDED_BUG set to a name, the reference is changed before any test runs. Each is a mistake
that implementations of this operator have really made, or are likely to make.
"""

from __future__ import annotations

import os
from pathlib import Path

BUGS: dict[str, tuple[str, str]] = {
    "query heads take key heads in turn": ("repeat_interleave(repeats, 1)", "repeat(1, repeats, 1)"),
    "causal from the first key": ("places[kv_length - length :, None] - places", "places[:length, None] - places"),
    "keys and values change places": ("return stored[0], stored[1]", "return stored[1], stored[0]"),
    "page numbers for offsets": (
        "starts[token // page_size] + token",
        "starts[token // page_size] * page_size + token",
    ),
    "every token at its page's start": (
        "starts[token // page_size] + token % page_size",
        "starts[token // page_size]",
    ),
    "half away from zero": ("torch.round(groups / scale)", "(((groups / scale).abs() + 0.5).floor() * groups.sign())"),
    "a code of -128": (".clamp(-most, most)", ".clamp(-most - 1, most)"),
    "no smallest scale": ("EPSILON = 1e-5", "EPSILON = 0.0"),
    "quantised in float32": (
        "most = 2 ** (quant_bit - 1) - 1",
        "most, numbers = 2 ** (quant_bit - 1) - 1, numbers.float()",
    ),
    "new tokens before they are rounded": (
        "        bias = None",
        "        keys[start_pos[b] :], values[start_pos[b] :] = key[new[b]], value[new[b]]\n        bias = None",
    ),
    "mask from column 0 for all sequences": (
        "columns = slice(kvstarts[b], kvstarts[b + 1])",
        "columns = slice(0, kvstarts[b + 1] - kvstarts[b])",
    ),
    "mask scaled like the scores": (
        "mask[:, new[b], columns].float()",
        "mask[:, new[b], columns].float() / math.sqrt(query.shape[2])",
    ),
    "causal for decoding batches": (
        "causal = is_alibi or (is_causal and length > 1 and b >= decoding_batches)",
        "causal = is_alibi or (is_causal and length > 1)",
    ),
    # Counting all of a row's distances from another token would change nothing: softmax does not see it.
    "what is in the cache is as near as the first new token": (
        "[:, None, None] * distance",
        "[:, None, None] * distance.clamp(max=length - 1)",
    ),
    "a row too many": (
        "cache_rows(cachestarts[b], 0, kvstarts[b + 1] - kvstarts[b], page_size)",
        "cache_rows(cachestarts[b], 0, kvstarts[b + 1] - kvstarts[b] + 1, page_size)",
    ),
    "scales are not stored": ("scale[plane, rows] = scales.to(scale.dtype)", "pass"),
    "pages counted from the first prompt": (
        "cache_rows(cachestarts[b]",
        "cache_rows(cachestarts[max(0, b - decoding_batches)]",
    ),
    "prompts do not see what is in the cache": (
        "scores.masked_fill(distance < 0, -math.inf)",
        "scores.masked_fill((distance < 0) | (places < kv_length - length), -math.inf)",
    ),
}


def pytest_configure() -> None:
    """Change the reference, if a bug is asked for."""
    name = os.environ.get("SEEDED_BUG")
    if not name:
        return
    from attmemo.fastseq.serving.ops import cache_attention as reference

    right, wrong = BUGS[name]
    source = Path(reference.__file__).read_text()
    assert right in source, f"the reference has changed: {right!r} is not there"
    exec(compile(source.replace(right, wrong), reference.__file__, "exec"), vars(reference))
