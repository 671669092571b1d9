"""Numbers in sentences on filling, of the tutorial and of how rows work: measured, set in code, or printed there."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

from docs_tools import agree, measured, numbers, page, samples_needed, says, set_in, table_rows
from page_code import blocks

from attmemo import memoize
from attmemo.db import history, pool, segment
from attmemo.embed.tokens import TokenIndex
from attmemo.reuse import filler, growing, pace

TEXT, FOUND = page("filling.md"), measured("filling.json")
HOW, TUTORIAL = page("how-rows-work.md"), page("tutorial.md")
SCRIPTS = Path(__file__).parents[1] / "scripts"
MIB, GIB = 1 << 20, 1 << 30
DEFAULTS = {name: one.default for name, one in inspect.signature(memoize).parameters.items()}
BUDGET, CONFIDENCE, CHANGED = DEFAULTS["budget"], DEFAULTS["confidence"], DEFAULTS["min_cosine"]
MEDIAN, RARE = 1.03, 1.10  # what filling may add to requests
SHOWN = [shown for _, shown in blocks(TUTORIAL) if shown]


WHOLE = set_in("bench_filling.py", r"^WHOLE = (\d+)")[0]  # lines of a log


class TestFilling:
    def test_the_pace_of_the_thread_is_what_the_page_says(self) -> None:
        says(TEXT, "Usually the thread takes # of one core", pace.SHARE)
        says(TEXT, "# of the processor time that it would take to compute all of its rows", pace.EARNED)
        first = pace.FIRST_SHARE, pace.ENOUGH
        says(TEXT, "three tenths behind that #. A database with # records has no such first work", *first)
        says(TEXT, "it is no more than # milliseconds beside one forward", pace.EACH * 1e3)
        assert (growing.PAYS, pace.FAST_SHARE, pace.GIVEN, pace.FIRST, pace.FREE) == (4, 0.5, 0.1, 0.3, 0.25)

    def test_rests_and_what_may_wait_are_what_the_page_says(self) -> None:
        piece = segment.PIECE / 1024, filler.PIECE * 1e3
        says(TEXT, "after each # KiB that takes its work past # milliseconds", *piece)
        says(TEXT, "a rest of # seconds at most", filler.LONGEST)
        says(TEXT, "it stores within # seconds after the request handed it over", filler.DUE)
        waiting = filler.MOST_WAITING / MIB, filler.SOON
        says(TEXT, "at most # MiB wait, and at most what the thread can store in # seconds", *waiting)
        batch = filler.DUE, filler.SOON
        says(TEXT, "as it can store in # seconds. While it must rest for more than # seconds, it takes", *batch)
        says(TEXT, "the records of the next # seconds there", growing.GATHERED)

    def test_segments_and_periods_are_what_the_page_says(self) -> None:
        large = pool.LARGEST / MIB, pool.LARGEST * pool.MOST_SEGMENTS / GIB, pool.MOST_SEGMENTS
        says(TEXT, "at most # MiB each, and more only above # GiB, where there are # of them", *large)
        says(TEXT, "whenever there are more than # of them, each two become one", history.MOST)
        assert (pool.SEGMENTS, pool.CARRIED, history.SECONDS) == (32, 0.5, 10)

    def test_what_single_records_would_keep_is_what_the_table_says(self) -> None:
        third = {name: float(cells[1]) for name, *cells in table_rows(TEXT, "| policy | 1/2 |")}
        single = max(share for name, share in third.items() if name.startswith("records"))
        says(TEXT, "Single records would keep # more", single - third["**segments, half carried**"])
        threshold = set_in("simulate_filling.py", r"^THRESHOLD = ([\d.]+)")
        says(TEXT, "share of the rows computed, at threshold #)", *threshold)

    def test_what_cold_starts_cost_was_measured(self) -> None:
        threshold = set_in("bench_filling.py", r"gate=False, threshold=([\d.]+)", places=2)
        says(TEXT, "over the first # lines of each log, in order of time, nothing stored at first, `threshold=#`",
             WHOLE, *threshold)  # fmt: skip
        says(TEXT, "On BGL it does not pay within # lines, and on Mac hardly", WHOLE)
        bgl, mac = (FOUND["cold"][f"minilm, {log}"]["guard"] for log in ("BGL", "Mac"))
        assert 0.9 < mac < 1.0 < bgl

    def test_a_certificate_takes_as_many_samples_as_the_page_says(self) -> None:
        clean, after_one = (samples_needed(changed, BUDGET, CONFIDENCE) for changed in (0, 1))
        says(TEXT, "until # clean samples are there, it computes and verifies", clean)
        assert 1.9 <= after_one / clean <= 2.1

    def test_what_filling_may_cost_is_kept_by_all_lines(self) -> None:
        says(TEXT, "The goal is # for the median and # for the 99th percentile: all lines meet it", MEDIAN, RARE)
        lines = {name: one["filling"] for name, one in FOUND["cost"].items()}
        assert all(one["median"] <= MEDIAN and one["99th percentile"] <= RARE for one in lines.values())
        [slow] = (name for name, one in lines.items() if one["mean"] > MEDIAN)
        assert slow == list(lines)[-2]
        says(TEXT, "In the last line but one the mean is above #", MEDIAN)
        each = lines[slow]["requests"] / set_in("bench_filling.py", r"^ROUNDS = (\d+)")[0]
        says(TEXT, "during the first few hundred of # requests. # requests tell little about a 99th percentile",
             each, lines["lines of five logs, 32 at once"]["requests"])  # fmt: skip

    def test_what_is_stored_is_found_within_a_second(self) -> None:
        assert "finds it within a second" in TEXT
        assert all(one["longest"] < 1 and not one["above one second"] for one in FOUND["soon"].values())

    def test_inputs_that_never_repeat_were_as_many_as_the_page_says(self) -> None:
        shape = set_in("bench_filling.py", r"generator\.choice\(words, \((\d+), (\d+)\)\)")
        bound = set_in("bench_filling.py", rf"^BOUND = (\d+) << {MIB.bit_length() - 1}$")
        says(TEXT, "# inputs that never repeat, # at once, # tokens each, a bound of # MiB",
             FOUND["never"]["seen"][-1]["inputs"], *shape, *bound)  # fmt: skip


class TestHowRowsWork:
    def test_defaults_are_what_the_page_says(self) -> None:
        says(HOW, "at most a given share of all answers changes, # % by default", 100 * BUDGET)
        tried = inspect.signature(TokenIndex.candidates).parameters["tried"].default
        says(HOW, "The # records with the nearest sketches are candidates", tried)


class TestTutorial:
    """What its sentences say is what its outputs show. These are run by `test_pages.py`."""

    first, second = (ast.literal_eval(SHOWN[place].splitlines()[1]) for place in (2, 4))
    monday, tuesday = (float(number.replace(",", "")) for number in re.findall(r"UTC +([\d,]+) +\d+%", TUTORIAL))

    def test_lines_are_those_of_the_outputs(self) -> None:
        says(TUTORIAL, "`OpenSSH_2k.log`, # lines of the public collection", self.monday + self.tuesday)
        says(TUTORIAL, "So # rows were computed, one for each token", float(numbers(SHOWN[1])[0]))
        says(TUTORIAL, "What happened to the # lines:", self.monday)
        says(TUTORIAL, "The other # lines were not looked up", self.monday - sum(self.first.values()))

    def test_the_table_of_lines_is_that_of_the_output(self) -> None:
        rows = {name.strip("`"): lines for name, lines, _ in table_rows(TUTORIAL, "| `done` | lines |")}
        assert rows.keys() == self.first.keys()
        agree(rows.values(), [self.first[name] for name in rows])

    def test_the_next_day_is_that_of_the_output(self) -> None:
        tokens, rows, *_ = map(float, numbers(SHOWN[4]))
        assert "Half of the rows" in TUTORIAL
        assert round(rows / tokens, 1) == 0.5
        assert "0 vectors changed" in SHOWN[4]
        left = self.tuesday - sum(self.second.values())
        says(TUTORIAL, "No vector of # changed: within the budget of # %. (# lines were not looked up.)",
             self.tuesday, 100 * BUDGET, left)  # fmt: skip

    def test_defaults_are_what_the_page_says(self) -> None:
        says(TUTORIAL, "a guard keeps the share of changed answers within # %", 100 * BUDGET)
        says(TUTORIAL, "if its cosine to the exact one is below # (`min_cosine=`)", CHANGED)

    def test_what_a_record_takes_is_what_the_folder_shows(self) -> None:
        [(records, mib)] = re.findall(r"records +(\d+), used [\s\S]*?, records ([\d.]+) MiB", TUTORIAL)
        says(TUTORIAL, "A record takes # MiB: memory is the price", float(mib) / int(records))

    def test_rows_of_the_service_are_those_of_the_output(self) -> None:
        says(TUTORIAL, "so all # rows were computed", float(re.findall(r"rows-computed: (\d+)", TUTORIAL)[0]))


def test_what_opening_takes_was_measured() -> None:
    turns = FOUND["opening"].values()
    (records,) = {turn["records"] for turn in turns}
    seconds = [turn["all"] for turn in turns]
    (tokens,) = set_in("bench_filling.py", r"integers\(0, 30000, \(1000, (\d+)\)\)")
    template = "Opening # records of # tokens takes # to # seconds until all can be found"
    says(TEXT, template, records, tokens, min(seconds), max(seconds))
