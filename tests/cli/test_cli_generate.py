"""`attmemo generate`: FastSeq's options and stock's, scores, bad input, and runs that were ended."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import attmemo, ended_by, refuse, succeed
from generators import LINES, POSITIONS, make_model, plain_loop, save, tokenizer
from transformers import AutoTokenizer, BartModel, BertConfig, BertForMaskedLM, GPT2Model, ViTConfig, ViTModel

from attmemo import fastseq
from attmemo.cli.generate_options import parse_batch
from attmemo.fastseq import Pipeline
from attmemo.fastseq.pipeline import metrics

BEAMS = {"num_beams": 2, "max_new_tokens": 6, "no_repeat_ngram_size": 2}
OPTIONS = ("--num-beams", "2", "--max-new-tokens", "6", "--no-repeat-ngram-size", "2")
TEXTS = [*LINES[:7], "", *LINES[7:14]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny models."""
    return {family: save(family, tmp_path_factory.mktemp(family)) for family in ("bart", "t5", "gpt2")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in TEXTS))
    return path


def lines(path: Path) -> list[str]:
    *found, last = path.read_bytes().decode().split("\n")
    assert last == ""
    return found


class TestAsStock:
    @pytest.mark.parametrize("family", ["bart", "t5", "gpt2"])
    def test_every_line_is_stocks_and_the_wrapped_model_is_used(
        self, family: str, saved: dict[str, str], source: Path, tmp_path: Path
    ) -> None:
        extra = ("--output-summaries-only", "--causal-lm") if family == "gpt2" else ()
        result = attmemo("generate", saved[family], source, tmp_path / "out", *OPTIONS, *extra, "--json", "-")
        assert "15 lines (14 generated now, 0 there before)" in result.stderr
        assert "1 line left blank" in result.stderr
        found = json.loads(result.stdout)
        assert found["fastseq"] is True
        assert found["fastseq_stats"]["calls"] == {"fast": found["batches"], "stock": 0}
        counts = found["fastseq_stats"]["counts"]
        unpacked = counts.get("prefix" if family == "gpt2" else "shared", 0)  # where the processor has no kernels
        assert counts.get("packed_steps", 0) + unpacked > 0
        limit = POSITIONS - 6 if family == "gpt2" else POSITIONS
        assert lines(tmp_path / "out") == plain_loop(make_model(family), TEXTS, limit=limit, **BEAMS)

    def test_a_prompt_is_there_unless_it_is_not_wanted(
        self, saved: dict[str, str], source: Path, tmp_path: Path
    ) -> None:
        succeed("generate", saved["gpt2"], source, tmp_path / "out", *OPTIONS)
        new = plain_loop(make_model("gpt2"), TEXTS, limit=POSITIONS - 6, **BEAMS)
        pairs = [(a, b) for a, b in zip(lines(tmp_path / "out"), new, strict=True) if b]
        assert all(whole.endswith(part) and len(whole) > len(part) for whole, part in pairs)

    @pytest.mark.parametrize("batch", ["auto", "1", "5"])
    def test_batches(self, batch: str, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        succeed("generate", saved["bart"], source, tmp_path / "out", *OPTIONS, "--bs", batch)
        assert lines(tmp_path / "out") == plain_loop(make_model("bart"), TEXTS, **BEAMS)

    def test_the_stock_path(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        args = ("generate", saved["bart"], source, tmp_path / "out", *OPTIONS, "--without_fastseq_opt", "--json", "-")
        assert json.loads(succeed(*args))["fastseq"] is False
        assert lines(tmp_path / "out") == plain_loop(make_model("bart"), TEXTS, **BEAMS)

    def test_a_model_that_fell_back_is_not_called_fast(
        self, saved: dict[str, str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from attmemo.fastseq.generate import fastmodel

        monkeypatch.setattr(fastmodel, "self_test", lambda fast, mode="shared": "of its own will")
        common = ("generate", saved["bart"], source, tmp_path / "out", *OPTIONS)
        found = json.loads(succeed(*common, "--json", "-"))
        assert found["fastseq"] is False
        assert found["fastseq_stats"]["calls"] == {"fast": 0, "stock": found["batches"]}
        assert "1 batch took the original path: of its own will" in succeed(*common)
        assert lines(tmp_path / "out") == plain_loop(make_model("bart"), TEXTS, **BEAMS)


class TestOptions:
    def test_everything_that_fastseq_takes(
        self, saved: dict[str, str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: dict[str, Any] = {}
        real = Pipeline.__init__

        def noted(self: Any, *arguments: Any, **options: Any) -> None:
            seen.update(options)
            real(self, *arguments, **options)

        monkeypatch.setattr(Pipeline, "__init__", noted)
        fastseq = (
            "--device cpu --task summarization --bs 3 --decoder_start_token_id 2 --n_obs 9 --no_repeat_ngram_size 2 "
            "--include_special_tokens --clean_up_tokenization_spaces --preprocess_workers 3 --postprocess_workers 2 "
            "--return_tensors pt --padding max_length --max_tokenizer_length 50 --max_gen_length 9 "
            "--max_new_tokens 7 --min_gen_length 4 --output_summaries_only --output_sequence_scores --beam 4 "
            "--eos_token_id 3 --temperature 0.9 --top_k 7 --top_p 0.8 --repetition_penalty 1.5 --do_sample "
            "--num_return_sequences 2 --seed 11 --padding_side right --use_slow_tokenizer --without_fastseq_opt "
            "--no_truncation"
        )
        succeed("generate", saved["bart"], source, tmp_path / "out", *shlex.split(fastseq))
        expected = {
            "batch": 3, "decoder_start_token_id": 2, "no_repeat_ngram_size": 2, "keep_special": True, "clean_up": True,
            "encoders": 3, "decoders": 2, "padding": "max_length", "max_source": 50, "max_new_tokens": 7,
            "min_length": 4, "new_only": True, "output_scores": True, "num_beams": 4, "eos_token_id": 3,
            "temperature": 0.9, "top_k": 7, "top_p": 0.8, "repetition_penalty": 1.5, "do_sample": True,
            "num_return_sequences": 2, "seed": 11, "padding_side": "right", "truncate": False, "device": "cpu",
        }  # fmt: skip
        assert {name: seen.get(name) for name in expected} == expected
        found = lines(tmp_path / "out")
        assert len(found) == 9
        assert all(line.count("####") == 1 for line in found)
        assert all(float(part.split("\t")[1]) < 0 for line in found if "[CLS]" in line for part in line.split("####"))

    def test_stocks_names(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        one = ("--num-beams", "2", "--max-length", "7", "--min-length", "5", "--batch-size", "3", "--limit", "5")
        two = ("--beam", "2", "--max_gen_length", "7", "--min_gen_length", "5", "--bs", "3", "--n_obs", "5")
        for name, options in (("one", one), ("two", two)):
            succeed("generate", saved["bart"], source, tmp_path / name, *options, "--length-penalty", "2")
        assert lines(tmp_path / "one") == lines(tmp_path / "two")
        wanted = plain_loop(make_model("bart"), TEXTS[:5], num_beams=2, max_length=7, min_length=5, length_penalty=2.0)
        assert lines(tmp_path / "one") == wanted

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (("--min-new-tokens", "5"), {"min_new_tokens": 5}),
            (("--early-stopping",), {"early_stopping": True}),
            (("--no-early-stopping",), {"early_stopping": False}),
            (("--early-stopping-never",), {"early_stopping": "never"}),
            (("--do-sample", "--min_p", "0.1", "--typical_p", "0.9"),
             {"do_sample": True, "min_p": 0.1, "typical_p": 0.9}),
        ],
    )  # fmt: skip
    def test_every_setting_arrives(
        self, options: tuple[str, ...], expected: dict[str, Any], saved: dict[str, str], source: Path, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        from transformers import BartForConditionalGeneration

        seen: list[dict[str, Any]] = []
        real = BartForConditionalGeneration.generate

        def noted(self: Any, *arguments: Any, **given: Any) -> Any:
            seen.append(given)
            return real(self, *arguments, **given)

        monkeypatch.setattr(BartForConditionalGeneration, "generate", noted)
        common = ("generate", saved["bart"], source, tmp_path / "out", "--bs", "15", "--limit", "3")
        succeed(*common, "--beam", "2", "--max-new-tokens", "6", "--without-fastseq-opt", *options)
        assert [{name: given.get(name) for name in expected} for given in seen] == [expected]

    def test_a_model_that_samples_of_itself_stops_when_told(
        self, saved: dict[str, str], source: Path, tmp_path: Path
    ) -> None:
        folder = Path(shutil.copytree(saved["bart"], tmp_path / "model"))
        settings = json.loads((folder / "generation_config.json").read_text())
        (folder / "generation_config.json").write_text(json.dumps({**settings, "do_sample": True, "top_k": 20}))
        succeed("generate", folder, source, tmp_path / "out", *OPTIONS, "--no-do-sample")
        assert lines(tmp_path / "out") == plain_loop(make_model("bart"), TEXTS, **BEAMS)

    def test_two_ways_to_stop_early(self) -> None:
        result = attmemo("generate", "m", "i", "o", "--early-stopping", "--early-stopping-never")
        assert result.exit_code == 2

    def test_fp16_and_dtype(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        for name, options in (("one", ("--fp16",)), ("two", ("--dtype", "float16"))):
            succeed("generate", saved["bart"], source, tmp_path / name, *OPTIONS, *options)
        assert lines(tmp_path / "one") == lines(tmp_path / "two")

    def test_weights_in_8_bits(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        common = ("generate", saved["bart"], source, tmp_path / "out", *OPTIONS, "--weights", "int8")
        succeed(*common)
        rounded = fastseq.accelerate(make_model("bart"), weights="int8")
        assert lines(tmp_path / "out") == plain_loop(rounded, TEXTS, **BEAMS)
        assert rounded.stats()["counts"]["packed_steps"] > 0
        assert attmemo(*common, "--without-fastseq-opt").exit_code == 2

    def test_all_lines_as_fastseq_asks_for_them(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        succeed(
            "generate", saved["bart"], source, tmp_path / "out", *OPTIONS, "--n_obs", "-1", "--min_gen_length", "-1"
        )
        assert len(lines(tmp_path / "out")) == len(TEXTS)

    def test_the_models_settings_for_a_task(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(saved["t5"], tmp_path / "model"))
        config = json.loads((folder / "config.json").read_text())
        known = {"prefix": "warn : ", "num_beams": 3, "max_length": 6, "early_stopping": True}
        config["task_specific_params"] = {"translation_en_to_ro": known}
        (folder / "config.json").write_text(json.dumps(config))
        common = ("generate", folder, source)
        succeed(*common, tmp_path / "one", "--task", "translation_en_to_ro")
        model = make_model("t5")
        wanted = plain_loop(model, TEXTS, prefix="warn : ", num_beams=3, max_length=6, early_stopping=True)
        assert lines(tmp_path / "one") == wanted
        succeed(*common, tmp_path / "two", "--task", "translation_en_to_ro", "--beam", "1", "--max-new-tokens", "4",
                "--prefix", "", "--no-early-stopping")  # fmt: skip
        assert lines(tmp_path / "two") == plain_loop(model, TEXTS, max_new_tokens=4)
        assert lines(tmp_path / "two") != wanted

    @pytest.mark.parametrize("text", ["0", "-1", "many", "", "1.5"])
    def test_no_batch_size(self, text: str) -> None:
        result = attmemo("generate", "m", "i", "o", "--bs", text)
        assert result.exit_code == 2
        assert "auto, or a number" in result.stderr

    def test_a_batch_size(self) -> None:
        assert [parse_batch("auto"), parse_batch("12")] == ["auto", 12]

    def test_a_place_for_scores_without_a_reference(self) -> None:
        result = attmemo("generate", "m", "i", "o", "--score_path", "s")
        assert result.exit_code == 2
        assert "--reference-path" in result.stderr

    @pytest.mark.parametrize("option", ["--limit", "--n_obs"])
    def test_no_lines_are_taken_for_all(self, option: str) -> None:
        result = attmemo("generate", "m", "i", "o", option, "0")
        assert result.exit_code == 2
        assert "no line at all" in result.stderr

    def test_languages_of_a_model_that_has_none(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        assert "no languages" in refuse("generate", saved["bart"], source, tmp_path / "out", "--target-lang", "ro_RO")

    def test_what_it_counted_as_json(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        source.write_text(source.read_text() + "warn " * 200 + "\n")
        found = json.loads(succeed("generate", saved["bart"], source, tmp_path / "out", *OPTIONS, "--json", "-"))
        counts = {key: found[key] for key in ("lines", "generated", "blank", "truncated", "resumed", "halvings")}
        assert counts == {"lines": 16, "generated": 15, "blank": 1, "truncated": 1, "resumed": 0, "halvings": 0}
        assert found["seconds"] >= found["stages"]["generating"] > 0


class TestScores:
    def reference(self, folder: Path, texts: list[str]) -> Path:
        path = folder / "reference.txt"
        path.write_text("".join(f"{text}\n" for text in texts))
        return path

    @pytest.mark.parametrize(
        ("task", "package"), [("summarization", "rouge_score"), ("translation_a_to_b", "sacrebleu")]
    )
    def test_the_output_as_reference_is_perfect(
        self, task: str, package: str, saved: dict[str, str], source: Path, tmp_path: Path
    ) -> None:
        pytest.importorskip(package, reason=f"{package} is not installed")
        texts = [text for text in TEXTS if text]
        source.write_text("".join(f"{text}\n" for text in texts))
        wanted = plain_loop(make_model("bart"), texts, **BEAMS)
        path, where = self.reference(tmp_path, wanted), tmp_path / "score.json"
        args = (
            "generate",
            saved["bart"],
            source,
            tmp_path / "out",
            *OPTIONS,
            "--task",
            task,
            "--reference_path",
            path,
        )
        found = json.loads(succeed(*args, "--score_path", where, "--json", "-"))["scores"]
        assert found == json.loads(where.read_text())
        assert set(found) == (
            {"bleu", "chrf"} if "translation" in task else {"rouge1", "rouge2", "rougeL", "rougeLsum"}
        )
        assert all(value > 80 for value in found.values()), "less than 100 for lines of one word or of marks only"
        others = self.reference(tmp_path, wanted[1:] + wanted[:1])
        found = json.loads(succeed(*args[:-1], others, "--json", "-"))["scores"]
        assert all(value < 60 for value in found.values())

    def test_the_best_of_several_is_scored(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        pytest.importorskip("rouge_score")
        best = plain_loop(make_model("bart"), TEXTS[:5], **BEAMS)
        path = self.reference(tmp_path, best)
        args = ("--num_return_sequences", "2", "--output_sequence_scores", "--n_obs", "5", "--reference-path", path)
        found = json.loads(
            succeed("generate", saved["bart"], source, tmp_path / "out", *OPTIONS, *args, "--json", "-")
        )
        assert found["scores"]["rougeL"] > 95

    @pytest.mark.parametrize("count", [0, 14, 16])
    def test_a_reference_of_another_length(self, count: int, source: Path, tmp_path: Path) -> None:
        pytest.importorskip("rouge_score")
        path = self.reference(tmp_path, ["word"] * count)
        stderr = refuse("generate", "no-such-model", source, tmp_path / "out", "--reference-path", path)
        assert f"has {count} lines" in stderr
        assert "has 15: expected as many" in stderr

    def test_a_missing_reference(self, source: Path, tmp_path: Path) -> None:
        pytest.importorskip("rouge_score")
        stderr = refuse("generate", "no-such-model", source, tmp_path / "out", "--reference-path", tmp_path / "none")
        assert "none: no such file" in stderr

    @pytest.mark.parametrize(("task", "package"), [("summarization", "rouge_score"), ("translation", "sacrebleu")])
    def test_the_package_is_missing(
        self, task: str, package: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, package, None)
        path = self.reference(tmp_path, TEXTS)
        stderr = refuse(
            "generate", "no-such-model", source, tmp_path / "out", "--task", task, "--reference-path", path
        )
        assert "pip install '.[generate]'" in stderr
        assert package.replace("_", "-") in stderr

    def test_rouge_of_known_lines(self) -> None:
        pytest.importorskip("rouge_score")
        found = metrics.score("rouge", ["the cat sat"], ["the cat ran"])
        assert found["rouge1"] == pytest.approx(200 / 3)
        assert found["rouge2"] == pytest.approx(50)

    def test_bleu_of_known_lines(self) -> None:
        sacrebleu = pytest.importorskip("sacrebleu")
        hypotheses, references = ["the cat sat on the mat today"], ["the cat sat on the mat"]
        expected = sacrebleu.corpus_bleu(hypotheses, [references]).score
        assert metrics.score("bleu", hypotheses, references)["bleu"] == pytest.approx(expected)
        assert 50 < expected < 100


class TestBadInput:
    @pytest.mark.parametrize(
        ("raw", "said"), [(None, "no such file"), (b"", "is empty"), (b"ok\nna\xefve\n", "line 2: not UTF-8")]
    )
    def test_the_input(self, raw: bytes | None, said: str, saved: dict[str, str], tmp_path: Path) -> None:
        if raw is not None:
            (tmp_path / "in").write_bytes(raw)
        assert said in refuse("generate", saved["bart"], tmp_path / "in", tmp_path / "out", *OPTIONS)

    def test_the_output_is_never_the_input(self, saved: dict[str, str], source: Path) -> None:
        assert "would replace" in refuse("generate", saved["bart"], source, source)
        assert lines(source) == TEXTS

    def test_a_pipe_is_refused(self, saved: dict[str, str], tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "in")
        stderr = refuse("generate", saved["bart"], tmp_path / "in", tmp_path / "out", *OPTIONS)
        assert "is a pipe" in stderr
        assert not (tmp_path / "out.part").exists()

    @pytest.mark.parametrize("link", [None, "soft", "hard"])
    @pytest.mark.parametrize(
        ("files", "said"),
        [
            (("in", "out", "ref", "out"), "OUTPUT and --score-path are the same"),
            (("in", "out", "ref", "out.part"), "OUTPUT.part and --score-path are the same"),
            (("in", "out", "ref", "in"), "--score-path"), (("in", "out", "ref", "ref"), "--score-path"),
            (("in", "in", "ref", "score"), "OUTPUT"), (("in", "ref", "ref", "score"), "OUTPUT"),
            (("out.part", "out", "ref", "score"), "OUTPUT.part"),
        ],
    )  # fmt: skip
    def test_no_run_writes_over_its_own_files(
        self, files: tuple[str, ...], said: str, link: str | None, tmp_path: Path
    ) -> None:
        for name in files:
            (tmp_path / name).write_text(f"what was in {name}\n")
        before = {path.name: path.read_text() for path in tmp_path.iterdir()}
        paths = [tmp_path / name for name in files]
        if link is not None:
            paths[3] = tmp_path / "link"
            paths[3].symlink_to(files[3]) if link == "soft" else paths[3].hardlink_to(tmp_path / files[3])
            before["link"] = before[files[3]]
        source, output, reference, scores = paths
        args = ("--reference-path", reference, "--score-path", scores)
        assert said in refuse("generate", "no-such-model", source, output, *args)
        assert {path.name: path.read_text() for path in tmp_path.iterdir()} == before

    def test_the_json_file_is_the_output(self, source: Path, tmp_path: Path) -> None:
        for name in ("out", "in.txt"):
            args = ("generate", "no-such-model", source, tmp_path / "out", "--json", tmp_path / name)
            assert "--json" in refuse(*args)

    def test_the_output_has_no_directory(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        assert "no directory" in refuse("generate", saved["bart"], source, tmp_path / "none" / "out", *OPTIONS)

    def test_a_long_line(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        source.write_text(source.read_text() + "warn " * 200 + "\n")
        common = ("generate", saved["bart"], source, tmp_path / "out", *OPTIONS)
        stderr = refuse(*common, "--no-truncation")
        assert "line 16 has 802 tokens, the model takes 64" in stderr
        assert "--no-truncation" in stderr
        assert "1 text cut to what the model takes" in succeed(*common)

    @pytest.mark.parametrize("options", [("--num-return-sequences", "3"), ("--do-sample", "--temperature", "-1")])
    def test_options_that_transformers_refuses(
        self, options: tuple[str, ...], saved: dict[str, str], source: Path, tmp_path: Path
    ) -> None:
        common = ("generate", saved["bart"], source, tmp_path / "out", *OPTIONS)
        assert "these options cannot be generated with" in refuse(*common, *options)
        succeed(*common)  # and what was refused is not in the way of what is right

    def test_an_error_of_the_model_is_not_blamed_on_the_options(
        self, saved: dict[str, str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers.models.bart.modeling_bart import BartEncoder

        def broken(self: Any, *arguments: Any, **given: Any) -> Any:
            raise ValueError("the model is broken")

        monkeypatch.setattr(BartEncoder, "forward", broken)
        args = ("generate", saved["bart"], source, tmp_path / "out", *OPTIONS, "--without-fastseq-opt")
        result = attmemo(*args)
        assert result.exit_code == 1
        assert "unexpected ValueError: the model is broken" in result.stderr

    @pytest.mark.parametrize("place", [".", "none/score.json"])
    def test_a_place_for_scores_that_cannot_be_written(self, place: str, source: Path, tmp_path: Path) -> None:
        pytest.importorskip("rouge_score")
        args = ("--reference-path", source, "--score-path", tmp_path / place)
        assert "--score-path" in refuse("generate", "no-such-model", source, tmp_path / "out", *args)

    def test_a_missing_model(self, source: Path, tmp_path: Path) -> None:
        assert "no model in" in refuse("generate", tmp_path / "none", source, tmp_path / "out")

    def test_a_device_that_is_not_there(self, saved: dict[str, str], source: Path, tmp_path: Path) -> None:
        assert "--device quantum" in refuse("generate", saved["bart"], source, tmp_path / "out", "--device", "quantum")

    @pytest.mark.parametrize("kind", ["classifier", "masked", "images", "no head", "bare decoder"])
    def test_a_model_that_does_not_generate(self, kind: str, tiny_bert: str, source: Path, tmp_path: Path) -> None:
        folder = tmp_path / "model"
        torch.manual_seed(0)
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        if kind == "classifier":
            folder, said = Path(tiny_bert), "(bert) does not generate texts: it is a BertForSequenceClassification"
        elif kind == "masked":
            BertForMaskedLM(BertConfig(vocab_size=40, **small)).save_pretrained(folder)
            said = "it is a BertForMaskedLM"
        elif kind == "images":
            ViTModel(ViTConfig(image_size=4, patch_size=2, **small)).save_pretrained(folder)
            said = "cannot load the model"
        elif kind == "no head":
            from transformers import BertModel

            BertModel(BertConfig(vocab_size=40, **small)).save_pretrained(folder)
            said = "it has no weights for cls.predictions"
        else:
            config = make_model("gpt2").config
            config.tie_word_embeddings = False
            GPT2Model(config).save_pretrained(folder)
            said = "it has no weights for lm_head.weight"
        if kind != "classifier":
            AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(folder)
        stderr = refuse("generate", folder, source, tmp_path / "out")
        assert said in stderr
        assert str(folder) in stderr
        assert not (tmp_path / "out.part").exists()

    def test_a_bare_model_whose_head_is_tied_generates(self, source: Path, tmp_path: Path) -> None:
        """As the checkpoint of bart-base is."""
        whole = make_model("bart")
        bare = BartModel(whole.config)
        bare.load_state_dict(whole.model.state_dict())
        bare.save_pretrained(tmp_path / "model")
        tokenizer().save_pretrained(tmp_path / "model")
        succeed("generate", tmp_path / "model", source, tmp_path / "out", *OPTIONS)
        assert lines(tmp_path / "out") == plain_loop(whole, TEXTS, **BEAMS)


class TestInterrupted:
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
    def test_a_killed_run_neither_loses_nor_doubles_a_line(
        self, how: signal.Signals, saved: dict[str, str], tmp_path: Path
    ) -> None:
        texts = [*LINES, ""] * 6
        source, output, part = tmp_path / "in.txt", tmp_path / "out", tmp_path / "out.part"
        source.write_text("".join(f"{text}\n" for text in texts))
        common = ["generate", saved["bart"], str(source), str(output), *OPTIONS, "--window", "100"]
        code, stderr = ended_by(
            how, lambda: part.exists() and part.read_bytes().count(b"\n") > 30, *common, "--bs", "1"
        )
        assert code == (130 if how == signal.SIGINT else -signal.SIGKILL)
        if how == signal.SIGINT:
            assert f"interrupted; {output}.part holds what was generated, the same command resumes" in stderr
            assert "Traceback" not in stderr
        assert not output.exists()
        found = json.loads(succeed(*common, "--bs", "64", "--json", "-"))
        assert found["resumed"] >= 30
        assert found["lines"] == len(texts)
        once = plain_loop(make_model("bart"), [*LINES, ""], **BEAMS)
        assert lines(output) == once * 6

    def test_other_options_are_refused_and_restart_begins_anew(
        self, saved: dict[str, str], source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from transformers import BartForConditionalGeneration

        calls = []
        real = BartForConditionalGeneration.generate

        def interrupted(self: Any, *arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return real(self, *arguments, **options)

        monkeypatch.setattr(BartForConditionalGeneration, "generate", interrupted)
        common = ("generate", saved["bart"], source, tmp_path / "out", "--bs", "2")
        result = attmemo(*common, *OPTIONS)
        assert result.exit_code == 130
        assert os.path.exists(tmp_path / "out.part")
        stderr = refuse(*common, "--beam", "3")
        assert "generate num_beams 2 then, 3 now" in stderr
        assert "--restart" in stderr
        found = json.loads(succeed(*common, "--beam", "3", "--max-new-tokens", "4", "--restart", "--json", "-"))
        assert found["resumed"] == 0
        assert lines(tmp_path / "out") == plain_loop(make_model("bart"), TEXTS, num_beams=3, max_new_tokens=4)
