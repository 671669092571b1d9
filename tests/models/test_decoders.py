"""Prefill from stored maps: the cache for decoding, padding on either side, and calls that stay exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, inputs_of
from memoized_families import NEAR, Case, gap, output
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache

from attmemo import UnsupportedModelError, unmemoize
from attmemo.db import Database
from attmemo.models import adapter_for
from attmemo.models.cache_name import CACHE_NAME
from attmemo.models.check import context_from_maps
from attmemo.profiler.build import build_from_inputs

ENCODER_DECODERS = [name for name, family in FAMILIES.items() if family.generates and family.adapter in ("bart", "t5")]
DECODERS = [name for name, family in FAMILIES.items() if family.generates and name not in ENCODER_DECODERS]
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 0, "temperature": 0.7},
    "beam": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}
NEW = 6


@pytest.fixture(params=DECODERS, scope="module", name="case")
def _case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(request.param, tmp_path_factory.mktemp("decoder"))
    yield case
    unmemoize(case.model)


@pytest.fixture(autouse=True)
def _bare_afterwards(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "case" in request.fixturenames:
        unmemoize(request.getfixturevalue("case").model)


def generate(model: Any, inputs: dict[str, Tensor], **options: Any) -> Tensor:
    torch.manual_seed(11)
    model.generation_config.eos_token_id = None  # all sequences as long as asked for
    found: Tensor = model.generate(**inputs, max_new_tokens=NEW, min_new_tokens=NEW, pad_token_id=0, **options)
    return found


def left(case: Case, rows: list[int]) -> dict[str, Tensor]:
    """Stored sequences as a batch padded at the start, as generation needs it."""
    lengths = [int(case.stored["attention_mask"][row].sum()) for row in rows]
    longest = max(lengths)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for place, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        ids[place, longest - n :] = case.stored["input_ids"][row, :n]
        mask[place, longest - n :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [[1], [0, 2, 6], [3, 0, 5, 1]], ids=["one", "one length", "padded at the start"])
def test_generation_after_a_prefill_from_its_own_maps_is_the_models_own(
    case: Case, mode: str, rows: list[int]
) -> None:
    inputs = left(case, rows)
    expected = generate(case.model, inputs, **MODES[mode])
    handle = case.serve()
    assert torch.equal(generate(case.model, inputs, **MODES[mode]), expected)
    stats = handle.stats()
    beams = MODES[mode].get("num_beams", 1)
    assert stats["hits"] == len(rows) * beams * len(stats["layers"]), stats
    assert set(stats["ineligible"]) == {"cached decoding"}


def test_generation_from_maps_of_another_text_is_what_these_maps_give_without_a_cache(case: Case) -> None:
    n = 12
    inputs = case.rows(inputs_of(case.family, [n], seed=21), [0])
    handle = case.serve()
    output(case.model, inputs)
    record = int(handle.engine.last_found.records[0])
    handle.reset_stats()
    seen = generate(case.model, inputs)[0, n:]
    assert handle.stats()["hits"] == len(handle.stats()["layers"])
    unmemoize(case.model)
    assert torch.equal(seen, reference(case, inputs["input_ids"], record))
    assert not torch.equal(seen, generate(case.model, inputs)[0, n:]), "the map of another text changed nothing"


def reference(case: Case, ids: Tensor, record: int) -> Tensor:
    """Greedy decoding without a cache, with a record's maps for the prompt."""
    adapter, sites = adapter_for(case.model)
    n, prompt = ids.shape[1], ids.shape[1]
    with Database(case.path) as database:
        stored = [torch.as_tensor(database.map(site.layer, record)).float() for site in sites]

    def hooked(layer: int) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> Any:
            hidden, apm = adapter.named(args, kwargs)["hidden_states"], adapter.map_of(returned)[0].clone()
            apm[:, :n, :n] = stored[layer]
            (context,) = context_from_maps(adapter, module, hidden[0], [apm])
            output = adapter.finish(module, context[None], hidden)
            return (output, *returned[1:])

        return hook

    handles = [site.module.register_forward_hook(hooked(site.layer), with_kwargs=True) for site in sites]
    model: Any = case.model
    try:
        with torch.inference_mode(), adapter.capturing(model):
            for _ in range(NEW):
                logits = model(input_ids=ids, use_cache=False).logits
                ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    finally:
        for handle in handles:
            handle.remove()
    return ids[0, prompt:]


