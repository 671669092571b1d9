"""`memoize` and `unmemoize`: which database serves which model, what is refused, and what a model is afterwards."""

from __future__ import annotations

import copy
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from handle_tools import Inputs, logits
from safetensors.torch import load_file
from torch import Tensor, nn

import attmemo
from attmemo import Database, DatabaseError, Memoization, StaleDatabaseError, UnsupportedModelError, memoize, unmemoize
from attmemo.db import DatabaseWriter
from attmemo.errors import AdapterCheckError, AttmemoError, DatabaseNotFoundError, EmbedderMissingError
from attmemo.profiler.build import BuildOptions, build_database
from attmemo.profiler.models import LoadedModel, collate, load_model, tokenize


def patched(model: nn.Module) -> list[str]:
    """Modules whose `forward` is not their class's."""
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


def is_bare(model: Any) -> bool:
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return not patched(model) and hooks == 0 and "attmemo" not in model.__dict__


def tuned(path: Path, **values: Any) -> None:
    """Give a database the outcome of a tuning run."""
    with Database(path) as database:
        manifest = database.manifest
    outcome = {"lookup": "sequence", "thresholds": [0.4, 0.6], "budget": 0.01, "certified": True} | values
    with DatabaseWriter(path, manifest.model, manifest.storage, manifest.settings) as writer:
        writer.publish(tuning=outcome)


class TestWhereTheDatabaseIsFound:
    def test_in_the_cache_by_the_models_fingerprint(
        self, model: Any, inputs: Inputs, bert_database: Path, deberta_database: Path, tmp_path: Path
    ) -> None:
        shutil.copytree(deberta_database, tmp_path / "cache" / "another")
        shutil.copytree(bert_database, tmp_path / "cache" / "ours")
        memoize(model, 0.0, gate=False)
        assert model.attmemo.database.path == tmp_path / "cache" / "ours"
        logits(model, inputs)
        assert model.attmemo.stats()["hit_rate"] == 1.0

    def test_nowhere_says_what_to_run(self, model: Any) -> None:
        with pytest.raises(DatabaseNotFoundError, match="attmemo build-database"):
            memoize(model, 0.5)
        assert is_bare(model)

    @pytest.mark.parametrize("kind", [str, Path, Database])
    def test_where_the_user_says(self, model: Any, bert_database: Path, kind: Callable[[Path], Any]) -> None:
        given = kind(bert_database)
        memoize(model, 0.5, given)
        assert Path(model.attmemo.database.path) == bert_database
        assert not isinstance(given, Database) or model.attmemo.database is given

    def test_one_database_serves_a_classifier_and_its_bare_encoder(
        self, model: Any, inputs: Inputs, flat_database: Path
    ) -> None:
        encoder = model.base_model
        with torch.inference_mode():
            want = encoder(**inputs).last_hidden_state
            memoize(encoder, 0.0, flat_database, gate=False)
            found = encoder(**inputs).last_hidden_state
        valid = inputs["attention_mask"].bool()
        assert torch.allclose(found[valid], want[valid], atol=1e-4)
        assert encoder.attmemo.stats()["hit_rate"] == 1.0


