"""Numbers of sentences on the first page and the pages of first steps and of the service: JSON files, and the code."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
from docs_tools import RowsCase, measured, page, samples_needed, says, spread

from attmemo.memoization import memoize
from attmemo.profiler.advise import FEWEST, AdviseOptions
from attmemo.profiler.demo import BATCH, BUDGET, JUDGED, LEAST_WINDOWS, MAPS_FROM, MAPS_SHARE, OTHERS, SECONDS, STORED
from attmemo.profiler.demo import FEWEST as LINES
from attmemo.profiler.race import EVERY, MIN_COSINE
from attmemo.serve.clients import CONNECTIONS, FILES
from attmemo.serve.connection import HEAD, HEADERS, PIPELINED
from attmemo.serve.model import SCORE_STEP
from attmemo.serve.room import STALLED
from attmemo.serve.routes_texts import TOKENS
from attmemo.serve.service import ANSWERS, BODIES, LARGEST, SMALL, WATCHED
from attmemo.serve.settings import Settings
from attmemo.serve.threads import CHARACTERS, PIECE, REST

SCRIPTS = str(Path(__file__).parents[1] / "scripts")
REPEATED = ("lines-OpenSSH", "lines-HDFS", "lines-HDFS-threshold52", "lines-Apache")
SERVERS = ("rows", "none", "plain")
FIRST, STEPS, SERVICE = page("../README.md"), page("first-steps.md"), page("service.md")


def runs(found: Any) -> list[Any]:
    """All runs of wrk of the first table: 64, 8 and 1 clients, and two with batches."""
    return [one for way in SERVERS for one in (*found[way]["single"], found[way]["batches_of_32"])]


def test_what_a_prepared_database_gains_was_measured() -> None:
    template = "rows of a prepared database are # to # times as fast as stock there, on streams"
    says(FIRST, template, *spread(REPEATED, "rows"))
    says(FIRST, "in another run, where packed blocks are # to #.", *spread(REPEATED, "packed"))
    packed = [RowsCase(name).over("packed") for name in ("deberta-windows", "deberta-base-8x512")]
    says(FIRST, "With DeBERTa packed blocks are # to # times as fast", *packed)


def test_the_first_page_has_the_default_budget() -> None:
    budget = inspect.signature(memoize).parameters["budget"].default
    says(FIRST, "by default at most # % of all answers may change", 100 * budget)


def test_the_demo_is_made_as_the_page_says() -> None:
    says(STEPS, "as they come, # at once, in bfloat16", BATCH)
    says(STEPS, 'reuse="rows", budget=#)`', BUDGET)
    says(STEPS, "an embedding with a cosine below # has changed", MIN_COSINE)
    says(STEPS, "The stream ends after # seconds in all", SECONDS)
    says(STEPS, "those of the # lines before, with a threshold chosen on # more", STORED, JUDGED)
    says(STEPS, "where the lines are at least # and the time # seconds", (STORED + JUDGED) / MAPS_SHARE, MAPS_FROM)
    says(STEPS, "one of four, of less than # lines", (STORED + JUDGED) / MAPS_SHARE)
    says(STEPS, "Of a file of less than # lines", LEAST_WINDOWS * EVERY * BATCH)
    assert LEAST_WINDOWS == 5, "five points"
    assert (EVERY, OTHERS) == (4, 8), "one batch of eight; one of four"
    demos = measured("demo-payments.json").values()
    assert {(demo["batch"], demo["budget"], demo["min_cosine"]) for demo in demos} == {(BATCH, BUDGET, MIN_COSINE)}


def test_a_certificate_needs_as_many_samples_as_the_page_says() -> None:
    says(STEPS, "If no sample changed, # are needed, and # if one did.", samples_needed(0), samples_needed(1))


def test_advice_reads_as_many_texts_as_the_page_says() -> None:
    says(STEPS, "plays the tokens of the first # texts", AdviseOptions().limit)
    says(STEPS, "It needs # texts, better thousands.", FEWEST)
    says(STEPS, "a line each, of # lines or more", LINES)


def test_the_service_has_the_steps_of_the_page() -> None:
    says(SERVICE, "A request that waits less than # seconds is not watched", WATCHED)
    says(SERVICE, "a score, from 0 to 1, that moved by more than #.", SCORE_STEP)


def test_clients_may_take_what_the_page_says() -> None:
    seconds = Settings("m").client_seconds
    says(SERVICE, "start line and headers | # KiB, # headers | 431", HEAD / 1024, HEADERS)
    says(SERVICE, "the start of the connection | # seconds |", seconds)
    says(SERVICE, "the time of a body | # seconds | 408", seconds)
    says(SERVICE, "| # MiB, or # times `--payload-limit` if that is more | 429", BODIES / 2**20, LARGEST)
    says(SERVICE, "reads nothing of its answer | # seconds |", seconds)
    says(SERVICE, "in one request | # | 422", TOKENS)
    says(SERVICE, "all answers of more than # KiB that are made or sent | # MiB | 429", SMALL / 1024, ANSWERS / 2**20)
    says(SERVICE, "| connections | #, or # less than the limit of open files | 503", CONNECTIONS, FILES)
    says(SERVICE, "on one connection | # |", PIPELINED)
    says(SERVICE, "has sent nothing for # second gives way", STALLED)
    says(SERVICE, "A body of no more than # KiB is always let in", SMALL / 1024)
    says(SERVICE, "Requests of one piece, # inputs and # characters at most, have threads", PIECE, CHARACTERS)
    says(SERVICE, "a thread for these rests # times as long as a piece took", REST)


def test_the_services_lines_are_parted_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    script = importlib.import_module("bench_serve")
    log = tmp_path / "data" / "loghub_2k" / f"{script.LOG}_2k.log"
    log.parent.mkdir(parents=True)
    log.write_text("a line\n" * 100)
    stored, asked = script.lines_of(tmp_path)
    template = "the first # % of the lines stored before, the later # % asked"
    says(SERVICE, template, len(stored), len(asked))


def test_what_the_load_generator_takes_was_measured() -> None:
    found = runs(measured("service.json"))
    says(SERVICE, "it uses at most # of one core", max(one["cores_of_wrk"] for one in found))
    seconds = {round(one["requests"] * (1 if one["clients"] != 2 else 32) / one["lines_per_second"]) for one in found}
    assert len(seconds) == 1
    says(SERVICE, "One run of # seconds each", *seconds)


def test_what_a_single_line_takes_was_measured() -> None:
    found = measured("service.json")
    rates = [found["rows"]["single"][0]["lines_per_second"], found["direct"]["rows"]["lines_per_second"]]
    says(SERVICE, "a single line takes # ms, and # ms in the library", *(1e3 / rate for rate in rates))
