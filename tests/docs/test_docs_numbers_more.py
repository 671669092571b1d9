"""Numbers on the pages about attention, generation, studies, families and scale are those of the JSON beside them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from docs_tools import agree, measured, numbers, only, page, says, set_in, shows, table_rows

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
SHAPES = {"BART-large": "bart-large", "T5-base": "t5-base", "GPT-2-medium": "gpt2-medium"}
FORMS = ("bfloat16", "int8", "int8, groups of 8", "int4")
PROSE = ("stories", "captions", "wikitext")
COPIES = ("fig15", "table8", "fastseq_table1", "fastseq_table3", "fastseq_table4", "el_table2", "el_table3")
MEANS = "speedup at ragged lengths, geometric means"
HOUR = 0.04  # dollars that a core is assumed to cost
Scripts = Callable[[str], ModuleType]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Scripts:
    """Imports a script of the repository by its name."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module


def setting(record: str, shape: str, length: int, new: int = 100, beams: int = 4, lines: int = 4) -> dict[str, Any]:
    """A row of fastseq-bench.json or fastseq-gpu.json."""
    return only(measured(record)["rows"], shape=shape, length=length, new=new, beams=beams, lines=lines)


class TestPagesOfScripts:
    @pytest.mark.parametrize("name", ["bench-families", "bench-twelve-layers"])
    def test_the_pages_of_families_are_those_of_their_json(
        self, name: str, script: Scripts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        families = script("bench_families")
        monkeypatch.setattr(families, "draw_families", lambda found: b"")
        families.write(measured(f"{name}.json"), tmp_path / name)
        texts = page(f"{name}.md"), (tmp_path / f"{name}.md").read_text(encoding="utf-8")
        lines = ([line for line in text.splitlines() if line.startswith(("|", "Conditions"))] for text in texts)
        assert next(lines) == next(lines)
        assert numbers(texts[0]) == numbers(texts[1])  # the words of notes were edited, their numbers were not

    def test_the_page_of_fastseq_is_that_of_its_json(self, script: Scripts) -> None:
        assert page("fastseq-bench.md") == script("bench_fastseq").table(measured("fastseq-bench.json"))

    @pytest.mark.parametrize(("name", "tables"), [("decoder", "tables"), ("pruned", "table")])
    def test_the_tables_of_the_studies_are_those_of_their_json(self, name: str, tables: str, script: Scripts) -> None:
        marked, study = script("marked"), script(f"study_{name}")
        text = page(f"study-{name}.md").split(marked.BEGIN)[1].split(marked.END)[0]
        assert text.split() == getattr(study, tables)(measured(f"study-{name}.json")).split()

    @pytest.mark.parametrize("name", ["ngram", "ngram-gpu"])
    def test_the_tables_of_ngrams_are_those_of_their_json(self, name: str, script: Scripts) -> None:
        text = page("generate.md").split(f"[{name}.json]")[1].split(".json]")[0]
        assert script("bench_ngram").table(measured(f"{name}.json")["cases"]) in text

    def test_the_sentence_about_a_launch_is_that_of_its_json(self) -> None:
        step = measured("ngram-gpu.json")["cases"]["one step, 128 rows of 4096 tokens"]["milliseconds"]
        says(page("generate.md"), "A launch takes # ms from Python", step["kernel, in place"]["median"])


class TestPaper:
    """Every number of paper.md is in a file of docs/paper (tests/scripts/test_paper.py). These copy other records."""

    @pytest.mark.parametrize("name", COPIES)
    def test_what_a_figure_took_from_other_records_is_still_there(self, name: str, script: Scripts) -> None:
        run = script("paper.frame").Run(Path(), Path())
        found = json.loads(json.dumps(script("paper.registry").figure(name).measure(run)))
        kept = measured(f"paper/{name}.json")
        assert found == {key: kept[key] for key in found}

    def test_speeds_of_the_operator_are_those_of_its_record(self) -> None:
        operator = measured("attention-op.json")
        assert measured("paper/pmx.json")["speed"] == operator["summary"][MEANS][0]
        alone = {"kind": "decode", "batch": 1, "queries": "float32"}
        rows = [row for row in operator["rows"] if alone.items() <= row.items()]
        points = [{"keys": row["keys"], "ms": row["milliseconds"]["float32"]} for row in rows]
        assert measured("paper/kvcache.json")["operator"] == points

    def test_perplexities_are_those_of_the_study(self) -> None:
        for kind, words in measured("paper/table5.json")["perplexity"].items():
            serving = measured("study-decoder.json")["kinds"][kind]["serving"]
            assert words["exact"] == serving["perplexity_exact"]
            for point in words["points"]:
                source = only(serving["points"], lookup="sequence", threshold=point["threshold"])
                assert point == {key: source[key] for key in point}

    def test_steps_and_bytes_of_bart_are_those_of_its_record(self) -> None:
        kept = measured("paper/fastseq_table2.json")
        steps = setting("fastseq-bench.json", "bart-large", 512, 50, lines=16)
        assert kept["stock_seconds"] == steps["seconds"]["stock"]
        names = ("+ shared cache", "+ n-gram", "+ pipeline", "+ larger batch")
        for rung, name in zip(("shared", "+ngram", "+pipeline", "+batch"), names, strict=True):
            assert kept["speeds"][name] == steps["ratio"][rung]
        held = setting("fastseq-bench.json", "bart-large", 1024, 50)["formula_bytes"]
        assert list(kept["cache_bytes"].values()) == [held["stock"], held["shared"]]


class TestAttention:
    def test_the_tables_of_a_cpu_are_those_of_the_json(self, script: Scripts) -> None:
        bench, rows = script("bench_attention_op"), measured("attention-op.json")["rows"]
        for kind in ("float32", "bfloat16"):
            assert bench.table([row for row in rows if row["queries"] == kind]) in page("attention-op.md")
        assert bench.table_of_means(bench.mean_speedups(rows)) in page("attention-op.md")

    def test_the_table_of_a_gpu_is_that_of_the_json(self) -> None:
        shown = table_rows(page("attention-op.md"), "## On a GPU")
        for cells, row in zip(shown, measured("attention-op-gpu.json")["rows"]["bfloat16"], strict=True):
            assert cells[:3] == [str(row["batch"]), row["lengths"], row["kind"]]
            for cell, way in zip(cells[3:6], ("padded SDPA", "one by one", "transformers"), strict=True):
                assert shows(cell, row["milliseconds"][way]) if way in row["milliseconds"] else cell == ""
            for cell, form in zip(cells[6:], FORMS, strict=True):
                over = row["speedup over"][form]
                ways = [way for way in ("padded SDPA", "transformers") if way in over]
                assert [float(number) for number in numbers(cell)] == [over[way] for way in ways]

    def test_the_table_of_exactness_is_that_of_the_json(self) -> None:
        shown = table_rows(page("attention-op.md"), "## Exactness")
        for cells, row in zip(shown, measured("attention-op.json")["accuracy"], strict=True):
            assert [*cells[:2], cells[3]] == [str(row["bits"]), str(row["group"]), f"{row['nmse']:.1e}"]
            assert shows(cells[2], row["bytes of an element"])

    def test_the_sentences_are_those_of_the_json(self) -> None:
        text, summary = page("attention-op.md"), measured("attention-op.json")["summary"]
        gains = summary["float32 time / int8 time at 2048 keys and more"]
        says(text, "int8 is # to # times as fast as float32", min(gains), max(gains))
        says(text, "as fast as float32, with # of its bytes", summary["int8 bytes / float32 bytes"])
        cpu = measured("attention-op.json")
        rate = cpu["conditions"]["gigabytes_per_second a sum of 1 GiB reads"]
        decoded = [row for row in cpu["rows"] if (row["queries"], row["kind"]) == ("float32", "decode")]
        passes = [
            row["milliseconds"]["padded, packed"] / (row["bytes"]["float32"] / (1e6 * rate))
            for row in decoded if row["lengths"] == "128-4096"
        ]  # fmt: skip
        says(text, "would take 1/# to 1/# of packed SDPA's time, at the # GB/s", min(passes), max(passes), rate)
        rows = measured("attention-op-gpu.json")["rows"]
        ragged = [row for row in rows["bfloat16"] if (row["lengths"], row["kind"]) == ("128-4096", "decode")]
        over = {form: [row["speedup over"][form]["transformers"] for row in ragged] for form in FORMS}
        four = over.pop("int4")
        more = [value for values in over.values() for value in values]
        says(text, "the operator is # to # times as fast as transformers' own", min(more), max(more))
        says(text, "int8 caches, and # to # times with int4", min(four), max(four))
        alone = [row["speedup over"]["float32"]["padded SDPA"] for row in rows["float32"] if row["kind"] == "decode"]
        says(text, "float32: # to # times as fast as padded SDPA in decoding", min(alone), max(alone))


class TestFastseq:
    def test_the_first_table_is_that_of_the_json(self) -> None:
        shown = table_rows(page("fastseq.md"), "## At a glance")
        assert len(shown) == 3
        for name, long, peer, short in shown:
            ratios = [setting("fastseq-bench.json", SHAPES[name], length)["ratio"] for length in (1024, 128)]
            agree([long, peer, short], [ratios[0]["+pipeline"], ratios[0]["ctranslate2"], ratios[1]["+pipeline"]])

    def test_the_tables_of_settings_and_of_steps_are_those_of_the_json(self) -> None:
        shown = table_rows(page("fastseq.md"), "## When it pays")
        assert len(shown) == len(measured("fastseq-bench.json")["rows"]) - 1  # the steps have a table of their own
        for shape, length, new, beams, *cells, peer in shown:
            row = setting("fastseq-bench.json", shape, int(length.replace(",", "")), int(new), int(beams))
            seconds, ratio = row["seconds"], row["ratio"]
            stock, own = (seconds[way] + row["load_seconds"][way] for way in ("stock", "+pipeline"))
            agree(cells, [seconds["stock"], ratio["+pipeline"], stock / own, ratio["el"]])
            assert shows(peer, ratio["ctranslate2"]) if "ctranslate2" in ratio else peer == ""
        ratio = setting("fastseq-bench.json", "bart-large", 512, 50, lines=16)["ratio"]
        steps = [cells[1] for cells in table_rows(page("fastseq.md"), "| step | speed |")]
        agree(steps, [ratio[rung] for rung in ("shared", "+ngram", "+pipeline", "+batch")])

    def test_the_table_of_a_gpu_is_that_of_the_json(self) -> None:
        shown = table_rows(page("fastseq.md"), "**On a GPU**")
        assert len(shown) == 4
        for name, length, stock, *cells in shown:
            row = setting("fastseq-gpu.json", SHAPES[name], int(length.replace(",", "")), lines=32)
            assert shows(stock, row["seconds"]["stock"])
            for cell, rung in zip(cells, ("shared", "+ngram", "+pipeline", "el"), strict=True):
                assert shows(cell, row["ratio"][rung]) if rung in row["ratio"] else cell == "–"

    def test_the_sentences_about_a_gpu_are_those_of_the_json(self) -> None:
        text, stock = page("fastseq.md"), setting("fastseq-gpu.json", "bart-large", 128, lines=32)["seconds"]["stock"]
        says(text, "BART-large takes # ms there, of stock with short sources too", 1e3 * stock / 100)
        large = setting("fastseq-gpu.json", "bart-large", 1024, 140, lines=320)
        seconds, held = large["seconds"], large["formula_bytes"]
        says(text, "took # s with EL-attention and # s with shared states", seconds["el"], seconds["shared"])
        states = [held[mode] / 2**30 for mode in ("el", "shared", "stock")]
        says(text, "their states take # GiB and # GiB, stock's would take # GiB", *states)

    def test_the_sentences_about_memory_and_the_operator_are_those_of_the_json(self) -> None:
        text, row = page("fastseq.md"), setting("fastseq-bench.json", "bart-large", 1024, 50)
        held = row["formula_bytes"]
        source = (held["stock"] - row["cache_bytes"]["suffix"]) / row["el_cache_bytes"]["shared"]
        says(text, "shared states are # times smaller than stock's", held["stock"] / held["shared"])
        says(text, "states of EL-attention are # times smaller", source)
        means = measured("attention-op.json")["summary"][MEANS]
        plain, eight = (only(means, queries="float32", cache=cache) for cache in ("float32", "int8"))
        says(text, "is # times as fast as padded SDPA the way transformers does it,", plain["transformers"])
        says(text, "and # times in 8 bits", eight["transformers"])
        half = only(means, queries="bfloat16", cache="bfloat16")
        says(text, "it is # times as fast as the usual call", plain["padded, enable_gqa"])
        says(text, "and # times (bfloat16: #) as fast as", plain["padded, packed"], half["padded, packed"])


class TestStudies:
    def test_similarities_in_sentences_are_those_of_the_json(self) -> None:
        text, kinds = page("study-decoder.md"), measured("study-decoder.json")["kinds"]

        def means(column: str, *names: str) -> tuple[float, float]:
            """The least and the largest mean of a layer."""
            layers = [layer["scores"][column] for name in names for layer in kinds[name]["similarity"]["by_layer"]]
            return min(sum(one) / len(one) for one in layers), max(sum(one) / len(one) for one in layers)

        values = (*means("best", *PROSE), *means("random map", *PROSE))
        says(text, "# to # in the mean, not far above a random record's # to #. Serving", *values)
        says(text, "in mean similarity (# to #; all layers", *means("mean map", *PROSE))
        says(text, "The best record scores # to #, and the lookups", *means("best", "templates"))
        says(text, "although the records found have # to # in the mean", *means("found per sequence", "stories"))
        held = kinds["stories"]["held_out_similarity"]
        principal = held["held_out_similarity_principal"]
        says(text, "stored stories (# of them, which found #)", held["held_out"], principal)
        says(text, "(`--stored # --asked #`)", kinds["stories"]["stored"], kinds["stories"]["asked"])

    def test_perplexities_in_sentences_are_those_of_the_json(self) -> None:
        text, kinds = page("study-decoder.md"), measured("study-decoder.json")["kinds"]
        exact = {name: kind["serving"]["perplexity_exact"] for name, kind in kinds.items()}
        points = {name: kind["serving"]["points"] for name, kind in kinds.items()}
        forced = {name: only(points[name], lookup="sequence", threshold=0) for name in PROSE}
        served, mean = ({name: forced[name][key] for name in PROSE} for key in ("perplexity", "perplexity, mean map"))
        says(text, "of the model's own stories from # to # and that", exact["stories"], served["stories"])
        says(text, "and that of captions from # to #. At", exact["captions"], served["captions"])
        says(text, "effect on perplexity (stories: # to #)", exact["stories"], mean["stories"])
        says(text, "lower* its perplexity (# to #, with", exact["wikitext"], served["wikitext"])
        says(text, "with the mean map to #)", mean["wikitext"])
        good = only(points["templates"], lookup="sequence", threshold=0.9)
        says(text, "With # % of the calls served (threshold .9,", 100 * good["hit_rate"])
        says(text, "perplexity goes from # to #; the", exact["templates"], good["perplexity"])
        says(text, "the mean map gives # and", good["perplexity, mean map"])
        says(text, "and a random map #.", good["perplexity, random map"])
        each = only(points["templates"], lookup="layer", threshold=0.95)
        says(text, "At .95 with a lookup in every layer, # % are served", 100 * each["hit_rate"])
        says(text, "At thresholds of .6 and more nothing is served")
        high = [point["hit_rate"] for name in PROSE for point in points[name] if point["threshold"] >= 0.6]
        assert set(high) == {0}

    def test_continuations_in_sentences_are_those_of_the_json(self) -> None:
        text, kinds = page("study-decoder.md"), measured("study-decoder.json")["kinds"]
        good = only(kinds["templates"]["generation"]["points"], threshold=0.9)
        says(text, "is the exact model's for # % of the prompts", 100 * good["first_token_same"])
        says(text, "but only # % of the continuations are the same", 100 * good["identical"])
        assert all(kind["generation"]["own_maps"]["identical"] == 1 for kind in kinds.values())
        says(text, "All # continuations of every kind are identical", kinds["stories"]["generation"]["prompts"])
        assert only(kinds["wikitext"]["generation"]["points"], threshold=0)["identical"] == 0
        says(text, "none of the # is the exact model's", kinds["wikitext"]["generation"]["prompts"])

    def test_the_sentences_about_a_pruned_model_are_those_of_the_json(self) -> None:
        text, study = page("study-pruned.md"), measured("study-pruned.json")
        dense, pruned = study["models"]["dense"], study["models"]["pruned"]
        lost = [100 * (row["accuracy_exact"] - row["accuracy"]["32"]) for row in pruned["levels"]]
        first = pruned["levels"][0]
        says(text, "the pruned model loses # points** of accuracy", lost[0])
        says(text, "of accuracy (# to #) with", first["accuracy_exact"], first["accuracy"]["32"])
        says(text, "with # % of its calls served", 100 * first["hit_rate"])
        says(text, "It loses # points at the moderate level and # at the aggressive level", *lost[1:])
        found = [one["held_out_similarity"]["held_out_similarity_trained"] for one in (pruned, dense)]
        says(text, "has a mean similarity of #; for the dense model it is #.", *found)
        says(text, "memoization**: # to # after", dense["levels"][0]["accuracy_exact"], first["accuracy_exact"])
        levels = dense["levels"] + pruned["levels"]
        largest = max(row["largest_logit_difference_between_batch_sizes"] for row in levels)
        says(text, "Logits differ by at most #e-6 between batch sizes", 1e6 * largest)
        says(text, "**Database.** # training phrases", study["data"]["stored"])
        says(text, "Asked: all # dev sentences", study["data"]["asked"])
        says(text, "to # % of each Linear weight", 100 * study["pruning"]["sparsity"])
        trained = study["pruning"]
        sizes, minutes = (trained["steps"], trained["batch_size"]), trained["cpu_seconds"] / 60
        says(text, "answers: # steps of # phrases, # minutes of processor time", *sizes, minutes)
        says(text, "after # minutes of training", trained["seconds"] / 60)


class TestScale:
    def test_the_comparison_with_a_gpu_is_that_of_the_json(self) -> None:
        text, found, other = page("scale.md"), measured("gpu-embed.json"), measured("rows.json")["another machine"]
        tokens, line, stock, packed, rows = table_rows(text, "**Against a GPU.**")
        speeds = found["lines_per_second"]
        agree(tokens[1:], [speeds[f"tokens to embeddings, {count} at once"] for count in (1, 32, 1024)])
        agree(line[3:], [speeds["text to embeddings, 1024 at once"]])
        ms = {way: path["ms"] for way, path in other["lines-OpenSSH-bfloat16-bfloat16"]["paths"].items()}
        agree([stock[2], packed[2]], [round(1e3 / ms[way], -1) for way in ("stock, sorted", "packed")])
        agree(rows[2:3], [round(1e3 / ms["rows"], -2)])
        says(text, "a second through MiniLM, # tokens each", found["tokens_a_line"])
        cores = [speeds["tokens to embeddings, 1024 at once"] * 2 * ms[way] / 1e3 for way in ("packed", "rows")]
        says(text, "as much as # cores with packed blocks or # with rows", *cores)

    def test_bytes_of_records_are_those_of_the_json(self) -> None:
        text, rows = page("scale.md"), measured("rows.json")
        shown = {(model, storage): sizes for model, storage, *sizes in table_rows(text, "**Bytes.**")}
        stored = [rows[f"bert-8x{length}-bfloat16-bfloat16"]["record_bytes"] / 1e6 for length in (128, 512)]
        agree(shown["BERT-base", "bfloat16"][1:], stored)

    def test_the_table_of_cores_is_that_of_the_json(self) -> None:
        text, rows = page("scale.md"), measured("rows.json")
        paths = rows["lines-OpenSSH-bfloat16-bfloat16"]["paths"]
        table = table_rows(text, "**Cores.**")
        dollars = list[float]()
        for (_, *cells), way in zip(table, ("stock", "packed", "rows"), strict=True):
            ms = paths[way]["ms"]
            agree(cells, [ms, 1e3 / ms / 2, 2e3 * ms / 3600])
            dollars.insert(0, HOUR * 2e3 * ms / 3600)
        agree(numbers(table[2][0]), [100 * paths["rows"]["stats"]["share_computed"]])
        template = (
            "an assumed # dollars a core-hour the table of cores gives # dollars a million lines with rows, "
            "# with packed blocks, # with the stock model"
        )
        says(text, template, HOUR, *dollars)
        shape = [rows[f"bert-{shape}-bfloat16-bfloat16"]["paths"] for shape in ("1x128", "8x128", "32x128")]
        gains = [paths["stock"]["ms"] / paths["rows"]["ms"] for paths in shape]
        share = 100 * max(paths["rows"]["stats"]["share_computed"] for paths in shape)
        says(text, "with # % of the rows is # to # times as fast as the stock model", share, min(gains), max(gains))


def test_what_the_drift_gains_was_measured() -> None:
    found = measured("drift.json")
    rows = table_rows(page("rows.md"), "| | the first 300 lines of OpenSSH")
    assert len(rows) == 2
    for (_, *cells), share in zip(rows, ("0.0", "1.0"), strict=True):
        for cell, log in zip(cells, ("OpenSSH", "HDFS", "BGL", "Apache", "Mac"), strict=True):
            agree(numbers(cell), [found[log][share]["below .98"], found[log][share]["mean"]])
    lines = set_in("study_drift.py", r"LINES: Final = (\d+)")
    says(page("rows.md"), "the first # lines of each log one by one", *lines)
