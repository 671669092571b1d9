"""The tables of docs/fastseq-bench.md and docs/fastseq-types.md, made of their records."""

from __future__ import annotations

import statistics
from typing import Any, Final


def shown(name: str) -> str:
    """What the pages call a type or a rung."""
    return name.replace("stock", "original")


ROUNDED: Final = ("bfloat16", "int8", "bfloat16, int8")


def summary_of_types(rows: list[dict[str, Any]]) -> list[str]:
    """Float32 against float32, and the fastest type against the fastest of each peer, in CPU seconds."""
    lines = [
        "| shape | source | new | beams | texts | float32 over CTranslate2's | fastest type "
        "| over CTranslate2's fastest | over llama.cpp | over OpenVINO | over original float32 |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|",
    ]
    for row in rows:
        spent = row["cpu_seconds"]

        def over(peer: float | None, own: float | None) -> str:
            return "" if peer is None or own is None else f"{peer / own:.2f}x"

        own = min((spent[name], name) for name in ROUNDED if name in spent)
        peers = [value for name, value in spent.items() if name.startswith("CTranslate2 ")]
        cells = [
            row["shape"], f"{row['length']:,}", row["new"], row["beams"], row["batch"],
            over(spent.get("CTranslate2 float32"), spent.get("float32")), own[1],
            over(min(peers, default=None), own[0]), over(spent.get("llama.cpp Q8_0"), own[0]),
            over(spent.get("OpenVINO int8"), own[0]), over(spent.get("stock float32"), own[0]),
        ]  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def table_of_types(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    rows = record["rows"]
    lines = [
        "# fastseq: types measured",
        "",
        "From text to text, medians of the rounds, the encoder or the prompt included. Every type runs in a process "
        "of its own, in\nturns. Equal texts: to those of the first type. Random weights; with beams, n-gram 3.",
        "",
        "Where the load is above the number of cores, the machine was busy with other work: CPU seconds say more "
        "then, and ratios\nare those of CPU seconds. The floor is the time in which the decoder's packed weights are "
        "read once, as each step does,\nat the best rate at which torch summed 256 MiB in the same runs; it is left "
        "out where it is above what a token took.",
        "",
        *summary_of_types(rows),
    ]
    for row in rows:
        base, first = next(iter(row["cpu_seconds"].items()))
        lines += [
            "",
            f"**{row['shape']}, {row['length']} source tokens, {row['new']} new, {row['beams']} "
            f"{'beam' if row['beams'] == 1 else 'beams'}, batch {row['batch']}**",
            "",
            f"{row['processor']}, {row['threads']} threads, torch {row['torch']}, transformers "
            f"{row['transformers']}, CTranslate2 {row['ctranslate2']}, {row['date']}, commit {row['commit']}, "
            f"{row['rounds_each']} rounds, load {row['load'][0]:.1f} to {row['load'][1]:.1f}",
            "",
            f"| type | CPU seconds | over {shown(base)} | seconds | equal texts | CPU ms a token | floor, ms |",
            "|---|---:|---:|---:|---:|---:|---:|",
        ]
        for name, seconds in row["cpu_seconds"].items():
            packed = row["packed_bytes"][name]
            floor = "" if packed is None else f"{packed / row['bytes_a_second'] * 1e3:.1f}"
            if floor and float(floor) > seconds / row["new"] * 1e3:  # others read from memory meanwhile
                floor = ""
            lines.append(
                f"| {shown(name)} | {seconds:.2f} | {first / seconds:.2f}x | {row['seconds'][name]:.2f} "
                f"| {row['same'][name]} of {row['batch']} | {seconds / row['new'] * 1e3:.1f} | {floor} |"
            )
    lines += table_of_quality(record.get("quality")) + table_of_partings(record.get("bfloat16", []))
    return "\n".join(lines) + "\n"


def table_of_quality(quality: dict[str, Any] | None) -> list[str]:
    """What `scripts/quality_fastseq.py` measured."""
    if quality is None:
        return []
    facts = quality["conditions"]
    lines = [
        "",
        "## Texts of trained weights",
        "",
        f"torch {facts['torch']}, transformers {facts['transformers']}, {facts.get('date')}, commit "
        f"{facts.get('commit')}. A BART of width 96, trained for "
        f"{quality['steps']:,} steps, restores sentences;\nstories260K, a Llama of width 64, goes on with beginnings. "
        "ROUGE (F-measure) and BLEU: against the sentences, and against the\ntexts of original float32.",
        "",
        "| task | search | type | equal to float32 | ROUGE-1 | ROUGE-2 | ROUGE-L | BLEU |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in quality["rows"]:
        scores = " | ".join(f"{row['scores'][name]:.2f}" for name in ("rouge1", "rouge2", "rougeL", "bleu"))
        lines.append(
            f"| {row['task']} | {row['search']} | {shown(row['type'])} | {row['equal']} of {row['lines']} | {scores} |"
        )
    return lines


def table_of_partings(tasks: list[dict[str, Any]]) -> list[str]:
    """Where texts of bfloat16 part from those of transformers in bfloat16."""
    if not tasks:
        return []
    lines = [
        "",
        "## Where texts in bfloat16 part",
        "",
        "Greedy, against transformers in bfloat16. Equal with eager: texts of transformers that stay the same when it "
        "computes attention\neager, not by SDPA. The other columns are of the first step at which a text of fastseq "
        "has another word. Gap: between the\nlogits of the two words, in transformers' bfloat16, in spacings of "
        "bfloat16's numbers at that size. Float32 sides with: which word\nthe same weights prefer, computed in "
        "float32. Float32's gap: in standard deviations of transformers' own error over the\nvocabulary at that step.",
        "",
        "| task | equal | equal with eager | parted | gap of 1 spacing | of 2 | of 4 | largest | float32 sides "
        "with transformers | with fastseq | float32's gap, median | largest |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in tasks:
        parted, equal = row["partings"], row["equal"]
        gaps = [one["gap"] / one["spacing"] for one in parted]
        errors = [abs(one["exact_gap"]) / one["off"] for one in parted]
        near = [str(sum(gap <= most for gap in gaps)) for most in (1, 2, 4)]
        sides = sum(one["exact_gap"] > 0 for one in parted)
        cells = [
            row["task"], f"{equal['fastseq']} of {row['lines']}", f"{equal['eager']} of {row['lines']}",
            str(len(parted)), *near, f"{max(gaps):.0f}", str(sides), str(len(parted) - sides),
            f"{statistics.median(errors):.1f}", f"{max(errors):.1f}",
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def table(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    facts = record["conditions"]
    lines = [
        "# fastseq: measured" + ("" if facts["dtype"] == "float32" else f" in {facts['dtype']}"),
        "",
        f"{facts['processor']}, {facts['threads']} threads, {facts['dtype']}, torch {facts['torch']}, transformers "
        f"{facts['transformers']}; medians of interleaved rounds; text in to text out. Random weights, n-gram 3.",
        "",
        "If the load is above the number of threads, the machine was busy with other work. Then CPU seconds say more "
        "than seconds.",
        "",
        "| shape | N | new | beam | batch | lines | rounds | load | rung | seconds | over the original "
        "| with loading | CPU seconds | over the original | same text |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        first = next(iter(row["seconds"]))
        for rung, seconds in row["seconds"].items():
            loaded = {name: row["seconds"][name] + row["load_seconds"][name] for name in (first, rung)}
            lines.append(
                f"| {row['shape']} | {row['length']} | {row['new']} | {row['beams']} | {row['batch']} "
                f"| {row['lines']} | {len(row['rounds'][rung])} "
                f"| {row['load'][0]:.0f} to {row['load'][1]:.0f} | {shown(rung)} "
                f"| {seconds:.2f} | {row['ratio'][rung]:.2f}x | {loaded[first] / loaded[rung]:.2f}x "
                f"| {row['cpu_seconds'][rung]:.1f} | {row['cpu_seconds'][first] / row['cpu_seconds'][rung]:.2f}x "
                f"| {'yes' if row['same_text'][rung] else 'no'} |"
            )
    lines += [
        "",
        "Cached states in MiB. The original's number is the formula, 2LDs(BMN + BMt). The other numbers were read "
        "from the\ntensors and equal their formulas to the byte: 2LDs(BN + BMt) shared, BNDs in the place of 2LDsBN "
        "with EL-attention.",
        "",
        "| shape | N | new | beam | batch | original | shared | original / shared | EL "
        "| source alone, original / EL |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        if "formula_bytes" in row and row["lines"] <= row["batch"]:
            lines.append(_memory(row))
    return "\n".join(lines) + "\n"


def _memory(row: dict[str, Any]) -> str:
    formula, shared, el = row["formula_bytes"], row["cache_bytes"], row["el_cache_bytes"]
    suffix = {mode: held["suffix"] for mode, held in (("shared", shared), ("el", el)) if held and "suffix" in held}
    assert sum(shared.values()) == formula["shared"], "what is held is not what the formula says"
    cells = [row["shape"], row["length"], row["new"], row["beams"], row["batch"], f"{formula['stock'] / 2**20:.0f}"]
    cells += [f"{sum(shared.values()) / 2**20:.0f}", f"{formula['stock'] / formula['shared']:.2f}"]
    if el:
        assert sum(el.values()) == formula["el"], "what is held is not what the formula says"
        source = sum(el.values()) - suffix.get("el", 0)
        cells += [f"{sum(el.values()) / 2**20:.0f}", f"{(formula['stock'] - suffix['shared']) / source:.0f}"]
    else:
        cells += ["", ""]
    return "| " + " | ".join(map(str, cells)) + " |"
