"""FastSeq Table 4: the quality of generated text."""

from __future__ import annotations

from paper.fastseq_rows import NAMES, bench, setting, where
from paper.frame import Claim, Figure, Found, Run, judge, table

# ROUGE-1/2/L in float32: baseline, FastSeq
PAPER_ROWS = {
    "UniLM": ("43.08/20.43/40.34", "43.09/20.29/40.32"), "BART": ("44.21/21.20/41.03", "44.21/21.20/41.03"),
    "ProphetNet": ("44.20/21.17/41.30", "44.20/21.17/41.30"),
}  # fmt: skip


def measure(run: Run) -> Found:
    record = bench()
    rows = [
        {"name": row["shape"], "setting": setting(row), "lines": row["lines"],
         "same": {rung: same for rung, same in row["same_text"].items() if rung not in ("stock", "ctranslate2")}}
        for row in record["rows"]
    ]  # fmt: skip
    return {"conditions": record["conditions"], "rows": rows}


def claims(found: Found) -> list[Claim]:
    cells = [same for row in found["rows"] for same in row["same"].values()]
    return [
        Claim(
            "in float32 the generated text is exactly the same", "BART, ProphetNet: equal ROUGE; UniLM: ±0.14",
            f"{sum(cells)} of {len(cells)} runs give the same text, so every metric is equal", judge(all(cells)),
        ),
        Claim(
            "in float16 ROUGE differs by 0.01 at most", "BART 21.20 → 21.21",
            "`attmemo generate MODEL articles.txt out.txt --reference-path highlights.txt` on a GPU", "not measured",
            "needs a GPU and weights",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"Texts of every step compared with the original's; {where(found)}. Paper: CNN/DailyMail test set, "
        "ROUGE-1/2/L."
    )


def rows(found: Found) -> str:
    lines: list[tuple[object, ...]] = [
        (
            NAMES[row["name"]],
            row["setting"],
            row["lines"],
            ", ".join(row["same"]),
            "yes" if all(row["same"].values()) else "no",
        )
        for row in found["rows"]
    ]
    lines += [(f"paper: {name}", "", "", f"{base} → {fast}", "") for name, (base, fast) in PAPER_ROWS.items()]
    return table(("model", "setting", "texts", "steps compared", "same text"), lines)


def why(found: Found) -> str:
    return (
        "ROUGE compares texts with references. Equal texts have equal ROUGE, so that the stricter question is "
        "asked here: is it the same text? Weights are random, which makes ties and near-ties likelier than in a "
        "trained model. The tests compare tokens and scores of every step for eighteen families "
        "([fastseq](fastseq.md))."
    )


FIGURE = Figure("fastseq_table4", "FastSeq Table 4: quality", measure, claims, caption, rows, why)
