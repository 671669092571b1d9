"""Linear layers beside oneDNN's: thousand million operations a second of one thread, for the four layers of a block.

    python scripts/bench_linear.py                                  # a table, about ten minutes
    python scripts/bench_linear.py --hidden 384 --rows 46 1472

Columns: `torch` is `torch.nn.functional.linear` in bfloat16, with bias; `packed` is the same with
weights in oneDNN's own order; `onednn8` is its product of codes, without rounding of rows. The others are layers of
`attmemo.kernels`, with bias, rounding of rows and, going up, GELU: type and instruction set. Each number is the best
of many calls, by the processor's time of the thread. Weights are warm.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from attmemo.kernels.linear import Linear
from attmemo.kernels.linear8 import Linear8
from attmemo.kernels.linear16 import Linear16
from attmemo.kernels.linear32 import Linear32

SECONDS, LEAST = 0.1, 5  # a number takes so long, and so many calls


def layers_of(hidden: int) -> list[tuple[str, int, int, str]]:
    """Name, inputs, outputs and activation."""
    return [
        ("qkv", hidden, 3 * hidden, "none"), ("out", hidden, hidden, "none"),
        ("up", hidden, 4 * hidden, "gelu"), ("down", 4 * hidden, hidden, "none"),
    ]  # fmt: skip


def product_of_codes(weight: Tensor) -> Callable[[Tensor], Tensor] | None:
    """oneDNN's 8-bit product with bfloat16 results, from rows; None if this torch has none."""
    codes = (weight.float() / weight.float().abs().amax(1, keepdim=True) * 127).round().char()
    scales, zeros = torch.full((len(weight),), 0.01), torch.zeros(len(weight), dtype=torch.int64)
    try:
        packed = torch.ops.onednn.qlinear_prepack(codes, None)

        def call(x: Tensor) -> Tensor:
            found: Tensor = torch.ops.onednn.qlinear_pointwise(
                x, 0.02, 128, packed, scales, zeros, None, 1.0, 0, torch.bfloat16, "none", [], ""
            )
            return found

        call(torch.zeros(16, weight.shape[1], dtype=torch.uint8))
    except (AttributeError, RuntimeError, TypeError):
        return None
    return call


def calls_of(weight: Tensor, bias: Tensor, activation: str, rows: int) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is measured, by name."""
    x = torch.randn(rows, weight.shape[1]).bfloat16()
    packed = Linear.of([weight], [bias])
    yield "torch", lambda: F.linear(x, weight, bias)
    yield "packed", lambda: packed(x)
    codes, product = torch.randint(0, 255, x.shape, dtype=torch.uint8), product_of_codes(weight)
    if product is not None:
        yield "onednn8", lambda: product(codes)
    for name, kind, dtype, sets in (
        ("16", Linear16, torch.bfloat16, ("amx", "avx512bf16")),
        ("8", Linear8, torch.bfloat16, ("amx", "vnni16", "vnni")),
        ("32", Linear32, torch.float32, ("avx512", "avx2")),
    ):  # fmt: skip
        layer, own = kind.of([weight.to(dtype)], [bias.to(dtype)], activation), x.to(dtype)
        for isa in sets:
            if isa in kind.instruction_sets():
                yield f"{name} {isa}", lambda layer=layer, own=own, isa=isa: layer(own, threads=1, isa=isa)


def seconds_of(call: Callable[[], object]) -> float:
    call()
    best, begin, count = float("inf"), time.perf_counter(), 0
    while count < LEAST or time.perf_counter() - begin < SECONDS:
        before = time.thread_time()
        call()
        best, count = min(best, time.thread_time() - before), count + 1
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, nargs="+", default=[384, 768, 1024])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 46, 256, 1472, 4096])
    parser.add_argument("--only", nargs="+", help="columns that are measured; all without it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    headed = False
    with torch.inference_mode():
        for hidden in arguments.hidden:
            for name, inputs, outputs, activation in layers_of(hidden):
                weight, bias = (torch.randn(outputs, inputs) / inputs**0.5).bfloat16(), torch.randn(outputs).bfloat16()
                for rows in arguments.rows:
                    calls = dict(calls_of(weight, bias, activation, rows))
                    chosen = [one for one in calls if not arguments.only or one in arguments.only]
                    if not headed:
                        print("| layer | rows |", " | ".join(chosen), "|")
                        print("|---|---|" + "---|" * len(chosen))
                        headed = True
                    speeds = [2e-9 * rows * inputs * outputs / seconds_of(calls[one]) for one in chosen]
                    cells = " | ".join(f"{speed:.0f}" for speed in speeds)
                    print(f"| {name} {inputs} > {outputs} | {rows} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
