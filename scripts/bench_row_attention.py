"""Time attention of packed sequences over the share of the rows that are computed; write a JSON and print a table.

    python scripts/bench_row_attention.py row-attention.json                       # a minute
    python scripts/bench_row_attention.py row-attention.json --before before.json  # over the times of an earlier JSON

One layer's attention: the other rows are those of records in the batch's type, or in int8. One thread; its processor
time, the least of all rounds, in which the cases take turns. Each case stands over all rows of its own sizes, type and
instruction set, of the earlier JSON if there is one.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attmemo.kernels import _row_attention as native
from attmemo.kernels.row_attention import Attend, Layout, Stored, instruction_sets
from attmemo.system.machine import conditions

SHAPES = {"32 x 46, 12 heads of 32": (32, 46, 12, 32), "8 x 128, 12 heads of 64": (8, 128, 12, 64)}
WAYS = {"amx": "bfloat16", "avx512bf16": "bfloat16", "avx512": "float32", "avx2": "float32"}
SHARES = (0.1, 0.4, 1.0)


class Case(NamedTuple):
    """What is measured."""

    shape: str
    isa: str
    dtype: str
    record: str
    share: float

    @property
    def whole(self) -> Case:
        return self._replace(record=self.dtype, share=1.0)

    def __str__(self) -> str:
        return ", ".join(map(str, self))


def cases() -> list[Case]:
    """Those of this processor; with all rows there is no record."""
    return [
        Case(shape, isa, dtype, record, share)
        for shape in SHAPES
        for isa, dtype in WAYS.items() if isa in instruction_sets()
        for record in (dtype, "int8")
        for share in SHARES if share < 1 or record == dtype
    ]  # fmt: skip


def make(case: Case) -> tuple[Attend, list[Tensor]]:
    """A call, and what it reads beside its arguments."""
    batch, length, heads, width = SHAPES[case.shape]
    rng, columns = np.random.default_rng(0), heads * width
    dtype, record = getattr(torch, case.dtype), getattr(torch, case.record)
    fresh = max(1, round(length * case.share))
    key_starts, starts = np.arange(batch + 1) * length, np.arange(batch + 1) * fresh
    positions = np.concatenate([np.sort(rng.choice(length, fresh, replace=False)) for _ in range(batch)])
    sources = np.tile(-1 - np.arange(length), batch)
    sources[np.repeat(key_starts[:-1], fresh) + positions] = np.arange(batch * fresh)
    layout = Layout(starts, key_starts, positions.astype(np.int32), sources.astype(np.int32))
    rows = torch.randn(batch * fresh, 3 * columns).to(dtype)
    planes = [(torch.randn(batch, length, columns) * 50).to(record) for _ in range(2)]
    scales = [torch.rand(batch, length, heads) / 60 for _ in range(2)]
    at = [np.array([part.data_ptr() for part in plane], np.uint64) for plane in planes + scales]
    codes = (at[2], at[3], 4 * heads) if record == torch.int8 else (None, None, 0)
    stored = Stored(at[0], at[1], np.full(batch, length), record, columns * record.itemsize, *codes)
    whole = Layout(starts, key_starts) if case.share == 1 else layout
    call = Attend(
        *rows.split(columns, 1), heads, whole, scale=width**-0.5, out=torch.empty(len(rows), columns, dtype=dtype),
        stored=None if case.share == 1 else stored, threads=1, isa=case.isa,
    )  # fmt: skip
    return call, planes + scales


def measure(seconds: float) -> dict[Case, float]:
    """Microseconds of each case."""
    calls = {case: make(case) for case in cases()}
    times = dict.fromkeys(calls, float("inf"))
    gc.disable()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for case, (call, _) in calls.items():
            for _ in range(4):
                begin = time.thread_time_ns()
                native.attend(*call.arguments)
                times[case] = min(times[case], (time.thread_time_ns() - begin) / 1000)
    return times


def table(times: dict[Case, float], before: dict[str, float]) -> str:
    """A line for each shape, instruction set and record: microseconds, and over all rows."""
    text = "| shape | instruction set | type | record | " + " | ".join(f"{share:.0%}" for share in SHARES) + " |\n"
    text += "|" + "---|" * (4 + len(SHARES)) + "\n"
    for case in dict.fromkeys(case._replace(share=1.0) for case in times):
        parts = [times.get(case._replace(share=share)) for share in SHARES]
        base = before.get(str(case.whole), times[case.whole])
        line = [f"{part:.0f} ({part / base:.2f})" if part else "" for part in parts]
        text += "| " + " | ".join([*case[:4], *line]) + " |\n"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--before", type=Path, help="an earlier JSON, whose times of all rows are 1")
    parser.add_argument("--seconds", type=float, default=50)
    options = parser.parse_args()
    times = measure(options.seconds)
    found: dict[str, Any] = {"microseconds": {str(case): part for case, part in times.items()}}
    options.out.write_text(json.dumps(found | {"conditions": conditions()}, indent=1) + "\n")
    before = json.loads(options.before.read_text())["microseconds"] if options.before else {}
    print(table(times, before))


if __name__ == "__main__":
    main()
