"""Numbers in the sentences of the page about the guard are those of the code, of arithmetic and of JSON files."""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType

import pytest
from docs_tools import measured, page, samples_needed, says, set_in

from attmemo import debts
from attmemo.guard import certificate, draw, futile, keeper, margin, verified
from attmemo.guard.guard import AGAIN, DRAWN, EARNED, RETURNED, SAVED
from attmemo.guarded import AT_ONCE, BOTH_WAYS, MOVES, OWED
from attmemo.kernels.align import Rule
from attmemo.perfmodel import forward_times
from attmemo.planner.guarded import MORE_NEAR, MORE_NEAR_OF_VECTORS, MOST_ROWS, TRIED
from attmemo.profiler.race import MIN_COSINE, PACKED, ROWS

TEXT, FOUND = page("guard.md"), measured("guard.json")
SCRIPT = "bench_guard.py"
BUDGET, CONFIDENCE = 0.01, 0.95
LEAST = math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - BUDGET))
"""Clean samples without which no test can rule out the budget: fewer are too likely at this rate."""


def highest(changed: int, same: int) -> float:
    """The rate of changed answers that so many samples do not rule out."""
    return certificate.highest_rate(changed, same, CONFIDENCE)


def test_the_shares_of_samples_are_those_of_the_code() -> None:
    says(TEXT, "as long as the account (below) pays. Afterwards # % are drawn", 100 * DRAWN)
    says(TEXT, "One of them that changed takes # more. Until", samples_needed(1) - samples_needed(0))
    says(TEXT, "one served answer in # is a sample", 1 / AGAIN)
    says(TEXT, "as many as add about # % to the time, but always # % of these answers",
         100 * draw.ADDED, 100 * draw.LEAST)  # fmt: skip
    says(TEXT, "Of # to # answers that could be served, one is a sample", 1 / DRAWN, 1 / draw.LEAST)
    says(TEXT, "a certified guard samples # to # %", 100 * draw.LEAST, 100 * DRAWN)
    says(TEXT, "The sample finds it with probability # to # each time", draw.LEAST, DRAWN)
    says(TEXT, "The first # batches that are verified so, and one in # later", BOTH_WAYS, BOTH_WAYS)


def test_what_makes_a_slot_free_is_that_of_the_code() -> None:
    says(TEXT, "A slot of numbers is free after # different harmless values, a slot of words after #",
         verified.NUMBERS, verified.WORDS)  # fmt: skip
    says(TEXT, "Each blame adds # times the first number of harmless values", verified.PENALTY)
    says(TEXT, "Up to # records are tried", TRIED)


def test_margins_are_those_of_the_code() -> None:
    says(TEXT, "must be ahead of the second best: by # of probability at first",
         margin.CLASSES.steps[margin.CLASSES.first])  # fmt: skip
    assert margin.SHARE == 0.5, "half of the budget"
    says(TEXT, "they fall down to #, and to # with more rows, while half of the budget",
         margin.CLASSES.steps[0], margin.WIDER.steps[0])  # fmt: skip
    says(TEXT, "Such an answer has a margin of its own, # at first", margin.WIDER.steps[margin.WIDER.first])
    says(TEXT, "where more than # of the rows would be computed", MOST_ROWS)
    assert Rule().near + MORE_NEAR == 3, "three neighbours of every token"
    assert MORE_NEAR == 2, "two more than usual"
    assert Rule().near + MORE_NEAR_OF_VECTORS == 4, "four neighbours of every token"
    none_changed = -math.log(1 - margin.SURENESS)  # the mean at which no change at all is as unlikely
    says(TEXT, "An upper bound is taken for this, at # %: if no answer was seen to change, # may",
         100 * margin.SURENESS, none_changed)  # fmt: skip
    says(TEXT, "Where a word stands in a free slot, the margin is #", margin.CLASSES.sure)
    says(TEXT, "with a cosine of # at first and # at least", margin.VECTORS.steps[margin.VECTORS.first],
         margin.VECTORS.steps[0])  # fmt: skip
    says(TEXT, "near the one with fewer rows: a cosine of # at first and # at least",
         margin.MOVED.steps[margin.MOVED.first], margin.MOVED.steps[0])  # fmt: skip
    assert MOVES == 0.5, "half of the distance"
    says(TEXT, "below a cosine of #, where the bound is #", 1 - MOVES * (1 - MIN_COSINE), MIN_COSINE)
    says(TEXT, "at least # at each step", margin.SEEN)


def test_when_a_kind_is_not_tried_is_that_of_the_code() -> None:
    assert futile.FEWEST == 5, "five answers of a kind"
    says(TEXT, "If more than # of its answers were below every margin", futile.SHARE)
    says(TEXT, "unless another record serves. # % of them are verified", 100 * DRAWN)


def test_the_account_of_verifications_is_that_of_the_code() -> None:
    says(TEXT, "The account holds # verifications at first, and never more. A request adds #, a served answer # more",
         SAVED, EARNED, RETURNED)  # fmt: skip
    says(TEXT, "After an alarm the account is filled up to a half of #", SAVED)
    says(TEXT, "at most every # seconds", keeper.EVERY)


def test_the_alarm_is_that_of_the_code() -> None:
    says(TEXT, "a bet that the rate is #, # or # times the budget", *certificate.WORSE)
    says(TEXT, "when the mean stake reaches #: at a rate of just the budget, # samples",
         *[certificate.BETWEEN_ALARMS] * 2)  # fmt: skip


