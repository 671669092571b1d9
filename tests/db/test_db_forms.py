"""What is stored is what is read, within what the form promises; and a compact database serves like any other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from databases import add_maps
from hypothesis import given, settings
from hypothesis import strategies as st

from attmemo import Database, memoize
from attmemo.db.encodings import STORAGE, TYPES, length_of, pack, unpack
from attmemo.db.slot_kinds import SlotKind
from attmemo.embed.similarity import similarity_score
from attmemo.embed.training import TrainOptions
from attmemo.errors import DatabaseCorruptError, DatabaseError
from attmemo.profiler.build import BuildOptions, BuildResult, build_database
from attmemo.profiler.models import collate, load_model, tokenize
from attmemo.profiler.train import train_database


def softmaxed(heads: int, length: int, sharpness: float, causal: bool, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(heads, length, length, generator=generator)
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
    return scores.softmax(-1)


@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from(sorted({maps for maps, _ in STORAGE.values()})),
    causal=st.booleans(),
    heads=st.integers(1, 4),
    length=st.integers(1, 50),
    sharpness=st.floats(0.0, 12.0),
    seed=st.integers(0, 99),
)
def test_a_map_comes_back_as_it_was_within_the_rounding_of_its_form(
    name: str, causal: bool, heads: int, length: int, sharpness: float, seed: int
) -> None:
    apm = softmaxed(heads, length, sharpness, causal, seed)
    stored = pack(apm, name, causal)
    shape = (heads, "n(n+1)/2") if causal else (heads, "n", "n")
    assert tuple(stored.shape) == SlotKind("map", 1, name, shape).shape_for(length)
    assert length_of(tuple(stored.shape)) == length
    assert stored.dtype == TYPES[name]
    back = unpack(stored)
    loss = 1.0 - float(similarity_score(apm, back))
    assert loss <= {"float32": 1e-6, "float16": 1e-3, "bfloat16": 5e-3, "uint8": 1e-2}[name]
    if name == "uint8":
        assert torch.allclose(back.sum(-1), torch.ones(heads, length), atol=1e-5)
    if causal:
        assert not bool(back.triu(1).any())


def test_a_row_without_probability_reads_as_no_number_and_not_as_a_guess() -> None:
    apm = torch.eye(4)[None].clone()
    apm[0, 2] = 0.0
    back = unpack(pack(apm, "uint8", False))
    assert bool(back[0, 2].isnan().all())
    assert torch.equal(back[0, [0, 1, 3]], apm[0, [0, 1, 3]])


@pytest.fixture(scope="module", params=["float16", "uint8"])
def compact(request: Any, tiny_bert: str, service_log: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained database that keeps the first layer's hidden states only."""
    path = tmp_path_factory.mktemp("compact") / request.param
    options = BuildOptions(max_length=48, storage=request.param, inputs="first")
    build_database(load_model(tiny_bert), [service_log], path, options)
    train_database(path, TrainOptions(steps=10))
    return path


class TestCompactDatabases:
    def test_stored_texts_asked_again_are_served_nearly_as_they_were(
        self, compact: Path, tiny_bert: str, log_lines: list[str]
    ) -> None:
        loaded = load_model(tiny_bert)
        inputs = collate(loaded, tokenize(loaded, log_lines[:12], 48))
        with torch.inference_mode():
            exact = loaded.model(**inputs).logits
            for fetch in ("auto", "direct", "map", "view", "copy"):
                model: Any = memoize(loaded.model, 0.0, compact, gate=False, fetch=fetch)  # type: ignore[arg-type]
                given = model(**inputs).logits
                assert model.attmemo.stats()["hit_rate"] == 1.0
                assert torch.allclose(given, exact, atol=2e-2)

    def test_a_lookup_in_every_layer_is_refused_with_what_to_do(self, compact: Path, tiny_bert: str) -> None:
        with pytest.raises(DatabaseError, match=r"first layer only[\s\S]*--inputs all"):
            memoize(load_model(tiny_bert).model, 0.5, compact, lookup="layer")

    def test_every_checksum_holds_and_resuming_adds_nothing(
        self, compact: Path, tiny_bert: str, service_log: Path
    ) -> None:
        with Database(compact) as database:
            assert list(database.check()) == []
            storage = database.manifest.storage
        again = BuildOptions(max_length=48, storage=storage, inputs="first")
        assert build_database(load_model(tiny_bert), [service_log], compact, again).added == 0

    def test_other_layers_than_before_are_refused(self, compact: Path, tiny_bert: str, service_log: Path) -> None:
        options = BuildOptions(max_length=48, storage=compact.name, inputs="all")
        loaded = load_model(tiny_bert)
        with pytest.raises(DatabaseError, match="inputs"):
            build_database(loaded, [service_log], compact, options)


def test_eight_bits_hold_four_times_the_sequences_of_float32(
    tiny_bert: str, service_log: Path, tmp_path: Path
) -> None:
    """With the padding between slots; a file's header of a page counts little where there are many."""
    sizes = {}
    for storage in ("float32", "uint8"):
        path = tmp_path / storage
        options = BuildOptions(max_length=48, storage=storage, limit=40)
        build_database(load_model(tiny_bert), [service_log], path, options)
        with Database(path) as database:
            sizes[storage] = sum(c.stride * c.slots for c in database.manifest.classes) / len(database)
    assert sizes["float32"] >= 4 * sizes["uint8"]


