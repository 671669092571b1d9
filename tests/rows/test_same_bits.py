"""The same input gives the same bits: those of its own record, as long as there is one."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from guarded import BASE, BOTH, LENGTHS, Case, certify, done, field, guarded, rows_of, run, taught, until, variant
from packed_models import HEADS, MODELS, Inputs, batch, changed, firsts, head, rows_database
from torch import Tensor

from attmemo import memoize, unmemoize
from attmemo.rows.candidate import Offer
from attmemo.rows.index import hash_of

TEXTS = [5, 40, 17, 9, 33, 9, 22, 28]
CASES: list[tuple[str, Callable[[], Any], torch.dtype, str]] = [
    (f"{name}-{dtype}-{linear}".replace("torch.", ""), make, dtype, linear)
    for name, make in (
        ("BERT", MODELS["BERT"]), ("DeBERTa-v2", MODELS["DeBERTa-v2"]), ("ModernBERT", MODELS["ModernBERT"]),
        ("NomicBERT", MODELS["NomicBERT"]),
        *((kind, lambda kind=kind: head(kind, HEADS[kind]))
          for kind in ("BertForSequenceClassification", "DebertaV2ForSequenceClassification")),
    )
    for dtype in (torch.float32, torch.bfloat16) for linear in ("exact", "int8")
]  # fmt: skip


@contextmanager
def last_states(model: Any) -> Iterator[list[Tensor]]:
    """Collects the last hidden states of each call of the blocks."""
    reuse, found = model.attmemo.engine.reuse, list[Tensor]()
    own = reuse.serve

    def serve(*given: Any) -> Tensor:
        made: Tensor = own(*given)
        found.append(made.clone())
        return made

    reuse.serve = serve
    # Exact forwards go the hooked way if there is a hook inside of the model.
    hook = model.attmemo.host.get_input_embeddings().register_forward_hook(lambda *_: None)
    if reuse.name == "rows":
        hook.remove()
    try:
        yield found
    finally:
        hook.remove()
        del reuse.serve


def bits(rows: Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def padded(inputs: Inputs, more: int) -> Inputs:
    """Without columns of padding alone, and with so many of them."""
    n = int(inputs["attention_mask"].sum(1).max())
    return {name: torch.nn.functional.pad(value[:, :n], (0, more)) for name, value in inputs.items()}


@pytest.mark.parametrize(("make", "dtype", "linear"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_a_text_has_one_answer_whatever_is_asked_beside_it(
    make: Callable[[], Any], dtype: torch.dtype, linear: str
) -> None:
    """Alone, beside others, computed, verified, repeated; while other texts are reused."""
    model = memoize(
        make().to(dtype), database=":memory:", reuse="rows", gate=False, linear=linear, min_cosine=-1.0, near=0,
        budget=0.01,
    )
    certify(model)
    model.attmemo.guarded.guard.drawn = 0.3
    rng, texts, seen = random.Random(1), batch(TEXTS, 5), [set[bytes]() for _ in TEXTS]
    for turn in range(30):
        places = rng.choices(range(len(TEXTS)), k=rng.randint(1, 4))
        asked = {name: value[places] for name, value in texts.items()}
        if turn % 3:
            others = changed(rows_of(texts, *rng.choices(range(len(TEXTS)), k=2)), turn)
            asked = {name: torch.cat([asked[name], others[name]]) for name in asked}
        before = firsts(model)
        with last_states(model) as states, torch.inference_mode():
            model(**padded(asked, rng.randint(0, 3)))
        alone = model.attmemo.first_row and firsts(model) > before
        for number, place in enumerate(places):
            seen[place].add(bits(states[0][number, : 1 if alone else TEXTS[place]]))
        assert model.attmemo.flush()
    stats = model.attmemo.stats()
    assert [len(one) for one in seen] == [1] * len(TEXTS)
    assert stats["repeated"] > 20
    assert not stats["failures"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_repeat_has_the_bits_of_packed_blocks_and_no_row_is_computed(dtype: torch.dtype) -> None:
    for bare in (MODELS["BERT"]().to(dtype), MODELS["ModernBERT"]().to(dtype)):
        exact, model = memoize(copy.deepcopy(bare), reuse="none"), guarded(bare)
        expected = field(run(exact, BASE))
        for turn in range(4):
            assert torch.equal(field(run(model, BASE)), expected)
            assert model.attmemo.stats()["rows_computed"] == sum(LENGTHS), f"turn {turn}"


def test_an_answer_survives_a_restart(tmp_path: Path) -> None:
    for number, linear in enumerate(("exact", "int8")):
        bare, answers = MODELS["BERT"](), []
        for _ in range(3):
            model = memoize(
                copy.deepcopy(bare), reuse="rows", fill=tmp_path / str(number), gate=False, max_bytes=1 << 24,
                linear=linear, budget=0.01,
            )  # fmt: skip
            answers.append(field(run(model, BASE)))
            repeated = model.attmemo.stats()["repeated"]
            unmemoize(model)
        assert repeated == len(LENGTHS)
        assert torch.equal(answers[0], answers[1])
        assert torch.equal(answers[1], answers[2])


def test_a_prepared_record_gives_one_answer_in_any_batch(tmp_path: Path) -> None:
    """Without a guard too, and in whatever type it is stored."""
    bare = MODELS["BERT"]()
    for storage in ("float32", "int8"):
        path = rows_database(bare, [BASE], tmp_path / storage, storage)
        model = memoize(copy.deepcopy(bare), 0.3, path, gate=False, budget=None)
        together = field(run(model, BASE))
        for place, n in enumerate(LENGTHS):
            for beside in (0, 3):
                own, other = rows_of(BASE, place), rows_of(changed(BASE, 2), 1)
                part = {name: torch.cat([own[name], other[name][:beside]]) for name in BASE}
                assert torch.equal(field(run(model, padded(part, beside)))[0, :n], together[place, :n])


def test_equal_texts_of_a_batch_stay_equal_however_they_are_answered() -> None:
    case = Case("BERT")
    for least, verdict in ((-2.0, "reused"), (2.0, "below the margin")):
        model = taught(case.bare, min_cosine=-1.0)
        model.attmemo.guarded.guard.margin.least = least
        seen = field(run(model, rows_of(BOTH, 1, 0, 1, 3, 1)))
        assert done(model)[verdict] == 5
        assert torch.equal(seen[0], seen[2])
        assert torch.equal(seen[0], seen[4])


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "DebertaV2ForSequenceClassification"])
def test_a_repeat_beside_others_leaves_them_first_rows_alone(kind: str) -> None:
    """A head that reads first rows gets that of the record as it is; of the others only first rows are computed."""
    bare, stored = head(kind, HEADS[kind]), batch([24, 20, 22], 1)
    model = memoize(bare, database=":memory:", reuse="rows", gate=False, near=0, budget=0.01)
    run(model, stored)
    parts = rows_of(stored, 0, 1), rows_of(changed(stored, 3), 2), batch([24], 9)
    mixed = {name: torch.cat([part[name] for part in parts]) for name in stored}
    before = firsts(model)
    with last_states(model) as states:
        seen = run(model, mixed).logits
    assert firsts(model) == before + 1
    assert states[0][:, 1:].isnan().all()
    assert done_of(model)["repeated"] == 2
    exact = memoize(copy.deepcopy(unmemoize(model)), reuse="none")
    with last_states(exact) as expected:
        logits = run(exact, mixed).logits
    assert torch.equal(states[0][:, 0], expected[0][:, 0])
    assert torch.equal(seen, logits)


def done_of(model: Any) -> dict[str, int]:
    found: dict[str, int] = model.attmemo.stats()["guard"]["done"]
    return found


def test_an_answer_that_another_record_gave_becomes_exact_with_a_record_of_its_own_and_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This is the limit: without a record of its own a text may be answered by another one, or by none."""
    monkeypatch.setattr("attmemo.guard.deferred.MOST", 0)  # what is drawn is computed at once
    case = Case("BERT")
    model, exact = taught(case.bare, min_cosine=-1.0), field(run(case.exact, BOTH))
    guard = model.attmemo.guarded.guard
    first = field(run(model, BOTH))
    assert not any(torch.equal(*pair) for pair in zip(first, exact, strict=True)), "answers of other records"
    assert torch.equal(field(run(model, BOTH)), first), "the same record gives the same"
    guard.drawn = 1.0
    assert torch.equal(field(run(model, BOTH)), exact), "samples are exact, and kept"
    guard.drawn = 0.0
    for inputs in (BOTH, rows_of(BOTH, 3, 0), BOTH):
        rows = [3, 0] if len(inputs["input_ids"]) == 2 else range(6)
        seen = field(run(model, inputs))
        assert all(torch.equal(seen[place], exact[row]) for place, row in enumerate(rows))