class TestThresholds:
    def test_auto_without_tuning_names_the_command(self, model: Any, bert_database: Path) -> None:
        for arguments in ({}, {"threshold": "auto"}):
            with pytest.raises(DatabaseError, match="attmemo tune"):
                memoize(model, database=bert_database, **arguments)
        assert is_bare(model)

    def test_auto_takes_what_was_tuned(self, model: Any, bert_database: Path, tmp_path: Path) -> None:
        path = shutil.copytree(bert_database, tmp_path / "db")
        tuned(path, lookup="layer")
        memoize(model, database=path)
        handle = model.attmemo
        assert (handle.threshold, handle.lookup) == ([0.4, 0.6], "layer")
        assert "0.01" in handle.stats()["threshold_source"]
        memoize(model, 0.9, path)
        assert model.attmemo.lookup == "sequence", "a threshold of one's own is not bound to the tuned lookup"

    def test_auto_for_another_lookup_than_the_tuned_one_is_refused(
        self, model: Any, bert_database: Path, tmp_path: Path
    ) -> None:
        path = shutil.copytree(bert_database, tmp_path / "db")
        tuned(path)
        with pytest.raises(DatabaseError, match="tuned for lookup='sequence', not 'layer'"):
            memoize(model, "auto", path, lookup="layer")
        assert is_bare(model)

    @pytest.mark.parametrize(
        ("given", "expected"),
        [
            (0.75, [0.75, 0.75]),
            (0, [0.0, 0.0]),
            (1, [1.0, 1.0]),
            ([0.5, 0.75], [0.5, 0.75]),
            ((0.5, 1), [0.5, 1.0]),
            (np.float32(0.5), [0.5, 0.5]),
            (np.array([0.5, 0.25]), [0.5, 0.25]),
        ],
        ids=repr,
    )
    def test_one_for_all_layers_or_one_for_each(
        self, model: Any, bert_database: Path, given: Any, expected: list[float]
    ) -> None:
        memoize(model, given, bert_database)
        assert model.attmemo.threshold == expected
        assert [row["threshold"] for row in model.attmemo.stats()["layers"]] == expected

    @pytest.mark.parametrize(
        "given",
        [
            -0.1, 1.1, 95, float("nan"), float("inf"), [0.5], [0.5, 0.5, 0.5], [], [0.5, 2.0], "0.9", None, True,
            ["a", "b"],
        ],
        ids=repr,
    )
    def test_what_is_not_a_score_is_refused(self, model: Any, bert_database: Path, given: Any) -> None:
        with pytest.raises(ValueError, match="threshold"):
            memoize(model, given, bert_database)
        assert is_bare(model)


