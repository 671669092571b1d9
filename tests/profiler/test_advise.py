"""Advice on the user's own texts: what is played is what the library does, and the advice follows from the numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from attmemo.cli.app import app
from attmemo.errors import DataError
from attmemo.guard.guard import Guard
from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import NO_KINDS
from attmemo.memoization import memoize
from attmemo.profiler.advise import FEWEST, PAYS, AdviseOptions, advise, play_tokens, recommend
from attmemo.profiler.logs import generate_log
from attmemo.profiler.models import LoadedModel, Tokens, tokenize
from attmemo.profiler.peers.paths import another, way_of
from attmemo.rows.token_kinds import kinds_of


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("log") / "my.log"
    file.write_text("\n".join(generate_log(240, 4, ("login",))) + "\n")
    return file


@pytest.fixture(scope="module")
def found(tiny_bert: str, log: Path) -> Iterator[dict[str, Any]]:
    cache = log.parent / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ATTMEMO_CACHE", str(cache))
        yield advise(tiny_bert, [log], AdviseOptions(max_length=64, seconds=0.0))
    assert not cache.exists(), "advice makes no database"


def words(*ids: int) -> Tokens:
    return Tokens(0, list(ids), None)


class TestPlay:
    def test_the_first_text_is_computed_and_a_like_one_but_for_its_change(self) -> None:
        one, other = words(*range(1, 21)), words(*range(1, 10), 99, *range(11, 21))
        played = play_tokens([one, other], 1, 0.5, Rule(), None, NO_KINDS)
        assert played.rows.tolist() == [20, 5]  # the change, a neighbour on both sides, the first and the last token
        assert (played.records, played.tokens) == (1, 20)
        assert played.share() == 25 / 40

    def test_texts_of_one_batch_do_not_serve_each_other(self) -> None:
        text = words(*range(1, 21))
        played = play_tokens([text, text, text], 2, 0.5, Rule(), None, NO_KINDS)
        assert played.rows.tolist() == [20, 20, 0]
        assert played.known.tolist() == [False, False, True]
        assert played.records == 1, "the same tokens are stored once"

    def test_what_supplies_less_than_the_threshold_does_not_serve(self) -> None:
        one, other = words(*range(1, 21)), words(*range(1, 10), *range(50, 61))
        assert play_tokens([one, other], 1, 0.5, Rule(), None, NO_KINDS).rows.tolist() == [20, 20]
        assert play_tokens([one, other], 1, 0.3, Rule(), None, NO_KINDS).rows[1] < 20

    def test_a_guard_verifies_before_it_serves(self, loaded: LoadedModel) -> None:
        texts = tokenize(loaded, list(generate_log(400, 2, ("login",))), 64)
        kinds = kinds_of(loaded.tokenizer)
        free = play_tokens(texts, 8, 0.5, Rule(), None, kinds)
        guarded = play_tokens(texts, 8, 0.5, Rule(), Guard(0.01, 0.95, seed=0), kinds)
        assert free.verified.sum() == 0
        assert (guarded.verified[:100] > 0).sum() > 50
        assert guarded.share() > free.share()
        whole = guarded.rows == guarded.lengths
        later = (guarded.verified > 0) & ~whole
        assert later.any()
        assert (guarded.verified[later] == guarded.lengths[later]).all(), "served, and computed whole afterwards"
        assert (guarded.verified[whole] < guarded.lengths[whole]).all(), "exact, and computed from a record too"

    def test_the_guard_decides_as_the_memoized_model_does_where_no_answer_changes(
        self, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows computed by the library, and as played: to the row."""
        monkeypatch.setattr("attmemo.rows.throttle.Pace.share", 1.0)  # nothing is left out because the thread rests
        texts = tokenize(loaded, list(generate_log(320, 2, ("login",))), 64)
        served = another(loaded)
        memoize(
            served.model, database=":memory:", reuse="rows", tokenizer=loaded.tokenizer, gate=False, min_cosine=-1.0,
            answer=lambda output: torch.ones(len(output.logits), 2), budget=0.01,
        )  # fmt: skip
        handle: Any = served.model.attmemo
        handle.guard_anew(Guard(0.01, 0.95, seed=0))
        with torch.inference_mode():
            for start in range(0, len(texts), 8):
                way_of(served)(texts[start : start + 8])
                assert handle.flush()
        played = play_tokens(texts, 8, 0.5, Rule(), Guard(0.01, 0.95, seed=0), kinds_of(loaded.tokenizer))
        assert played.rows.sum() + played.verified.sum() == handle.stats()["rows_computed"]