def test_a_text_whose_record_is_on_its_way_is_computed_as_it_was() -> None:
    """Though another record could serve: its own one will have the same bits."""
    case = Case("BERT")
    model, exact = taught(case.bare, min_cosine=-1.0), field(run(case.exact, BOTH))
    store, n = model.attmemo.engine.reuse.store, LENGTHS[2]
    tokens = BOTH["input_ids"][2, :n].numpy().astype(np.int32)
    offers = [Offer.of(tokens, store.layout, np.zeros(store.layout.nbytes(n), np.uint8), 0)]
    assert model.attmemo.rows_to_compute([tokens.tolist()])[0] < n
    store._offered[hash_of(tokens)] = offers[0]
    assert store.awaiting(tokens, np.array([0, n])).tolist() == [True]
    assert store.awaiting(tokens, np.array([0, n - 1, n])).tolist() == [False, False]
    assert model.attmemo.rows_to_compute([tokens.tolist()]) == [n]
    seen = field(run(model, BOTH))
    assert [torch.equal(*pair) for pair in zip(seen, exact, strict=True)] == [place == 2 for place in range(6)]
    assert store.index.same(tokens) >= 0
    assert until(lambda: not store.awaiting(tokens, np.array([0, n])).any()), "it is there"
    assert torch.equal(field(run(model, BOTH))[2], exact[2])


