"""The pipeline: what a plain loop gives, in order, each line once, whatever fails or is interrupted."""

from __future__ import annotations

import ast
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from generators import LINES, POSITIONS, make_model, plain_loop, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from shared_data import shared
from transformers import GenerationConfig, LogitsProcessorList

import attmemo.fastseq
from attmemo.errors import AttmemoError, DataError, UnsupportedModelError
from attmemo.fastseq import NoRepeatNGram, Pipeline
from attmemo.fastseq.pipeline import planner
from attmemo.fastseq.pipeline.journal import Journal, JournalError
from attmemo.fastseq.pipeline.map_ahead import map_ahead
from attmemo.fastseq.pipeline.model_properties import tokenizer_name
from attmemo.fastseq.pipeline.result import Result, best_of

BEAMS = {"num_beams": 3, "max_new_tokens": 8, "no_repeat_ngram_size": 3}
TEXTS = [*LINES[:9], "", *LINES[9:20], "  \t", *LINES[20:33]]


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {family: make_model(family) for family in ("bart", "t5", "gpt2")}


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 10
    while any(thread.name.startswith(("ahead", "behind")) for thread in threading.enumerate()):
        assert time.monotonic() < deadline, threading.enumerate()
        time.sleep(0.01)


class Watched:
    """A model that notes the rows it is asked for, and may fail."""

    def __init__(self, model: Any, before: Callable[[int, torch.Tensor], None] = lambda call, ids: None) -> None:
        self.model = model
        self.before = before
        self.rows: list[int] = []

    def generate(self, input_ids: torch.Tensor, **options: Any) -> Any:
        self.before(len(self.rows), input_ids)
        self.rows.append(len(input_ids))
        return self.model.generate(input_ids=input_ids, **options)


def write(folder: Path, lines: list[str]) -> Path:
    path = folder / "in.txt"
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


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


