"""Upkeep of a database that fills itself, from the command line: what was forgotten is gone, and nothing else."""

from __future__ import annotations

import datetime
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import attmemo, refuse, succeed
from databases import fill
from pools import MODEL, body_of, damage, entry, hit, is_right, opened, tokens_of
from transformers import PreTrainedTokenizerFast

from attmemo.db import Database
from attmemo.db.folder import ASIDE
from attmemo.db.namespaces import bytes_in, folder_of, write_name
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.history import Work
from attmemo.db.pools.pool import Entry
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import DatabaseNotFoundError
from attmemo.loading import load_tokenizer, tokenizer_digest


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    """Twenty records, some of them used, the first five older than the others."""
    path = tmp_path / "pool"
    with opened(path, 1 << 24) as pool:
        old = [entry(number) for number in range(5)]
        pool.add([Entry(one.tokens, one.body, one.note, made=1_000_000.0) for one in old])
        pool.add([entry(number) for number in range(5, 20)])
        for number in (1, 7, 7):
            kept = pool.records[number]
            hit(kept)
    return path


def found(*words: str | Path) -> dict[str, Any]:
    """The result of a command, as JSON."""
    result: dict[str, Any] = json.loads(succeed(*words, "--quiet", "--json", "-"))
    return result


def identities(path: Path) -> list[int]:
    """What records stand for; their bytes are right."""
    with opened(path, fills=False) as pool:
        assert all(is_right(kept) and kept.is_sound for kept in pool.records.values())
        return sorted(int(kept.tokens[0]) for kept in pool.records.values())


def test_inspect_shows_records_bytes_and_uses(folder: Path) -> None:
    shown = found("inspect", folder)
    assert (shown["records"], shown["hits"], shown["counts"]) == (20, 3, {"added": 20})
    assert sum(age["records"] for age in shown["ages"]) == 20
    assert shown["bytes"] >= shown["record_bytes"] > 0
    assert "it fills itself" in succeed("inspect", folder)


def test_check_names_a_damaged_record_and_says_that_it_is_not_served(folder: Path) -> None:
    assert found("check", folder)["ok"]
    with opened(folder, fills=False) as pool:
        damage(pool.records[3])
    result = attmemo("check", folder)
    assert result.exit_code == 1
    assert "record 3" in result.stdout
    assert "1 finding in 20 records" in result.stderr


def test_compact_keeps_every_record_and_its_uses(folder: Path) -> None:
    before = identities(folder)
    assert found("compact", folder)["records"] == 20
    assert identities(folder) == before
    assert found("inspect", folder)["hits"] == 3


def blocks(path: Path) -> int:
    """Bytes that a folder takes on the disk."""
    return sum(512 * file.stat().st_blocks for file in path.rglob("*"))


