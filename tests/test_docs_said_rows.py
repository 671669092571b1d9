"""Numbers in sentences of the pages about rows and measurements are those of JSON files, scripts and constants."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import torch
from docs_tools import RowsCase, measured, page, says, set_in

from attmemo.embed.sketch import Sketch
from attmemo.embed.tokens import GRAPH_FROM, _Shelf
from attmemo.kernels.linear8 import Linear8
from attmemo.mmap import HUGE_PAGE
from attmemo.planner.rows import THRESHOLD
from attmemo.profiler.evaluate import EvaluateOptions
from attmemo.profiler.race import MIN_COSINE

ROWS, MEASURED = page("rows.md"), page("measured.md")
SIZES = (1, 8, 32)


def peer_runs(dtype: str) -> list[dict[str, Any]]:
    """Runs of docs/peers.json with MiniLM."""
    runs = measured("peers.json")["runs"]
    return [run for run in runs if (run["model"]["name"], run["model"]["dtype"]) == ("minilm", dtype)]


def cell(run: dict[str, Any], path: str, batch: int) -> dict[str, Any]:
    """What a run found of a path, in the order of arrival."""
    (found,) = (one for one in run["cells"] if (one["path"], one["batch"], one["by_length"]) == (path, batch, False))
    return dict(found)


def test_what_8_bits_gain_in_float32_was_measured() -> None:
    (run,) = peer_runs("float32")
    assert run["stream"]["name"] == "OpenSSH"
    own, exact = ([cell(run, path, batch) for batch in SIZES] for path in ("none-int8", "none"))
    template = (
        "lines of OpenSSH one, # and # at a time: #, # and # times as fast as the stock model, where exact layers "
        "gain #, # and #. Mean cosine #, lowest # % # ("
    )
    speeds = [one["speed"] for one in own + exact]
    for found in (one["quality"] for one in own):
        says(ROWS, template, *SIZES[1:], *speeds, found["cosine_mean"], 1, found["cosine_p1"])


def test_what_8_bits_gain_with_a_matrix_unit_was_measured() -> None:
    runs = peer_runs("bfloat16")
    assert len(runs) == 7, "streams, as the page says"
    assert all("amx_int8" in run["conditions"]["features"] for run in runs)
    ends = list[float]()
    for batch in SIZES:
        gains = [cell(run, "none", batch)["ms"] / cell(run, "none-int8", batch)["ms"] for run in runs]
        ends += [min(gains), max(gains)]
    template = (
        "with one text at a time 8 bits are # to # times as fast as exact layers, with # texts # to # times, "
        "with # texts # to # times."
    )
    says(ROWS, template, *ends[:2], SIZES[1], *ends[2:4], SIZES[2], *ends[4:])


def test_8_bits_keep_a_quarter_of_the_bytes() -> None:
    exact = RowsCase("lines-OpenSSH", "float32").stats("weight_bytes")
    shapes = [[(384, 384)] * 3, [(384, 384)], [(1536, 384)], [(384, 1536)]]  # of a layer of MiniLM: outputs, inputs
    layer = sum(Linear8.of([torch.zeros(one) for one in part], [None] * len(part)).nbytes for part in shapes)
    says(ROWS, "(MiniLM: # MB in place of #)", 6 * layer / 1e6, exact / 1e6)
    assert 0.25 <= 6 * layer / exact <= 0.26


def test_what_near_and_a_single_sequence_gain_was_measured() -> None:
    case = RowsCase("lines-HDFS")
    template = "On HDFS `near=1` computes # of the rows: mean cosine #, 1st percentile #."
    says(ROWS, template, case.stats("share_computed"), *case.cosines())
    gain = RowsCase("bert-1x128").over("rows", "the best OpenVINO")
    says(ROWS, "rows are left: # times as fast as OpenVINO.", gain)


def test_settings_of_rows_are_those_of_the_code() -> None:
    says(ROWS, "share of its tokens that a record must supply, # by default", THRESHOLD)
    tokens, _, sketches, *_ = _Shelf.empty(1, 1, Sketch().dimensions).room
    template = "# bytes a token and # KiB a record, with room for twice as many. From # records on hnswlib"
    says(ROWS, template, tokens.nbytes, sketches.nbytes / 1024, GRAPH_FROM)
    (admit,) = re.findall(r"`--admit (\S+)`", ROWS)
    says(ROWS, "`--admit #` also leaves out texts of which a record supplies # % of the tokens.",
         float(admit), 100 * float(admit))  # fmt: skip


def test_settings_of_the_runs_are_those_of_the_scripts() -> None:
    (stored,), (asked,) = (set_in("bench_rows.py", text) for text in (r"cut = int\((\S+) \* ", r"\nASKED = (\d+)"))
    (later,) = set_in("bench_rows.py", r"\((\S+), 1\.0, ASKED\)")
    template = "The first # % of the lines of a log are stored (in bfloat16), # later lines are asked; windows are a"
    says(ROWS, f"{template} random sample of the later # %.", 100 * stored, asked, 100 - 100 * later)
    (threshold,) = set_in("study_drift.py", r"Unguarded, threshold=(\S+)\)")
    (least,) = set_in("study_drift.py", r"\(own < (\S+)\)\.mean")
    template = "no guard, `threshold=#`: the share of served lines whose cosine to the exact embedding is below #, and"
    says(ROWS, template, threshold, least)


def test_an_answer_has_changed_below_the_cosine_that_the_pages_say() -> None:
    for file in ("streams.json", "streams-float32.json", "streams-avx512.json"):
        assert {stream["min_cosine"] for stream in measured(file)["streams"].values()} == {MIN_COSINE}
    says(MEASURED, "an answer has changed if its cosine is below #.", MIN_COSINE)
    (least,) = (field.default for field in fields(EvaluateOptions) if field.name == "min_cosine")
    says(MEASURED, "if an embedding's cosine to the exact one is below #.", least)


def test_what_other_pages_measured_is_said_again() -> None:
    cells = [cell for cell in measured("paper/table6.json")["cells"] if cell["page_bytes"] == HUGE_PAGE]
    last = max(cells, key=lambda cell: int(cell["batch"]))
    (least,) = re.findall(r"takes more than (\d+) times as long as mapping the\s+batch", MEASURED)
    template = "In pages of # MiB, a fresh copy of a batch of # maps takes more than # times as long as mapping the"
    says(MEASURED, f"{template} batch", HUGE_PAGE >> 20, last["batch"], float(least))
    assert last["ways"]["copy"]["fetch_ms"] > float(least) * last["ways"]["map"]["fetch_ms"]
    pruned = measured("study-pruned.json")
    says(MEASURED, "A classifier pruned to # % is served more", 100 * pruned["pruning"]["sparsity"])
    sizes = [int(size) for size in pruned["models"]["dense"]["levels"][0]["accuracy"]]
    says(MEASURED, "answers and hits are the same in batches of #, # and # (", *sizes)
