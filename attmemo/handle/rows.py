"""Memoization by stored rows: what `memoize(reuse="rows")` checks and makes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from attmemo.arguments import check_tokenizer
from attmemo.db.folder import GUARDS
from attmemo.db.namespaces import folder_of
from attmemo.errors import AnswerError, ArgumentError
from attmemo.fingerprint import arithmetic
from attmemo.guard.answers import AnswerRule, Answers, is_class_of_first_row
from attmemo.guard.attack_labels import attack_labels
from attmemo.guard.change_log import ChangeLog
from attmemo.guard.check import check_answers
from attmemo.guard.confidence import KEY, Sureness
from attmemo.guard.deferred import Deferred
from attmemo.guard.file import Ledger
from attmemo.guard.forward import Guarded
from attmemo.guard.guard import Guard
from attmemo.guard.keeper import Keeper
from attmemo.guard.planner import GuardedPlanner
from attmemo.guard.rules import digest_of_rules
from attmemo.guard.shadow import Shadow
from attmemo.handle.growing import Records, growing_rows
from attmemo.handle.namespaces import Namespaces
from attmemo.handle.stack import StackMemoization, blocks_of, choose_linear, handle_of, packed_of
from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import NO_KINDS, Kinds
from attmemo.kernels.linear8 import LinearName
from attmemo.models import Adapter
from attmemo.packed.check import check_stack, check_whole
from attmemo.packed.head_check import reads_first_row
from attmemo.packed.runner import Packed
from attmemo.rows.check import check_rows
from attmemo.rows.planner import THRESHOLD, RowPlanner
from attmemo.rows.serve import Rows
from attmemo.rows.token_kinds import find_tokenizer, kinds_of

_LOG = logging.getLogger("attmemo")

UNGUARDED: Final = (
    "reuse='rows' with budget=None answers from rows of similar inputs, and nothing guards the answers: measure them "
    "on your own data with attmemo evaluate"
)
NO_TOKENIZER: Final = (
    "no tokenizer was found, so numbers and words cannot be told apart: only the very changes that were verified are "
    "reused. Give memoize(…, tokenizer=…)"
)

VECTORS: Final = "vectors", "mean", "neighbours"

ATTACKS: Final = (
    "labels are about attacks ({}): only equal inputs are reused, since who writes an input may know what others "
    "wrote; reuse='rows' reuses similar ones all the same"
)


@dataclass(frozen=True, slots=True)
class Guarding:
    """How answers are guarded."""

    budget: float  # share of answers that may change
    confidence: float
    answers: Answers  # what an answer is
    tokenizer: Any  # tells numbers from words; None: one is looked for
    shadow: bool  # every answer is exact; what would have been reused is counted
    log: ChangeLog | None  # has verified answers that had changed

    @classmethod
    def of(
        cls, budget: float | None, confidence: float, answer: AnswerRule, min_cosine: float, tokenizer: Any,
        shadow: bool, log_changes: str | os.PathLike[str] | None,
    ) -> Guarding | None:  # fmt: skip
        """From the arguments of `memoize`, checked; None: answers are not guarded. ArgumentError: a wrong argument."""
        answers = Answers(answer, min_cosine)
        check_tokenizer(tokenizer)
        if not budget:
            return None
        Guard(budget, confidence)  # it checks its numbers
        log = None if log_changes is None else ChangeLog(log_changes)
        return cls(budget, confidence, answers, tokenizer, shadow, log)


def prepare_rows(
    encoder: nn.Module, outer: Any, adapter: Adapter, records: Records, *, threshold: Any, rule: Rule, gate: bool,
    guarding: Guarding | None, linear: LinearName, vectors: bool, chooses: bool, insists: bool, namespaces: int,
) -> StackMemoization:  # fmt: skip
    """Check everything and make the handle for rows; the model is not changed yet.

    `outer` is what the caller holds: the model itself, or a wrapper around it. `vectors`: whether answers that are
    vectors may come from rows of similar inputs; if not, AnswerError is raised for them.
    `chooses`: 8-bit layers may be proven beside, with half of the budget. `insists`: similar inputs are reused,
    whatever a classifier's labels are about. `namespaces`: so many may be named later.
    """
    share = _share(threshold)
    tokenizer = None if guarding is None else guarding.tokenizer or find_tokenizer(outer) or find_tokenizer(encoder)
    blocks_of(encoder, adapter, "rows")
    whole = answering_of(outer, encoder)
    if guarding is not None:  # first of all: a head that cannot be read must leave no folder behind
        check_answers(whole, guarding.answers, adapter, encoder, tokenizer)
        if guarding.answers.are_vectors and not vectors:
            kind, name, kept = ("scores", "score", "an order") if guarding.answers.are_scores else VECTORS
            what = f"{type(outer).__name__} gives {kind}, and rows of similar inputs pull {kind} towards each other."
            hint = f"reuse='rows' or answer='{name}' reuses rows all the same, where {kept} need not be kept"
            raise AnswerError(what, hint)
    packed = packed_of(encoder, adapter, "rows", linear)  # behind: it takes as much memory as the weights
    with ExitStack() as undo:
        making = _Making(encoder, adapter, packed, whole, tokenizer, share, rule, gate, guarding, linear)
        handle = making.handle(records, undo)
        check_stack(handle, adapter, encoder, packed)
        storage = handle.engine.reuse.store.storage  # type: ignore[attr-defined]
        check_rows(handle, adapter, encoder, storage, packed)
        handle.first_row = reads_first_row(handle, adapter, encoder)
        handle.parts = check_whole(handle, adapter, encoder, packed.dtype)
        if guarding is not None:
            making.learn_of(insists)
            deferred = Deferred(whole, handle.engine.watch)
            making.guard(handle, deferred, handle.folder if records.prepared is None else records.prepared.path, undo)
            handle.spaces = _namespaces(handle, making, records, deferred, namespaces)
            if chooses:
                _choose_linear(handle, making)
        undo.pop_all()
    if guarding is None:
        _LOG.warning("attmemo: %s", UNGUARDED)
    return handle


@dataclass
class _Making:
    """What a model's own handle and those of its namespaces are made of."""

    encoder: nn.Module
    adapter: Adapter
    packed: Packed
    whole: nn.Module
    tokenizer: Any
    share: float
    rule: Rule
    gate: bool
    guarding: Guarding | None
    linear: LinearName
    budget: float = 0.0  # that rows have now: half of it once 8-bit layers serve
    equal_only: bool = False  # similar inputs are not reused

    def __post_init__(self) -> None:
        if self.guarding is not None:
            self.budget, self.kinds = self.guarding.budget, _kinds(self.tokenizer)

    def handle(self, records: Records, undo: ExitStack, like: Rows | None = None) -> StackMemoization:
        """A handle with a store of its own; `like`: what serves the model already."""
        prepared, guarding, packed = records.prepared, self.guarding, self.packed
        if guarding is None and prepared is None and records.fills:
            raise ArgumentError(
                "new records are what the guard verifies, and budget=None is without a guard.",
                "give a budget; or only read a database, with fill=False",
            )
        grows = prepared is None or (guarding is not None and records.grow)
        store = growing_rows(self.encoder, self.adapter, packed, records, self.tokenizer, undo, grows=grows)
        undo.callback(store.close)
        growing, relative = store if grows else None, packed.blocks.relative
        if guarding is None:
            planner = RowPlanner(
                store.index, self.share, self.rule.for_unguarded(), relative=relative, gated=self.gate
            )
        else:
            planner = GuardedPlanner(
                store.index, self.share, self.rule, relative=relative, gated=self.gate, guard=self.new_guard(),
                kinds=self.kinds, rounds=store.storage[1] not in (packed.dtype, torch.float32), store=growing,
            )  # fmt: skip
        scratch = None if like is None else like.scratch
        reuse = Rows(packed.blocks, packed, store, guarded=guarding is not None, scratch=scratch)
        found = handle_of(self.encoder, self.adapter, packed, reuse, planner, prepared)
        found.folder = None if growing is None else growing.folder
        return found

    def new_guard(self) -> Guard:
        """A guard that knows nothing."""
        assert self.guarding is not None
        found = Guard(self.budget, self.guarding.confidence, free=len(self.kinds) > 0)
        found.equal_only = self.equal_only
        if self.answers.are_vectors:
            found.compare_vectors()
        return found

    def keep_budget(self, handle: StackMemoization) -> None:
        """Have a handle begin anew within the budget that rows have now; what it knows of changes stays."""
        planner = handle.planner
        if isinstance(planner, GuardedPlanner) and planner.guard.budget != self.budget:
            own = self.new_guard()
            own.verified.merge(planner.guard.verified.state())
            handle.guard_anew(own)

    @property
    def answers(self) -> Answers:
        """What an answer is."""
        assert self.guarding is not None
        return self.guarding.answers

    def learn_of(self, insists: bool) -> None:
        """Look at what the model's answers are; only once it was checked."""
        config = getattr(self.encoder, "config", None)
        if not (self.answers.are_vectors or self.answers.spans) and is_class_of_first_row(self.answers.rule, config):
            self.rule = self.rule.for_classes()
        labels = [] if insists else attack_labels(config)
        if labels:
            self.equal_only = True
            _LOG.warning("attmemo: %s", ATTACKS.format(", ".join(labels[:3])))
        self.answering = {
            "head": head_of(self.whole, self.adapter.host(self.encoder)), "vectors": self.answers.are_vectors,
            "answer": self.answers.name,
        }  # fmt: skip

    def guard(self, handle: StackMemoization, deferred: Deferred, folder: Path | None, undo: ExitStack) -> None:
        """Guard the answers of a handle; what is learned is kept in the folder, if any."""
        planner, guarding, rule = handle.planner, self.guarding, self.rule
        assert isinstance(planner, GuardedPlanner)
        assert guarding is not None
        planner.guard, planner.rule = self.new_guard(), rule  # what the checks asked must not be learned
        named = isinstance(self.answers.rule, str)  # a function may be another one next time
        keeper = None
        if folder is not None and named:
            settings = self.answering | {
                "min_cosine": self.answers.min_cosine,
                "budget": self.budget, "confidence": guarding.confidence, "threshold": self.share,
                "near": rule.near, "near_numbers": rule.near_where(words=False),
                "most_moved": rule.most_moved, "rules": digest_of_rules(),
                "dtype": arithmetic(str(self.packed.dtype), self.linear),
                "kinds": hashlib.sha256(planner.kinds.tobytes()).hexdigest(),
            }  # fmt: skip
            keeper = Keeper(planner.guard, ledger_of(folder, settings))
            undo.callback(keeper.close)
        growing = handle._store
        sureness = Sureness(self.answers, growing)
        if named:
            sureness.key = _digest(self.answering).digest()[:KEY]
        if growing is not None:
            growing.know(sureness.of_note)
        shadow = Shadow() if guarding.shadow else None
        guarded = Guarded(
            planner.guard, self.answers, planner, handle.engine, growing, sureness, deferred, shadow, guarding.log
        )
        handle.guard(self.whole, guarded, keeper)


