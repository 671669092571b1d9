"""The pipeline: what a plain loop gives, in order, each line once, whatever fails."""

from __future__ import annotations

import ast
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generators import LINES, POSITIONS, plain_loop, tokenizer
from pipeline_tools import BEAMS, TEXTS, Watched, write
from shared_data import shared
from transformers import GenerationConfig

import attmemo.fastseq
from attmemo.errors import AttmemoError, DataError, UnsupportedModelError
from attmemo.fastseq import Pipeline
from attmemo.fastseq.pipeline.map_ahead import map_ahead

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


class TestAsThePlainLoop:
    @pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
    @pytest.mark.parametrize(
        "options",
        [
            {"max_new_tokens": 8}, BEAMS, {**BEAMS, "num_return_sequences": 2},
            {"num_beams": 2, "max_new_tokens": 6, "early_stopping": True, "length_penalty": 2.0},
        ],
        ids=lambda options: ",".join(options),
    )  # fmt: skip
    @pytest.mark.parametrize("buckets", [True, False])
    def test_no_text_differs(
        self, family: str, options: dict[str, Any], buckets: bool, models: dict[str, Any]
    ) -> None:
        limit = POSITIONS - options["max_new_tokens"] if family == "gpt2" else POSITIONS
        wanted = plain_loop(models[family], TEXTS, 4, limit=limit, **options)
        assert len({str(text) for text in wanted}) > len(TEXTS) // 2, "outputs that do not vary show nothing"
        pipeline = Pipeline(models[family], tokenizer(), batch=4, window=16, buckets=buckets, **options)
        assert list(pipeline(TEXTS)) == wanted

    @pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
    @pytest.mark.parametrize("options", [{"max_new_tokens": 8}, BEAMS, {**BEAMS, "num_return_sequences": 2}], ids=str)
    def test_a_wrapped_model_is_used(self, family: str, options: dict[str, Any], models: dict[str, Any]) -> None:
        fast = attmemo.fastseq.wrap(models[family])
        pipeline = Pipeline(fast, tokenizer(), batch=4, window=16, **options)
        limit = POSITIONS - options["max_new_tokens"] if family == "gpt2" else POSITIONS
        assert list(pipeline(TEXTS)) == plain_loop(models[family], TEXTS, 4, limit=limit, **options)
        stats = fast.stats()
        assert stats["calls"]["stock"] == 0, stats["stock_reasons"]
        assert stats["calls"]["fast"] > len(TEXTS) // 4
        if "num_beams" in options:
            assert stats["counts"]["prefix" if family == "gpt2" else "shared"] > 0

    def test_a_planned_batch(self, models: dict[str, Any]) -> None:
        watched = Watched(models["bart"])
        pipeline = Pipeline(watched, tokenizer(), **BEAMS)
        assert list(pipeline(TEXTS)) == plain_loop(models["bart"], TEXTS, **BEAMS)
        assert watched.rows == [len(TEXTS) - 2], "memory is there for all at once"
        pipeline.planner.free = pipeline.planner.bytes(3, 3, 12, 8)  # type: ignore[union-attr]
        watched.rows = []
        assert list(pipeline(TEXTS)) == plain_loop(models["bart"], TEXTS, **BEAMS)
        assert min(watched.rows[:-1]) < max(watched.rows), "shorter texts, larger batches"

    def test_a_batch_is_planned_for_the_path_that_is_taken(self, models: dict[str, Any]) -> None:
        fast = attmemo.fastseq.wrap(models["bart"])
        assert Pipeline(fast, tokenizer(), **BEAMS).planner.mode == "shared"  # type: ignore[union-attr]
        for generation in ({"use_cache": False}, {"generation_config": GenerationConfig(use_cache=False)}):
            pipeline = Pipeline(fast, tokenizer(), **BEAMS, **generation)
            assert pipeline.planner.mode == "stock"  # type: ignore[union-attr]

    @pytest.mark.parametrize("window", [1, 5, 1000])
    def test_windows(self, window: int, models: dict[str, Any]) -> None:
        pipeline = Pipeline(models["bart"], tokenizer(), batch=3, window=window, **BEAMS)
        assert list(pipeline(TEXTS)) == plain_loop(models["bart"], TEXTS, **BEAMS)

    def test_many_threads_on_one_tokenizer(self, models: dict[str, Any]) -> None:
        """A fast tokenizer refuses to be changed while it is used."""
        pipeline = Pipeline(
            models["bart"], tokenizer(), batch=2, window=3, encoders=4, decoders=3, max_source=7, max_new_tokens=3
        )
        assert list(pipeline(TEXTS * 6)) == plain_loop(models["bart"], TEXTS, limit=7, max_new_tokens=3) * 6

    def test_padding_to_the_greatest_length(self, models: dict[str, Any]) -> None:
        for family in ("bart", "gpt2"):
            options = {"batch": 4, "padding": "max_length", "max_source": 40, **BEAMS}
            texts = list(Pipeline(models[family], tokenizer(), **options)(TEXTS))
            assert texts == plain_loop(models[family], TEXTS, limit=40, **BEAMS)

    def test_a_prefix(self, models: dict[str, Any]) -> None:
        pipeline = Pipeline(models["t5"], tokenizer(), batch=4, prefix="warn : ", **BEAMS)
        assert list(pipeline(TEXTS)) == plain_loop(models["t5"], TEXTS, prefix="warn : ", **BEAMS)
        assert list(pipeline(TEXTS)) != plain_loop(models["t5"], TEXTS, **BEAMS)

    def test_a_decoder_with_its_prompt(self, models: dict[str, Any]) -> None:
        new = list(Pipeline(models["gpt2"], tokenizer(), batch=4, max_new_tokens=5)(TEXTS[:6]))
        both = list(Pipeline(models["gpt2"], tokenizer(), batch=4, max_new_tokens=5, new_only=False)(TEXTS[:6]))
        assert all(whole.endswith(part) and len(whole) > len(part) for whole, part in zip(both, new, strict=True))

    def test_a_tokenizer_without_padding(self, models: dict[str, Any]) -> None:
        bare = tokenizer()
        bare.pad_token, bare.eos_token = None, "[SEP]"
        wanted = plain_loop(models["gpt2"], TEXTS[:8], **BEAMS)
        assert list(Pipeline(models["gpt2"], bare, batch=4, **BEAMS)(TEXTS[:8])) == wanted
        assert bare.pad_token is None, "the user's tokenizer is as it was"

    def test_special_tokens_are_kept_if_asked(self, models: dict[str, Any]) -> None:
        texts = list(Pipeline(models["bart"], tokenizer(), keep_special=True, max_new_tokens=3)(TEXTS[:3]))
        assert all(text.startswith("[CLS]") for text in texts)

    def test_scores_are_those_of_beam_search(self, models: dict[str, Any]) -> None:
        options = {**BEAMS, "num_return_sequences": 2}
        pipeline = Pipeline(models["bart"], tokenizer(), batch=1, output_scores=True, **options)
        results = list(pipeline.results(TEXTS[:3]))
        encoded = tokenizer()(TEXTS[1], return_tensors="pt")
        output = models["bart"].generate(
            input_ids=encoded["input_ids"], return_dict_in_generate=True, output_scores=True, **options
        )
        assert results[1].scores == output.sequences_scores.tolist()
        with pytest.raises(AttmemoError, match="beam search"):
            Pipeline(models["bart"], tokenizer(), output_scores=True)

    def test_articles(self, models: dict[str, Any]) -> None:
        articles = shared("data/cnndm/cnndm_128.txt").read_text().split("\n")[:12]
        found = list(Pipeline(models["bart"], tokenizer(), batch=5, **BEAMS).results(articles))
        assert [result.texts[0] for result in found] == plain_loop(models["bart"], articles, **BEAMS)
        assert all(result.truncated for result in found)


