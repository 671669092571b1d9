"""A database that fills itself: what was computed serves the next request, and the next process."""

from __future__ import annotations

import copy
import errno
import gc
import os
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from packed_models import MODELS, NEAR, batch, gap, rows_database, valid
from pools import refuse

from attmemo import DatabaseError, StaleDatabaseError, UnsupportedModelError, memoize, unmemoize
from attmemo.db import cache_directory, filling_path
from attmemo.db.environments import ENVIRONMENTS
from attmemo.db.files import storing
from attmemo.db.pools.filling import is_filling
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.fingerprint import fingerprint, model_fields

LENGTHS = [30, 20, 33, 16]
INPUTS = batch(LENGTHS, 3)


def filled(model: Any, folder: Any = True, **options: Any) -> Any:
    """A copy that fills a folder; always looked up, so that nothing depends on this machine's speed."""
    settings = {"reuse": "rows", "gate": False, "fill": folder, "max_bytes": 1 << 24, "budget": 0.01} | options
    return memoize(copy.deepcopy(model), **settings)


def answer(model: Any, inputs: Any = INPUTS) -> Any:
    """What the whole model gives, the first of its outputs."""
    with torch.inference_mode():
        return model(**inputs)[0]


def ask(model: Any, inputs: Any = INPUTS) -> Any:
    """The same, once all that was handed over is stored."""
    found = answer(model, inputs)
    assert model.attmemo.flush()
    return found


def apart(seen: Any, expected: Any, inputs: Any = INPUTS) -> float:
    """The greatest difference, at valid tokens."""
    return gap(seen, expected, valid(inputs) if seen.dim() == 3 else None)


def refused(*_: Any, **__: Any) -> Any:
    """What opening a folder to fill it ends with on a disk that is read only."""
    with storing(Path("own")):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def served(model: Any) -> int:
    """Answers that came from records so far."""
    return int(model.attmemo.stats()["reused"] + model.attmemo.stats()["repeated"])


