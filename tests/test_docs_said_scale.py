"""Numbers in sentences of the pages about scale, use and the format: of JSON files, of the code, or counted here."""

from __future__ import annotations

import inspect
import re
from itertools import count
from pathlib import Path

from docs_tools import RowsCase, measured, numbers, page, says, set_in, shows, table_rows
from page_code import blocks

from attmemo import debts, memoize
from attmemo.db import manifest, slots
from attmemo.db.forms import ROW_STORAGE, TYPES
from attmemo.embed.calibration import COVERAGE
from attmemo.embed.siamese import DIMENSION
from attmemo.embed.tokens import GRAPH_FROM
from attmemo.kernels.align import Rule
from attmemo.mmap import CACHE_LINE, HUGE_PAGE
from attmemo.perfmodel import row_gate
from attmemo.perfmodel.tuner import sequences_judged, sequences_needed
from attmemo.reuse.row_layout import RowLayout

SCALE, ROWS, USE, FORMAT, OWN = (page(f"{name}.md") for name in ("scale", "rows", "use", "format", "own-family"))
MODELS = {"MiniLM-L6": (6, 384, 12), "BERT-base": (12, 768, 12)}
"""Layers, width and heads."""
UNITS = {"kB": 1e3, "MB": 1e6}


def record_bytes(model: str, storage: str, tokens: int) -> int:
    """Bytes of a record, without what rounds it up on a disk."""
    rows, last = ROW_STORAGE[storage]
    return RowLayout(*MODELS[model], (TYPES[rows], TYPES[last])).nbytes(tokens)


class TestScale:
    def test_each_cell_of_bytes_is_what_a_record_takes(self) -> None:
        rows = table_rows(SCALE, "**Bytes.**")
        assert [row[:2] for row in rows] == [[model, kind] for model in MODELS for kind in ("int8", "bfloat16")]
        for model, storage, *cells in rows:
            for cell, tokens in zip(cells, (30, 128, 512), strict=True):
                assert shows(cell, record_bytes(model, storage, tokens) / UNITS[cell.split()[1]]), cell

    def test_bytes_of_a_million_templates_are_counted(self) -> None:
        small, large = 30, 128
        least, most = record_bytes("MiniLM-L6", "int8", small) / 1e3, record_bytes("BERT-base", "int8", large) / 1e6
        template = "a million templates of # tokens take # GB for MiniLM in int8, and # TB for BERT-base at # tokens."
        says(SCALE, template, small, least, most, large)

    def test_records_of_logs_were_measured(self) -> None:
        cold = measured("filling.json")["cold"]
        records = [cold[f"minilm, {log}"]["no guard, records"] for log in ("OpenSSH", "HDFS", "BGL")]
        lines = set_in("bench_filling.py", r"^WHOLE = (\d+)")[0]
        says(SCALE, "# lines of OpenSSH need # records, of HDFS #, of BGL # (", lines, *records)
        stored = RowsCase("lines-OpenSSH", storage="int8")
        each, tokens = stored.found["record_bytes"], stored.stats("tokens") / stored.stats("sequences")
        template = "that is # MB for OpenSSH (# kB a line of # tokens)"
        says(SCALE, template, records[0] * each / 1e6, each / 1e3, tokens)

    def test_settings_of_the_runs_are_those_of_the_script(self) -> None:
        says(SCALE, "MiniLM, bfloat16, batches of #,", *set_in("bench_rows.py", r"ids\[cut:\]\[:ASKED\], (\d+), "))
        gpu = measured("gpu-embed.json")["conditions"]
        assert (gpu["cores"], gpu["dtype"]) == (3, "float16")
        assert "an H100 in float16 with three cores beside it" in SCALE

    def test_what_the_tests_of_actors_do_is_what_the_page_says(self) -> None:
        text = (Path(__file__).parent / "test_ray_data.py").read_text(encoding="utf-8")
        lines = [int(number.replace("_", "")) for number in re.findall(r"generate_log\(([\d_]+), seed", text)]
        says(SCALE, "in the middle of its third batch, over # invented log lines; a slow test over #.", *lines)
        (near,) = re.findall(r'found\["score"\], expected\["score"\], atol=1e-(\d)\)', text)
        says(SCALE, "the same classes, scores within 1e-#.", int(near))