class TestLongAndBlank:
    def test_blank_lines_stay_blank(self, models: dict[str, Any]) -> None:
        found = list(Pipeline(models["bart"], tokenizer(), batch=4, num_return_sequences=2, **BEAMS).results(TEXTS))
        assert [result.row for result in found] == list(range(len(TEXTS)))
        assert [result.row for result in found if result.blank] == [9, 21]
        assert all(result.texts == ["", ""] for result in found if result.blank)

    def test_only_blank_lines_and_no_lines(self, models: dict[str, Any]) -> None:
        watched = Watched(models["bart"])
        assert list(Pipeline(watched, tokenizer(), max_new_tokens=2)(["", " ", "\t"])) == ["", "", ""]
        assert list(Pipeline(watched, tokenizer(), max_new_tokens=2)([])) == []
        assert watched.rows == []

    def test_a_text_that_the_tokenizer_makes_nothing_of(self, models: dict[str, Any]) -> None:
        bare = tokenizer()
        bare.backend_tokenizer.post_processor = None  # as GPT-2's: no special tokens
        pipeline = Pipeline(models["gpt2"], bare, max_new_tokens=2)
        (first, none, last) = pipeline.results(["warn 1", "\u200b", "warn 2"])
        assert none.blank
        assert not first.blank
        assert not last.blank

    def test_long_texts_are_cut_and_counted(self, models: dict[str, Any]) -> None:
        long = "warn " * 200
        found = list(Pipeline(models["bart"], tokenizer(), **BEAMS).results(["warn", long, "warn"]))
        assert [result.truncated for result in found] == [False, True, False]
        assert found[1].texts == plain_loop(models["bart"], [long], **BEAMS)

    def test_a_long_text_names_its_line(self, models: dict[str, Any]) -> None:
        lines = [*["warn"] * 9, "warn " * 200]
        with pytest.raises(DataError, match=r"line 10 has 802 tokens, the model takes 64"):
            list(Pipeline(models["bart"], tokenizer(), window=4, truncate=False, **BEAMS)(lines))

    def test_no_limit_where_positions_are_relative(self, models: dict[str, Any]) -> None:
        pipeline = Pipeline(models["t5"], tokenizer(), truncate=False, max_new_tokens=2)
        assert pipeline.limit is None
        assert not next(pipeline.results(["warn " * 200])).truncated

    def test_a_decoder_leaves_room_for_what_it_says(self, models: dict[str, Any]) -> None:
        pipeline = Pipeline(models["gpt2"], tokenizer(), max_new_tokens=30, min_new_tokens=30)
        assert pipeline.limit == POSITIONS - 30
        assert len(list(pipeline(["warn " * 200]))) == 1
        with pytest.raises(AttmemoError, match="no room"):
            Pipeline(models["gpt2"], tokenizer(), max_new_tokens=POSITIONS)

    @pytest.mark.parametrize(
        ("options", "limit"),
        [
            ({}, POSITIONS - 20), ({"max_new_tokens": 5}, POSITIONS - 5), ({"max_length": 30}, 29),
            ({"max_length": 500}, POSITIONS - 1), ({"max_new_tokens": 5, "max_length": 9}, POSITIONS - 5),
            ({"max_new_tokens": 5, "max_source": 11}, 11),
        ],
    )  # fmt: skip
    def test_the_room_of_a_prompt(self, options: dict[str, Any], limit: int, models: dict[str, Any]) -> None:
        assert Pipeline(models["gpt2"], tokenizer(), **options).limit == limit

    def test_something_else_than_a_text(self, models: dict[str, Any]) -> None:
        with pytest.raises(DataError, match=r"text 3 is a int; expected a str"):
            list(Pipeline(models["bart"], tokenizer(), max_new_tokens=2)(["a", "b", 3]))  # type: ignore[list-item]