class TestAdvise:
    def test_gives_every_number_that_the_command_shows(self, found: dict[str, Any]) -> None:
        assert found["texts"] == 240
        for kind in ("guarded", "unguarded"):
            part = found[kind]
            assert all(0 < part[half] < 2 for half in ("rows_first_half", "rows_second_half"))
            assert part["over_stock"] / part["over_packed"] == pytest.approx(
                found["ms"]["stock"] / found["ms"]["packed"]
            )
        assert found["ms"]["int8"] > 0
        assert found["unguarded"]["rows_second_half"] < found["unguarded"]["rows_first_half"]
        assert found["advice"]

    def test_bytes_are_those_of_the_records(self, found: dict[str, Any]) -> None:
        """Two layers, keys and values of 32 numbers, and the last hidden states, all float32."""
        part = found["unguarded"]
        a_token = (2 * 2 + 1) * 32 * 4
        assert part["bytes"] == pytest.approx(part["records"] * a_token * found["tokens"] / found["texts"], rel=0.2)

    def test_too_few_texts_are_refused(self, tiny_bert: str, tmp_path: Path) -> None:
        file = tmp_path / "few.txt"
        file.write_text("one\ntwo\n")
        with pytest.raises(DataError, match=r"2 texts are too few .* expected 100 or more"):
            advise(tiny_bert, [file])
        file.write_text("one\n")
        with pytest.raises(DataError, match="1 text is too few"):
            advise(tiny_bert, [file])

    def test_a_model_that_is_none_is_told_before_the_texts_are_read(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="no model in"):
            advise(str(tmp_path / "nope"), [tmp_path / "x.log"])

    def test_the_help_says_how_many_are_needed(self) -> None:
        assert f"{FEWEST} or more" in CliRunner().invoke(app, ["advise", "--help"]).output

    def test_the_command_shows_the_advice(self, tiny_bert: str, log: Path, tmp_path: Path) -> None:
        done = CliRunner().invoke(
            app, ["advise", tiny_bert, str(log), "--max-length", "64", "--seconds", "0", "--json", str(tmp_path / "x")]
        )
        assert done.exit_code == 0, done.output
        shown = " ".join(done.stdout.split())
        for advice in json.loads((tmp_path / "x").read_text())["advice"]:
            assert advice in shown
        assert max(map(len, done.stdout.splitlines())) <= 80


class TestRecommendation:
    def result(
        self, guarded: float, unguarded: float, duplicates: float = 0.0, packed: float = 1.4, int8: float = 1.0,
        kind: str = "language-model",
    ) -> dict[str, Any]:  # fmt: skip
        return {
            "guarded": {"over_packed": guarded, "over_stock": guarded * packed}, "duplicates": duplicates,
            "unguarded": {"over_packed": unguarded}, "native_bfloat16": True, "kind": kind,
            "ms": {"stock": 10.0, "packed": 10.0 / packed, "int8": 10.0 / packed / int8},
        }  # fmt: skip

    def test_reuse_where_it_pays(self) -> None:
        exact, advice = recommend(self.result(2.0, 2.5))
        assert "memoize(model) is exact and gives 1.40 times" in exact
        assert "Use memoize(model, budget=0.01)" in advice
        assert "2.0 times the speed of exact mode, 2.8 of the original model" in advice
        assert "pauses between requests" in advice

    def test_packed_blocks_where_nothing_repeats(self) -> None:
        packed, no = recommend(self.result(1.0, 1.0))
        assert "memoize(model) is exact and gives 1.40 times" in packed
        assert "Do not reuse" in no

    def test_openvino_where_packed_blocks_gain_nothing_either(self) -> None:
        assert "OpenVINO in bfloat16" in recommend(self.result(1.0, 1.0, packed=0.9))[0]

    def test_8_bits_where_they_are_faster(self) -> None:
        _, rounded, reuse = recommend(self.result(1.3, 1.3, int8=1.5))
        assert "linear='int8' gives 1.50 times the speed of exact blocks" in rounded
        assert "8-bit layers alone are as fast" in reuse
        assert not any("OpenVINO" in advice for advice in recommend(self.result(1.0, 1.0, packed=0.9, int8=1.5)))

    def test_a_cache_for_exact_duplicates(self) -> None:
        cache, _, no = recommend(self.result(1.0, 1.0, duplicates=0.6))
        assert "60 % of the texts are exact duplicates" in cache
        assert "adds too little" in no

    def test_a_longer_look_where_only_the_guard_stands_in_the_way(self) -> None:
        assert "guard verifies for long" in recommend(self.result(PAYS - 0.1, PAYS + 0.1))[1]

    def test_vectors_are_not_reused_but_by_a_classifier_and_static_ones_are_named(self) -> None:
        _, reuse, other = recommend(self.result(2.0, 2.0, kind="encoder"))
        assert "answer=classifier" in reuse
        assert "static embeddings" in other

    @pytest.mark.parametrize(("kind", "named"), [("classifier", "smaller model"), ("tagger", "GLiNER")])
    def test_what_may_serve_better_is_named(self, kind: str, named: str) -> None:
        assert named in recommend(self.result(1.0, 1.0, kind=kind))[-1]
