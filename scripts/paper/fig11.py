"""AttMEMO Fig. 11: how often each record is reused."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure as Plot

from attmemo.models import adapter_for
from attmemo.profiler.answers import prepare, serving
from attmemo.profiler.map_recorder import Capture
from paper import sst2
from paper.frame import Claim, Figure, Found, Run, judge, percent, table, where
from paper.plots import PAPER, bars, legend, sheet

MOST = 6  # uses of one record, the paper's


def measure(run: Run) -> Found:
    stored, asked_count = run.size((6000, 640), (60, 12))
    loaded = sst2.model(run)
    asked = sst2.tokens(loaded, sst2.sentences(run, "test_labeled", asked_count)[0])
    used: list[int] = []
    adapter, sites = adapter_for(loaded.model)
    with sst2.open_database(run, stored) as database, serving(loaded, database, "layer") as handle:
        handle.disable()
        with Capture(loaded.model, adapter, sites) as capture:
            for items, inputs in prepare(loaded, asked, 32):
                hidden = capture.run(inputs).inputs[0]
                used += handle.planner.index.find(0, hidden, [len(item) for item in items]).records.tolist()
    counts = np.bincount([record for record in used if record >= 0])
    uses = np.bincount(counts[counts > 0])
    return {
        "stored": stored, "asked": asked_count, "found": sum(record >= 0 for record in used),
        "records_used": int((counts > 0).sum()), "records_by_uses": uses.tolist(),
    }  # fmt: skip


def claims(found: Found) -> list[Claim]:
    by = found["records_by_uses"]
    twice = sum(by[:3]) / found["records_used"]
    return [
        Claim(
            "most records are reused once or twice", "“only once or twice”",
            f"{percent(twice)} of the records that are used", judge(twice > 0.5),
        ),
        Claim("no record is used more than six times", "6", f"{len(by) - 1}", judge(len(by) - 1 <= MOST)),
    ]  # fmt: skip


def caption(found: Found) -> str:
    return (
        f"minilm-sst2, {found['stored']:,} train phrases stored, the nearest record by embeddings at layer 0 for "
        f"{found['asked']} test sentences ({found['found']} have a record of their length); no threshold. Paper: "
        f"BERT-base, 10,000 stored, 640 asked. {where(found)}."
    )


def rows(found: Found) -> str:
    by = found["records_by_uses"]
    lines = [(uses, by[uses], percent(by[uses] / found["records_used"], 1)) for uses in range(1, len(by))]
    return table(("uses", "records", "share of the records that are used"), lines)


def why(found: Found) -> str:
    return (
        f"Of {found['stored']:,} records {found['records_used']} are used at all by {found['found']} queries. Free "
        "sentences have no template, so that each query has a nearest record of its own: the paper concludes that the "
        "database must be large. For lines made of templates the opposite holds: few records serve almost everything "
        "([a database that fills itself](filling.md))."
    )


def draw(found: Found) -> Plot:
    figure, (axes,) = sheet(1, "How often a record is used")
    by = found["records_by_uses"][1:]
    bars(axes, [str(uses) for uses in range(1, len(by) + 1)], {"records": by})
    axes.axvline(MOST - 0.5, color=PAPER, linewidth=1.2, label="paper: no more than 6 uses")
    axes.set(xlabel="uses", ylabel="records", yscale="log")
    legend(axes)
    return figure


FIGURE = Figure("fig11", "AttMEMO Fig. 11: reuse of records", measure, claims, caption, rows, why, draw)
