"""The attention operator of ppl.pmx: conformance, case by case."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from attmemo.fastseq.ops import multi_head_cache_attention
from paper.frame import DOCS, Claim, Figure, Found, Run, document, judge, table, where

PRECISION = {torch.float32: 1e-12, torch.float16: 1e-6, torch.bfloat16: 5e-5}  # squared error over squared output


def measure(run: Run) -> Found:
    # The cases, the float64 judge and the oracle are those of the tests.
    sys.path.append(str(DOCS.parent / "tests" / "fastseq"))
    import ops_cases
    import test_ops_conformance as conformance

    drawn = conformance.cases()[:: run.size(1, 24)]
    made = [case.make() for case in drawn]
    for case, inputs in zip(drawn, made, strict=True):
        conformance.without_hidden_rows(case, inputs)
    theirs: list[dict[str, Any] | None] = [None] * len(drawn)
    if conformance.CHECKOUT:
        with tempfile.TemporaryDirectory() as folder:
            calls = [conformance.call_of(case, [inputs]) for case, inputs in zip(drawn, made, strict=True)]
            theirs = list(conformance.ask(calls, Path(folder)))
    rows: dict[str, dict[str, Any]] = {}
    for case, inputs, answer in zip(drawn, made, theirs, strict=True):
        own = ops_cases.clone(inputs)
        ours = multi_head_cache_attention(**own, **case.attributes())
        golden = torch.from_numpy(ops_cases.judge(case, own))
        scale = float(golden.square().sum()) or 1.0
        name = str(case.dtype).removeprefix("torch.")
        row = rows.setdefault(
            name, {"cases": 0, "worst": 0.0, "theirs_worst": None, "same_cache": 0, "asked_theirs": 0}
        )
        row["limit"] = PRECISION[case.dtype]
        row["cases"] += 1
        row["worst"] = max(row["worst"], float((ours.double() - golden).square().sum()) / scale)
        if answer is not None and "error" not in answer:
            other = float((answer["outputs"][0].double() - golden).square().sum()) / scale
            row["theirs_worst"] = max(row["theirs_worst"] or 0.0, other)
            row["asked_theirs"] += 1
            row["same_cache"] += torch.equal(ops_cases.octets(own["cache"]), ops_cases.octets(answer["cache"]))
    factors = {
        "layouts": len({case.layout for case in drawn}), "bits": sorted({case.bits for case in drawn}),
        "paged": sorted({case.paged for case in drawn}),
    }  # fmt: skip
    speed = document("attention-op")["summary"]["speedup at ragged lengths, geometric means"][0]
    return {
        "cases": len(drawn),
        "types": rows,
        "factors": factors,
        "speed": speed,
        "checkout": bool(os.environ.get("OPMX_REFERENCE")),
    }


def claims(found: Found) -> list[Claim]:
    types = found["types"].values()
    asked, same = (sum(row[key] for row in types) for key in ("asked_theirs", "same_cache"))
    right = all(row["worst"] <= row["limit"] for row in types)
    worst = "; ".join(f"{name} {row['worst']:.0e}" for name, row in found["types"].items())
    agrees = (
        Claim(
            "the operator writes the cache that ppl.pmx's operator writes", "bit by bit",
            f"{same} of {asked} calls, caches equal", judge(same == asked > 0),
        )
        if asked
        else Claim(
            "the operator writes the cache that ppl.pmx's operator writes", "bit by bit",
            "`OPMX_REFERENCE=ppl.pmx pytest tests/fastseq/test_ops_conformance.py`", "not measured",
            "needs a checkout of ppl.pmx",
        )
    )  # fmt: skip
    return [
        Claim(
            "the operator computes what the specification of ppl.pmx says",
            "4 layouts, offset or pages, 8 bits, ALiBi, masks, grouped heads",
            f"{found['cases']} random calls; largest squared error over squared output: {worst}", judge(right),
        ),
        agrees,
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"{found['cases']} calls of tests/fastseq/test_ops_conformance.py: {found['factors']['layouts']} cache "
        "layouts, with pages and with offsets, plain and 8-bit caches, ragged batches of prompts and single tokens, "
        f"ALiBi, masks, grouped heads. The judge computes in float64 and shares no code with the operator. "
        f"{where(found)}."
    )


def rows(found: Found) -> str:
    lines = [
        (
            name, row["cases"], f"{row['worst']:.1e}"
            , "" if row["theirs_worst"] is None else f"{row['theirs_worst']:.1e}",
            f"{row['limit']:.0e}",
            f"{row['same_cache']} of {row['asked_theirs']}" if row["asked_theirs"] else "not asked",
        )
        for name, row in found["types"].items()
    ]  # fmt: skip
    head = ("type", "calls", "largest error here", "of ppl.pmx", "limit of the tests", "caches equal bit by bit")
    return table(head, lines)


def why(found: Found) -> str:
    speed = found["speed"]
    return (
        "The specification gives no speeds. Nothing differs but what we mean to differ: a query whose mask leaves "
        f"no key gives zeros here, and not NaN. On ragged batches the operator is {speed['padded, enable_gqa']} "
        f"times as fast as padded SDPA as it is usually called, and {speed['padded, packed']} times as fast as its "
        "fastest form, in float32 ([the attention operator](attention-op.md))."
    )


FIGURE = Figure("pmx", "ppl.pmx: conformance of the operator", measure, claims, caption, rows, why)