class TestErrors:
    def test_of_the_source(self, models: dict[str, Any]) -> None:
        def source() -> Iterator[str]:
            yield from TEXTS[:8]
            raise ConnectionError("the source is gone")

        seen: list[str] = []
        with pytest.raises(ConnectionError, match="is gone"):
            seen.extend(Pipeline(models["bart"], tokenizer(), batch=4, window=4, max_new_tokens=2)(source()))
        assert len(seen) == 8, "what came before is not lost"

    def test_of_the_tokenizer(self, models: dict[str, Any]) -> None:
        own = tokenizer()
        with pytest.raises(TypeError, match="no tokens today"):
            list(Pipeline(models["bart"], Broken(own, "encode"), batch=4, max_new_tokens=2)(TEXTS))

    def test_of_the_words(self, models: dict[str, Any]) -> None:
        with pytest.raises(TypeError, match="no words today"):
            list(Pipeline(models["bart"], Broken(tokenizer(), "decode"), batch=4, max_new_tokens=2)(TEXTS * 5))

    def test_of_the_model(self, models: dict[str, Any]) -> None:
        def fail(call: int, ids: torch.Tensor) -> None:
            if call == 2:
                raise ZeroDivisionError("in the model")

        seen: list[str] = []
        pipeline = Pipeline(Watched(models["bart"], fail), tokenizer(), batch=4, window=4, max_new_tokens=2)
        with pytest.raises(ZeroDivisionError, match="in the model"):
            seen.extend(pipeline(LINES))
        assert len(seen) == 8

    def test_a_consumer_that_goes_away(self, models: dict[str, Any]) -> None:
        taken = 0

        def source() -> Iterator[str]:
            nonlocal taken
            while True:
                taken += 1
                yield LINES[taken % len(LINES)]

        texts = Pipeline(models["bart"], tokenizer(), batch=4, window=8, max_new_tokens=2)(source())
        assert [next(texts) for _ in range(3)]
        time.sleep(0.3)
        assert taken <= 8 * 7, "an endless source was read without end"
        texts.close()  # type: ignore[attr-defined]

    @pytest.mark.parametrize("options", [{"batch": 0}, {"batch": "all"}, {"window": 0}, {"decoders": 0}], ids=str)
    def test_arguments_that_make_no_sense(self, options: dict[str, Any], models: dict[str, Any]) -> None:
        with pytest.raises(AttmemoError, match=r"expected|at least"):
            Pipeline(models["bart"], tokenizer(), **options)

    def test_a_length_beyond_the_positions(self, models: dict[str, Any]) -> None:
        with pytest.raises(AttmemoError, match=r"65 tokens are asked for, the model takes 64"):
            Pipeline(models["bart"], tokenizer(), max_source=65)

    def test_a_model_that_does_not_generate(self) -> None:
        with pytest.raises(UnsupportedModelError, match="Linear has no generate"):
            Pipeline(torch.nn.Linear(1, 1), tokenizer())

    def test_a_model_without_a_configuration(self, models: dict[str, Any]) -> None:
        bare = SimpleNamespace(generate=models["bart"].generate)
        with pytest.raises(AttmemoError, match=r"config=model\.config"):
            Pipeline(bare, tokenizer())
        pipeline = Pipeline(bare, tokenizer(), config=models["bart"].config, batch=4, **BEAMS)
        assert list(pipeline(TEXTS)) == plain_loop(models["bart"], TEXTS, **BEAMS)


