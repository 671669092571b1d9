"""Memoization by stored rows: what `memoize(reuse="rows")` checks and makes."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from attmemo.adapters import Adapter
from attmemo.db import KIND_ROWS, Database
from attmemo.embed.kinds import find_tokenizer, kinds_of
from attmemo.errors import DatabaseError
from attmemo.guard import AnswerRule, Answers, Guard, Keeper, Ledger
from attmemo.guarded import Guarded
from attmemo.handles.stack import StackMemoization, handle_of, packed_of
from attmemo.kernels.align import Rule
from attmemo.planner import GuardedPlanner, RowPlanner
from attmemo.planner.rows import THRESHOLD
from attmemo.reuse.growing import GrowingRows
from attmemo.reuse.row_store import DatabaseRows, RowStore
from attmemo.reuse.rows import Rows
from attmemo.selfchecks.answers import check_answers
from attmemo.selfchecks.blocks import check_stack
from attmemo.selfchecks.rows import check_rows

_LOG = logging.getLogger("attmemo")

UNGUARDED: Final = (
    "reuse='rows' with budget=None answers from rows of similar inputs, and nothing guards the answers: measure them "
    "on your own data with attmemo evaluate"
)
GUARDS: Final = "guard"
"""Folder in a database that keeps what guards have learned."""
NO_TOKENIZER: Final = (
    "no tokenizer was found, so numbers and words cannot be told apart: only the very changes that were verified are "
    "served. Give memoize(…, tokenizer=…)"
)


@dataclass(frozen=True, slots=True)
class Guarding:
    """How answers are guarded.

    Parameters
    ----------
    budget : float
        Share of answers that may change.
    confidence : float
    answers : Answers
        What an answer is.
    tokenizer
        Tells numbers from words; None: one is looked for.
    """

    budget: float
    confidence: float
    answers: Answers
    tokenizer: Any

    @classmethod
    def of(
        cls, budget: float | None, confidence: float, answer: AnswerRule, min_cosine: float, tokenizer: Any
    ) -> Guarding | None:
        """From the arguments of `memoize`, checked; None: answers are not guarded. ValueError: a wrong argument."""
        answers = Answers(answer, min_cosine)
        if budget is None:
            return None
        Guard(budget, confidence)  # it checks its numbers
        return cls(budget, confidence, answers, tokenizer)


def prepare_rows(
    encoder: nn.Module, outer: Any, adapter: Adapter, opened: Database | None, *, owned: bool, threshold: Any,
    rule: Rule, gate: bool, guarding: Guarding | None, max_bytes: int | None,
) -> StackMemoization:  # fmt: skip
    """Check everything and make the handle for rows; the model is not changed yet.

    `outer` is what the caller holds: the model itself, or a wrapper around it. Without a database, records are kept in
    memory.
    """
    share = _share(threshold)
    packed = packed_of(encoder, adapter, "rows")
    blocks = packed.blocks
    if opened is not None and opened.manifest.layers_kept(KIND_ROWS) != len(blocks.blocks):
        raise DatabaseError(
            f"{opened.path} keeps no rows of {len(blocks.blocks)} blocks.",
            "attmemo build-database --reuse rows --model … --data …",
        )
    with ExitStack() as undo:
        prepared = None if opened is None else DatabaseRows(opened)
        storage = (packed.dtype, packed.dtype) if prepared is None else prepared.storage
        store: RowStore
        if guarding is None and prepared is not None:
            store, planner = prepared, RowPlanner(prepared.index, share, rule, relative=blocks.relative, gated=gate)
        else:
            if guarding is None:
                raise ValueError("database=':memory:' fills itself with what the guard verifies: it needs a budget")
            kinds = _kinds(guarding.tokenizer, outer, encoder)
            store = GrowingRows(storage, blocks.heads, prepared, max_bytes)
            planner = GuardedPlanner(
                store.index, share, rule, relative=blocks.relative, gated=gate,
                guard=Guard(guarding.budget, guarding.confidence, free=len(kinds) > 0), kinds=kinds,
                rounds=any(kind.itemsize < packed.dtype.itemsize for kind in storage),
            )  # fmt: skip
        undo.callback(store.close)
        reuse = Rows(blocks, packed, store)
        handle = handle_of(encoder, adapter, packed, reuse, planner, opened, owned=owned)
        check_stack(handle, adapter, encoder)
        check_rows(handle, adapter, encoder, storage)
        if guarding is not None:  # only now: what the checks ask must not be learned
            assert isinstance(planner, GuardedPlanner)
            whole = _answering(outer, encoder)
            check_answers(whole, guarding.answers, adapter, encoder)
            if guarding.answers.are_vectors:
                planner.guard.compare_vectors()
            keeper = None
            if opened is not None and isinstance(guarding.answers.rule, str):  # a function may be another next time
                settings = {
                    "head": head_of(whole, adapter.host(encoder)), "vectors": guarding.answers.are_vectors,
                    "answer": guarding.answers.name, "min_cosine": guarding.answers.min_cosine,
                    "budget": guarding.budget, "confidence": guarding.confidence, "threshold": share,
                    "near": rule.near, "most_moved": rule.most_moved, "dtype": str(packed.dtype),
                    "kinds": hashlib.sha256(planner.kinds.tobytes()).hexdigest(),
                }  # fmt: skip
                keeper = Keeper(planner.guard, ledger_of(opened.path, settings))
                undo.callback(keeper.close)
            handle.guard(whole, Guarded(planner.guard, guarding.answers, planner, reuse), keeper)
        undo.pop_all()
    if guarding is None:
        _LOG.warning("attmemo: %s", UNGUARDED)
    return handle


def ledger_of(database: Path, settings: dict[str, Any]) -> Ledger:
    """The file of the guard with these settings, beside the records of a database."""
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return Ledger(database / GUARDS / f"{key}.safetensors", settings)


def head_of(model: nn.Module, host: nn.Module) -> str:
    """A hash of what lies around the part of a model that is served: other heads give other answers."""
    inside = {id(value) for value in (*host.parameters(), *host.buffers())}
    found = hashlib.sha256(type(model).__name__.encode())
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if id(value) not in inside:
            found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
            found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(model, nn.Sequential):  # sentence-transformers pools and normalizes by settings of its modules
        found.update("".join(str(module) for module in list(model)[1:]).encode())
    return found.hexdigest()


def _answering(outer: Any, encoder: nn.Module) -> nn.Module:
    """The module whose output has the answers: a sentence-transformers model pools, other wrappers call the model."""
    return outer if isinstance(outer, nn.Sequential) and hasattr(outer, "encode") else encoder


def _kinds(tokenizer: Any, outer: Any, encoder: nn.Module) -> np.ndarray[Any, np.dtype[np.uint8]]:
    found = tokenizer or find_tokenizer(outer) or find_tokenizer(encoder)
    if found is None:
        _LOG.warning("attmemo: %s", NO_TOKENIZER)
        return np.empty(0, np.uint8)
    return kinds_of(found)


def _share(threshold: Any) -> float:
    if isinstance(threshold, str) and threshold == "auto":
        return THRESHOLD
    if isinstance(threshold, int | float) and not isinstance(threshold, bool) and 0.0 <= threshold <= 1.0:
        return float(threshold)
    raise ValueError(f"for reuse='rows' a threshold is one share of tokens in [0, 1], or 'auto'; got {threshold!r}")
