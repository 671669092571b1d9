"""A language model in the profiler and on the command line: what its answer is, how text is scored, all the way."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refuse, succeed
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from attmemo import Database, UnsupportedModelError, memoize, unmemoize
from attmemo.models.cache_name import cache_of
from attmemo.profiler.answers import KEPT, ask, changed, harm, likeliest, perplexity, prepare, serving
from attmemo.profiler.evaluate import EvaluateOptions, evaluate
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import LoadedModel, NextToken, answers, collate, load_model, tokenize
from attmemo.profiler.tables import make_tables
from attmemo.profiler.train import _run, _texts

FAMILIES = ["llama", "gpt2"]
VOCABULARY, LONGEST = 300, 64


def make_tokenizer(lines: list[str], begin: bool) -> PreTrainedTokenizerFast:
    """Words of the lines; no padding token, and perhaps nothing at the beginning, as GPT-2's."""
    cutter = pre_tokenizers.BertPreTokenizer()
    words = Counter(word for line in lines for word, _ in cutter.pre_tokenize_str(line))
    frequent = sorted(words, key=lambda word: (-words[word], word))[: VOCABULARY - 2]
    vocabulary = {word: number for number, word in enumerate(["<unk>", "<s>", *frequent])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = cutter
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="<s>", model_max_length=LONGEST
    )


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    if family == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=LONGEST, initializer_range=0.3,
                bos_token_id=1, eos_token_id=1,
            )
        )  # fmt: skip
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=LONGEST, initializer_range=0.3, bos_token_id=1,
            eos_token_id=1, pad_token_id=None,
        )
    )  # fmt: skip


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory, log_lines: list[str]) -> dict[str, str]:
    """Folders of a tiny random Llama and GPT-2."""
    found = {}
    for family in FAMILIES:
        folder = tmp_path_factory.mktemp(family)
        make_model(family).eval().save_pretrained(folder)
        make_tokenizer(log_lines, begin=family == "llama").save_pretrained(folder)
        found[family] = str(folder)
    return found


@pytest.fixture(params=FAMILIES, name="loaded")
def _loaded(request: pytest.FixtureRequest, places: dict[str, str]) -> LoadedModel:
    return load_model(places[request.param])


