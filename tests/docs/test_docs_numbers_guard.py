"""Numbers of the page about the guard are those of docs/guard.json."""

from __future__ import annotations

from typing import Any

import pytest
from docs_tools import agree, measured, numbers, page, says, table_rows

TEXT, FOUND = page("guard.md"), measured("guard.json")
LOGS = ("OpenSSH", "HDFS", "BGL", "Apache", "Android", "Hadoop", "Mac", "Thunderbird")
STREAMS = [
    ("lines of 8 logs", "**the guard**", "lines", "guard"), ("", "the same, seed 1", "seed 1", "guard"),
    ("", "the same, seed 2", "seed 2", "guard"),
    ("", "whole at once below the margin", "lines", "whole below the margin"),
    ("", "with `near=1`", "near", "guard"),
    ("", "without the certificate: verified changes and the margin alone", "lines", "no certificate"),
    ("", "without the margin", "lines", "no margin"),
    ("", "no guard: whatever supplies .4 of the tokens", "lines", "no guard"),
    ("windows of 4 lines", "**the guard**", "windows", "guard"), ("", "no guard", "windows", "no guard"),
    ("embeddings of 4 logs", "**the guard**", "embeddings", "guard"),
    ("", "whole at once below the cosine", "embeddings", "whole below the margin"),
    ("", "without the certificate", "embeddings", "no certificate"),
    ("", "without the margin", "embeddings", "no margin"), ("", "no guard", "embeddings", "no guard"),
]  # fmt: skip
"""The rows of the table: what they begin with, a case and what guarded it."""


def sums(logs: dict[str, dict[str, Any]]) -> list[float]:
    """Lines, served, served of second halves, changed in percent, of the worst log too, and rows computed."""
    runs = list(logs.values())
    total = {name: sum(run[name] for run in runs) for name in ("lines", "served", "served_late", "changed", "rows")}
    lines, worst = total["lines"], max(run["changed"] / run["lines"] for run in runs)
    shares = total["served"] / lines, 2 * total["served_late"] / lines, 100 * total["changed"] / lines, 100 * worst
    return [lines, *shares, total["rows"] / sum(run["tokens"] for run in runs)]


def test_the_table_of_streams_was_measured() -> None:
    rows = table_rows(TEXT, "| stream | | lines | served")
    assert len(rows) == len(STREAMS)
    for row, (stream, way, case, guard) in zip(rows, STREAMS, strict=True):
        assert row[:2] == [stream, way]
        agree(row[2:], sums(FOUND[case][guard]))


def test_what_falls_short_was_measured() -> None:
    _, served, second, *_, rows = sums(FOUND["lines"]["guard"])
    says(TEXT, "the guard served # and #, and computed #.", served, second, rows)
    *_, other = sums(FOUND["seed 1"]["guard"])
    says(TEXT, "With another draw of samples (seed 1) it computed #:", other)
    _, _, second, changed, *_ = sums(FOUND["lines"]["whole below the margin"])
    says(TEXT, "computed whole, # of it are served; but then # % of the answers change.", second, changed)
    embeddings = FOUND["embeddings"]["guard"]
    first = embeddings["OpenSSH"]
    assert all(embeddings[log]["served"] >= 0.8 * first["lines"] for log in ("OpenSSH", "HDFS", "Apache")), "are met"
    assert all(run["changed"] <= 0.01 * run["lines"] for run in embeddings.values()), "are met"
    says(TEXT, "Of OpenSSH # lines are samples that are answered exactly", first["done"]["sampled"])
    halves = [sums(FOUND["embeddings"][name])[2] for name in ("guard", "whole below the margin")]
    text = "More rows serve # of the second halves; where all that is below the cosine is computed whole, #."
    says(TEXT, text, *halves)
    together, alone = (sum(run["rows"] for run in runs.values()) for runs in (FOUND["lines"]["guard"], FOUND["alone"]))
    assert alone > together, "a log alone pays for all samples itself"


def test_what_each_log_was_served_was_measured() -> None:
    rows = table_rows(TEXT, "| stream | OpenSSH | HDFS")
    cases = {
        "lines": FOUND["lines"]["guard"], "windows of 4 lines": FOUND["windows"]["guard"],
        "lines, each log alone": FOUND["alone"], "embeddings": FOUND["embeddings"]["guard"],
    }  # fmt: skip
    for (label, *cells), (name, logs) in zip(rows, cases.items(), strict=True):
        assert label == name
        for cell, log in zip(cells, LOGS, strict=True):
            if log in logs:
                run = logs[log]
                agree(numbers(cell), [run["served"] / run["lines"], 100 * run["changed"] / run["lines"]])
            else:
                assert cell == "–"


def test_the_budget_was_kept_over_all_lines_and_nearly_in_each_log() -> None:
    for case in ("lines", "near", "windows", "embeddings"):
        *_, changed, worst, _ = sums(FOUND[case]["guard"])
        assert changed <= 1.0
        assert worst <= 2.0


