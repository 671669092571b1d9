"""`attmemo serve --reuse prefix`: a policy before every text is computed once, and no answer changes."""

from __future__ import annotations

from pathlib import Path

from services import WORDS, living, tiny
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForSequenceClassification


def test_texts_behind_one_policy_compute_what_is_new_and_answers_are_the_same(tmp_path: Path) -> None:
    folder = tiny(tmp_path, 3)
    names = ["input_ids", "attention_mask"]  # a decoder has no types
    PreTrainedTokenizerFast.from_pretrained(folder, model_input_names=names).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=4 + len(WORDS) + 100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, num_labels=3, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForSequenceClassification(config).save_pretrained(folder)
    policy = " ".join(str(number) for number in range(50))
    texts = [f"{policy} {word}" for word in WORDS[:4]]
    with living(folder, reuse="prefix", database=None, budget=0, row_headers=True) as live:
        replies = [live.post("/predict", {"inputs": text}) for text in texts]
        exact = [live.post("/predict", {"inputs": text, "reuse": "off"}) for text in texts]
        assert [reply.status for reply in replies] == [200] * 4
        assert [reply.json for reply in replies] == [reply.json for reply in exact]
        rows = [int(reply.headers["x-attmemo-rows-computed"]) for reply in replies]
        assert rows == [rows[0], *[rows[0] - 48] * 3]
        assert replies[0].headers["x-attmemo-reuse"] == "prefix"
        assert live.get("/live").json["reuse"] == "prefix"
