"""EL-attention Table 1: operations and bytes of a decoding step, counted."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from attmemo.fastseq.generate.beam_attention import shared_attention
from attmemo.fastseq.generate.el_attention import Projections, el_cross_attention
from paper.frame import Claim, Figure, Found, Run, judge, table, where

HEADS, WIDTH, BEAMS, SAMPLES = 16, 1024, 4, 2


def parts(length: int, samples: int = SAMPLES, beams: int = BEAMS) -> dict[str, Any]:
    """Tensors of one step of cross-attention in BART-large's shape."""
    torch.manual_seed(0)
    head = WIDTH // HEADS
    key_weight, value_weight = torch.randn(2, HEADS, head, WIDTH) / WIDTH**0.5
    return {
        "query": torch.randn(samples * beams, HEADS, 1, head),
        "hidden": torch.randn(samples, length, WIDTH),
        "projections": Projections(None, None, key_weight, value_weight, None),
        "weight": torch.cat([key_weight.flatten(0, 1), value_weight.flatten(0, 1)]),
    }


def build(part: dict[str, Any], beams: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, for so many beams of each sample: the first group of the table."""
    hidden = part["hidden"].repeat_interleave(beams, 0)
    both = (hidden @ part["weight"].T).view(len(hidden), -1, 2, HEADS, WIDTH // HEADS)
    key, value = both.permute(2, 0, 3, 1, 4)
    return key, value


def measure(run: Run) -> Found:
    rows = []
    for length in run.size((256, 512, 1024), (8, 16)):
        part = parts(length)
        keys = build(part, BEAMS)
        ways = {
            "build keys and values": lambda part=part: build(part, 1),
            "attention, multi-head": lambda part=part, keys=keys: _plain(part["query"], *keys),
            "attention, EL": lambda part=part: el_cross_attention(
                part["query"], part["hidden"], part["projections"], None, None
            ),
        }
        row: dict[str, Any] = {"length": length}
        with torch.inference_mode():
            for name, way in ways.items():
                with FlopCounterMode(display=False) as counter:
                    way()
                row[name] = counter.get_total_flops()
            usual = shared_attention(part["query"], *build(part, 1), None, None)
            row["difference"] = float((usual - ways["attention, EL"]()).abs().max())
        row["bytes, multi-head"] = sum(tensor.numel() for tensor in keys) * 4
        row["bytes, EL"] = part["hidden"].numel() * 4
        rows.append(row)
    return {"heads": HEADS, "width": WIDTH, "beams": BEAMS, "samples": SAMPLES, "rows": rows}


def _plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention in its usual form: fused kernels on a CPU are not counted."""
    return (query @ key.transpose(2, 3)).softmax(-1) @ value


def claims(found: Found) -> list[Claim]:
    last = found["rows"][-1]
    more = last["attention, EL"] / last["attention, multi-head"]
    less = last["bytes, multi-head"] / last["bytes, EL"]
    growth = found["rows"][-1]["build keys and values"] / found["rows"][-2]["build keys and values"]
    return [
        Claim(
            "EL-attention builds no keys and values, and reads less", "O(n·d²) → 0; memory / 2·beams a layer",
            f"{last['build keys and values'] / 1e9:.1f} GFLOP → 0; {less:.0f} times fewer bytes in one layer",
            judge(growth > 1.9, less == 2 * found["beams"]),
        ),
        Claim(
            "EL-attention has h times the arithmetic of attention", "O(x·n·d) → O(x·h·n·d)",
            f"{more:.1f} times, {found['heads']} heads", judge(0.8 * found["heads"] < more < 1.6 * found["heads"]),
            "the factors of the query and the output come on top",
        ),
        Claim(
            "the output is that of multi-head attention", "identical",
            f"largest difference {max(row['difference'] for row in found['rows']):.1e}",
            judge(all(row["difference"] < 1e-3 for row in found["rows"])),
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"One step of cross-attention, {found['samples']} samples, {found['beams']} beams, {found['heads']} heads, "
        f"width {found['width']}, float32: floating-point operations counted by torch while the library's functions "
        f"run, and bytes of the cached states. {where(found)}."
    )


def rows(found: Found) -> str:
    lines = [
        (
            row["length"], *(f"{row[key] / 1e6:.1f}" for key in list(row) if key.startswith(("build", "attention"))),
            f"{row['bytes, multi-head'] / 1e6:.1f}", f"{row['bytes, EL'] / 1e6:.1f}",
        )
        for row in found["rows"]
    ]  # fmt: skip
    head = (
        "n",
        "build K and V, MFLOP",
        "attention, multi-head",
        "attention, EL",
        "cached, multi-head, MB",
        "cached, EL",
    )
    return table(head, lines)


def why(found: Found) -> str:
    return (
        "The orders of the table are facts about the algebra, and counting confirms them. The original generation "
        f"repeats the first group for each beam, so that it builds {found['beams']} times what the table says."
    )


FIGURE = Figure("el_table1", "EL-attention Table 1: complexity", measure, claims, caption, rows, why)
