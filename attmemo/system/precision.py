"""The precisions that this processor computes natively."""

from __future__ import annotations

import functools
import logging
import platform
from typing import Final

import torch

from attmemo.system.machine import CPUINFO, cores, processor

_LOG = logging.getLogger("attmemo")

BFLOAT16: Final = {"avx512_bf16", "amx_bf16", "bf16"}
"""Features of processors that multiply bfloat16: dot products or a matrix unit, on x86 and Arm."""


@functools.cache
def has_native_bfloat16() -> bool | None:
    """Whether the processor multiplies bfloat16 natively; None if unknown."""
    return bool(BFLOAT16 & set(processor()[1])) if CPUINFO.exists() else None


def best_dtype() -> torch.dtype:
    """Return the number type in which a model is fastest here: bfloat16 where the processor multiplies it natively.

    Returns
    -------
    torch.dtype
        ``torch.bfloat16``, or ``torch.float32`` elsewhere and where the processor does not say what it has.
    """
    return torch.bfloat16 if has_native_bfloat16() else torch.float32


def slow(dtype: torch.dtype) -> str | None:
    """A warning if this processor only emulates the type; None if it computes the type natively."""
    if dtype == torch.bfloat16 and has_native_bfloat16() is False:
        return (
            f"the model computes in bfloat16, which this {platform.machine()} processor only emulates: "
            "float32 is many times faster here (use model.float(), and a database built in float32)"
        )
    if dtype == torch.float16:
        return "the model computes in float16; few processors have instructions for float16, so float32 may be faster"
    return None


def warn_if_slow(dtype: torch.dtype) -> None:
    """Warn of a type that is emulated here, and of more threads than cores."""
    warning = slow(dtype)
    if warning is not None:
        _LOG.warning("attmemo: %s", warning)
    threads, count = torch.get_num_threads(), cores()
    if threads > count:  # the number is the program's own: other work of torch goes by it too
        _LOG.warning(
            "attmemo: torch computes with %d threads, and the quota or affinity of this process gives %d cores: the "
            "threads wait in turns. torch.set_num_threads(%d) mends that", threads, count, count,
        )  # fmt: skip
