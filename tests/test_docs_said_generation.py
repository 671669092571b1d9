"""Numbers in sentences of the pages about generation and serving: of JSON files, of the code, or computed here."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from conftest import shared
from docs_tools import measured, numbers, only, page, release, says, set_in, table_rows
from test_ops_serving import ROOT, example, rounded_perplexity
from transformers import LlamaConfig, LlamaForCausalLM

from attmemo.cache_name import CACHE_NAME
from attmemo.cli.app import app
from attmemo.fastseq import Pipeline
from attmemo.fastseq.pipeline import planner
from attmemo.fastseq.serving.cached_model import make_cache

FAST, GENERATE, SERVING = page("fastseq.md"), page("generate.md"), page("serving.md")
SMALL = {"num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
"""The sizes of stories260K that decide how many bytes a token takes."""


def setting(record: str, **wanted: Any) -> dict[str, Any]:
    """The one row of a JSON that has these values."""
    return only(measured(record)["rows"], **wanted)


class TestFastseq:
    def test_settings_of_the_runs_are_those_of_the_json(self) -> None:
        found = measured("fastseq-bench.json")
        assert (found["conditions"]["cores"], found["conditions"]["dtype"]) == (2, "float32")
        (batch,) = {row["batch"] for row in found["rows"]}
        first = setting("fastseq-bench.json", shape="bart-large", length=1024, new=100)
        says(FAST, "Measured with # beams, batch #, # new tokens, float32", first["beams"], batch, first["new"])
        says(FAST, "random weights, batch #, stock beside it", batch)
        steps = setting("fastseq-bench.json", lines=16)
        sizes = steps["lines"], steps["length"], steps["beams"], steps["new"]
        says(FAST, "(BART-large's shape, # texts of # tokens, # beams, # new tokens, one round)", *sizes)
        assert steps["shape"] == "bart-large"
        assert {len(times) for times in steps["rounds"].values()} == {1}
        says(FAST, "with the planner's batch instead of #", batch)
        small = setting("fastseq-bench.json", shape="bart-large", length=1024, new=50, beams=4)
        template = "For BART-large with # beams, N = # and t = #, shared states"
        says(FAST, template, small["beams"], small["length"], small["new"])

    def test_settings_of_the_gpu_are_those_of_the_json(self) -> None:
        found = measured("fastseq-gpu.json")
        assert found["conditions"]["dtype"] == "float16"
        (beams,) = {row["beams"] for row in found["rows"]}
        first = [row for row in found["rows"] if row["new"] == 100]
        assert {(row["batch"], row["lines"], len(row["rounds"]["stock"])) for row in first} == {(32, 32, 1)}
        torch_release = release(found["conditions"]["torch"])
        says(FAST, "float16, torch #, # texts in one batch, # beams, # new tokens;", torch_release, 32, beams, 100)
        large = setting("fastseq-gpu.json", lines=320)
        sizes = large["lines"], large["length"], large["new"]
        says(FAST, "for large batches: # texts of # tokens, # new tokens, took", *sizes)
        differs = [not same for row in first for way, same in row["same_text"].items() if way != "stock"]
        assert all(differs), "in every row, as the page says"

    def test_settings_of_the_operator_are_those_of_the_json(self) -> None:
        (lengths,) = {row["lengths"] for row in measured("attention-op.json")["rows"] if "-" in row["lengths"]}
        says(FAST, "at lengths of # to # on two cores", *map(int, lengths.split("-")))
        bits = sorted({row["bits"] for row in measured("attention-op.json")["accuracy"]}, reverse=True)
        says(FAST, "in float or quantised to # or # bits", *bits)

    def test_scores_agree_as_near_as_the_tests_ask(self) -> None:
        text = (Path(__file__).parent / "test_fastseq_wrap.py").read_text(encoding="utf-8")
        whole, words = (re.findall(rf"assert_close\({what}.*, atol=1e-(\d)\)", text) for what in ("expected", "one"))
        says(FAST, "agree to 1e-#, the scores of every word at every step to 1e-#", *map(int, whole + words))


class TestGenerate:
    def test_defaults_are_those_of_the_code(self) -> None:
        command: Any = typer.main.get_command(app)
        (window,) = (one.default for one in command.commands["generate"].params if one.name == "window")
        assert inspect.signature(Pipeline).parameters["window"].default == window
        says(GENERATE, "Lines are sorted by length within # lines (`--window`)", window)
        says(GENERATE, "No batch is larger than #.", planner.MOST)
        assert planner.SHARE == {"cpu": 0.5, "cuda": 0.9}, "half of the free memory, and nine tenths"

    def test_settings_of_the_runs_are_those_of_the_json(self) -> None:
        cores, gpu = (measured(name)["conditions"] for name in ("ngram.json", "ngram-gpu.json"))
        versions = [release(cores[name]) for name in ("torch", "transformers")]
        says(GENERATE, "Two cores, torch #, transformers #, float32, medians of five batches", *versions)
        assert (cores["cores"], cores["repeats"]) == (2, 5)
        says(GENERATE, "torch #; the kernel is Triton's there", release(gpu["torch"]))
        (loops,) = set_in("bench_ngram.py", r"^LOOP, .* = \"loop \(≤ ([\d.]+)\)")
        says(GENERATE, "which are in transformers # and before", loops)


def near(cell: str, value: float) -> None:
    """Refuse a number that is not the value; its last digit may be another: sums in another order round so."""
    (printed,) = numbers(cell)
    assert abs(float(printed) - value) <= 10.0 ** -len(printed.partition(".")[2]), f"printed {cell}, found {value}"


@pytest.fixture(scope="class")
def stories() -> Iterator[tuple[Any, list[list[int]]]]:
    """The model and the texts of the example, in one thread."""
    model, tokenizer = example.load(shared("data/weights_stories260K"))
    lines = (ROOT / "examples" / "stories.txt").read_text(encoding="utf-8").splitlines()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield model, [tokenizer(line).input_ids for line in lines]
    torch.set_num_threads(threads)


class TestServing:
    rows = table_rows(SERVING, "| cache | bytes a token |")

    def test_bytes_of_a_token_are_those_of_the_cache(self) -> None:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=8, intermediate_size=8, **SMALL))
        caches = {name: make_cache(model, pages=1, **kind) for name, kind in example.CACHES.items()}
        shown = {name: bytes_a_token for name, bytes_a_token, *_ in self.rows[1:]}
        assert shown == {name: str(cache.stats().bytes_per_token) for name, cache in caches.items()}

    def test_what_a_quantised_cache_costs_is_what_the_example_measures(self, stories: Any) -> None:
        model, texts = stories
        assert {name: getattr(model.config, name) for name in SMALL} == SMALL
        exact = example.exact_perplexity(model, texts)
        near(self.rows[0][2], exact)
        found = example.measure_quality(model, texts, example.CACHES)
        for (name, _, perplexity, more), row in zip(self.rows[1:], found, strict=True):
            assert name == row.cache
            near(perplexity, row.perplexity)
            near(more, 100 * (row.perplexity / exact - 1))
        values = rounded_perplexity(model, texts, 4, 8, keys=False)
        assert values / exact < 1.001, "next to nothing, as the page says"

    def test_what_the_page_says_of_the_model_is_so(self, stories: Any) -> None:
        model, texts = stories
        tokens = sum(map(len, texts)) - len(texts)  # the first of a text is not predicted
        says(SERVING, "`examples/stories.txt` (# tokens, written", tokens)
        says(SERVING, "whose heads have # elements", model.config.head_dim)
        with torch.inference_mode():
            caches = [model(torch.tensor([text]), use_cache=True)[CACHE_NAME] for text in texts]
        reach = max(layer.keys.abs().max().item() for cache in caches for layer in cache.layers)
        says(SERVING, "this model's keys, which reach #.", reach)