class TestWrongDatabases:
    def test_one_weight_in_its_last_bit_is_another_model(self, model: Any, bert_database: Path) -> None:
        weight = model.base_model.encoder.layer[1].output.dense.weight
        with torch.no_grad():
            weight[3, 5] = torch.nextafter(weight[3, 5], torch.tensor(9.0))
        with pytest.raises(StaleDatabaseError, match="weights: database sha256"):
            memoize(model, 0.5, bert_database)
        assert is_bare(model)

    def test_another_configuration_is_named(self, model: Any, bert_database: Path) -> None:
        model.config.layer_norm_eps = 1e-3
        with pytest.raises(StaleDatabaseError, match=r"config\.layer_norm_eps: database 1e-12, model 0.001"):
            memoize(model, 0.5, bert_database)
        assert is_bare(model)

    def test_another_precision_is_named(self, model: Any, bert_database: Path) -> None:
        with pytest.raises(StaleDatabaseError, match="dtype: database float32, model bfloat16"):
            memoize(model.to(torch.bfloat16), 0.5, bert_database)
        assert is_bare(model)

    def test_another_family_is_refused(self, model: Any, deberta_database: Path) -> None:
        with pytest.raises(StaleDatabaseError):
            memoize(model, 0.5, deberta_database)
        assert is_bare(model)

    def test_a_head_may_differ(self, model: Any, bert_database: Path) -> None:
        with torch.no_grad():
            model.classifier.weight.add_(1.0)
        memoize(model, 0.5, bert_database)

    def test_an_untrained_database_says_so(
        self, loaded: LoadedModel, model: Any, service_log: Path, tmp_path: Path
    ) -> None:
        build_database(loaded, [service_log], tmp_path / "db", BuildOptions(max_length=48, limit=20))
        with pytest.raises(EmbedderMissingError, match="attmemo train-embedder"):
            memoize(model, 0.5, tmp_path / "db")
        assert is_bare(model)

    def test_a_damaged_index_is_an_error_now_and_not_in_the_first_request(
        self, model: Any, bert_database: Path, tmp_path: Path
    ) -> None:
        for lookup, name in (("sequence", "sequence"), ("layer", "layer-001")):
            path = shutil.copytree(bert_database, tmp_path / name)
            (file,) = path.glob(f"index-*/{name}.safetensors")
            raw = bytearray(file.read_bytes())
            raw[len(raw) // 2] ^= 1
            file.write_bytes(raw)
            with pytest.raises(DatabaseError, match=name):
                memoize(model, 0.5, path, lookup=lookup)  # type: ignore[arg-type]
            assert is_bare(model)

    def test_a_model_that_is_not_on_the_cpu_is_refused(self, model: Any, bert_database: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="on meta"):
            memoize(model.to("meta"), 0.5, bert_database)
        assert is_bare(model)

    def test_a_model_whose_attention_was_changed_is_refused(self, model: Any, bert_database: Path) -> None:
        module = model.base_model.encoder.layer[0].attention.self
        own = module.forward

        def scaled(*args: Any, **kwargs: Any) -> Any:
            context, apm = own(*args, **kwargs)
            return 1.01 * context, apm

        module.forward = scaled
        with pytest.raises(AdapterCheckError):
            memoize(model, 0.5, bert_database)
        assert module.forward is scaled
        assert patched(model) == ["bert.encoder.layer.0.attention.self"]


class TestInPlaceAndBack:
    def test_nothing_but_forward_is_touched(self, model: Any, bert_database: Path) -> None:
        keys, kinds = list(model.state_dict()), [type(module) for module in model.modules()]
        modules = {name for name, _ in model.named_modules()}
        assert memoize(model, 0.5, bert_database) is model
        assert isinstance(model.attmemo, Memoization)
        assert list(model.state_dict()) == keys
        assert [type(module) for module in model.modules()] == kinds
        assert {name for name, _ in model.named_modules()} == modules
        assert len(patched(model)) == 3  # two layers, and the model around them
        assert unmemoize(model) is model
        assert is_bare(model)
        assert list(model.state_dict()) == keys

    def test_undoing_twice_is_fine(self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path) -> None:
        memoize(model, 0.0, bert_database, gate=False)
        unmemoize(unmemoize(model))
        assert is_bare(model)
        assert torch.equal(logits(model, inputs), exact)

    def test_a_forward_that_someone_put_there_before_comes_back(
        self, model: Any, inputs: Inputs, bert_database: Path
    ) -> None:
        module = model.base_model.encoder.layer[1].attention.self
        own, calls = module.forward, []

        def theirs(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return own(*args, **kwargs)

        module.forward = theirs
        memoize(model, 1.0, bert_database, gate=False)
        calls.clear()
        logits(model, inputs)
        assert calls == [1], "the exact path goes through what was there"
        assert copy.deepcopy(model).base_model.encoder.layer[1].attention.self.forward is theirs
        unmemoize(model)
        assert module.forward is theirs

    def test_memoizing_again_replaces_what_was_there(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path
    ) -> None:
        memoize(model, 1.0, bert_database, gate=False)
        first = model.attmemo
        memoize(model, 0.0, bert_database, gate=False)
        logits(model, inputs)
        assert model.attmemo is not first
        assert (first.stats()["calls"], model.attmemo.stats()["calls"]) == (0, 16), "the first one is still asked"
        assert model.attmemo.stats()["hit_rate"] == 1.0
        assert not first.enabled
        with pytest.raises(AttmemoError, match="memoize"):
            first.enable()
        unmemoize(model)
        assert is_bare(model)
        assert torch.equal(logits(model, inputs), exact)

    @pytest.mark.parametrize("enabled", [True, False])
    def test_a_memoize_that_fails_leaves_the_model_as_it_was(
        self, model: Any, inputs: Inputs, bert_database: Path, deberta_database: Path, enabled: bool
    ) -> None:
        memoize(model, 0.0, bert_database, gate=False)
        first = model.attmemo
        if not enabled:
            first.disable()
        for call in (
            lambda: memoize(model, 2.0, bert_database),
            lambda: memoize(model, 0.5, deberta_database),
            lambda: memoize(model, "auto", bert_database),
        ):
            with pytest.raises((ValueError, DatabaseError)):
                call()
            assert model.attmemo is first
            assert first.enabled is enabled
        logits(model, inputs)
        assert first.stats()["hits"] == (16 if enabled else 0)

    @pytest.mark.parametrize("outer_first", [True, False])
    def test_a_model_inside_a_memoized_one_is_not_served_twice(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path, outer_first: bool
    ) -> None:
        pair = [model, model.base_model]
        first, second = pair if outer_first else pair[::-1]
        memoize(first, 0.0, bert_database, gate=False)
        earlier = first.attmemo
        memoize(second, 0.0, bert_database, gate=False)
        logits(model, inputs)
        assert earlier.stats()["calls"] == 0
        assert second.attmemo.stats()["hits"] == 16
        unmemoize(model)
        assert not patched(model)
        assert torch.equal(logits(model, inputs), exact)

    def test_switching_off_and_on(self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path) -> None:
        memoize(model, 0.0, bert_database, gate=False)
        handle = model.attmemo
        assert handle.enabled
        handle.disable()
        handle.disable()
        assert not handle.enabled
        assert not patched(model)
        assert torch.equal(logits(model, inputs), exact)
        assert handle.stats()["calls"] == 0
        assert handle.stats()["enabled"] is False
        handle.enable()
        handle.enable()
        logits(model, inputs)
        assert handle.stats()["hits"] == 16
        handle.disable()
        assert not patched(model), "enabled twice, disabled once"

    def test_the_signature_of_forward_stays(self, model: Any, bert_database: Path) -> None:
        """sentence-transformers passes on only what it finds there."""
        import inspect

        before = inspect.signature(model.base_model.forward)
        memoize(model, 0.5, bert_database)
        assert inspect.signature(model.base_model.forward) == before


class TestNeighbours:
    """Others who put themselves into the way of a model, or share its layers."""

    @pytest.mark.parametrize("whole", [True, False], ids=["the model", "a layer"])
    def test_a_forward_put_around_a_served_one_stays(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path, whole: bool
    ) -> None:
        module = model.base_model if whole else model.base_model.encoder.layer[1].attention.self
        handle = memoize(model, 0.0, bert_database, gate=False).attmemo
        served, calls = module.forward, []

        def around(*args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return served(*args, **kwargs)

        module.forward = around
        logits(model, inputs)
        hits = handle.stats()["hits"]
        assert hits > 0
        unmemoize(model)
        assert module.forward is around
        calls.clear()
        assert torch.equal(logits(model, inputs), exact), "ours is still inside, and has to let through"
        assert calls == [1]
        module.forward = served  # as they leave it who put back what was there
        assert torch.equal(logits(model, inputs), exact)

    def test_memoizing_a_model_says_that_it_undoes_another(
        self, model: Any, bert_database: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = copy.copy(model.base_model)
        other._modules = dict(model.base_model._modules)  # another model on top of the same layers
        memoize(model, 0.5, bert_database)
        first = model.attmemo
        with caplog.at_level("WARNING", "attmemo"):
            memoize(model, 0.6, bert_database)
            assert not caplog.records, "the same model, memoized anew"
            first = model.attmemo
            memoize(other, 0.5, bert_database)
        assert not first.enabled
        assert "shares layers with this one, and is no longer memoized" in caplog.text
        unmemoize(other)


class TestSavingAndCopying:
    def test_saving_saves_the_bare_model(
        self, model: Any, inputs: Inputs, exact: Tensor, bert_database: Path, tiny_bert: str, tmp_path: Path
    ) -> None:
        memoize(model, 0.0, bert_database, gate=False)
        logits(model, inputs)
        model.save_pretrained(tmp_path / "saved")
        written, original = (
            load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", Path(tiny_bert))
        )
        assert written.keys() == original.keys()
        assert "attmemo" not in (tmp_path / "saved" / "config.json").read_text()
        again = type(model).from_pretrained(tmp_path / "saved").eval()
        assert torch.equal(logits(again, inputs), exact)

    @pytest.mark.parametrize("family", ["bert", "deberta"])
    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_a_copy_is_bare_and_computes_with_its_own_weights(
        self, request: pytest.FixtureRequest, log_lines: list[str], family: str, how: str
    ) -> None:
        loaded = load_model(request.getfixturevalue(f"tiny_{family}"))
        bare = load_model(loaded.name).model
        inputs = collate(loaded, tokenize(loaded, log_lines[:4], 48))
        model: Any = memoize(loaded.model, 0.0, request.getfixturevalue(f"{family}_database"), gate=False)
        served = logits(model, inputs)
        model.attmemo.reset_stats()
        if how == "deepcopy":
            twin = copy.deepcopy(model)
        else:
            file = io.BytesIO()
            torch.save(model, file)
            twin = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
        assert twin.attmemo is None
        assert torch.equal(logits(twin, inputs), logits(bare, inputs))
        for one in (twin, bare):  # as fine-tuning would: the old weights must not show through
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.mul_(1.25)
        assert torch.equal(logits(twin, inputs), logits(bare, inputs))
        assert torch.equal(logits(copy.deepcopy(twin), inputs), logits(bare, inputs))
        assert model.attmemo.stats()["calls"] == 0, "the copy asked the original's engine"
        assert torch.equal(logits(model, inputs), served)
        assert model.attmemo.stats()["hit_rate"] == 1.0

    def test_a_copy_can_be_memoized_itself(self, model: Any, inputs: Inputs, bert_database: Path) -> None:
        twin = copy.deepcopy(memoize(model, 0.0, bert_database, gate=False))
        memoize(twin, 0.0, bert_database, gate=False)
        logits(twin, inputs)
        assert twin.attmemo.stats()["hit_rate"] == 1.0
        assert model.attmemo.stats()["calls"] == 0
        unmemoize(twin)
        assert "attmemo" not in twin.__dict__


class TestStats:
    def test_are_counts_that_add_up_and_can_be_written_as_json(
        self, loaded: LoadedModel, model: Any, inputs: Inputs, bert_database: Path, log_lines: list[str]
    ) -> None:
        memoize(model, [0.0, 1.0], bert_database, gate=False)
        empty = model.attmemo.stats()
        assert (empty["calls"], empty["hits"], empty["hit_rate"]) == (0, 0, 0.0)
        logits(model, inputs)
        with torch.inference_mode():
            model(**inputs, output_hidden_states=True)
        stats = json.loads(json.dumps(model.attmemo.stats(), allow_nan=False))
        assert (stats["calls"], stats["hits"]) == (32, 8)
        assert stats["hit_rate"] == stats["hits"] / stats["calls"]
        assert stats["ineligible"] == {"output_hidden_states": 16}
        assert stats["calls"] == sum(row["sequences"] for row in stats["layers"]) + sum(stats["ineligible"].values())
        assert [row["hits"] for row in stats["layers"]] == [8, 0]
        assert [row["hit_rate"] for row in stats["layers"]] == [1.0, 0.0]
        assert 0.5 < stats["layers"][0]["mean_predicted_similarity"] <= 1.0
        assert stats["layers"][1]["mean_predicted_similarity"] is None
        assert stats["layers"][0]["ms_spent"] > 0.0
        assert stats["layers"][0]["ms_saved"] is None, "nothing is known about the exact path without a profile"
        assert stats["database"] == str(bert_database)
        model.attmemo.reset_stats()
        assert model.attmemo.stats()["calls"] == 0
        logits(model, inputs)
        assert model.attmemo.stats()["calls"] == 16

    def test_a_handle_shows_what_it_serves(self, model: Any, bert_database: Path) -> None:
        memoize(model, 0.5, bert_database)
        assert str(bert_database) in repr(model.attmemo)
        assert "sequence" in repr(model.attmemo)


class TestSurroundings:
    def test_a_compiled_model_is_served(self, model: Any, inputs: Inputs, bert_database: Path) -> None:
        memoize(model, 0.0, bert_database, gate=False)
        want = logits(model, inputs)
        model.attmemo.reset_stats()
        compiled = torch.compile(model, backend="eager")
        assert torch.allclose(logits(compiled, inputs), want, atol=1e-5)
        assert model.attmemo.stats()["hit_rate"] == 1.0
        torch._dynamo.reset()

    def test_a_sentence_transformer_is_served(
        self, tiny_bert: str, flat_database: Path, log_lines: list[str], tmp_path: Path
    ) -> None:
        pytest.importorskip("sentence_transformers")
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.models import Pooling, Transformer

        stack = SentenceTransformer(modules=[Transformer(tiny_bert, max_seq_length=48), Pooling(32)], device="cpu")
        want = stack.encode(log_lines[:40])
        assert memoize(stack, 0.0, flat_database, gate=False) is stack
        assert stack.attmemo is stack[0].auto_model.attmemo
        found = stack.encode(log_lines[:40])
        assert stack.attmemo.stats()["hit_rate"] == 1.0
        assert np.abs(found - want).max() < 1e-4 * np.abs(want).max()
        unmemoize(stack)
        assert not hasattr(stack, "attmemo")
        assert not patched(stack)
        assert np.array_equal(stack.encode(log_lines[:40]), want)

    def test_everything_public_is_there(self) -> None:
        assert all(hasattr(attmemo, name) for name in attmemo.__all__)