def _namespaces(
    outer: StackMemoization, making: _Making, records: Records, deferred: Deferred, most: int
) -> Namespaces:  # fmt: skip
    """Namespaces, each with a folder of its own where records or guards have one."""
    opened = None if records.prepared is None else records.prepared.path
    places = [place for place in (outer.folder, opened) if place is not None]
    reuse = outer.engine.reuse
    assert isinstance(reuse, Rows)

    def make(name: str, max_bytes: int) -> StackMemoization:
        own = None if outer.folder is None else folder_of(outer.folder, name)
        with ExitStack() as undo:
            found = making.handle(
                replace(records, folder=own, max_bytes=max_bytes), undo, reuse
            )
            found.engine.serve_within(outer.engine, found)
            making.guard(found, deferred, folder_of(places[-1], name) if places else None, undo)
            undo.pop_all()
        return found

    return Namespaces(outer, make, most, places, making.keep_budget)


def _choose_linear(handle: StackMemoization, making: _Making) -> None:
    """Have 8-bit layers proven within half of the budget; rows have all of it before, and the other half then."""
    guarding, planner = making.guarding, handle.planner
    assert guarding is not None
    assert isinstance(planner, GuardedPlanner)
    half = guarding.budget / 2

    @contextmanager
    def begin() -> Iterator[None]:
        emptied = list[StackMemoization]()

        def empty(stack: ExitStack) -> None:
            """The same text has other bits in 8 bits."""
            for one in (handle, *(handle.spaces.opened() if handle.spaces is not None else ())):
                if one._store is not None and one not in emptied:
                    stack.enter_context(one._store.emptied())
                    emptied.append(one)

        with ExitStack() as stack:
            empty(stack)
            making.budget = half  # a namespace that opens now looks at it once it is among them
            yield
            empty(stack)
            for one in emptied:
                making.keep_budget(one)
                own, outer = one.engine.reuse, handle.engine.reuse
                assert isinstance(own, Rows)
                assert isinstance(outer, Rows)
                own.run_as(outer)

    choose_linear(
        handle, making.encoder, making.adapter, making.whole, making.answers, half, guarding.confidence,
        served=begin, rows=planner, gate=making.gate,
    )  # fmt: skip


def ledger_of(database: Path, settings: dict[str, Any]) -> Ledger:
    """The file of the guard with these settings, beside the records of a database."""
    return Ledger(database / GUARDS / f"{_digest(settings).hexdigest()[:16]}.safetensors", settings)


def _digest(settings: dict[str, Any]) -> Any:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode())


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


def answering_of(outer: Any, encoder: nn.Module) -> nn.Module:
    """The module whose output has the answers: a sentence-transformers model pools, other wrappers call the model."""
    return outer if isinstance(outer, nn.Sequential) and hasattr(outer, "encode") else encoder


def _kinds(tokenizer: Any) -> Kinds:
    if tokenizer is None:
        _LOG.warning("attmemo: %s", NO_TOKENIZER)
        return NO_KINDS
    return kinds_of(tokenizer)


def _share(threshold: Any) -> float:
    if isinstance(threshold, str) and threshold == "auto":
        return THRESHOLD
    if isinstance(threshold, int | float) and not isinstance(threshold, bool) and 0.0 <= threshold <= 1.0:
        return float(threshold)
    what = f"for reuse='rows' a threshold is one share of tokens in [0, 1], or 'auto'; got {threshold!r}."
    raise ArgumentError(what, f"threshold={THRESHOLD}")