def test_when_reuse_is_judged_is_that_of_the_code() -> None:
    assert forward_times.KNOWN == 6, "six forwards in a row"
    says(TEXT, "after # forwards without records at first and then after twice as many each time, up to #",
         forward_times.SOONEST, forward_times.PERIOD)  # fmt: skip
    says(TEXT, "one forward in # runs without them", forward_times.SELDOM)
    says(TEXT, "tokens that differ by a factor of up to # from those of the first", forward_times.ALIKE)
    says(TEXT, "or # verifications are done, or learning has cost as much time as # requests",
         SAVED, forward_times.INVESTED)  # fmt: skip


def test_what_samples_prove_is_arithmetic() -> None:
    says(TEXT, "Before the first sample this rate is #, after # clean samples #, after # it is #",
         highest(0, 0), 100, highest(0, 100), samples_needed(0), highest(0, samples_needed(0)))  # fmt: skip
    says(TEXT, "A certificate for # % at # % takes # clean samples here, and # at least in any test",
         100 * BUDGET, 100 * CONFIDENCE, samples_needed(0), LEAST)  # fmt: skip
    says(TEXT, "One sample that changes costs # more", samples_needed(1) - samples_needed(0))


def test_when_what_is_owed_is_verified_is_that_of_the_code(fresh_idle: ModuleType) -> None:
    says(TEXT, "of # answers at most: token ids", debts.MOST)
    template = "After # seconds without a request a thread verifies up to # answers at once"
    says(TEXT, template, fresh_idle.QUIET, AT_ONCE)
    says(TEXT, "So a request finds at most # sequences in its way", AT_ONCE)
    says(TEXT, "a request that finds more than # answers owed", OWED)
    says(TEXT, "where # answers are owed", debts.MOST)


@pytest.fixture
def fresh_idle() -> ModuleType:
    """The module as users get it: tests set its time."""
    spec = importlib.util.find_spec("attmemo.idle")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_streams_are_those_of_the_script() -> None:
    (first,), (threshold,) = set_in(SCRIPT, r"len\(windows\) \* ([\d.]+)"), set_in(SCRIPT, r'"threshold": ([\d.]+)')
    budget, lines = set_in(SCRIPT, r"BUDGET, LINES = ([\d.]+), (\d+)")
    (confidence,) = set_in(SCRIPT, r"kind\(BUDGET, ([\d.]+),")
    assert (budget, confidence) == (BUDGET, CONFIDENCE)
    (seed,) = set_in(SCRIPT, r"kind: type\[Guard\], seed: int = (\d+)")
    says(TEXT, "`threshold=#`, budget # %, confidence # %, seed #. Streams are", threshold, 100 * budget,
         100 * confidence, seed)  # fmt: skip
    says(TEXT, "Streams are the first # lines of the later # % of each log", lines, 100 * (1 - first))
    says(TEXT, "The classifier learns from the first # % of OpenSSH and HDFS", 100 * first)
    says(TEXT, "Then the later # % go through it twice", 100 * (1 - first))
    samples, streams = set_in(SCRIPT, r"generator\.random\(([\d_]+)\) < BUDGET / 2\) for _ in range\((\d+)\)")
    says(TEXT, "of # streams of # samples had a false alarm", streams, samples)
    rates = [100 * float(rate) for rate in FOUND["simulated"]["falsely_certified"]]
    says(TEXT, "with a true rate of #, # and # % of changed answers", *rates)


def test_what_the_margins_serve_and_spare_was_measured() -> None:
    runs = FOUND["lines"]["no margin"]
    lines = sum(run["lines"] for run in runs.values())
    served, changed = (sum(run[name] for run in runs.values()) / lines for name in ("served_late", "changed"))
    template = "Without any margin # of the second half are served, but # % of the answers change, # % of those to BGL"
    says(TEXT, template, 2 * served, 100 * changed, 100 * runs["BGL"]["changed"] / runs["BGL"]["lines"])
    assert changed > BUDGET
    runs = FOUND["lines"]["guard"]
    unsure = {log: run["done"]["below the margin"] + run["done"].get("left", 0) for log, run in runs.items()}
    assert set(sorted(unsure, key=lambda log: unsure[log])[-2:]) == {"BGL", "Mac"}, "the model itself is unsure"
    new = {log: run["done"]["whole"] + run["done"]["learned"] for log, run in runs.items()}
    assert set(sorted(new, key=lambda log: new[log])[-2:]) == {"BGL", "Mac"}, "like no earlier one"


def test_whether_reuse_pays_was_measured() -> None:
    runs = [measured(name) for name in ("streams.json", "streams-float32.json")]
    batch, lines = runs[0]["batch"], runs[0]["lines"]
    assert [(run["batch"], run["lines"]) for run in runs] == [(batch, lines)] * 2
    streams = [run["streams"]["OpenSSH"] for run in runs]
    assert [stream["dtype"] for stream in streams] == ["bfloat16", "float32"]
    for stream in streams:
        assert stream["conditions"]["cores"] == 2, "as the page says"
        assert "amx_bf16" in stream["conditions"]["features"]
    late = [stream["parts"]["last third"] for stream in streams]
    (guarded, packed), (float32, packed32) = ([batch * one["ms"][way] for way in (ROWS, PACKED)] for one in late)
    says(TEXT, "batches of # lines of OpenSSH, MiniLM, two cores with a matrix unit, the last third of # lines",
         batch, lines)  # fmt: skip
    says(TEXT, "In bfloat16 a batch takes # milliseconds with the guard, and # with packed blocks", guarded, packed)
    says(TEXT, "Reuse had not ended there: # of these lines were served", late[0]["served"])
    says(TEXT, "In float32 reuse pays: a batch takes # milliseconds with the guard, and # with packed blocks",
         float32, packed32)  # fmt: skip
    assert float32 < packed32