class TestUse:
    def test_scores_of_templated_prompts_are_those_of_the_study(self) -> None:
        layers = measured("study-decoder.json")["kinds"]["templates"]["similarity"]["by_layer"]
        means = [sum(best) / len(best) for best in (layer["scores"]["best"] for layer in layers)]
        says(USE, "on templated prompts the best records score # to # (", min(means), max(means))

    def test_what_the_guard_served_was_measured(self) -> None:
        guard, none = (measured("guard.json")["lines"][way].values() for way in ("guard", "no guard"))
        lines, served, changed, rows, tokens = (
            sum(run[name] for run in guard) for name in ("lines", "served", "changed", "rows", "tokens")
        )
        template = (
            "On # lines of eight logs, with nothing stored at first, it served # of the lines, computed # of the "
            "rows and changed # % of the answers; without the guard # % would have changed."
        )
        without = 100 * sum(run["changed"] for run in none) / lines
        says(USE, template, lines, served / lines, rows / tokens, 100 * changed / lines, without)

    def test_defaults_are_those_of_the_code(self) -> None:
        budget = 100 * inspect.signature(memoize).parameters["budget"].default
        says(USE, "within a budget, # % by default", budget)
        says(USE, "by default at most # % of all answers may change", budget)
        needed = sequences_needed(0.01)
        texts = next(total for total in count(needed) if sequences_judged(total, 0.01))
        template = "For a budget of # % `tune` alone needs # texts that are not in the database, to judge # of them"
        says(USE, template, 1, texts, needed)
        says(page("python.md"), "a lower bound that held for # % of held-out lookups", 100 * COVERAGE)
        says(page("glossary.md"), "a lower bound for # % of held-out lookups", 100 * COVERAGE)
        says(page("privacy.md"), "the answers of about # inputs at most", debts.MOST)
        says(page("install.md"), "a graph for lookups among more than # records", GRAPH_FROM)

    def test_defaults_of_rows_are_those_of_the_code(self) -> None:
        says(ROWS, "One batch in #, at most, tries again.", row_gate.RARELY)
        says(ROWS, "are computed too, on both sides; # by default.", Rule().near)
        codes, whole = (record_bytes("MiniLM-L6", storage, 128) for storage in ("int8", "bfloat16"))
        says(ROWS, "Codes take # % of the bytes of bfloat16 (MiniLM-L6)", 100 * codes / whole)


class TestFormat:
    def test_bounds_are_those_of_the_code(self) -> None:
        says(FORMAT, "a newline; at most # MiB.", manifest.MAX_BYTES >> 20)
        says(FORMAT, "at most the larger of a page and # MiB.", HUGE_PAGE >> 20)
        says(FORMAT, "or to # bytes: the latter only for slots", CACHE_LINE)
        says(FORMAT, "below # KiB of a type of one byte", slots.TIGHT >> 10)
        says(FORMAT, "and zeros up to # bytes.", slots.HEADER_BYTES)
        says(FORMAT, "`report.dimension` is d (# if absent)", DIMENSION)


def test_rows_of_the_family_of_the_page_are_those_of_the_output() -> None:
    """The outputs are compared by `test_pages.py`."""
    shown = [shown for _, shown in blocks(OWN) if shown]
    served, tokens, rows = map(int, shown[1].split())
    assert served == 1, "of the two sequences, the first"
    (second,) = map(int, re.findall(r"^mask\[1, (\d+):\] = 0", OWN, re.MULTILINE))
    says(OWN, "Of the first sequence # of # rows were computed", rows - second, tokens - second)
    says(OWN, "The second one has # tokens.", second)
    says(OWN, "so all # were computed.", second)
    assert numbers(shown[0]) == [str(tokens)]