@pytest.fixture(scope="module", name="bare", params=["BERT", "DeBERTa-v3", "ModernBERT"])
def _bare(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


class TestByItself:
    def test_auto_fills_a_database_in_the_cache_directory(
        self, bare: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = memoize(copy.deepcopy(bare), database="auto", gate=False, max_bytes=1 << 24, budget=0.01)
        assert model.attmemo.reuse == "rows"
        own = filling_path(fingerprint(model_fields(bare)))
        assert own.parent == cache_directory()
        assert is_filling(own)
        assert str(own) in caplog.text
        assert "attmemo forget" in caplog.text
        expected = ask(model)
        assert served(model) == 0
        assert model.attmemo.stats()["offered"] == {"kept": len(LENGTHS)}
        assert apart(ask(model), expected) <= NEAR
        assert served(model) == len(LENGTHS)
        unmemoize(model)
        caplog.clear()
        again = memoize(copy.deepcopy(bare), database="auto", gate=False, budget=0.01)
        assert "keeps tokens" not in caplog.text, "told once"
        assert apart(ask(again), expected) <= NEAR
        assert served(again) == len(LENGTHS), "from its first request on"

    def test_without_filling_records_are_only_read(self, bare: Any, tmp_path: Path) -> None:
        first = filled(bare, tmp_path / "own")
        expected = ask(first)
        unmemoize(first)
        model = memoize(copy.deepcopy(bare), database=tmp_path / "own", fill=False, gate=False, budget=0.01)
        assert apart(ask(model), expected) <= NEAR
        assert served(model) == len(LENGTHS)
        other = batch(LENGTHS, 9)
        ask(model, other)
        assert model.attmemo.stats()["records"] == len(LENGTHS)
        assert model.attmemo.stats()["offered"] == {}

    def test_a_damaged_database_is_an_error_for_a_model_that_only_reads(
        self, bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path))
        model = memoize(copy.deepcopy(bare), database="auto", gate=False, max_bytes=1 << 24, budget=0.01)
        ask(model)
        folder = Path(model.attmemo.stats()["folder"])
        unmemoize(model)
        (folder / "FILLING.json").write_text("{}")
        with pytest.raises(DatabaseError):
            memoize(copy.deepcopy(bare), database="auto", fill=False, budget=0.01)
        assert not list(folder.rglob("set-aside")), "nothing was changed"
        again = memoize(copy.deepcopy(bare), database="auto", gate=False, max_bytes=1 << 24, budget=0.01)
        ask(again)
        assert caplog.text.count("set aside") == 1
        assert again.attmemo.stats()["folder"] == str(folder)
        assert again.attmemo.stats()["records"] == len(LENGTHS)

    def test_a_family_without_blocks_is_refused_by_name_and_packed_by_nothing(self) -> None:
        model = FAMILIES["GPT-2"].make() if "GPT-2" in FAMILIES else FAMILIES["GPT2"].make()
        with pytest.raises(UnsupportedModelError):
            memoize(model, reuse="rows", budget=0.01)

    def test_a_model_whose_answers_cannot_be_compared_runs_packed(self, caplog: pytest.LogCaptureFixture) -> None:
        import transformers as hf

        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        config = hf.BertConfig(**sizes, vocab_size=120)
        torch.manual_seed(0)
        model = memoize(hf.BertForMaskedLM(config).eval(), budget=0.01)
        assert model.attmemo.reuse == "none"
        assert "logits (2, 11, 120) are no classes of sequences" in caplog.text

    def test_a_cache_directory_that_cannot_be_written_leaves_records_in_memory(
        self, bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("ATTMEMO_CACHE", str(tmp_path / "file"))
        model = memoize(copy.deepcopy(bare), database="auto", gate=False, budget=0.01)
        assert caplog.text.count("kept in memory only") == 1
        expected = ask(model)
        assert apart(ask(model), expected) <= NEAR
        assert served(model) == len(LENGTHS)


class TestShared:
    def test_a_model_that_nothing_holds_gives_its_folder_back(self, bare: Any, tmp_path: Path) -> None:
        model = filled(bare, tmp_path / "own")
        ask(model)
        pool = model.attmemo.engine.reuse.store.pool
        assert pool._key in ENVIRONMENTS._open
        key = pool._key
        del pool, model
        for _ in range(100):
            gc.collect()
            if key not in ENVIRONMENTS._open:
                break
            time.sleep(0.1)
        assert key not in ENVIRONMENTS._open

    def test_what_requests_cost_is_kept_with_the_records(self, bare: Any, tmp_path: Path) -> None:
        model = filled(bare, tmp_path / "own")
        for _ in range(3):
            ask(model)
        stats = model.attmemo.stats()
        unmemoize(model)
        with closing(SharedPool(tmp_path / "own", 1, fills=False)) as pool:
            (period,) = pool.history().periods
        assert period.work == (stats["sequences"], stats["tokens"], stats["rows_computed"])
        assert stats["sequences"] == 3 * len(LENGTHS)
        assert stats["tokens"] == 3 * sum(LENGTHS)

    def test_two_models_of_one_process_share_what_they_store(self, bare: Any, tmp_path: Path) -> None:
        one, other = filled(bare, tmp_path / "own"), filled(bare, tmp_path / "own")
        expected = ask(one)
        assert other.attmemo.flush()  # its thread looks for what others have stored
        assert apart(ask(other), expected) <= NEAR
        assert served(other) == len(LENGTHS)
        unmemoize(one)
        assert apart(ask(other), expected) <= NEAR
        assert served(other) == 2 * len(LENGTHS), "closing one leaves the other"

    def test_another_model_is_refused(self, bare: Any, tmp_path: Path) -> None:
        unmemoize(filled(bare, tmp_path / "own"))
        other = copy.deepcopy(bare)
        with torch.no_grad():
            next(p for p in other.parameters() if p.dim() == 2).add_(0.1)
        with pytest.raises(StaleDatabaseError):
            memoize(other, database=tmp_path / "own", reuse="rows", budget=0.01)

    def test_a_folder_that_fills_itself_takes_no_maps_and_no_second_folder(self, bare: Any, tmp_path: Path) -> None:
        unmemoize(filled(bare, tmp_path / "own"))
        with pytest.raises(ValueError, match="no maps"):
            memoize(copy.deepcopy(bare), database=tmp_path / "own", reuse="maps")
        with pytest.raises(ValueError, match="fills no other"):
            memoize(copy.deepcopy(bare), database=tmp_path / "own", fill=tmp_path / "other", budget=0.01)

    def test_it_needs_a_budget_unless_it_only_reads(self, bare: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="budget"):
            filled(bare, tmp_path / "own", budget=None)
        first = filled(bare, tmp_path / "own")
        expected = ask(first)
        unmemoize(first)
        model = memoize(copy.deepcopy(bare), database=tmp_path / "own", budget=None, fill=False, gate=False)
        assert apart(ask(model), expected) <= NEAR
        assert served(model) == len(LENGTHS)


class TestInFrontOfAPreparedOne:
    @pytest.fixture(name="prepared", params=["float32", "int8"])
    def _prepared(self, request: pytest.FixtureRequest, bare: Any, tmp_path: Path) -> Path:
        return rows_database(bare, [INPUTS], tmp_path / "prepared", request.param)

    def test_both_serve_and_only_the_folder_grows(self, bare: Any, prepared: Path, tmp_path: Path) -> None:
        before = {file: file.read_bytes() for file in prepared.rglob("*") if file.is_file()}
        own, other = tmp_path / "own", batch(LENGTHS, 9)
        model = memoize(
            copy.deepcopy(bare), database=prepared, fill=own, gate=False, max_bytes=1 << 24, min_cosine=-1.0,
            budget=0.01,
        )
        ask(model)
        whole = model.attmemo.engine.reuse.store.storage[1] == torch.float32
        assert model.attmemo.stats()["guard"]["done"] == {"repeated" if whole else "whole": len(LENGTHS)}
        ask(model, other)
        assert model.attmemo.stats()["records"] == len(LENGTHS)
        unmemoize(model)
        again = memoize(copy.deepcopy(bare), database=prepared, fill=own, gate=False, budget=0.01)
        assert again.attmemo.stats()["records"] == len(LENGTHS)
        assert len(again.attmemo.engine.reuse.store.index) == 2 * len(LENGTHS)
        after = {file: file.read_bytes() for file in before}
        assert {file for file in before if before[file] != after[file]} <= {prepared / "catalogue/lock.mdb"}

    def test_a_folder_of_another_storage_is_refused(self, bare: Any, prepared: Path, tmp_path: Path) -> None:
        unmemoize(filled(bare, tmp_path / "own", database=rows_database(bare, [INPUTS], tmp_path / "b", "bfloat16")))
        with pytest.raises(DatabaseError, match="fill another folder"):
            memoize(copy.deepcopy(bare), database=prepared, fill=tmp_path / "own", budget=0.01)


class TestTrouble:
    def test_a_full_disk_costs_no_answer_and_is_told_once(
        self, bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = filled(bare, tmp_path / "own")
        expected = answer(bare)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "posix_fallocate", full)
            for _ in range(3):
                assert apart(ask(model), expected) <= NEAR
        assert caplog.text.count("new records are not kept") == 1
        assert "the disk is full" in caplog.text
        assert served(model) == 0
        ask(model)
        assert model.attmemo.stats()["records"] == len(LENGTHS), "it goes on once there is room"

    @pytest.mark.parametrize("part", ["FILLING.json", "catalogue/data.mdb", "segments/*", "guard/*.safetensors"])
    def test_a_folder_with_a_cut_file_is_filled_on_and_that_is_told_once(
        self, bare: Any, tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = filled(bare, tmp_path / "own")
        expected = ask(first)
        unmemoize(first)
        (file,) = (tmp_path / "own").glob(part)
        os.truncate(file, 100)
        cut = file.read_bytes()
        caplog.clear()
        for _ in range(2):
            model = filled(bare, tmp_path / "own")
            assert apart(ask(model), expected) <= NEAR
            assert apart(ask(model), expected) <= NEAR
            assert model.attmemo.stats()["records"] == len(LENGTHS)
            assert served(model) > 0
            unmemoize(model)
        assert caplog.text.count("set aside") == 1
        assert str(file.parent if "data" in part else file) in caplog.text
        found = [one for one in (tmp_path / "own").rglob("*") if one.is_file() and one.stat().st_size == 100]
        assert [one.read_bytes() for one in found] == [cut], "it is kept"

    @pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS], ids=errno.errorcode.get)
    @pytest.mark.parametrize("call", ["mkdir", "fsync", "posix_fallocate"])
    def test_a_full_disk_at_the_start_costs_no_answer_and_is_told_once(
        self, bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
        call: str, code: int,
    ) -> None:  # fmt: skip
        """A new folder: records are kept in memory, and the next start makes it."""
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refuse(code))
            model = filled(bare, tmp_path / "own")
        assert [record.levelname for record in caplog.records if "in memory only" in record.message] == ["WARNING"]
        assert "keeps tokens" not in caplog.text
        assert model.attmemo.stats()["folder"] is None
        expected = answer(bare)
        for _ in range(2):
            assert apart(ask(model), expected) <= NEAR
        assert served(model) == len(LENGTHS)
        unmemoize(model)
        again = filled(bare, tmp_path / "own")
        ask(again)
        assert again.attmemo.stats()["folder"] == str(tmp_path / "own")
        assert again.attmemo.stats()["records"] == len(LENGTHS)

    def test_a_folder_on_a_disk_that_became_read_only_serves(
        self, bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        first = filled(bare, tmp_path / "own")
        expected = ask(first)
        unmemoize(first)
        with monkeypatch.context() as patched:
            patched.setattr("attmemo.db.aside.SharedPool", refused)
            model = filled(bare, tmp_path / "own")
        assert caplog.text.count("new records are not kept") == 1
        assert apart(ask(model), expected) <= NEAR
        assert served(model) == len(LENGTHS)
        other = batch(LENGTHS, 9)
        assert apart(ask(model, other), answer(bare, other), other) <= NEAR
        assert model.attmemo.stats()["records"] == len(LENGTHS)

    def test_a_folder_that_cannot_be_used_for_another_reason_is_refused_by_name(
        self, bare: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "own").mkdir()
        (tmp_path / "own" / "notes.txt").write_text("mine")
        with pytest.raises(DatabaseError, match="holds other files"):
            filled(bare, tmp_path / "own")

    def test_a_folder_that_is_taken_away_costs_no_answer(self, bare: Any, tmp_path: Path) -> None:
        import shutil

        model = filled(bare, tmp_path / "own")
        expected = ask(model)
        shutil.rmtree(tmp_path / "own")
        other = batch(LENGTHS, 9)
        assert apart(ask(model), expected) <= NEAR
        assert apart(ask(model, other), answer(bare, other), other) <= NEAR


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "1 room"])
def test_a_bound_that_is_no_number_of_bytes_is_refused(bare: Any, tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        filled(bare, tmp_path / "own", max_bytes=wrong)
