"""What the guard would have done with texts, had they come one after the other, live, to a database of rows.

The guard begins with nothing, and the texts are asked in the order of the data, through the path that a user gets.
Nothing of it is stored: neither records nor what the guard learns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attmemo.db import Database
from attmemo.guard import AnswerRule, Guard
from attmemo.handles.stack import StackMemoization
from attmemo.memoization import memoize, unmemoize
from attmemo.planner.rows import RowPlanner
from attmemo.profiler.answers import ask, changed, prepare
from attmemo.profiler.models import LoadedModel, Progress, Tokens

ANSWERS: dict[str, AnswerRule] = {"class": "class", "mean": "mean", "cls": "cls"}
"""Answers that a guard reads, by how the application pools."""


def play(
    loaded: LoadedModel, database: Database, tokens: Sequence[Tokens], exact: Tensor, options: Any, tell: Progress
) -> dict[str, Any] | None:
    """Shares of the texts served and changed, and of the rows computed; None if the answer cannot be guarded.

    `exact` has the exact answers in the order of rows.
    """
    answer = ANSWERS.get("class" if loaded.kind == "classifier" else str(loaded.pooling))
    if loaded.answer is not None or answer is None:
        return None
    total = len(tokens)
    memoize(
        loaded.model, options.threshold, database, reuse="rows", budget=options.budget, confidence=options.confidence,
        answer=answer, min_cosine=options.min_cosine, tokenizer=loaded.tokenizer, near=options.near,
        most_moved=options.most_moved, gate=options.gate,
    )  # fmt: skip
    try:
        handle: Any = loaded.model.attmemo
        assert isinstance(handle, StackMemoization)
        handle.guard_anew(Guard(options.budget, options.confidence, seed=0))  # the tokenizer is always known here
        in_order = sorted(tokens, key=lambda item: item.row)
        prepared = prepare(loaded, in_order, options.batch_size, sort=False)
        given = ask(loaded, prepared, progress=lambda done: tell("guarded answers", done, total))
        planner = handle.planner
        assert isinstance(planner, RowPlanner)
        stats, rule = handle.stats(), planner.rule
    finally:
        unmemoize(loaded.model)
    guard = stats["guard"]
    differ = changed(loaded.kind, exact, given, options.min_cosine)
    valid = sum(map(len, tokens))
    late = torch.arange(total) >= total // 2
    return {
        "budget": options.budget, "confidence": options.confidence, "reused": stats["reused"] / total,
        "repeated": stats["repeated"] / total,
        "changed": float(differ.float().mean()), "changed_late": float(differ[late].float().mean()),
        "share_computed": stats["rows_computed"] / valid, "verified": guard["verified"], "margin": guard["margin"],
        "state": guard["state"], "done": guard["done"], "says": guard["says"],
        "near": rule.near, "near_numbers": rule.near_where(words=False),
    }  # fmt: skip
