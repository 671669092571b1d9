"""Runs that ended before their time: resumed, no line is lost or doubled, and files are whole or not there."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from generators import LINES, make_model, plain_loop, tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipeline_tools import BEAMS, TEXTS, Watched, write
from transformers import GenerationConfig, LogitsProcessorList

from attmemo.errors import AttmemoError, DataError
from attmemo.fastseq import NoRepeatNGram, Pipeline
from attmemo.fastseq.pipeline import planner
from attmemo.fastseq.pipeline.journal import Journal, JournalError
from attmemo.fastseq.pipeline.model_properties import tokenizer_name
from attmemo.fastseq.pipeline.result import Result, best_of

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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
