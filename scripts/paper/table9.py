"""AttMEMO Table 9: LLaMA-65B on GPUs and on CPUs: not measured."""

from __future__ import annotations

from paper.frame import Claim, Figure, Found, Run, table

PAPER_ROWS = {  # tokens a second, dollars of hardware, dollars in the cloud
    "4 GPU instances (8 A10)": (5.54, 61_200, 1.6), "1 CPU instance": (1.01, 7_900, 0.88),
    "6 CPU instances": (6.06, 47_400, 0.88),
}  # fmt: skip
COMMAND = "attmemo generate LLAMA-65B prompts.txt texts.txt --max-new-tokens 2000"


def measure(run: Run) -> Found:
    base, *others = ((speed, bought, cloud) for speed, bought, cloud in PAPER_ROWS.values())
    return {"paper_ratios": [[base[1] / other[1], base[2] / other[2], other[0] / base[0]] for other in others]}


def claims(found: Found) -> list[Claim]:
    return [
        Claim(
            "six CPU instances generate 9 % more tokens a second than eight A10", "6.06 against 5.54 tokens/s",
            f"`{COMMAND}`", "not measured", "needs 147 GB of weights and seven machines",
        ),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return "The paper's values; nothing was measured here."


def rows(found: Found) -> str:
    lines = [(name, *values) for name, values in PAPER_ROWS.items()]
    return table(("paper", "tokens/s", "hardware, $", "cloud, $"), lines)


def why(found: Found) -> str:
    hardware, cloud, _ = found["paper_ratios"][1]
    return (
        "The table has no memoization in it: it compares hardware. Its text reads the ratios "
        f"{hardware:.2f} and {cloud:.2f} as savings of 29 % and 80 %; as shares of the cost they are "
        f"{100 * (1 - 1 / hardware):.0f} % and {100 * (1 - 1 / cloud):.0f} %."
    )


FIGURE = Figure("table9", "AttMEMO Table 9: large models on CPUs", measure, claims, caption, rows, why)