@contextmanager
def projections(model: nn.Module) -> Iterator[dict[str, int]]:
    """Counts calls of the projections of Q, K and V, by name."""
    counts: dict[str, int] = {}
    handles = []

    def counted(name: str) -> Any:
        def hook(*_: Any) -> None:
            counts[name] = counts.get(name, 0) + 1

        return hook

    for name, module in model.named_modules():
        last = name.rsplit(".", 1)[-1]
        if last in ("q_proj", "k_proj", "v_proj", "c_attn"):
            handles.append(module.register_forward_hook(counted(last)))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def test_q_and_k_are_not_projected_without_a_cache(case: Case) -> None:
    with projections(case.model) as counts:
        case.serve()
        counts.clear()  # of the self-check
        with torch.inference_mode():
            case.model(**case.stored, use_cache=False)
        assert set(counts) <= {"v_proj"}, counts
        with torch.inference_mode():
            case.model(**case.stored, use_cache=True)
        assert "q_proj" not in counts
        assert "c_attn" not in counts


def test_the_cache_is_filled_as_by_the_exact_path(case: Case) -> None:
    inputs, hits = case.mixed()
    lengths = case.lengths(inputs)
    expected, seen = DynamicCache(config=case.model.config), DynamicCache(config=case.model.config)
    if case.family.adapter == "gpt-neo":
        expected, seen = DynamicCache(), DynamicCache()
    model: Any = case.model
    with torch.inference_mode():
        model(**inputs, **{CACHE_NAME: expected}, use_cache=True)
    handle = case.serve()
    with torch.inference_mode():
        model(**inputs, **{CACHE_NAME: seen}, use_cache=True)
    stats = handle.stats()
    assert stats["hits"] == len(hits) * len(stats["layers"])
    assert seen.get_seq_length() == expected.get_seq_length() == max(lengths)
    for ours, theirs in zip(seen.layers, expected.layers, strict=True):
        assert type(ours) is type(theirs)
        kept = theirs.keys.shape[2]
        assert ours.keys.shape == theirs.keys.shape
        for row, n in enumerate(lengths):
            valid = max(0, n - (max(lengths) - kept))  # of a window only the last are kept
            for a, b in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                if valid:
                    assert gap(a[row, :, :valid], b[row, :, :valid]) <= NEAR


def test_a_cache_that_cannot_be_filled_stays_exact_and_says_so(case: Case) -> None:
    if case.family.adapter == "gpt-neo":
        pytest.skip("GPT-Neo does not take a static cache of its layers' types")
    inputs = case.rows(case.stored, [0, 2])
    model: Any = case.model

    def run() -> Tensor:
        cache = StaticCache(config=model.config, max_cache_len=32)
        with torch.inference_mode():
            found: Tensor = model(**inputs, **{CACHE_NAME: cache}, use_cache=True).logits
        return found

    expected = run()
    handle = case.serve()
    assert torch.equal(run(), expected)
    assert handle.stats()["hits"] == 0
    assert all("cache of type StaticCache" in reason for reason in handle.stats()["ineligible"])


def test_a_call_with_token_types_is_served(case: Case) -> None:
    """Some tokenizers add them. Llama's layers ignore them; GPT-2 adds them to the embeddings."""
    inputs = case.rows(case.stored, [0])
    inputs["token_type_ids"] = torch.zeros_like(inputs["input_ids"])
    handle = case.serve()
    try:
        output(case.model, inputs)
    except TypeError:
        pytest.skip("the model takes no token types")
    assert handle.stats()["hit_rate"] == 1.0


def test_a_mask_of_packed_sequences_stays_exact(case: Case) -> None:
    if case.family.adapter == "opt":
        pytest.skip("OPT takes no such mask: it counts positions from it")
    n = 12
    ids = case.stored["input_ids"][1:2, :n]
    blocks = torch.block_diag(torch.ones(5, 5), torch.ones(7, 7)).tril().bool()[None, None]
    model: Any = case.model
    mask = torch.zeros(1, 1, n, n).masked_fill(~blocks, torch.finfo(torch.float32).min)
    with torch.inference_mode():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        handle = case.serve()
        seen = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert torch.equal(seen, expected)
    assert handle.stats()["hits"] == 0
    assert set(handle.stats()["ineligible"]) == {"the mask is not plain padding on one side"}


def test_bidirectional_attention_of_a_decoder_is_exact(case: Case) -> None:
    ids = case.stored["input_ids"][1:2, :12]
    model: Any = case.model
    try:
        with torch.inference_mode():
            expected = model(input_ids=ids, is_causal=False, use_cache=False).logits
    except TypeError:
        pytest.skip("the model takes no such flag")
    handle = case.serve()
    with torch.inference_mode():
        seen = model(input_ids=ids, is_causal=False, use_cache=False).logits
    if handle.stats()["hits"]:  # GPT-Neo drops the flag before its layers see it, and stays causal
        assert gap(seen, expected) <= 1e-5
    else:
        assert torch.equal(seen, expected)


