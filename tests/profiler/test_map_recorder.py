"""Maps and inputs of each layer, taken while a model runs."""

from __future__ import annotations

import pytest
import torch

from attmemo.models import adapter_for
from attmemo.profiler.map_recorder import Capture
from attmemo.profiler.models import LoadedModel, collate, load_model, tokenize


class TestCapture:
    @pytest.mark.parametrize("family", ["bert", "deberta"])
    def test_gives_what_each_layer_saw_and_made_and_leaves_the_model_alone(
        self, request: pytest.FixtureRequest, log_lines: list[str], family: str
    ) -> None:
        from attmemo.models import check_adapter

        loaded = load_model(request.getfixturevalue(f"tiny_{family}"))
        adapter, sites = adapter_for(loaded.model)
        check_adapter(adapter, loaded.model, sites)
        implementation = loaded.model.config._attn_implementation  # type: ignore[union-attr]
        items = sorted(tokenize(loaded, log_lines[:4], 96), key=len)
        with Capture(loaded.model, adapter, sites) as capture:
            captured = capture.run(collate(loaded, items))
            alone = capture.run(collate(loaded, items[:1]))
        assert captured.spans.lengths == [len(item) for item in items]
        for item, (maps, inputs) in zip(items, captured, strict=True):
            n = len(item)
            assert [m.shape for m in maps] == [(4, n, n)] * 2
            assert [x.shape for x in inputs] == [(n, 32)] * 2
            assert all(torch.allclose(m.sum(-1), torch.ones(4, n), atol=1e-4) for m in maps)
        for ours, theirs in zip(captured.sequence(0)[0], alone.sequence(0)[0], strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5), "padding changed a map"
        assert loaded.model.config._attn_implementation == implementation  # type: ignore[union-attr]
        assert not any(module._forward_hooks for module in loaded.model.modules())

    def test_of_padding_in_front_is_refused(self, loaded: LoadedModel, log_lines: list[str]) -> None:
        from attmemo import UnsupportedModelError

        adapter, sites = adapter_for(loaded.model)
        inputs = collate(loaded, sorted(tokenize(loaded, log_lines[:30], 96), key=len)[::29])
        flipped = {name: value.flip(1) for name, value in inputs.items()}
        with (
            Capture(loaded.model, adapter, sites) as capture,
            pytest.raises(UnsupportedModelError, match="not plain padding"),
        ):
            capture.run(flipped)
