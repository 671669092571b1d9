"""docs/paper.md and its plots, made of the JSONs alone."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from pathlib import Path

from paper.frame import Figure, Found, table
from paper.plots import as_png
from paper.registry import NAMES, figure

HEAD = """# The papers, figure by figure

The project implements published systems: AttMEMO (arXiv 2301.09262), FastSeq (arXiv 2106.04718), EL-attention (arXiv
2105.04779), the attention operator of ppl.pmx, and the key-value cache. This page puts every figure and table of the
papers beside what is measured here. `scripts/paper` measures and writes the page:

```
python scripts/paper ../shared docs/paper            # all figures that docs/paper does not have yet
python scripts/paper ../shared docs/paper fig03      # one figure, again
python scripts/paper ../shared docs/paper --page     # this page and its plots, from the JSONs
```

Each figure has one JSON with its conditions. The machine has two cores and no GPU; three claims about GPUs were
measured on an H100. The papers' machines had 48 cores and 1.5 TB of memory, or a V100. So absolute times differ, and
ratios are compared. What could not be measured is marked "not measured".

"""


def load(folder: Path, name: str) -> Found | None:
    """A figure's JSON, if there is one."""
    file = folder / f"{name}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def text(folder: Path) -> str:
    """The page. `folder` holds the JSONs, and lies beside the page."""
    rows, sections, verdicts = [], [], Counter[str]()
    for name in NAMES:
        one, found = figure(name), load(folder, name)
        if found is None:
            sections.append(
                f"## {one.title}\n\nNot measured yet: `python scripts/paper ../shared docs/paper {name}`.\n"
            )
            continue
        for claim in one.claims(found):
            verdicts[claim.verdict] += 1
            verdict = f"**{claim.verdict}**" + (f": {claim.why}" if claim.why else "")
            link = f"[{one.title.split(':')[0]}]({folder.name}/{name}.json)"
            rows.append((link, claim.what, claim.paper, claim.here, verdict))
        sections.append(_section(one, found, folder))
    counted = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    summary = f"## What holds today\n\n{len(rows)} claims: {counted}.\n\n"
    claims = table(("where", "claim", "paper", "here", "verdict"), rows)
    return HEAD + summary + claims + "\n\n" + "\n".join(sections)


def _section(one: Figure, found: Found, folder: Path) -> str:
    wrapped = "\n\n".join(textwrap.fill(part, 119, break_long_words=False) for part in one.why(found).split("\n\n"))
    plot = f"![{one.title}]({folder.name}/{one.name}.png)\n\n" if one.draw is not None else ""
    caption = textwrap.fill(f"{one.caption(found)} ([JSON]({folder.name}/{one.name}.json))", 119)
    return f"## {one.title}\n\n{one.table(found)}\n\n{plot}{caption}\n\n{wrapped}\n"


def write(folder: Path) -> Path:
    """Write the page beside `folder`, and the plots into it."""
    for name in NAMES:
        one, found = figure(name), load(folder, name)
        if one.draw is not None and found is not None:
            (folder / f"{name}.png").write_bytes(as_png(one.draw(found)))
    page = folder.parent / "paper.md"
    page.write_text(text(folder), encoding="utf-8")
    return page