def test_rotary_layers_called_by_hand_stay_exact(case: Case) -> None:
    adapter, sites = adapter_for(case.model)
    if not adapter.rotary:
        pytest.skip("positions are part of what goes in")
    calls: list[Any] = []
    hook = sites[0].module.register_forward_hook(lambda _m, a, k, o: calls.append((a, k, o)), with_kwargs=True)
    with torch.inference_mode():
        adapter.host(case.model)(input_ids=case.stored["input_ids"][1:2, :12], use_cache=False)
    hook.remove()
    args, kwargs, returned = calls[0]
    handle = case.serve(lookup="layer")
    with torch.inference_mode():
        seen = sites[0].module(*args, **kwargs)
    assert torch.equal(seen[0], returned[0])
    assert list(handle.stats()["ineligible"]) == [
        "a layer was called outside of its model: its positions are unknown"
    ]


def test_maps_at_positions_with_a_gap_are_not_stored(case: Case, tmp_path: Path) -> None:
    ids = case.stored["input_ids"][1:2, :12]
    positions = torch.arange(12)[None] + (torch.arange(12)[None] > 5) * 3
    if not adapter_for(case.model)[0].rotary:
        pytest.skip("positions are part of what goes in")
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions}
    with pytest.raises(UnsupportedModelError, match="positions are not consecutive"):
        build_from_inputs(case.model, [batch], tmp_path / "db")


def test_positions_with_a_gap_stay_exact_with_rotary_attention(case: Case) -> None:
    if case.family.adapter == "opt":
        pytest.skip("OPT counts positions from the mask")
    ids = case.stored["input_ids"][1:2, :12]
    positions = torch.arange(12)[None] + (torch.arange(12)[None] > 5) * 3
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
    model: Any = case.model
    with torch.inference_mode():
        expected = model(**given).logits
        handle = case.serve()
        seen = model(**given).logits
    if adapter_for(model)[0].rotary:
        assert torch.equal(seen, expected)
        assert set(handle.stats()["ineligible"]) == {"positions are not consecutive"}
    else:
        assert handle.stats()["hits"] > 0, "positions are part of what goes in"


def test_an_error_while_serving_leaves_a_whole_cache(case: Case) -> None:
    """A record that cannot be read makes the layer exact. The original code fills the cache, once."""
    inputs = case.rows(case.stored, [0, 2])
    model: Any = case.model
    with torch.inference_mode():
        expected = model(**inputs, use_cache=True)
    handle = case.serve()

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("gone")

    handle.engine.reuse.source.multiply = broken
    with torch.inference_mode():
        seen = model(**inputs, use_cache=True)
    assert torch.equal(seen.logits, expected.logits)
    assert seen[CACHE_NAME].get_seq_length() == expected[CACHE_NAME].get_seq_length()
    assert sum(handle.stats()["failures"].values()) == 2 * len(handle.stats()["layers"])


class TestEncoderDecoders:
    @pytest.fixture(params=ENCODER_DECODERS, scope="class", name="pair")
    def _pair(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
        case = Case(request.param, tmp_path_factory.mktemp("pair"))
        yield case
        unmemoize(case.model)

    @pytest.mark.parametrize("mode", MODES)
    def test_generation_after_a_memoized_encoder_is_the_models_own(self, pair: Case, mode: str) -> None:
        unmemoize(pair.model)
        inputs = pair.rows(pair.stored, [0, 1, 3])
        expected = generate(pair.model, inputs, **MODES[mode])
        handle = pair.serve()
        assert torch.equal(generate(pair.model, inputs, **MODES[mode]), expected)
        stats = handle.stats()
        assert stats["hits"] == 3 * len(stats["layers"])
        assert not stats["ineligible"], "the decoder's layers are none of ours"

    def test_a_whole_forward_is_served_in_its_encoder(self, pair: Case) -> None:
        unmemoize(pair.model)
        model: Any = pair.model
        inputs = pair.stored | {"decoder_input_ids": torch.ones(len(pair.stored["input_ids"]), 4, dtype=torch.long)}
        with torch.inference_mode():
            expected = model(**inputs).logits
            handle = pair.serve()
            seen = model(**inputs).logits
        assert gap(seen, expected) <= NEAR
        assert handle.stats()["hit_rate"] == 1.0
