"""EL-attention Table 2: speed by model and task."""

from __future__ import annotations

from matplotlib.figure import Figure as Plot

from paper.fastseq_rows import NAMES, bench, gpu, in_types, setting, speed, table_of_types, where
from paper.frame import Claim, Figure, Found, Run, judge, table
from paper.plots import bars, legend, sheet

# float16 and float32: times as fast
PAPER_ROWS = {
    "beam": {"Transformer SQuAD": (2.7, 2.0), "BART XSum": (4.7, 3.9), "BART CNN/DM": (5.0, 3.6),
             "GPT-2 small": (1.8, 1.7), "GPT-2 medium": (2.2, 1.8)},
    "diverse": {"Transformer SQuAD": (2.8, 2.1), "BART XSum": (4.6, 3.8), "BART CNN/DM": (5.3, 3.8)},
    "greedy": {"Transformer SQuAD": (1.6, 1.4), "BART XSum": (2.5, 3.0), "BART CNN/DM": (3.1, 2.8),
               "GPT-2 small": (1.8, 1.5), "GPT-2 medium": (1.8, 1.6)},
}  # fmt: skip


def measure(run: Run) -> Found:
    record = bench()
    rows = [
        {"name": row["shape"], "setting": setting(row), "length": row["length"], "new": row["new"],
         "beams": row["beams"],
         "el": speed(row, "el"), "shared": speed(row, "shared") or speed(row, "+pipeline")}
        for row in record["rows"] if speed(row, "el") is not None
    ]  # fmt: skip
    on_gpu = [
        {"name": row["shape"], "setting": setting(row), "length": row["length"], "el": speed(row, "el"),
         "shared": speed(row, "shared")}
        for row in gpu() if not row.get("first round")
    ]  # fmt: skip
    return {"conditions": record["conditions"], "rows": rows, "gpu": on_gpu,
            "types": in_types(*NAMES)}  # fmt: skip


def _row(found: Found, name: str, length: int, beams: int = 4) -> Found:
    chosen: list[Found] = [r for r in found["rows"] if (r["name"], r["length"], r["beams"]) == (name, length, beams)]
    return chosen[0]


def claims(found: Found) -> list[Claim]:
    bart, gpt = _row(found, "bart-large", 1024), _row(found, "gpt2-medium", 1024)
    short = _row(found, "bart-large", 128)
    behind = [row["shared"] > row["el"] for row in found["rows"]]
    wide = _row(found, "bart-large", 1024, 8)
    half = [row["el"] for row in found["gpu"]]
    return [
        Claim("EL-attention, BART CNN/DailyMail, beam, float32", "3.6x", f"{bart['el']:.2f}x (1,024 source tokens)",
              judge(bart["el"] > 1.5, bart["el"] >= 2.9)),
        Claim("EL-attention, BART XSum, beam, float32", "3.9x", f"{short['el']:.2f}x (128 source tokens)",
              judge(short["el"] > 1.2, short["el"] >= 3.0), "XSum's sources are longer than 128 tokens"),
        Claim("EL-attention, GPT-2 medium, beam, float32", "1.8x", f"{gpt['el']:.2f}x (1,024 source tokens)",
              judge(gpt["el"] >= 1.8)),
        Claim("the gain grows with the beams", "larger beam, more gain",
              f"BART {bart['el']:.2f}x with 4 beams, {wide['el']:.2f}x with 8", judge(wide["el"] > bart["el"])),
        Claim("EL-attention is the fastest exact method", "no other shared cache compared",
              f"keys and values shared by the beams are faster in {sum(behind)} of {len(behind)} rows (CPU)",
              judge(not any(behind)), "h times the arithmetic costs time on a CPU"),
        Claim("float16 on a GPU: 1.8x to 5.3x", "1.8x to 5.3x",
              f"{min(half):.2f}x to {max(half):.2f}x (H100, batch 32)",
              judge(min(half) >= 1.8, max(half) >= 1.8), "the GPU waits for Python, in the original too"),
        Claim("diverse beam search and greedy search: 1.4x to 5.3x", "1.4x to 5.3x", "beam search alone was timed",
              "not measured",
              "greedy search has one beam: nothing is repeated; diverse groups run on the original path"),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"{where(found)}; on a GPU: one H100, float16, torch 2.11, one round after one that is not counted. Paper: "
        "V100, batch as large as fits, its own baseline of fairseq and transformers."
    )


def rows(found: Found) -> str:
    lines: list[tuple[object, ...]] = [
        (NAMES[row["name"]], row["setting"], f"{row['el']:.2f}x", f"{row['shared']:.2f}x", "") for row in found["rows"]
    ]
    lines += [
        (NAMES[row["name"]], f"{row['setting']} (GPU)", "", f"{row['shared']:.2f}x", f"{row['el']:.2f}x")
        for row in found["gpu"]
    ]
    for search, cells in PAPER_ROWS.items():
        lines += [
            (f"paper: {name}", search, f"{single}x (float32)", "", f"{half}x (float16)")
            for name, (half, single) in cells.items()
        ]
    head = ("model", "setting", "EL-attention", "shared keys and values", "EL-attention, GPU, float16")
    return f"{table(head, lines)}\n\n{table_of_types(found['types'])}"


def why(found: Found) -> str:
    return (
        "The gain of the paper has two causes that it does not separate: states are not repeated for each beam, "
        "and keys and values are not kept at all. The first is the shared cache; it is as exact, and on a CPU it "
        "is faster than EL-attention in every row. EL-attention is for memory: it reads hidden states and "
        "multiplies more, which a GPU in half precision has to spare and two cores have not. An H100 is so fast that "
        "a step of 32 texts takes the time that Python needs to launch it, in the original and here: with 128 source "
        "tokens nothing gains there."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "Times as fast as the original, beam search, float32", 7.0)
    groups = [f"{row['name']}\n{row['length']} + {row['new']}\n{row['beams']} beams" for row in found["rows"]]
    paper = {"bart-large": PAPER_ROWS["beam"]["BART CNN/DM"][1], "gpt2-medium": PAPER_ROWS["beam"]["GPT-2 medium"][1]}
    series = {
        "EL-attention": [row["el"] for row in found["rows"]],
        "shared keys and values": [row["shared"] for row in found["rows"]],
        "paper (V100, EL)": [
            paper.get(row["name"]) if (row["length"], row["beams"]) == (1024, 4) else None for row in found["rows"]
        ],
    }
    bars(axes, groups, series)
    axes.tick_params(axis="x", labelsize=5.5)
    axes.set_ylabel("times as fast")
    legend(axes)
    return figure


FIGURE = Figure("el_table2", "EL-attention Table 2: speed", measure, claims, caption, rows, why, draw)