def test_what_windows_cost_where_they_do_not_pay_was_measured() -> None:
    runs = [FOUND["windows"]["guard"][log] for log in ("BGL", "Mac")]
    shares = [run["rows"] / run["tokens"] for run in runs]
    says(TEXT, "records cost more than they save, # and # times the rows without reuse", *shares)


def test_what_samples_cost_was_measured() -> None:
    rows = table_rows(TEXT, "| lines at once | lines | drawn")
    found = [(size, part, one) for size, parts in FOUND["overhead"]["sizes"].items() for part, one in parts.items()]
    for (size, part, *cells), (at_once, lines, one) in zip(rows, found, strict=True):
        assert (size, part) == (at_once, lines)
        ms = one["ms"]
        agree(cells, [100 * one["drawn"], ms["guard"], ms["nothing drawn"], one["over_nothing_drawn"]])
        assert one["over_nothing_drawn"] <= 1.05
    assert FOUND["overhead"]["conditions"]["cores"] == 2, "as the page says"
    assert "avx512f" in FOUND["overhead"]["conditions"]["features"]


def test_what_says_beforehand_that_an_answer_changes_was_measured() -> None:
    found = FOUND["predictors"]
    rows = table_rows(TEXT, "| answers | looked at | changed | the margin")
    assert [row[0] for row in rows] == list(found) == ["classes", "vectors"]
    for (_, *cells), one in zip(rows, found.values(), strict=True):
        agree(cells, [one["answers"], one["changed"], *one["area"].values()])
        assert max(one["area"], key=lambda name: one["area"][name]) == "margin", "says most"
    for head, one in zip(("| classes: margin of", "| vectors: cosine of"), found.values(), strict=True):
        line = next(line for line in TEXT.splitlines() if line.startswith(head))
        agree(numbers(line), [step for step, _, _ in one["curve"]])
        (_, *shares), (_, *changed) = table_rows(TEXT, head)
        agree(shares, [share for _, share, _ in one["curve"]])
        agree(changed, [100 * share for _, _, share in one["curve"]])


def test_other_numbers_of_neighbours_were_measured() -> None:
    none, two = (FOUND[case]["guard"] for case in ("near 0", "near 2"))
    _, served, _, changed, worst, rows = sums(none)
    says(TEXT, "(`near=0`): lines # served and # of the rows computed, hardly other numbers", served, rows)
    says(TEXT, "of the usual rule; but # % of the answers change, # % of those to BGL", changed, worst)
    assert worst == 100 * none["BGL"]["changed"] / none["BGL"]["lines"]
    assert changed > sums(FOUND["lines"]["guard"])[3]
    says(TEXT, "(`near=2`): lines # served", sums(two)[1])


def test_streams_that_switch_were_measured() -> None:
    rows = table_rows(TEXT, "| stream | first log | second log")
    assert len(rows) == len(FOUND["switch"])
    for (name, *cells), (logs, parts) in zip(rows, FOUND["switch"].items(), strict=True):
        assert name == logs.replace(", ", ", then ")
        agree([number for cell in cells for number in numbers(cell)], [part["served"] for part in parts])
    parts = [part for run in FOUND["switch"].values() for part in run]
    says(TEXT, "served of each 100 lines; # answers of # changed",
         sum(part["changed"] for part in parts), sum(part["lines"] for part in parts))  # fmt: skip


def test_adversaries_were_asked() -> None:
    kinds = FOUND["adversaries"].values()
    asked, served = (sum(kind[name] for kind in kinds) for name in ("asked", "served"))
    says(TEXT, "# were asked, # were served before they were verified", asked, served)
    assert served == 0


def test_streams_were_simulated() -> None:
    found = FOUND["simulated"]
    rates = [100 * share for share in found["falsely_certified"].values()]
    says(TEXT, "# and # % of changed answers, #, # and # % of # streams of # samples ever seemed to keep 1 %",
         1.2, 1.5, *rates, found["streams"], found["samples"])  # fmt: skip
    assert list(found["falsely_certified"]) == ["0.0101", "0.012", "0.015"]
    says(TEXT, "At half of the budget # % of", 100 * found["false_alarms_at_half_the_budget"])


@pytest.mark.parametrize(("row", "name"), [(0, "median"), (1, "p90")])
def test_the_delay_of_the_alarm_was_simulated(row: int, name: str) -> None:
    _, *cells = table_rows(TEXT, "| true rate | 2 % | 3 %")[row]
    agree(cells, [one[name] for one in FOUND["simulated"]["alarm_after"].values()])


def test_what_was_left_out_was_measured() -> None:
    rows, found = table_rows(TEXT, "| | seed | rows computed, logs"), measured("guard-ablations.json")["rows"]
    assert len(rows) == len(found)
    for row, one in zip(rows, found, strict=True):
        assert row[0] == one["what"]
        shares = [one[name]["rows"] / one[name]["tokens"] for name in ("logs", "growing", "instructed", "pairs")]
        agree(row[1:], [one["seed"], shares[0], one["logs"]["changed"], *shares[1:]])