class TestAnswers:
    def test_are_the_likeliest_tokens_behind_the_last_valid_one(
        self, loaded: LoadedModel, log_lines: list[str]
    ) -> None:
        assert loaded.kind == "language-model"
        assert loaded.tokenizer.pad_token_id is None
        assert loaded.labels == {}
        tokens = tokenize(loaded, log_lines[:9], LONGEST)
        assert len({len(item) for item in tokens}) > 1
        given = ask(loaded, prepare(loaded, tokens, 4))
        model: Any = loaded.model
        for item in tokens:
            with torch.inference_mode():
                alone = model(torch.tensor([item.ids])).logits[0, -1].softmax(0)
            assert int(given[item.row, 0, 0]) == int(alone.argmax())
            assert torch.allclose(given[item.row, :, 1], alone[given[item.row, :, 0].long()], atol=1e-4)

    def test_are_kept_without_the_logits_of_the_whole_vocabulary(
        self, loaded: LoadedModel, log_lines: list[str]
    ) -> None:
        """10,000 texts and 128,000 tokens would be 5 GB, twice."""
        given = ask(loaded, prepare(loaded, tokenize(loaded, log_lines[:9], LONGEST), 4))
        assert given.shape == (9, KEPT, 2)
        assert given.untyped_storage().nbytes() == 9 * KEPT * 2 * 4

    def test_are_compared_by_what_is_kept_of_them(self) -> None:
        """Total variation, which a list of the likeliest tokens knows but for the others' probabilities."""
        torch.manual_seed(0)
        logits = 4 * torch.randn(2, 1500, 200)
        logits[1, :500] = logits[0, :500]
        exact, given = logits
        kept = likeliest(exact), likeliest(given)
        assert torch.equal(changed("language-model", *kept, 0.98), exact.argmax(1) != given.argmax(1))
        whole = 0.5 * (exact.softmax(1) - given.softmax(1)).abs().sum(1)
        told = harm("language-model", *kept)
        assert torch.allclose(told[:500], torch.zeros(500), atol=1e-6)
        assert float((told - whole).abs().max()) < 0.1

    def test_need_the_head_for_one_token_a_text_and_no_cache(self, loaded: LoadedModel, log_lines: list[str]) -> None:
        seen = []
        head: Any = loaded.model.get_output_embeddings()  # type: ignore[operator]
        layer: Any = loaded.model.base_model.layers if hasattr(loaded.model.base_model, "layers") else None
        inputs = collate(loaded, tokenize(loaded, log_lines[:5], LONGEST))
        caches = []
        if layer is not None:
            layer[0].register_forward_pre_hook(
                lambda _m, args, kwargs: caches.append(cache_of(kwargs)), with_kwargs=True
            )
        with torch.inference_mode():
            kept = head.register_forward_hook(lambda _m, _a, output: seen.append(tuple(output.shape)))
            answers(loaded, inputs)
            assert seen == [(5, 1, VOCABULARY)]
            assert not any(caches)
            kept.remove()
            whole = loaded.model(**inputs).logits
        assert whole.shape == (*inputs["input_ids"].shape, VOCABULARY), "the head was left cut short"
        assert not head._forward_pre_hooks

    def test_a_failing_model_is_left_whole(self, loaded: LoadedModel) -> None:
        broken = {"input_ids": torch.tensor([[VOCABULARY + 5]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
        with pytest.raises(IndexError), torch.inference_mode():
            answers(loaded, broken)
        assert not loaded.model.get_output_embeddings()._forward_pre_hooks  # type: ignore[operator]

    def test_of_another_model_object_are_its_own(self, loaded: LoadedModel, places: dict[str, str]) -> None:
        """`evaluate --compile` asks a copy."""
        other = load_model(loaded.name)
        inputs = collate(loaded, tokenize(loaded, ["a b c", "d"], LONGEST))
        with torch.inference_mode():
            expected = answers(loaded, inputs)
            torch.nn.init.zeros_(loaded.model.get_input_embeddings().weight)  # type: ignore[operator]
            assert torch.equal(answers(loaded, inputs, NextToken(other.model)), expected)

    def test_change_when_another_token_comes_first(self) -> None:
        exact, given = map(likeliest, torch.tensor([[[1.0, 2.0], [3.0, 0.0]], [[0.0, 9.0], [0.0, 0.1]]]))
        assert changed("language-model", exact, given, 0.98).tolist() == [False, True]

    def test_of_a_text_without_tokens_are_those_behind_the_beginning(self, places: dict[str, str]) -> None:
        loaded = load_model(places["gpt2"])
        tokens = tokenize(loaded, ["", "a b"], LONGEST)
        assert tokens[0].ids == [1]
        given = ask(loaded, prepare(loaded, tokens, 2))
        assert torch.isfinite(given).all()

    def test_segments_of_a_plain_fast_tokenizer_do_not_reach_a_decoder_without_them(
        self, places: dict[str, str], log_lines: list[str]
    ) -> None:
        loaded = load_model(places["llama"])
        loaded.tokenizer.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        assert tokenize(loaded, log_lines[:1], LONGEST)[0].segments is not None
        assert set(collate(loaded, tokenize(loaded, log_lines[:2], LONGEST))) == {"input_ids", "attention_mask"}


class TestPerplexity:
    def test_is_that_of_each_token_after_the_ones_before_it(self, loaded: LoadedModel, log_lines: list[str]) -> None:
        tokens = tokenize(loaded, log_lines[:7], LONGEST)
        model: Any = loaded.model
        losses = []
        for item in tokens:
            for at in range(1, len(item)):
                with torch.inference_mode():
                    logits = model(torch.tensor([item.ids[:at]])).logits[0, -1]
                losses.append(-float(logits.log_softmax(0)[item.ids[at]]))
        expected = math.exp(sum(losses) / len(losses))
        found, count = perplexity(loaded, prepare(loaded, tokens, 3))
        assert count == len(losses)
        assert found == pytest.approx(expected, rel=1e-4)
        few, _ = perplexity(loaded, prepare(loaded, tokens, 3), most=3 * VOCABULARY * 5)  # 5 positions at a time
        assert few == pytest.approx(expected, rel=1e-4)

    def test_of_nothing_to_predict_is_none(self, loaded: LoadedModel) -> None:
        tokens = [item for item in tokenize(loaded, ["", "x"], LONGEST) if len(item) == 1]
        assert tokens
        assert perplexity(loaded, prepare(loaded, tokens, 2)) == (None, 0)


def test_a_head_without_weights_is_refused(tmp_path: Path, places: dict[str, str], log_lines: list[str]) -> None:
    """Saved from the bare decoder, but its configuration still speaks of a head that is not the embedding."""
    model = make_model("llama")
    model.model.save_pretrained(tmp_path)
    make_tokenizer(log_lines, begin=True).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(UnsupportedModelError, match=r"language model, but has no weights for lm_head"):
        load_model(str(tmp_path))


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lines")
    lines = list(generate_log(560, seed=5))
    files = {}
    for name, part in (("build", lines[:300]), ("tune", lines[300:440]), ("ask", lines[440:])):
        files[name] = folder / f"{name}.log"
        files[name].write_text("".join(f"{line}\n" for line in part))
    return files


@pytest.fixture(scope="module", params=FAMILIES, name="tuned")
def _tuned(
    request: pytest.FixtureRequest,
    places: dict[str, str],
    logs: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Path]:
    """The commands, one after the other."""
    model, path = places[request.param], tmp_path_factory.mktemp("way") / "db"
    succeed("build-database", "--model", model, "--data", logs["build"], "--output", path, "--max-length", "32")
    succeed("train-embedder", path, "--steps", "20", "--no-profile")  # what pays is no matter of this test
    told = succeed("tune", path, "--data", logs["tune"], "--budget", "0.3", "--json", "-", "--quiet")
    tuning = json.loads(told)
    assert tuning["certified"] is True
    assert tuning["served"] > 0.0
    assert tuning["min_cosine"] is None, "a language model's answers are tokens"
    return model, path


class TestTheWholeWay:
    def test_evaluation_tells_first_tokens_and_perplexity(
        self, tuned: tuple[str, Path], logs: dict[str, Path], tmp_path: Path
    ) -> None:
        _, path = tuned
        result = json.loads(
            succeed("evaluate", path, "--data", logs["ask"], "--no-gate", "--repeats", "1", "--limit", "60",
                    "--exhaustive", "10", "--report", tmp_path / "report", "--json", "-", "--quiet")
        )  # fmt: skip
        quality = result["quality"]
        assert result["hit_rate"] > 0.0
        assert result["ineligible"] == 0
        assert quality["changed_means"] == "another first token"
        assert quality["accuracy_exact"] is None
        assert quality["perplexity_exact"] != quality["perplexity_memoized"], "other maps, the same perplexity?"
        for row in (*result["controls"][:3], *result["sweep"]):
            assert row["perplexity"] > 1.0
        page = (tmp_path / "report" / "report.html").read_text()
        assert f"{quality['perplexity_memoized']:.4g}, exact {quality['perplexity_exact']:.4g}" in page
        assert "first tokens" in result["verdict"]
        assert f"perplexity {quality['perplexity_memoized']:.4g}" in result["verdict"]

    def test_what_evaluation_tells_is_what_the_user_gets(self, tuned: tuple[str, Path], logs: dict[str, Path]) -> None:
        model, path = tuned
        options = EvaluateOptions(gate=False, repeats=1, limit=40, exhaustive=0, sweep=False, controls=False)
        result = evaluate(path, [logs["ask"]], options)
        loaded = load_model(model)
        tokens = tokenize(loaded, logs["ask"].read_text().splitlines()[:40], 32)
        prepared = prepare(loaded, tokens, 32)
        exact = ask(loaded, prepared)
        assert perplexity(loaded, prepared)[0] == pytest.approx(result["quality"]["perplexity_exact"], rel=1e-6)
        bare: Any = memoize(loaded.model, "auto", path, gate=False)
        given = ask(loaded, prepared)
        stats = bare.attmemo.stats()
        assert stats["hit_rate"] == pytest.approx(result["hit_rate"])
        assert perplexity(loaded, prepared)[0] == pytest.approx(result["quality"]["perplexity_memoized"], rel=1e-6)
        differ = float(changed(loaded.kind, exact, given, 0.98).float().mean())
        assert differ == pytest.approx(result["quality"]["changed"])
        item = tokens[0]
        with torch.inference_mode():
            served = bare(torch.tensor([item.ids])).logits[0, -1]
        assert int(served.argmax()) == int(given[0, 0, 0])
        unmemoize(loaded.model)

    def test_its_own_texts_keep_their_perplexity(self, tuned: tuple[str, Path], logs: dict[str, Path]) -> None:
        """Every record finds itself: what is served is what would have been computed, but for float16 storage."""
        model, path = tuned
        loaded = load_model(model)
        prepared = prepare(loaded, tokenize(loaded, logs["build"].read_text().splitlines()[:40], 32), 16)
        exact, _ = perplexity(loaded, prepared)
        bare: Any = memoize(loaded.model, 0.0, path, gate=False)
        given, _ = perplexity(loaded, prepared)
        assert bare.attmemo.stats()["hit_rate"] == 1.0
        assert given == pytest.approx(exact, rel=1e-2)
        unmemoize(loaded.model)

    def test_costs_are_those_of_a_prefill_that_fills_a_cache(self, tuned: tuple[str, Path]) -> None:
        """Measured without one, the gate would take a hit for cheaper than it is when text is generated."""
        loaded = load_model(tuned[0])
        kept: list[Any] = []
        with Database(tuned[1]) as database, serving(loaded, database, "sequence") as handle:
            fill = handle.engine.reuse._fill
            handle.engine.reuse._fill = lambda *given: (kept.append(given[2]), fill(*given))  # type: ignore[method-assign]
            _run(loaded, _texts(loaded, 2, int(database.records.lengths[0]))[0])
            assert handle.stats()["hit_rate"] == 1.0
        assert len(kept) == 2, "one cache for each layer"
        assert all(keys is not None for keys in kept)

    def test_labels_are_refused(self, tuned: tuple[str, Path], tmp_path: Path) -> None:
        rows = tmp_path / "rows.csv"
        rows.write_text("text,label\nhello there,1\n")
        said = refuse("evaluate", tuned[1], "--data", rows, "--text-column", "text", "--label-column", "label")
        assert "next tokens, not classes" in said

    def test_a_database_built_for_the_bare_decoder_serves_it(
        self, places: dict[str, str], tuned: tuple[str, Path]
    ) -> None:
        """The head is behind the last map, so it is not part of the fingerprint."""
        loaded = load_model(tuned[0])
        with Database(tuned[1]) as database:
            memoize(loaded.model.base_model, "auto", database)
            assert loaded.model.base_model.attmemo.enabled  # type: ignore[union-attr]


def test_the_report_leaves_perplexity_out_where_there_is_none() -> None:
    tables = {table.title: table for table in make_tables({"hit_rate": 0.5, "quality": {"agreement": 1.0}})}
    assert "Perplexity" not in [row[0] for row in tables["Summary"].rows]
