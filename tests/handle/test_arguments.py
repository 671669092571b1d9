"""What a user can give wrong is refused by an error of this library that says what to do, and changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from families import FAMILIES
from torch import nn

from attmemo import AttmemoError, Database, memoize, similarity_score, unmemoize
from attmemo.arguments import check_together
from attmemo.cli.options import parse_size as parse_option
from attmemo.errors import AdapterCheckError, ArgumentError, ArgumentTypeError, DatabaseNotFoundError
from attmemo.serve.settings import Settings
from attmemo.system.sizes import bytes_of, parse_size


@pytest.fixture(scope="module", name="model")
def _model() -> Any:
    return FAMILIES["BERT classifier"].make()


def is_bare(model: Any) -> bool:
    return "attmemo" not in model.__dict__ and not any("forward" in module.__dict__ for module in model.modules())


def refused(kind: type[AttmemoError], said: str, call: Callable[[], Any]) -> str:
    """The hint of the error of this kind that the call must end with."""
    with pytest.raises(kind, match=said) as caught:
        call()
    assert caught.value.hint
    return caught.value.hint


class TestOneArgument:
    @pytest.mark.parametrize(
        ("given", "said", "hint"),
        [
            ({"database": 5}, "database is 5, of type int; expected a path", "leave out database"),
            ({"database": b"db"}, "database is b'db', of type bytes", "leave out database"),
            ({"database": ""}, "database is an empty text", "name a directory"),
            ({"database": "a\0b"}, "can be no path", "name a directory"),
            ({"database": "a" * 300}, "can be no path: File name too long", "name a directory"),
            ({"fill": ""}, "fill is an empty text", "name a directory"),
            ({"fill": 1}, "fill is 1, of type int; expected a path, or True, False", "leave out fill"),
            ({"fill": None}, "fill is None", "leave out fill"),
            ({"tokenizer": "bert"}, "tokenizer is 'bert', of type str", "AutoTokenizer.from_pretrained('bert')"),
            ({"tokenizer": object()}, "of type object; expected a tokenizer", "AutoTokenizer.from_pretrained"),
            ({"tokenizer": "bert", "budget": None, "database": "d"}, "tokenizer is 'bert'", "from_pretrained('bert')"),
            ({"max_bytes": "4 gallons"}, "max_bytes: '4 gallons' is not a size", "8GiB"),
            ({"max_bytes": "0"}, "max_bytes: '0' is no bytes at all", "8GiB"),
            ({"max_bytes": -1}, "max_bytes must be a whole number of bytes", "8GiB"),
            ({"budget": 1.5}, "budget must be a number from 0 on and below 1; got 1.5", "budget=0.01"),
            ({"budget": -0.1}, "budget must be a number from 0 on and below 1; got -0.1", "budget=0.01"),
            ({"budget": True}, "budget must be a number from 0 on and below 1; got True", "budget=0.01"),
            ({"budget": "1%"}, "budget must be a number from 0 on and below 1; got '1%'", "budget=0.01"),
            ({"confidence": None, "budget": 0.01}, "confidence must be a number between 0 and 1", "confidence=0.95"),
            ({"min_cosine": 2}, r"min_cosine must be a number in \[-1, 1\]", "min_cosine=0.98"),
            ({"answer": "best"}, "answer must be one of auto, class, spans, score, mean, cls", "a function"),
            ({"near": "1"}, "near must be a whole number of tokens", "near=1"),
            ({"most_moved": -1}, "most_moved must be a whole number of tokens", "most_moved=1"),
            ({"threshold": "high", "reuse": "rows", "budget": 0.1}, "a threshold is one share of", "threshold=0.5"),
            ({"reuse": "columns"}, "one of auto, maps, rows, prefix, local, none; got", "leave out reuse"),
            ({"linear": "int4"}, "linear must be one of auto, exact, int8", "leave out linear"),
            ({"lookup": "token"}, "lookup must be one of None, layer, sequence", "leave out lookup"),
            ({"fetch": "x"}, "fetch must be one of auto", "leave out fetch"),
            ({"residency": "x"}, "residency must be one of page-cache, hugepages", "leave out residency"),
        ],
    )  # fmt: skip
    def test_a_wrong_value_is_named(self, model: Any, given: dict[str, Any], said: str, hint: str) -> None:
        assert hint in refused(ArgumentError, said, lambda: memoize(model, **given))
        assert is_bare(model)

    @pytest.mark.parametrize("given", [{"database": 5}, {"fill": None}, {"tokenizer": "bert"}])
    def test_a_wrong_type_is_a_type_error_too(self, model: Any, given: dict[str, Any]) -> None:
        with pytest.raises(ArgumentTypeError) as caught:
            memoize(model, **given)
        assert isinstance(caught.value, TypeError | ValueError)

    @pytest.mark.parametrize("given", ["all-MiniLM-L6-v2", Path("models/own")])
    @pytest.mark.parametrize("call", [memoize, unmemoize])
    def test_a_name_in_place_of_a_model_says_how_to_load_it(self, call: Callable[[Any], Any], given: Any) -> None:
        hint = refused(AttmemoError, "is a name, not a model", lambda: call(given))
        assert f"SentenceTransformer('{given}')" in hint

    @pytest.mark.parametrize("given", [None, 5, nn.Linear(2, 2), nn.Sequential(), hf.BertConfig()])
    def test_what_holds_no_model_is_named(self, given: Any) -> None:
        refused(AttmemoError, f"{type(given).__name__} holds no transformers model", lambda: memoize(given))

    def test_a_class_in_place_of_a_model_is_named(self) -> None:
        refused(AttmemoError, "the class BertModel holds no transformers model", lambda: memoize(hf.BertModel))

    @pytest.mark.parametrize("given", ["", 5, None])
    def test_a_database_is_opened_by_its_path_alone(self, given: Any) -> None:
        with pytest.raises((ArgumentError, TypeError)):
            Database(given)

    def test_the_working_directory_is_never_read_by_an_empty_text(
        self, bert_database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(bert_database)
        refused(ArgumentError, "the working directory", lambda: Database(""))
        Database(".").close()

    def test_maps_of_different_shapes_are_named(self) -> None:
        refused(ArgumentError, "maps must share", lambda: similarity_score(torch.ones(2, 3, 3), torch.ones(2, 4, 4)))


MEMORY: dict[str, Any] = {"database": ":memory:", "budget": 0.01}


class TestTogether:
    """`memoize` and the settings of a service ask the same function."""

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"reuse": "maps", "linear": "int8"}, "linear='int8' is a setting of packed blocks; reuse='maps' has no"),
            (MEMORY | {"reuse": "maps"}, "database=':memory:' keeps rows; reuse='maps' serves none"),
            (MEMORY | {"reuse": "none"}, "database=':memory:' keeps rows; reuse='none' serves none"),
            (MEMORY | {"fill": "own"}, "database=':memory:' and fill='own' are two places for new records"),
            (MEMORY | {"fill": False}, "database=':memory:' begins with nothing, and fill=False keeps nothing"),
            (MEMORY | {"budget": None}, "budget=None is without a guard"),
            ({"fill": "own", "budget": None}, "budget=None is without a guard"),
            ({"budget": None}, "budget=None reuses records of a prepared database, and there is none"),
            ({"reuse": "rows"}, "reuse='rows' reuses rows of similar inputs, which can change answers; budget=0"),
            ({"database": ":memory:"}, "database=':memory:' reuses rows of similar inputs, which can change answers"),
            ({"fill": "own"}, "fill='own' reuses rows of similar inputs, which can change answers; budget=0 allows"),
            ({"fill": False, "budget": 0.01}, "reuse with nothing to read: fill=False keeps nothing"),
            ({"reuse": "rows", "fill": False, "budget": 0.01}, "reuse with nothing to read: fill=False keeps nothing"),
            ({"reuse": "maps", "budget": 0.01}, "a budget guards reuse of rows; maps have a threshold"),
            ({"fill": ":memory:"}, "fill=':memory:' is no directory"),
            ({"fill": "own", "reuse": "maps"}, "fill='own': a folder is filled with rows; reuse='maps' keeps none"),
            ({"fill": "own", "reuse": "none"}, "fill='own': a folder is filled with rows; reuse='none' keeps none"),
            ({"database": "db", "reuse": "none"}, "reuse='none' takes no database: it reuses nothing"),
            ({"database": "db", "reuse": "prefix"}, "reuse='prefix' keeps prefixes in memory, and reads no database"),
            ({"fill": "own", "reuse": "prefix"}, "reuse='prefix' keeps prefixes in memory; fill='own' does not"),
            ({"fill": False, "reuse": "prefix"}, "reuse='prefix' keeps prefixes in memory; fill=False does not"),
            ({"budget": 0.01, "reuse": "prefix"}, "reuse='prefix' changes no answer: there is nothing that a budget"),
            ({"budget": None, "reuse": "prefix"}, "reuse='prefix' changes no answer: there is nothing that a budget"),
            ({"near": 2, "reuse": "prefix"}, "threshold, near and most_moved are settings of similar inputs; reuse="),
            ({"database": "db", "reuse": "local"}, "reuse='local' keeps local rows in memory, and reads no database"),
            ({"budget": 0.01, "reuse": "local"}, "reuse='local' changes no answer: there is nothing that a budget"),
        ],
    )  # fmt: skip
    def test_what_makes_no_sense_is_refused_before_a_model_is_loaded(
        self, model: Any, given: dict[str, Any], said: str
    ) -> None:
        refused(ArgumentError, said, lambda: memoize(model, **given))
        refused(ArgumentError, said, lambda: Settings("a model", **given))
        assert is_bare(model)
        assert not Path("own").exists()

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ({"reuse": "none", "threshold": 0.5}, "reuse='none' takes no threshold"),
            ({"reuse": "none", "threshold": torch.full([3], 0.5)}, "reuse='none' takes no threshold"),
            ({"reuse": "none", "near": 2}, "near and most_moved are settings of rows; reuse='none' has none"),
            ({"reuse": "maps", "most_moved": 3}, "near and most_moved are settings of rows; reuse='maps' has none"),
            (MEMORY | {"reuse": "rows", "lookup": "layer"}, "lookup='layer' and fetch are settings of maps; reuse='"),
            ({"reuse": "prefix", "fetch": "copy"}, "lookup='layer' and fetch are settings of maps; reuse='prefix'"),
            (MEMORY | {"fetch": "copy"}, "lookup='layer' and fetch are settings of maps; reuse='rows'"),
        ],
    )  # fmt: skip
    def test_settings_of_another_kind_of_reuse_are_refused(
        self, model: Any, given: dict[str, Any], said: str
    ) -> None:
        refused(ArgumentError, said, lambda: memoize(model, **given))
        assert is_bare(model)

    @pytest.mark.parametrize(
        ("reuse", "budget"),
        [("auto", 0), ("auto", 0.01), ("maps", 0), ("rows", 0.01), ("rows", None), ("none", 0), ("none", 0.01),
         ("prefix", 0), ("local", 0)],
    )
    def test_defaults_go_together(self, reuse: str, budget: float | None) -> None:
        check_together(reuse=reuse, budget=budget)
        Settings("a model", reuse=reuse, budget=budget)  # type: ignore[arg-type]


class TestSizes:
    @pytest.mark.parametrize(
        ("given", "expected"),
        [(None, None), (0, 0), (123, 123), ("4GiB", 4 << 30), ("500 MB", 500_000_000), ("1.5k", 1536)],
    )
    def test_bytes_are_a_number_or_a_text(self, given: Any, expected: int | None) -> None:
        assert bytes_of(given) == expected

    def test_options_and_arguments_are_read_by_one_parser(self) -> None:
        for text in ("8GiB", "500MB", "1.5g", ".5 KiB", "7b"):
            assert parse_option(text) == parse_size(text) == bytes_of(text)

    @pytest.mark.parametrize("given", ["", "GiB", "-1", "1e9", "4 GiB more", "5 i", True, 1.5, b"4GiB", [4]])
    def test_what_is_no_size_is_refused(self, given: Any) -> None:
        refused(ArgumentError, "max_bytes", lambda: bytes_of(given))

    def test_a_bound_is_kept_that_was_given_as_a_text(self, model: Any, tmp_path: Path) -> None:
        try:
            memoize(model, fill=tmp_path / "own", max_bytes="3 MiB", budget=0.01)
            assert model.attmemo.engine.reuse.store.pool.max_bytes == 3 << 20
        finally:
            unmemoize(model)


class TestHints:
    def test_a_database_that_does_not_exist_says_how_to_begin_one(self, model: Any, tmp_path: Path) -> None:
        new = tmp_path / "new"
        hint = refused(DatabaseNotFoundError, "new does not exist", lambda: memoize(model, database=new))
        assert "budget=0.01 (attmemo serve: --budget 0.01) begins one there" in hint
        maps = refused(DatabaseNotFoundError, "new does not exist", lambda: memoize(model, database=new, reuse="maps"))
        assert maps.startswith(f"attmemo build-database --output {new}")
        assert not new.exists()

    @pytest.mark.parametrize("name", ["OPT", "GPT-2"])
    def test_a_family_without_packed_blocks_says_so(self, name: str) -> None:
        model, said = FAMILIES[name].make(), r"this family \([\w-]+\) has no packed blocks; only maps"
        for given in ({}, {"reuse": "none"}, MEMORY):
            refused(AttmemoError, said, lambda given=given: memoize(model, **given))  # type: ignore[misc]
        assert is_bare(model)

    @pytest.mark.parametrize("wanted", ["output_hidden_states", "output_attentions"])
    @pytest.mark.parametrize("given", [{"reuse": "none"}, MEMORY])
    def test_a_setting_that_keeps_every_call_exact_is_named(self, wanted: str, given: dict[str, Any]) -> None:
        model = FAMILIES["BERT"].make()
        model.set_attn_implementation("eager")  # type: ignore[operator]
        setattr(model.config, wanted, True)
        hint = refused(AdapterCheckError, rf"config\.{wanted}", lambda: memoize(model, **given))
        assert f"model.config.{wanted} = False" in hint
        assert is_bare(model)

    def test_hooks_inside_of_the_blocks_are_named(self) -> None:
        model = FAMILIES["BERT"].make()
        model.encoder.layer[0].register_forward_hook(lambda *_: None)  # type: ignore[union-attr, index]
        said = "a module inside of the blocks has hooks"
        assert "undo that" in refused(AdapterCheckError, said, lambda: memoize(model, reuse="none"))


def test_nothing_is_left_in_the_working_directory(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refusals: tuple[dict[str, Any], ...] = (
        {"database": ""}, {"fill": ""}, {"fill": "own", "budget": None}, {"fill": "own"},
        {"fill": "own", "budget": 0.01, "tokenizer": "x"}, {"database": "own", "budget": 0.01, "tokenizer": "x"},
    )  # fmt: skip
    for given in refusals:
        with pytest.raises(ArgumentError):
            memoize(model, **given)
    assert not os.listdir(tmp_path)
