"""What precisions this processor computes in natively."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

import torch

# Flags of /proc/cpuinfo: dot products or a matrix unit for bfloat16, of x86 and of Arm.
_BFLOAT16 = {"avx512_bf16", "amx_bf16", "bf16"}


@functools.cache
def has_native_bfloat16() -> bool | None:
    """Whether the processor multiplies bfloat16 itself; None if it does not say.

    Without, transformers runs in bfloat16 many times slower than in float32.
    """
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return bool(_BFLOAT16 & set(value.split()))
    return None


def slow(dtype: torch.dtype) -> str | None:
    """A warning for a model that computes in a type which this processor only emulates, None if it does not."""
    if dtype == torch.bfloat16 and has_native_bfloat16() is False:
        return (
            f"the model computes in bfloat16, which this {platform.machine()} processor only emulates: "
            "float32 is many times faster here (model.float(), and a database built so)"
        )
    if dtype == torch.float16:
        return "the model computes in float16, for which few processors have instructions: float32 may be faster"
    return None
