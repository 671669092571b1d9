"""Taggers under a guard: an answer is the list of spans of a text. Rerankers: a score."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from families import SIZES
from guarded import BASE, BOTH, FIRST, SECOND, certify, done, guarded, rows_of, run, taught, variant
from packed_models import NEAR, batch, gap, valid
from shared_data import shared

from attmemo import memoize
from attmemo.errors import AnswerError
from attmemo.guard.answers import Answers

LABELS = dict(enumerate(["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]))


def tagger(factor: float, **settings: Any) -> Any:
    """A random tagger; `factor`: how much its tags depend on the text. In the mean, a token is a person."""
    torch.manual_seed(1)
    model = hf.BertForTokenClassification(hf.BertConfig(**SIZES, id2label=LABELS, **settings)).eval()
    with torch.inference_mode():
        middle = model.bert(**BASE, return_dict=True).last_hidden_state[valid(BASE)].mean(0)
    with torch.no_grad():
        model.classifier.weight.mul_(factor)
        model.classifier.bias.copy_(torch.tensor([0.0, 8.0, 0.0, 0.0, 0.0]) - model.classifier.weight @ middle)
    return model


@pytest.mark.parametrize("returns", [True, False], ids=["output", "tuple"])
def test_tags_are_reused_once_their_changes_are_verified(returns: bool) -> None:
    bare = tagger(0.1, return_dict=returns)
    model = taught(bare)
    assert model.attmemo.planner.rule.near_where(words=False) == 1, "a tag is read from its own row"
    seen, exact = run(model, BOTH), run(bare, BOTH)
    assert type(seen) is type(exact)
    assert done(model)["reused"] > 0
    assert torch.equal(seen[0].argmax(-1)[valid(BOTH)], exact[0].argmax(-1)[valid(BOTH)])
    assert run(model, BOTH)[0].shape == exact[0].shape
    assert not model.attmemo.stats()["failures"]


def test_a_budget_alone_reuses_tags_and_not_those_of_other_heads() -> None:
    assert memoize(tagger(0.1), budget=0.01).attmemo.reuse == "rows"
    words = hf.BertForMaskedLM(hf.BertConfig(**SIZES)).eval()
    assert memoize(words, budget=0.01).attmemo.reuse == "none"


def test_what_changes_spans_is_found_logged_and_given_exactly(tmp_path: Path) -> None:
    bare, log = tagger(1e5), tmp_path / "changes"
    model, exact = guarded(bare, log_changes=log), memoize(copy.deepcopy(bare), reuse="none")
    for inputs in (BASE, variant(FIRST), variant(SECOND)):
        assert torch.equal(run(model, inputs)[0], run(exact, inputs)[0])
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert lines
    assert all(not line["given"] and line["verdict"] == "learn" for line in lines)
    assert len(model.attmemo.guarded.guard.verified.state()["harm"])


def test_what_is_said_of_special_tokens_is_no_change() -> None:
    """Their tags depend on the text, those of all other tokens do not."""
    bare = tagger(0.0, cls_token_id=1)
    inputs = BASE | {"input_ids": BASE["input_ids"].clone()}
    inputs["input_ids"][:, 0] = 1
    with torch.no_grad():
        bare.bert.embeddings.word_embeddings.weight[1] = 40.0
        bare.classifier.weight.copy_(300.0 * torch.randn(5, SIZES["hidden_size"]))
    model = guarded(bare)
    answers, mask = model.attmemo.guarded.answers, inputs["attention_mask"]
    output = run(bare, inputs)
    kept = {"logits": output.logits.clone()}
    kept["logits"][:, 0] = output.logits[:, 0].roll(1, -1)
    own = answers.mask_in(inputs)
    first, second = answers.read(output, own), answers.read(kept, own)
    assert torch.equal(first.values, second.values)
    assert not torch.equal(answers.read(output, mask).values, answers.read(kept, mask).values)
    assert model.attmemo.stats()["tokens"] == 0
    run(model, inputs)
    assert model.attmemo.stats()["tokens"] == int(mask.sum()), "they are tokens all the same"


def test_shadow_mode_counts_tags_that_would_be_reused() -> None:
    model = certify(guarded(tagger(0.1), shadow=True))
    for inputs in (BASE, variant(FIRST), variant(SECOND), BASE):
        run(model, inputs)
    found = model.attmemo.stats()["shadow"]
    assert found["seen"] == 24
    assert found["repeated"] >= 6
    assert model.attmemo.stats()["served"] == 0


def test_an_answer_depends_on_no_other_text_of_the_batch() -> None:
    answers, bare = Answers("auto", 0.98), tagger(300.0)
    answers.meet(bare)
    whole = answers.read(run(bare, BASE), answers.mask_in(BASE)).values
    for row in range(len(whole)):
        own = rows_of(BASE, row)
        length = int(own["attention_mask"].sum())
        alone = {name: value[:, :length] for name, value in own.items()}
        assert answers.read(run(bare, alone), answers.mask_in(alone)).values.tolist() == [whole[row]]


@pytest.mark.parametrize("kind", ["tags", "scores"])
def test_8_bits_are_proven_by_what_the_head_answers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attmemo.handle.stack.speed_of", lambda *_: 2.0)
    torch.manual_seed(1)
    scorer = hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=1)).eval()
    bare = tagger(0.1) if kind == "tags" else scorer
    model = memoize(copy.deepcopy(bare), budget=0.05, gate=False)
    assert model.attmemo.reuse == ("rows" if kind == "tags" else "none"), "rows pull scores towards each other"
    for seed in range(20):
        run(model, batch([9 + (seed + n) % 7 for n in range(32)], 1000 + seed))
    found = model.attmemo.stats()["linear_choice"]
    assert found["state"] == "int8"
    assert found["changed"] == 0


def test_a_score_is_reused_where_it_is_named() -> None:
    torch.manual_seed(1)
    bare = hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=1)).eval()
    with torch.no_grad():
        bare.classifier.weight.mul_(0.2)
    model = taught(bare, answer="score")
    seen, exact = run(model, BOTH), run(bare, BOTH)
    assert done(model)["reused"] > 0
    assert float((seen[0].sigmoid() - exact[0].sigmoid()).abs().max()) <= 0.05


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_a_pipeline_of_tags_gives_what_it_gave(strategy: str, tiny_bert: str, log_lines: list[str]) -> None:
    torch.manual_seed(1)
    tokenizer = hf.AutoTokenizer.from_pretrained(tiny_bert)
    config = hf.AutoConfig.from_pretrained(tiny_bert, id2label=LABELS, label2id={}, architectures=None)
    bare = hf.BertForTokenClassification(config).eval()
    with torch.no_grad():
        bare.classifier.weight.mul_(100.0)
    made = [hf.pipeline("token-classification", copy.deepcopy(bare), tokenizer=tokenizer, device="cpu",
                        aggregation_strategy=strategy) for _ in range(3)]  # fmt: skip
    expected = made[0](log_lines[:12], batch_size=4)
    assert any(expected)
    for own, options in zip(made[1:], ({}, {"budget": 0.01, "gate": False}), strict=True):
        memoize(own, **options)
        for _ in range(2):
            seen = own(log_lines[:12], batch_size=4)
            assert [[{**one, "score": 0} for one in text] for text in seen] == [
                [{**one, "score": 0} for one in text] for text in expected
            ]
            scores = [[one["score"] for text in found for one in text] for found in (seen, expected)]
            assert gap(*map(torch.tensor, scores)) <= 100 * NEAR, "the head makes differences 100 times as great"
            own.model.attmemo.flush() if options else None
    special = {tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id}
    assert special <= set(made[2].model.attmemo.guarded.answers.spans._special.tolist())


def test_tags_by_name_of_a_model_without_them_are_refused() -> None:
    model = hf.BertForSequenceClassification(hf.BertConfig(**SIZES, num_labels=3)).eval()
    with pytest.raises(AnswerError, match="no tags of tokens"):
        memoize(model, budget=0.01, answer="spans")


def test_a_trained_tagger_keeps_its_budget_on_forms() -> None:
    folder, forms = shared("models/minilm-pii"), shared("data/pii_forms/stream.jsonl")
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    bare = hf.AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model, exact = guarded(bare), memoize(copy.deepcopy(bare), reuse="none")
    texts = [json.loads(line)["text"] for line in forms.open()][:480]
    answers, changed = model.attmemo.guarded.answers, 0
    for start in range(0, len(texts), 16):
        inputs = tokenizer(texts[start : start + 16], padding=True, return_tensors="pt")
        mask = answers.mask_in(inputs)
        seen, expected = (answers.read(run(one, inputs), mask).values for one in (model, exact))
        changed += int((seen != expected).sum())
    assert done(model)["reused"] > 0
    assert changed <= 0.01 * len(texts)