def contents(path: Path) -> dict[Path, tuple[int, bytes]]:
    """Files with their times, but for those that are locks."""
    files = [file for file in path.rglob("*") if file.is_file() and "lock" not in file.name]
    return {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.fixture(name="large")
def _large(tmp_path: Path) -> Path:
    """Thirty records of 200 kB, as a model's are, in segments with gaps."""
    path = tmp_path / "large"
    with opened(path, 16 << 20) as pool:
        pool.add([entry(number, 200_000) for number in range(30)])
    return path


def test_compact_makes_a_folder_smaller_and_the_second_time_leaves_it(large: Path) -> None:
    before = blocks(large)
    said = found("compact", large)
    assert said["bytes"] < said["bytes_before"]
    after = blocks(large)
    assert after < before
    assert said["bytes"] < 30 * 200_000 * 1.03, "there are no gaps"
    written = contents(large)
    again = found("compact", large)
    assert again["bytes"] == again["bytes_before"] == said["bytes"]
    assert contents(large) == written
    assert identities(large) == list(range(30))


def test_forget_makes_a_folder_smaller_each_time(large: Path) -> None:
    """Also its catalogue: what is written over is not written behind."""
    years = range(2001, 2007)
    with opened(large, 16 << 20) as pool:
        for year in years:
            one = entry(year, 200_000)
            pool.add([Entry(one.tokens, one.body, made=datetime.datetime(year, 1, 1).timestamp())])
    sizes = [blocks(large)]
    for year in years:
        assert found("forget", large, "--before", f"{year}-06-01")["forgotten"] == 1
        sizes.append(blocks(large))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < sizes[0] - 6 * 200_000
    assert identities(large) == list(range(30))


def test_forget_that_means_no_record_changes_nothing_and_says_so(folder: Path) -> None:
    (folder / "guard").mkdir()
    (folder / "guard" / "0.safetensors").write_bytes(b"learned")
    before = contents(folder)
    assert found("forget", folder, "--before", "1970-01-02") == {
        "path": str(folder), "forgotten": 0, "guards": 0, "ok": True
    }  # fmt: skip
    assert "nothing was changed" in succeed("forget", folder, "--before", "1970-01-02")
    assert contents(folder) == before


def test_forget_that_was_killed_is_ended_by_the_next_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are gone, their tokens still lie in free pages: a call that means no record writes over these."""
    secret = tokens_of(2, 3000).tobytes()
    with monkeypatch.context() as patch:
        patch.setattr(SharedPool, "scrub", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert attmemo("forget", folder, "--before", "2001-01-01").exit_code == 130
    (folder / "guard").mkdir()
    (folder / "guard" / "0.safetensors").write_bytes(b"learned meanwhile")
    data = folder / "catalogue" / "data.mdb"
    assert secret in data.read_bytes(), "the test does not see what it looks for"
    assert found("forget", folder, "--before", "2001-01-01")["guards"] == 1
    assert secret not in data.read_bytes()
    assert identities(folder) == list(range(5, 20))


def test_merge_adds_what_the_records_take_and_no_more(large: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    with opened(other, 16 << 20) as pool:
        pool.add([entry(number, 200_000) for number in range(25, 40)])
    before = blocks(large)
    assert found("merge", large, other)["added"] == 10
    assert 0 < blocks(large) - before < 10 * 200_000 * 1.05
    assert identities(large) == list(range(40))


def test_forget_before_a_moment_takes_out_what_is_older(folder: Path) -> None:
    (folder / "guard").mkdir()
    (folder / "guard" / "0.safetensors").write_bytes(b"")
    secret = body_of(tokens_of(2, 3000)).tobytes()[:32]
    assert any(secret in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert found("forget", folder, "--before", "2001-01-01") == {
        "path": str(folder), "forgotten": 5, "guards": 1, "ok": True
    }  # fmt: skip
    assert identities(folder) == list(range(5, 20))
    assert not any(secret in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    assert found("forget", folder, "--before", "2001-01-01")["forgotten"] == 0


def test_forget_a_text_takes_out_the_records_that_hold_its_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate(["[UNK]", "john", "jane", "doe", "logged", "in"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    texts = [[2, 3, 4, 5], [1, 3, 4, 5], [4, 5, 2, 3 + (1 << 24)]]
    with opened(tmp_path / "pool") as pool:
        pool.add([Entry(np.array(ids, np.int32), np.zeros(64, np.uint8)) for ids in texts])
    words_of = ("--model", tmp_path / "model")
    assert found("forget", tmp_path / "pool", "--text", "jane doe", *words_of)["forgotten"] == 2
    with opened(tmp_path / "pool", fills=False) as pool:
        assert [kept.tokens.tolist() for kept in pool.records.values()] == [[1, 3, 4, 5]]
    result = attmemo("forget", tmp_path / "pool", "--text", "unheard", *words_of)
    assert result.exit_code != 0
    assert "no token" in result.stderr

    other = Filling.of(replace(MODEL, tokenizer="0" * 64), "float32")
    with closing(SharedPool(tmp_path / "other", 1 << 20, other)) as pool:
        pool.add([Entry(np.array(texts[0], np.int32), np.zeros(64, np.uint8))])
    assert "another tokenizer" in refuse("forget", tmp_path / "other", "--text", "jane doe", *words_of)
    assert found("inspect", tmp_path / "other")["records"] == 1
    assert found("forget", tmp_path / "other", "--text", "jane doe", *words_of, "--any-tokenizer")["forgotten"] == 1
    own = Filling.of(replace(MODEL, tokenizer=tokenizer_digest(load_tokenizer(str(tmp_path / "model")))), "float32")
    with closing(SharedPool(tmp_path / "own", 1 << 20, own)) as pool:
        pool.add([Entry(np.array(texts[0], np.int32), np.zeros(64, np.uint8))])
    assert found("forget", tmp_path / "own", "--text", "jane doe", *words_of)["forgotten"] == 1


def test_merge_adds_what_is_not_there_with_its_age_and_uses(folder: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "other") as other:
        other.add([entry(number) for number in (3, 30)])
    assert found("merge", tmp_path / "other", folder)["added"] == 19
    assert identities(tmp_path / "other") == [*range(20), 30]
    shown = found("inspect", tmp_path / "other")
    assert shown["hits"] == 3
    assert found("forget", tmp_path / "other", "--before", "2001-01-01")["forgotten"] == 4, "one was there before"


def in_namespace(folder: Path, name: str, numbers: range) -> Path:
    """A namespace with these records, the first of them old."""
    own = folder_of(folder, name)
    with opened(own, 1 << 24) as pool:
        first = entry(numbers[0])
        pool.add([Entry(first.tokens, first.body, first.note, made=1_000_000.0)])
        pool.add([entry(number) for number in numbers[1:]])
    write_name(own, name)
    return own


def test_inspect_names_namespaces_and_check_reads_them(folder: Path) -> None:
    own = in_namespace(folder, "a", range(30, 34))
    assert found("inspect", folder)["namespaces"] == {"a": bytes_in(own)}
    assert "namespace a" in succeed("inspect", folder)
    assert found("check", folder)["records"] == 24
    with opened(own, fills=False) as pool:
        damage(pool.records[2])
    result = attmemo("check", folder, "--quiet", "--json", "-")
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)["findings"]
    assert finding["where"].startswith(f"namespaces/{own.name}/segments/")


def test_forget_takes_records_out_of_namespaces_too(folder: Path) -> None:
    own, other = in_namespace(folder, "a", range(30, 34)), in_namespace(folder, "b", range(40, 44))
    assert found("forget", folder, "--namespace", "b", "--before", "2001-01-01")["forgotten"] == 1
    assert (identities(folder), identities(own), identities(other)) == (
        list(range(20)), [30, 31, 32, 33], [41, 42, 43]
    )  # fmt: skip
    assert found("forget", folder, "--before", "2001-01-01")["forgotten"] == 6
    assert (identities(folder), identities(own)) == (list(range(5, 20)), [31, 32, 33])


def test_forget_a_namespace_removes_all_of_it_and_nothing_else(folder: Path) -> None:
    own, other = in_namespace(folder, "a", range(30, 34)), in_namespace(folder, "b", range(40, 44))
    assert found("forget", folder, "--namespace", "a")["namespace"] == "a"
    assert not own.exists()
    assert (identities(folder), identities(other)) == (list(range(20)), [40, 41, 42, 43])
    assert "no namespace 'c'" in refuse("forget", folder, "--namespace", "c")


@pytest.mark.parametrize("words", [("forget",), ("forget", "--text", "x"), ("forget", "--before", "soon")])
def test_forget_without_saying_what_is_refused(folder: Path, words: tuple[str, ...]) -> None:
    result = attmemo(words[0], folder, *words[1:])
    assert result.exit_code == 2
    assert identities(folder) == list(range(20))


def test_a_folder_that_is_no_such_database_is_refused_with_a_next_step(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "fill=" in refuse("compact", tmp_path / "empty")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (("tune", "DB", "--data", "FILE"), "tune is for maps"),
        (("train-embedder", "DB"), "train-embedder is for maps"),
        (("evaluate", "DB", "--data", "FILE"), "evaluate is for prepared databases"),
        (("build-database", "--model", "MODEL", "--data", "FILE", "--output", "DB"), "no builder adds to it"),
    ],
)
def test_a_command_for_prepared_databases_says_what_the_folder_is(
    folder: Path, command: tuple[str, ...], says: str
) -> None:
    data = folder.parent / "texts.log"
    data.write_text("one\ntwo\n")
    before = contents(folder)
    words = [{"DB": str(folder), "FILE": str(data)}.get(word, word) for word in command]
    said = refuse(*words)
    assert "fills itself" in said
    assert says in said
    assert contents(folder) == before


def test_the_library_says_so_too(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DatabaseNotFoundError, match="keeps rows; a database of maps is asked for"):
        Database(folder)
    fill(tmp_path / "maps")
    for command in (("compact",), ("forget", "--before", "2001-01-01")):
        assert "is no database of rows: it has maps" in refuse(command[0], tmp_path / "maps", *command[1:])


def test_what_was_set_aside_goes_with_what_is_forgotten_and_else_is_named(folder: Path) -> None:
    """It cannot be searched."""
    (folder / ASIDE / "then").mkdir(parents=True)
    (folder / ASIDE / "then" / "0000000000").write_bytes(b"damaged")
    assert "7 bytes that were found damaged" in succeed("inspect", folder)
    assert "cannot be searched" in succeed("forget", folder, "--before", "1970-01-02")
    assert (folder / ASIDE / "then" / "0000000000").exists()
    assert "is removed too" in succeed("forget", folder, "--before", "2001-01-01")
    assert not (folder / ASIDE).exists()


def test_inspect_shows_what_requests_cost_and_why_records_went(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.png"
    assert "no request was noted yet" in refuse("inspect", folder, "--plot", file)
    with opened(folder, 1 << 18) as pool:
        pool.note(Work(40, 400, 300))
        pool.note(Work(60, 600, 100))
        for number in range(100, 130):
            pool.add([entry(number)])
            hit(pool.records[pool._next - 1])
        pool.add([entry(number) for number in range(200, 400)])
    shown = found("inspect", folder, "--plot", file)
    assert sum(part["requests"] for part in shown["history"]) == 100
    assert sum(part["rows"] for part in shown["history"]) == 400
    text = succeed("inspect", folder)
    assert "40 %" in text
    assert "not used since they were written" in text
    assert shown["counts"]["evicted"] > shown["counts"].get("evicted_used", 0)
    assert file.read_bytes().startswith(b"\x89PNG")
