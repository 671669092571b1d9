"""Numbers in sentences on the operator, the two studies and the papers: of their JSON, or set in code and scripts.

`test_docs_numbers_more.py` has the others. The tables are made again there and in `test_paper.py`.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import fmean
from typing import Any

from docs_tools import having, measured, only, page, release, says, set_in

from attmemo.embed.calibration import COVERAGE
from attmemo.profiler.controls import MEAN_OF

OPERATOR, DECODER, PRUNED, PAPER = map(page, ("attention-op.md", "study-decoder.md", "study-pruned.md", "paper.md"))
BENCH = "bench_attention_op.py"
CPU, GPU = measured("attention-op.json"), measured("attention-op-gpu.json")
KINDS, STUDY = measured("study-decoder.json")["kinds"], measured("study-pruned.json")
PROSE = ("stories", "captions", "wikitext")
RAGGED = "128-4096"


def figure(name: str) -> Any:
    """What a figure of the papers measured."""
    return measured(f"paper/{name}.json")


class TestOperator:
    def test_what_was_measured_is_what_the_script_sets(self) -> None:
        settings = CPU["conditions"]
        template = "(# query heads on # key heads of # elements), pages of # in random order, two threads"
        says(OPERATOR, template, *settings["heads"], settings["page_size"])
        assert settings["threads"] == 2
        shortest, behind = set_in(BENCH, r"torch\.randint\((\d+), (\d+), ")
        assert f"{shortest:.0f}-{behind - 1:.0f}" == RAGGED
        batches = [row["batch"] for row in having(CPU["rows"], lengths=RAGGED, kind="decode")]
        template = "(uniform in # to #): geometric means over batches of # to #."
        says(OPERATOR, template, shortest, behind - 1, min(batches), max(batches))
        says(OPERATOR, "int4 has groups of #", *set_in(BENCH, r'"int4": \{"bits": 4, "group": (\d+)\}'))
        says(OPERATOR, "hold one prompt of # tokens", *set_in(BENCH, r"\[1\] \* \(batch - 1\) \+ \[(\d+)\]"))
        tokens = set_in(BENCH, r"torch\.randn\((\d+), HEADS, WIDTH, generator")
        says(OPERATOR, "a float32 cache, # random tokens (", *tokens)

    def test_what_a_float32_cache_gains_was_measured(self) -> None:
        says(OPERATOR, "A float32 cache is not # times as fast as the packed way", 3)
        means = CPU["summary"]["speedup at ragged lengths, geometric means"]
        mean = only(means, queries="float32", cache="float32")
        assert mean["padded, packed"] < 3
        ragged = having(CPU["rows"], lengths=RAGGED, kind="decode", queries="float32")
        says(OPERATOR, "Padding is about half of what SDPA reads")
        assert round(fmean(1 - row["keys"] / (row["longest"] * row["batch"]) for row in ragged), 1) == 0.5
        assert all(2 * row["bytes"]["bfloat16"] == row["bytes"]["float32"] for row in ragged)

    def test_where_it_is_slower_was_measured(self) -> None:
        alone = having(CPU["rows"], batch=1, kind="decode")
        for kind in ("float32", "bfloat16"):
            long = having(alone, queries=kind, lengths="all 8192")
            assert all(row["speedup over"]["padded SDPA"][kind] < 1 for row in long)
        short = having(alone, lengths="all 128")
        own = [taken for row in short for name, taken in row["milliseconds"].items() if name in row["bytes"]]
        others = [row["milliseconds"]["padded SDPA"] for row in short]
        template = "One sequence of # tokens takes # to # ms, where padded SDPA takes # to # ms"
        says(OPERATOR, template, 128, min(own), max(own), min(others), max(others))

    def test_prompts_on_quantised_caches_are_as_the_page_says(self) -> None:
        found = {}
        for row in having(CPU["rows"], kind="prefill", queries="bfloat16"):
            gains = row["speedup over"]["padded SDPA"]
            found[row["keys"]] = [gain for name, gain in gains.items() if name.startswith("int")]
        short, long = found[512], found[2048]
        assert max(short) < 0.9
        assert all(0.9 < gain < 1.15 for gain in long)

    def test_differences_to_the_definition_are_the_limits_of_the_test(self) -> None:
        code = Path(__file__).with_name("test_ops_conformance.py").read_text(encoding="utf-8")
        limits = dict(re.findall(r"torch\.(\w+): \((\de-\d), ", code.split("LIMITS = ")[1].splitlines()[0]))
        assert limits.keys() == {"float32", "float16", "bfloat16"}
        said = ", ".join(f"{limit} ({name})" for name, limit in limits.items())
        assert f"outputs are within {said}" in " ".join(OPERATOR.split())

    def test_what_a_gpu_takes_was_measured(self) -> None:
        torch, device = GPU["conditions"]["torch"], GPU["conditions"]["device"]
        says(OPERATOR, "The Triton kernels on an H100, torch #", release(torch))
        assert "H100" in device
        sizes = ((1, 128), (64, 2048))
        decoded = having(GPU["rows"]["bfloat16"], kind="decode")
        found = [only(decoded, batch=count, lengths=f"all {keys}") for count, keys in sizes]
        padded = [row["milliseconds"]["padded SDPA"] for row in found]
        took = [row["milliseconds"]["padded SDPA"] / row["speedup over"]["bfloat16"]["padded SDPA"] for row in found]
        says(OPERATOR, "A call with one sequence of # tokens takes # ms: checks,", sizes[0][1], took[0])
        says(OPERATOR, "before the GPU has work. Padded SDPA takes # ms", padded[0])
        _, heads, width = GPU["conditions"]["heads"]
        read = 2 * 2 * 64 * 2048 * heads * width  # bytes of keys and values in bfloat16
        template = "With # sequences of # tokens the operator reads about # GB a second"
        says(OPERATOR, template, *sizes[1], round(read / took[1] / 1e6, -2))  # the record has one digit of how fast
        mixed = having(GPU["rows"]["bfloat16"], kind="mixed")
        quantised = {row["speedup over"][form]["padded SDPA"] for row in mixed for form in ("int8", "int4")}
        assert quantised == {0.1}, "ten times as long"
        prompts = having(GPU["rows"]["float32"], kind="prefill")
        assert {row["speedup over"]["float32"]["padded SDPA"] for row in prompts} == {0.1}, "a tenth"


class TestDecoder:
    def test_what_was_asked_is_what_the_script_sets(self) -> None:
        length = measured("study-decoder.json")["length"]
        says(DECODER, "exactly # tokens (`<s>` and # more)", length, length - 1)
        says(DECODER, "stories260K, a Llama of # layers", len(KINDS["stories"]["similarity"]["by_layer"]))
        says(DECODER, "in the similarity table; of # records where it is served", MEAN_OF)
        (new,) = {kind["generation"]["new_tokens"] for kind in KINDS.values()}
        says(DECODER, "of the continuations are the same for all # tokens", new)
        says(DECODER, "promises a lower bound for # % of lookups", 100 * COVERAGE)

    def test_bits_per_character_were_measured(self) -> None:
        bits = {name: KINDS[name]["bits_per_character"] for name in PROSE}
        template = "captions surprise the model least (# in the table below), WikiText-2 most (#)"
        says(DECODER, template, bits["captions"], bits["wikitext"])

    def test_scores_of_prose_were_measured(self) -> None:
        best = {name: [one["scores"]["best"] for one in KINDS[name]["similarity"]["by_layer"]] for name in PROSE}
        first = best["wikitext"][0]
        above = sum(score > 0.6 for score in first) / len(first)
        template = "Here no layer of prose has a best score above #, except for # % of WikiText's in layer #."
        says(DECODER, template, 0.6, 100 * above, 0)
        others = [layer for layers in best.values() for layer in layers if layer is not first]
        assert max(map(max, others)) <= 0.6
        means = [fmean(layer) for layer in best["wikitext"]]
        template = "WikiText-2 has # records, and the best of them score # to # in the mean"
        says(DECODER, template, KINDS["wikitext"]["stored"], min(means), max(means))

    def test_the_mean_map_beats_the_best_record_where_the_page_says_so(self) -> None:
        worse = [
            (name, one["layer"]) for name in PROSE for one in KINDS[name]["similarity"]["by_layer"]
            if fmean(one["scores"]["mean map"]) <= fmean(one["scores"]["best"])
        ]  # fmt: skip
        assert worse == [("wikitext", 0)]

    def test_thresholds_are_those_that_were_asked(self) -> None:
        served = [point for name in PROSE for point in KINDS[name]["serving"]["points"] if point["hit_rate"] > 0]
        tried = {point["threshold"] for name in PROSE for point in KINDS[name]["serving"]["points"]}
        first = max(point["threshold"] for point in served)
        says(DECODER, "At thresholds of # and more nothing is served", min(one for one in tried if one > first))
        stories = [point["threshold"] for point in KINDS["stories"]["serving"]["points"] if point["hit_rate"] > 0]
        says(DECODER, "Stories were served at #, although", max(stories))
        says(DECODER, "At the same threshold of # the first token", 0.9)  # that of test_docs_numbers_more.py
        templates = KINDS["templates"]["serving"]
        each = only(templates["points"], lookup="layer", threshold=0.95)
        assert each["perplexity"] <= templates["perplexity_exact"], "at no cost"


class TestPruned:
    def test_what_was_asked_is_what_the_script_sets(self) -> None:
        sizes = [float(size) for size in STUDY["models"]["pruned"]["levels"][0]["accuracy"]]
        says(PRUNED, "in batches of #, # and #, the records", *sizes)
        says(PRUNED, "accuracy are the same for #, # and #, as in the paper's", *sizes)
        for model in STUDY["models"].values():
            assert all(len(set(level["accuracy"].values())) == 1 for level in model["levels"])

    def test_the_share_of_weights_was_measured(self) -> None:
        share = 100 * STUDY["models"]["pruned"]["zeros_in_linear_weights"]
        says(PRUNED, "With # % of Q's and K's weights gone", share)

    def test_what_the_paper_loses_is_what_its_figure_has(self) -> None:
        pattern = r'^BASE, LEVELS = ([\d.]+), \{"\w+": ([\d.]+), "\w+": ([\d.]+), "\w+": ([\d.]+)\}'
        base, *levels = set_in("paper/table8.py", pattern)
        template = "The models of the paper (arXiv 2301.09262, Table 8) lose #, # and # points at the three levels"
        says(PRUNED, template, *(base - level for level in levels))
        says(PRUNED, "The paper's models have # %", base)


class TestPaper:
    """What the scripts write into sentences of `paper.md` themselves. All else they take from a JSON."""

    def test_claims_about_gpus_are_as_many_as_the_page_says(self) -> None:
        claims = re.findall(r"^\| \[[^\]]+\]\(paper/\w+\.json\) \|.*$", PAPER, re.MULTILINE)
        says(PAPER, "three claims about GPUs were measured on an H100")
        assert sum("H100" in claim for claim in claims) == 3

    def test_sizes_of_maps_are_counted(self) -> None:
        layer = figure("table4")
        says(PAPER, "four tensors of # GB are asked for", 4 * 12 * layer["batch"] * layer["length"] ** 2 / 1e9)
        (length,) = {row["length"] for row in having(figure("fig10")["rows"], family="gpt2")}
        template = "GPT-2 in batches of # is left out: its eager path needs several tensors of # GB"
        says(PAPER, template, 64, 4 * 12 * 64 * length**2 / 1e9)

    def test_searches_are_as_fast_as_the_page_says(self) -> None:
        says(PAPER, "stays below a millisecond and does not grow with the database")
        assert figure("fig07")["ms"]["embedding"] < 1
        sizes = figure("table3")["rows"]
        assert sizes[-1]["lookup_us"] <= sizes[0]["lookup_us"] < 1000
        rates = [100 * row["rate"] for row in sizes]
        says(PAPER, "the rate moves by a point")
        assert round(max(rates) - min(rates)) == 1

    def test_similarity_grows_from_the_length_on_that_the_page_names(self) -> None:
        found = {row["length"]: row for row in figure("fig12")["rows"]}
        padded = [fmean(row["padded"]) for row in found.values()]
        valid = [fmean(row["valid"]) for row in found.values()]
        says(PAPER, "From # tokens on the similarity of padded maps grows with the share", list(found)[1])
        assert padded[1] < padded[2] < padded[3]
        assert valid[1] >= valid[2] >= valid[3]
        says(PAPER, "At # tokens most sentences are cut", 16)
        assert found[16]["share_of_valid_tokens"] > 0.9

    def test_what_an_h100_gains_was_measured(self) -> None:
        gpu = measured("fastseq-gpu.json")
        says(PAPER, "one H100, float16, torch #", release(gpu["conditions"]["torch"]))
        short = [row["ratio"] for row in having(gpu["rows"], length=128)]
        assert all(row[way] < 1 for row in short for way in ("shared", "el")), "nothing gains there"
        (memory,) = re.findall(r"H100 (\d+)GB", gpu["conditions"]["processor"])
        says(PAPER, "and has # GB, which stock's states nearly fill with batch # (not run)", float(memory), 320)
        largest = only(figure("el_table3")["rows"], batch=320)
        assert 0.9 < largest["stock"] / (float(memory) * 1e9) < 1

    def test_the_vocabulary_and_the_first_part_of_a_step_are_as_the_page_says(self) -> None:
        sizes = {case["vocabulary"] for name, case in measured("ngram.json")["cases"].items() if "BART" in name}
        says(PAPER, "vocabulary of #; 2 threads", *sizes)
        steps = {row["context"]: row["cached"] for row in figure("kvcache")["rows"]}
        says(PAPER, "Up to # tokens the first part is most of the # ms", 1024, steps[128])
        assert steps[128] / steps[1024] > 0.5