class TestAdmission:
    def test_what_is_stored_already_is_not_stored_again(
        self, tiny_bert: str, log_lines: list[str], tmp_path: Path
    ) -> None:
        twice = tmp_path / "twice.log"
        twice.write_text("\n".join([*log_lines[:30], *log_lines[:30]]) + "\n")
        loaded = load_model(tiny_bert)
        found = build_database(loaded, [twice], tmp_path / "db", BuildOptions(max_length=48, admit=0.999))
        assert found.records <= 30
        assert found.alike >= 30
        assert found.records + found.alike == 60

    def test_a_build_in_two_goes_remembers_what_the_first_one_stored(
        self, tiny_bert: str, log_lines: list[str], tmp_path: Path
    ) -> None:
        loaded, options = load_model(tiny_bert), BuildOptions(max_length=48, admit=0.999)
        for name in ("first.log", "second.log"):
            (tmp_path / name).write_text("\n".join([*log_lines[:20], *([] if name[0] == "f" else ["x 1"])]) + "\n")
        before = build_database(loaded, [tmp_path / "first.log"], tmp_path / "db", options)
        after = build_database(loaded, [tmp_path / "second.log"], tmp_path / "db", options)
        assert after.records - before.records == after.added == 1
        assert after.alike == 20

    def asked_of_the_model(
        self, monkeypatch: pytest.MonkeyPatch, model: str, log: Path, output: Path, **options: Any
    ) -> tuple[BuildResult, int]:
        """What a build comes to, and how many sequences the model was run over."""
        from attmemo.profiler.map_recorder import Capture

        run, asked = Capture.run, []

        def counted(self: Capture, inputs: Any) -> Any:
            asked.append(len(inputs["input_ids"]))
            return run(self, inputs)

        with monkeypatch.context() as patch:
            patch.setattr(Capture, "run", counted)
            found = build_database(load_model(model), [log], output, BuildOptions(max_length=48, **options))
        return found, sum(asked)

    def test_what_was_left_out_is_not_asked_of_the_model_again(
        self, tiny_bert: str, log_lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log, output = tmp_path / "a.log", tmp_path / "db"
        log.write_text("\n".join([*log_lines[:20], *log_lines[:20]]) + "\n")
        ask = lambda **options: self.asked_of_the_model(monkeypatch, tiny_bert, log, output, **options)  # noqa: E731
        first, asked = ask(admit=0.99)
        assert asked == 40
        assert first.alike >= 20
        again, asked = ask(admit=0.99)
        assert (asked, again.alike, again.skipped) == (0, first.alike, first.records)
        assert ask(admit=0.9)[1] == 0  # what is alike at .99 is so at .9
        assert ask(admit=0.995)[1] == first.alike  # but not the other way round
        assert ask(admit=0.995)[1] == 0
        note = output / "left-out.json"
        good = note.read_bytes()
        for bad in (b"", b"[]", good[:-9], good.replace(b"rows", b"rose"), good.replace(b"base", b"bank"), b"\xff"):
            note.write_bytes(bad)
            assert ask(admit=0.99)[1] == first.alike, bad
        everything, asked = ask()
        assert (asked, everything.added) == (first.alike, first.alike)

    def test_a_text_left_out_for_a_record_that_was_lost_is_stored_again(
        self, tiny_bert: str, log_lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A note of unpublished work would leave out rows for which no record stands."""
        from attmemo.db import DatabaseWriter

        log, output = tmp_path / "a.log", tmp_path / "db"
        log.write_text("\n".join([*log_lines[:10], *log_lines[:10]]) + "\n")
        with monkeypatch.context() as patch:

            def fail(self: DatabaseWriter, **changes: Any) -> None:
                raise OSError("the machine went down here")

            patch.setattr(DatabaseWriter, "publish", fail)
            with pytest.raises(OSError, match="went down"):
                self.asked_of_the_model(monkeypatch, tiny_bert, log, output, admit=0.99)
        assert not (output / "left-out.json").exists()
        found, asked = self.asked_of_the_model(monkeypatch, tiny_bert, log, output, admit=0.99)
        assert asked == 20
        assert found.records + found.alike == 20

    def test_nothing_like_it_is_stored(self, tiny_bert: str, log_lines: list[str], tmp_path: Path) -> None:
        (tmp_path / "a.log").write_text("\n".join(log_lines[:25]) + "\n")
        options = BuildOptions(max_length=48, admit=1.0)
        found = build_database(load_model(tiny_bert), [tmp_path / "a.log"], tmp_path / "db", options)
        with Database(tmp_path / "db") as database:
            distinct = {database.slot("map", 0, r).numpy().tobytes() for r in range(len(database))}
        assert len(distinct) == found.records


def test_a_causal_model_whose_attention_looks_ahead_is_refused(tmp_path: Path) -> None:
    from attmemo.db import DatabaseWriter, ModelInfo, Provenance

    info = ModelInfo("m", "x", "causal", 1, 2, 4, "float32", 16, "0" * 64, {}, None)
    hidden = torch.zeros(5, 4)
    for storage in STORAGE:
        with DatabaseWriter(tmp_path / storage, info, storage) as writer:
            writer.add_source("s", "d")
            with pytest.raises(DatabaseCorruptError, match="looks ahead"):
                add_maps(writer, [softmaxed(2, 5, 1.0, False, 0)], [hidden], Provenance(0, 0, 0))
            apm = softmaxed(2, 5, 1.0, True, 0)
            record = add_maps(writer, [apm], [hidden], Provenance(0, 1, 0))
            assert float(similarity_score(writer.maps(record)[0], apm)) > 0.98
            writer.publish()
        with Database(tmp_path / storage) as database:
            assert float(similarity_score(database.map(0, record), apm)) > 0.98
            assert database.manifest.classes[1].layout.shape == (2, 15)
            assert list(database.check()) == []