@pytest.fixture(scope="module")
def whole(models: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The output of a run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    Pipeline(models["bart"], tokenizer(), batch=4, window=10, **BEAMS).run(write(folder, TEXTS), folder / "out")
    found = (folder / "out").read_bytes()
    assert found.decode().split("\n")[:-1] == plain_loop(models["bart"], TEXTS, **BEAMS)
    assert sorted(path.name for path in folder.iterdir()) == ["in.txt", "out"]
    return found


class TestResume:
    @pytest.mark.parametrize("stop", [0, 1, 2, 5, 8])
    @pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
    def test_a_run_that_ended_in_any_batch(
        self, stop: int, kind: type[BaseException], whole: bytes, models: dict[str, Any], tmp_path: Path
    ) -> None:
        def fail(call: int, ids: torch.Tensor) -> None:
            if call == stop:
                raise kind("stop")

        source, output = write(tmp_path, TEXTS), tmp_path / "out"
        first = Watched(models["bart"], fail)
        with pytest.raises(kind):
            Pipeline(first, tokenizer(), batch=4, window=10, **BEAMS).run(source, output)
        assert not output.exists()
        assert (tmp_path / "out.part").exists() == (stop > 0), "nothing done, nothing left"
        second = Watched(models["bart"])
        summary = Pipeline(second, tokenizer(), batch=4, window=10, **BEAMS).run(source, output)
        assert output.read_bytes() == whole
        assert sum(first.rows) + sum(second.rows) == len(TEXTS) - 2, "a line was generated twice, or not at all"
        assert summary.generated == sum(second.rows)
        assert summary.lines == len(TEXTS)
        assert not (tmp_path / "out.part").exists()

    @settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(share=st.floats(0, 1), batch=st.integers(1, 9), garbage=st.booleans())
    def test_a_journal_that_was_cut_anywhere(
        self, share: float, batch: int, garbage: bool, whole: bytes, models: dict[str, Any], tmp_path: Path
    ) -> None:
        source, output, part = write(tmp_path, TEXTS), tmp_path / "out", tmp_path / "out.part"
        output.unlink(missing_ok=True)
        part.unlink(missing_ok=True)

        def fail(call: int, ids: torch.Tensor) -> None:
            if call == 6:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Pipeline(Watched(models["bart"], fail), tokenizer(), batch=4, window=10, **BEAMS).run(source, output)
        raw = part.read_bytes()
        part.write_bytes(raw[: int(share * len(raw))] + (b'{"rows": [1' if garbage else b""))
        if garbage and raw[: int(share * len(raw))].endswith(b"\n") is False:
            part.write_bytes(raw[: int(share * len(raw))])
        Pipeline(models["bart"], tokenizer(), batch=batch, window=10, **BEAMS).run(source, output)
        assert output.read_bytes() == whole

    def test_an_interrupted_run_keeps_all_that_was_generated(self, models: dict[str, Any], tmp_path: Path) -> None:
        """Ctrl-C in a batch: those before it are kept, although their words were still being made."""

        def fail(call: int, ids: torch.Tensor) -> None:
            if call == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Pipeline(Watched(models["bart"], fail), tokenizer(), batch=4, window=99, **BEAMS).run(
                write(tmp_path, LINES), tmp_path / "out"
            )
        with Journal(
            tmp_path / "out", json.loads((tmp_path / "out.part").read_text().split("\n")[0])["made_from"]
        ) as j:
            assert len(j) == 12

    def test_sampling_goes_on_as_it_would_have(self, models: dict[str, Any], tmp_path: Path) -> None:
        options = {"do_sample": True, "max_new_tokens": 6, "seed": 7, "batch": 4, "window": 10}
        source = write(tmp_path, TEXTS)
        Pipeline(models["bart"], tokenizer(), **options).run(source, tmp_path / "whole")

        def fail(call: int, ids: torch.Tensor) -> None:
            if call == 4:
                raise KeyboardInterrupt

        before = torch.get_rng_state()
        with pytest.raises(KeyboardInterrupt):
            Pipeline(Watched(models["bart"], fail), tokenizer(), **options).run(source, tmp_path / "out")
        Pipeline(models["bart"], tokenizer(), **options).run(source, tmp_path / "out")
        assert (tmp_path / "out").read_text() == (tmp_path / "whole").read_text()
        assert torch.equal(torch.get_rng_state(), before), "the caller's random numbers are the caller's"
        Pipeline(models["bart"], tokenizer(), **{**options, "seed": 8}).run(source, tmp_path / "other")
        assert (tmp_path / "other").read_text() != (tmp_path / "whole").read_text()

    def test_less_memory_samples_the_same(
        self, models: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        options: dict[str, Any] = {"do_sample": True, "max_new_tokens": 6, "seed": 7, "window": 10}
        source = write(tmp_path, TEXTS)

        def with_memory_for(texts: int, model: Any) -> Pipeline:
            free = Pipeline(models["bart"], tokenizer(), **options).planner.bytes(texts, 1, 30, 6)  # type: ignore[union-attr]
            monkeypatch.setattr(planner, "free_memory", lambda device: 2 * free)
            return Pipeline(model, tokenizer(), **options)

        with_memory_for(4, models["bart"]).run(source, tmp_path / "whole")

        def fail(call: int, ids: torch.Tensor) -> None:
            if call == 3:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            with_memory_for(4, Watched(models["bart"], fail)).run(source, tmp_path / "out")
        with pytest.raises(JournalError, match="mode"):
            Pipeline(models["bart"], tokenizer(), mode="shared", **options).run(source, tmp_path / "out")
        with_memory_for(1, models["bart"]).run(source, tmp_path / "out")
        assert (tmp_path / "out").read_text() == (tmp_path / "whole").read_text()

    @pytest.mark.parametrize(("family", "length"), [("gpt2", {"max_length": 40}), ("bart", {"max_length": 9})])
    def test_padding_that_counts_as_length_is_the_same_after_the_resume(
        self, family: str, length: dict[str, Any], models: dict[str, Any], tmp_path: Path
    ) -> None:
        source, output = write(tmp_path, TEXTS), tmp_path / "out"

        def fail(call: int, ids: torch.Tensor) -> None:
            if call == 3:
                raise KeyboardInterrupt

        options: dict[str, Any] = {"batch": 4, "window": 10, **length}
        with pytest.raises(KeyboardInterrupt):
            Pipeline(Watched(models[family], fail), tokenizer(), **options).run(source, output)
        for changed in ({"batch": 7}, {"window": 99}, {"buckets": False}):
            pipeline = Pipeline(models[family], tokenizer(), **{**options, **changed})
            if family == "bart":  # whose decoder has a length of its own
                assert not pipeline._identity().keys() & changed.keys()
                continue
            with pytest.raises(JournalError, match=next(iter(changed))):
                pipeline.run(source, output)
        Pipeline(models[family], tokenizer(), **options).run(source, output)

    def interrupted(self, models: dict[str, Any], folder: Path) -> tuple[Path, Path]:
        def fail(call: int, ids: torch.Tensor) -> None:
            if call == 3:
                raise KeyboardInterrupt

        source, output = write(folder, TEXTS), folder / "out"
        with pytest.raises(KeyboardInterrupt):
            Pipeline(Watched(models["bart"], fail), tokenizer(), batch=4, window=10, **BEAMS).run(source, output)
        return source, output

    @pytest.mark.parametrize("changed", ["input", "beams", "model", "tokenizer", "prefix", "shorter"])
    def test_another_run_is_not_resumed(self, changed: str, models: dict[str, Any], tmp_path: Path) -> None:
        source, output = self.interrupted(models, tmp_path)
        left = (tmp_path / "out.part").read_bytes()
        options: dict[str, Any] = {"batch": 4, "window": 10, **BEAMS}
        model, limit, words = models["bart"], None, tokenizer()
        if changed == "tokenizer":
            words.backend_tokenizer.normalizer = None
        elif changed == "input":
            source.write_text(source.read_text().replace("1", "2", 1))
        elif changed == "beams":
            options["num_beams"] = 2
        elif changed == "prefix":
            options["prefix"] = "warn"
        elif changed == "shorter":
            limit = 20
        else:
            model = make_model("bart")
            with torch.no_grad():
                model.model.decoder.layers[1].fc1.weight[0, 0] += 1e-3
        said = {"beams": "generate num_beams 3 then, 2 now", "shorter": "lines 35 then, 20 now"}.get(changed, changed)
        with pytest.raises(JournalError, match=said) as caught:
            Pipeline(model, words, **options).run(source, output, limit=limit)
        assert "--restart" in str(caught.value)
        assert (tmp_path / "out.part").read_bytes() == left
        Pipeline(model, words, **options).run(source, output, limit=limit, resume=False)
        assert len(output.read_text().split("\n")) == (limit or len(TEXTS)) + 1

    def test_a_tokenizer_that_was_used_is_the_same(self, models: dict[str, Any]) -> None:
        words = tokenizer()
        before = tokenizer_name(words)
        words(["a", "b c"], truncation=True, max_length=3, padding="max_length")
        assert tokenizer_name(words) == before == tokenizer_name(tokenizer())
        words.pad_token = words.sep_token
        assert tokenizer_name(words) != before

    def test_another_batch_size_may_go_on(self, whole: bytes, models: dict[str, Any], tmp_path: Path) -> None:
        source, output = self.interrupted(models, tmp_path)
        Pipeline(models["bart"], tokenizer(), batch=7, window=99, buckets=False, **BEAMS).run(source, output)
        assert output.read_bytes() == whole

    def test_the_old_output_stays_until_the_new_is_whole(self, models: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "out").write_text("old")
        source, output = self.interrupted(models, tmp_path)
        assert output.read_text() == "old"
        Pipeline(models["bart"], tokenizer(), batch=4, window=10, **BEAMS).run(source, output)
        assert output.read_text() != "old"

    def test_a_link_is_replaced_by_a_file(self, models: dict[str, Any], tmp_path: Path) -> None:
        real = tmp_path / "elsewhere"
        real.mkdir()
        (real / "out").write_text("old")
        (real / "out").chmod(0o640)
        (tmp_path / "out").symlink_to(real / "out")
        Pipeline(models["bart"], tokenizer(), max_new_tokens=2).run(write(tmp_path, ["a"]), tmp_path / "out")
        assert (tmp_path / "out").is_symlink()
        assert (real / "out").read_text() != "old"
        assert (real / "out").stat().st_mode & 0o777 == 0o640

    def test_objects_among_the_options(self, models: dict[str, Any], tmp_path: Path) -> None:
        """The repr of an object differs in every process: nothing could be gone on with."""
        source, output = write(tmp_path, TEXTS), tmp_path / "out"

        def run(stop: int) -> None:
            def fail(call: int, ids: torch.Tensor) -> None:
                if call == stop:
                    raise KeyboardInterrupt

            processors = LogitsProcessorList([NoRepeatNGram(2)])
            config = GenerationConfig(max_new_tokens=4, num_beams=2, eos_token_id=3, pad_token_id=0)
            watched = Watched(models["bart"], fail)
            Pipeline(watched, tokenizer(), batch=4, logits_processor=processors, generation_config=config).run(
                source, output
            )

        with pytest.raises(KeyboardInterrupt):
            run(2)
        run(-1)
        assert len(output.read_text().split("\n")) == len(TEXTS) + 1

    def test_two_runs_cannot_write_one_output(self, models: dict[str, Any], tmp_path: Path) -> None:
        with (tmp_path / "out.part").open("w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            with pytest.raises(JournalError, match="another run is writing"):
                Pipeline(models["bart"], tokenizer(), **BEAMS).run(write(tmp_path, TEXTS), tmp_path / "out")

    @pytest.mark.parametrize("damage", ["not JSON\n", '{"rows": [1]}\n', '{"rows": [1, 2], "lines": ["a"]}\n', "[]\n"])
    def test_a_damaged_journal_is_refused(self, damage: str, models: dict[str, Any], tmp_path: Path) -> None:
        source, output = self.interrupted(models, tmp_path)
        with (tmp_path / "out.part").open("a") as part:
            part.write(damage)
        with pytest.raises(JournalError, match=r"out.part, line \d: not a record"):
            Pipeline(models["bart"], tokenizer(), batch=4, window=10, **BEAMS).run(source, output)

    def test_no_foreign_file_is_written_over(self, models: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "out.part").write_text("half of my thesis\n")
        with pytest.raises(JournalError, match="not a record"):
            Pipeline(models["bart"], tokenizer(), **BEAMS).run(write(tmp_path, TEXTS), tmp_path / "out")
        assert (tmp_path / "out.part").read_text() == "half of my thesis\n"


class TestJournal:
    def test_a_full_disk_leaves_whole_records(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.pwrite

        def full(fd: int, body: Any, offset: int) -> int:
            if b"second" in bytes(body):
                real(fd, bytes(body)[:9], offset)
                raise OSError(28, "No space left on device")
            return real(fd, body, offset)

        with Journal(tmp_path / "out", {}) as journal:
            journal.append([1], ["first"])
            monkeypatch.setattr(os, "pwrite", full)
            with pytest.raises(OSError, match="No space"):
                journal.append([0], ["second"])
            monkeypatch.undo()
        with Journal(tmp_path / "out", {}) as journal:
            assert list(journal.done) == [1]  # type: ignore[call-overload]
            journal.append([0], ["zeroth"])
            journal.finish(2)
        assert (tmp_path / "out").read_text() == "zeroth\nfirst\n"

    def test_a_run_that_did_nothing_is_not_in_the_way(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "out", {"beams": 1}):
            part = (tmp_path / "out.part").read_bytes()
        assert list(tmp_path.iterdir()) == []
        (tmp_path / "out.part").write_bytes(part)  # as a kill would have left it
        with Journal(tmp_path / "out", {"beams": 2}) as journal:
            journal.append([0], ["a"])
        with pytest.raises(JournalError, match="beams 2 then, 1 now"):
            Journal(tmp_path / "out", {"beams": 1})
        assert len(Journal(tmp_path / "out", {"beams": 2})) == 1

    def test_a_missing_row_is_refused(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "out", {}) as journal:
            journal.append([0, 2], ["a", "c"])
            with pytest.raises(JournalError, match=r"2 of 3 rows are there, missing \[1\]"):
                journal.finish(3)
        assert not (tmp_path / "out").exists()

    def test_a_line_break_in_a_line(self, tmp_path: Path) -> None:
        with Journal(tmp_path / "out", {}) as journal, pytest.raises(ValueError, match="line break"):
            journal.append([0], ["a\nb"])

    @pytest.mark.parametrize("text", ["\u2028 \x85 \x0b \x1f", "\ud83d", "日本語 🙂", '"\\ \t'])
    def test_characters_that_some_take_for_line_breaks(self, text: str, tmp_path: Path) -> None:
        with Journal(tmp_path / "out", {}) as journal:
            journal.append([0], [text])
        with Journal(tmp_path / "out", {}) as journal:
            journal.append([1], ["next"])
            journal.finish(2)
        found = (tmp_path / "out").read_bytes().decode().split("\n")
        assert found == [text.encode("utf-8", "replace").decode(), "next", ""]

    @pytest.mark.parametrize("kind", ["directory", "pipe"])
    def test_an_output_that_is_no_file(self, kind: str, tmp_path: Path) -> None:
        path = tmp_path / "out"
        path.mkdir() if kind == "directory" else os.mkfifo(path)
        with pytest.raises(AttmemoError, match="not a regular file"):
            Journal(path, {})

    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(AttmemoError, match="there is no directory"):
            Journal(tmp_path / "none" / "out", {})

    def test_batches_of_many_windows(self, tmp_path: Path) -> None:
        """More records than are kept in memory, their rows far apart."""
        rows = 3000
        with Journal(tmp_path / "out", {}) as journal:
            for start in range(1500):
                journal.append([start, rows - 1 - start], [f"{start}", f"{rows - 1 - start}"])
            journal.finish(rows)
        assert (tmp_path / "out").read_text() == "".join(f"{row}\n" for row in range(rows))


class TestFiles:
    @pytest.mark.parametrize(
        ("raw", "lines"),
        [
            (b"warn 1\nwarn 2", 2), (b"warn 1\r\nwarn 2\r\n", 2), (b"\xef\xbb\xbfwarn 1\nwarn 2\n", 2),
            ("warn 1\u2028warn 2\x85\x0b\n".encode(), 1), (b"\n\n", 2), (b"\n", 1),
        ],
    )  # fmt: skip
    def test_lines(self, raw: bytes, lines: int, models: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "in").write_bytes(raw)
        pipeline = Pipeline(models["bart"], tokenizer(), max_new_tokens=3)
        assert pipeline.run(tmp_path / "in", tmp_path / "out").lines == lines
        found = (tmp_path / "out").read_bytes()
        assert found.count(b"\n") == lines
        if lines == 2 and b"warn" in raw:
            assert found.decode().split("\n")[:-1] == plain_loop(
                models["bart"], ["warn 1", "warn 2"], max_new_tokens=3
            )

    @pytest.mark.parametrize(
        ("raw", "said"), [(None, "no such file"), (b"", "is empty"), (b"ok\nna\xefve\n", r"line 2: not UTF-8")]
    )
    def test_files_that_cannot_be_read(
        self, raw: bytes | None, said: str, models: dict[str, Any], tmp_path: Path
    ) -> None:
        if raw is not None:
            (tmp_path / "in").write_bytes(raw)
        with pytest.raises(DataError, match=said):
            Pipeline(models["bart"], tokenizer(), max_new_tokens=3).run(tmp_path / "in", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    def test_a_directory(self, models: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(DataError, match="is a directory"):
            Pipeline(models["bart"], tokenizer(), max_new_tokens=3).run(tmp_path, tmp_path / "out")

    def test_progress_counts_lines_once(self, models: dict[str, Any], tmp_path: Path) -> None:
        seen: list[tuple[str, int, int]] = []
        Pipeline(models["bart"], tokenizer(), batch=4, max_new_tokens=2, progress=lambda *step: seen.append(step)).run(
            write(tmp_path, TEXTS), tmp_path / "out"
        )
        counts = [done for _, done, _ in seen]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, len(TEXTS))
        assert {(what, total) for what, _, total in seen} == {("generating", len(TEXTS))}


class TestResult:
    def test_a_line(self) -> None:
        assert Result(0, ["a\nb\r\nc\rd"]).line == "a b c d"
        assert Result(0, ["a", "b"]).line == "a####b"
        assert Result(0, ["a", "b"], [-0.5, -1.25]).line == "a\t-0.500000####b\t-1.250000"

    def test_the_best_of_a_line(self) -> None:
        assert best_of("a####b\t1") == "a####b\t1"
        assert best_of("a####b", joined=True) == "a"
        assert best_of(Result(0, ["a\t1", "b"], [-0.5, -1.25]).line, joined=True, scored=True) == "a\t1"


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
    known = {*leaves, "attmemo.kernels", "attmemo.kernels.cache_attention", "attmemo.kernels.pages"}
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
        gate = threading.Event()

        def source() -> Iterator[int]:
            yield 1
            gate.wait(30)

        results = map_ahead(str, source())
        assert next(results) == "1"
        begin = time.monotonic()
        results.close()  # type: ignore[attr-defined]
        assert time.monotonic() - begin < 10
        gate.set()