def test_what_is_not_kept_is_awaited_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model = guarded(MODELS["BERT"]())
    store = model.attmemo.engine.reuse.store
    monkeypatch.setattr(store.pool, "fits", lambda nbytes: False)
    run(model, BASE)
    assert model.attmemo.stats()["offered"] == {"too_large": len(LENGTHS)}
    assert until(lambda: not store._offered)


def test_an_answer_is_exact_again_once_its_record_goes() -> None:
    case = Case("BERT")
    model, exact = guarded(case.bare), field(run(case.exact, BASE))
    run(model, BASE)
    store = model.attmemo.engine.reuse.store
    store._learn(store.pool.remove(list(store.pool.records)))
    for _ in range(2):
        assert torch.equal(field(run(model, BASE)), exact)


def test_the_own_record_of_a_text_goes_before_all_others() -> None:
    """Even where another record needs as few rows: the text is its beginning."""
    case = Case("BERT")
    model = guarded(case.bare, min_cosine=-1.0)
    long = batch([33], 4)
    short = {name: value[:, :32].contiguous() for name, value in long.items()}
    for inputs in (long, short):
        run(model, inputs)
    certify(model)
    before = done(model)
    assert torch.equal(field(run(model, short)), field(run(case.exact, short)))
    assert done(model) == before | {"repeated": 1}
    run(model, variant(4))
    assert np.isfinite(model.attmemo.stats()["share_computed"])