class Broken:
    """A tokenizer of which one half fails."""

    def __init__(self, own: Any, half: str) -> None:
        self.__dict__.update(own=own, half=half)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.own, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if self.half == "encode":
            raise TypeError("no tokens today")
        return self.own(*arguments, **options)

    def batch_decode(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("no words today")


class TestOutOfMemory:
    @pytest.mark.parametrize(
        "error",
        [
            torch.OutOfMemoryError("CUDA out of memory."), MemoryError(),
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
        ],
    )  # fmt: skip
    def test_no_line_is_lost_or_doubled(self, error: Exception, models: dict[str, Any], tmp_path: Path) -> None:
        def fail(call: int, ids: torch.Tensor) -> None:
            if len(ids) > 3:
                raise error

        watched = Watched(models["bart"], fail)
        pipeline = Pipeline(watched, tokenizer(), batch=16, **BEAMS)
        assert list(pipeline(TEXTS)) == plain_loop(models["bart"], TEXTS, **BEAMS)
        assert sum(watched.rows) == len(TEXTS) - 2
        watched.rows = []
        summary = pipeline.run(write(tmp_path, TEXTS), tmp_path / "out.txt")
        assert (tmp_path / "out.txt").read_text().split("\n")[:-1] == plain_loop(models["bart"], TEXTS, **BEAMS)
        assert summary.halvings == 3, "16, 8, 4"
        assert summary.largest_batch <= 3
        assert summary.generated == len(TEXTS) - 2

    def test_the_real_allocator(self, models: dict[str, Any]) -> None:
        def fail(call: int, ids: torch.Tensor) -> None:
            if len(ids) > 5:
                torch.empty(1 << 55)

        pipeline = Pipeline(Watched(models["bart"], fail), tokenizer(), batch=32, **BEAMS)
        assert list(pipeline(TEXTS)) == plain_loop(models["bart"], TEXTS, **BEAMS)

    def test_memory_for_not_one_text(self, models: dict[str, Any]) -> None:
        def fail(call: int, ids: torch.Tensor) -> None:
            raise MemoryError

        with pytest.raises(AttmemoError, match=r"line \d+: memory ran out for one text"):
            list(Pipeline(Watched(models["bart"], fail), tokenizer(), batch=16, **BEAMS)(TEXTS))

    def test_no_other_error_of_the_model_is_retried(self, models: dict[str, Any]) -> None:
        calls = []

        def fail(call: int, ids: torch.Tensor) -> None:
            calls.append(call)
            raise RuntimeError("shapes cannot be multiplied")

        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            list(Pipeline(Watched(models["bart"], fail), tokenizer(), batch=16, **BEAMS)(TEXTS))
        assert len(calls) == 1


def imported(code: str) -> Iterator[str]:
    """Full names of what a module imports."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            if node.module == "attmemo":
                yield from (f"attmemo.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_fast_generation_knows_nothing_of_memoization() -> None:
    folder = Path(attmemo.fastseq.__file__).parent
    files = sorted(folder.rglob("*.py"))
    assert {file.parent for file in files} >= {folder / "generate", folder / "pipeline", folder / "serving" / "ops"}
    leaves = {
        "attmemo.models.cache_name", "attmemo.errors", "attmemo.system.extras", "attmemo.loading",
        "attmemo.system.memory",
    }  # fmt: skip
    kernels = {
        "encoder_stack", "linear16", "linear32", "linear8", "norms", "omp_team", "packed_weights", "pages",
        "row_attention",
    }  # fmt: skip
    known = {*leaves, "attmemo.kernels", *(f"attmemo.kernels.{name}" for name in kernels)}
    for file in files:
        for name in imported(file.read_text()):
            outside = name.split(".")[0] == "attmemo" and not name.startswith("attmemo.fastseq")
            assert not outside or name in known, f"{file.relative_to(folder)} imports {name}"


class TestMapAhead:
    def test_order(self) -> None:
        def slow(number: int) -> int:
            time.sleep(0.002 * (number % 3))
            return -number

        assert list(map_ahead(slow, range(30), workers=4, ahead=3)) == [-number for number in range(30)]

    def test_not_too_much_is_read_ahead(self) -> None:
        read: list[int] = []

        def source() -> Iterator[int]:
            for number in range(100):
                read.append(number)
                yield number

        results = map_ahead(str, source(), workers=2, ahead=2)
        assert next(results) == "0"
        time.sleep(0.2)
        assert len(read) <= 6
        results.close()  # type: ignore[attr-defined]

    def test_an_error_comes_in_its_place(self) -> None:
        results = map_ahead(lambda number: 6 // number, [3, 2, 0, 1])
        assert [next(results), next(results)] == [2, 3]
        with pytest.raises(ZeroDivisionError):
            next(results)

    def test_a_source_that_hangs_never_keeps_the_caller_waiting(self) -> None:
        gate, ended = threading.Event(), threading.Event()

        def source() -> Iterator[int]:
            yield 1
            gate.wait(300)
            ended.set()

        results = map_ahead(str, source())
        assert next(results) == "1"
        results.close()  # type: ignore[attr-defined]
        assert not ended.is_set(), "the caller waited for the source"
        gate.set()
