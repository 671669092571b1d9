"""Before each call sentence-transformers asks a whole model for mode and device: answered at once, or as ever."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from attmemo import memoize, unmemoize
from attmemo.forward.wrapper_hooks import DeviceHook, ModeHook, Settled

TEXTS = ["disk 3 is 91 % full", "user root logged in"]

sentence = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")
if not hasattr(sentence.SentenceTransformer, "_resolve_inference_device"):
    pytest.skip("this version asks for no device", allow_module_level=True)


@pytest.fixture(name="model")
def _model(tiny_bert: str) -> Any:
    from sentence_transformers.models import Pooling, Transformer

    model = sentence.SentenceTransformer(
        modules=[Transformer(tiny_bert, max_seq_length=48), Pooling(32)], device="cpu"
    )
    return memoize(model)


def walks(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is called for every module of a model from now on."""
    found: list[str] = []
    for name in ("train", "named_modules"):
        original = getattr(nn.Module, name)

        def noted(self: nn.Module, *args: Any, _name: str = name, _original: Any = original, **kwargs: Any) -> Any:
            found.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(nn.Module, name, noted)
    return found


def test_a_second_encode_walks_over_no_modules(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = model.encode(TEXTS)
    found = walks(model, monkeypatch)
    assert np.array_equal(model.encode(TEXTS), expected)
    assert not found


def test_a_model_that_trains_is_put_into_evaluation_mode(model: Any) -> None:
    expected = model.encode(TEXTS)
    model.train()
    assert all(module.training for module in model.modules())
    assert np.array_equal(model.encode(TEXTS), expected)
    assert not any(module.training for module in model.modules())
    inner = model[0].model.encoder.layer[0]
    inner.training = True
    model.encode(TEXTS)
    assert not inner.training


def test_a_module_that_came_later_is_put_into_evaluation_mode(model: Any) -> None:
    model.encode(TEXTS)
    model.append(nn.Identity())
    assert model[-1].training
    model.eval()
    assert not model[-1].training


def test_tensors_elsewhere_are_seen(model: Any) -> None:
    settled = Settled(model)
    assert settled.is_on_cpu
    model[0].model.pooler.to("meta")
    assert not settled.is_on_cpu


def test_a_tensor_that_came_later_is_seen(model: Any) -> None:
    settled = Settled(model)
    model[0].register_buffer("more", torch.zeros(1))
    assert not settled.is_on_cpu


def test_a_tensor_that_was_replaced_does_not_stay_in_memory(model: Any) -> None:
    settled = Settled(model)
    dense = model[0].model.pooler.dense
    old = weakref.ref(dense.weight)
    dense.weight = nn.Parameter(torch.zeros_like(dense.weight))
    unmemoize(model)
    assert not settled.is_on_cpu
    assert not settled.evaluates
    gc.collect()
    assert old() is None


def test_another_device_is_asked_for_as_ever(model: Any) -> None:
    with pytest.raises(RuntimeError, match="such_device"):
        model.encode(TEXTS, device="such_device")


def test_modules_with_a_mode_of_their_own_are_asked(tiny_bert: str) -> None:
    class Counting(nn.Identity):
        asked = 0

        def train(self, mode: bool = True) -> Any:
            self.asked += 1
            return super().train(mode)

    from sentence_transformers.models import Pooling, Transformer

    counting = Counting()
    modules = [Transformer(tiny_bert, max_seq_length=48), Pooling(32), counting]
    model = memoize(sentence.SentenceTransformer(modules=modules, device="cpu"))
    before = counting.asked
    model.eval()
    assert counting.asked == before + 1


def test_undone_models_and_copies_have_their_own_methods(model: Any) -> None:
    hooks = [model.__dict__[name] for name in ("train", "_resolve_inference_device")]
    assert [type(hook) for hook in hooks] == [ModeHook, DeviceHook]
    expected = model.encode(TEXTS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(isinstance(value, (ModeHook, DeviceHook)) for value in vars(other).values())
        assert other.train() is other
        assert other[0].model.training
        assert not model.training
        assert np.allclose(other.encode(TEXTS), expected, atol=1e-5)
    unmemoize(model)
    assert not {"train", "_resolve_inference_device"} & set(vars(model))
    assert np.allclose(model.encode(TEXTS), expected, atol=1e-5)


def test_a_disabled_handle_leaves_both_methods(model: Any) -> None:
    model.attmemo.disable()
    assert not {"train", "_resolve_inference_device"} & set(vars(model))
    model.attmemo.enable()
    assert isinstance(model.__dict__["train"], ModeHook)
