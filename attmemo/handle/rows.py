"""Memoization by stored rows: what `memoize(reuse="rows")` checks and makes."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from attmemo.arguments import check_tokenizer
from attmemo.db import KIND_ROWS, Database, ModelInfo
from attmemo.db.aside import open_to_fill
from attmemo.db.encodings import ROW_STORAGE, TYPES
from attmemo.db.files import DAMAGED
from attmemo.db.folder import GUARDS, SEGMENTS
from attmemo.db.pools.filling import Filling
from attmemo.db.pools.pool import Pool
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.errors import AnswerError, ArgumentError, DatabaseError, DatabaseLockedError, StorageFullError
from attmemo.fingerprint import arithmetic, check_fields, tokenizer_digest
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
from attmemo.handle.description import describe
from attmemo.handle.stack import StackMemoization, blocks_of, choose_linear, handle_of, packed_of
from attmemo.kernels.align import Rule
from attmemo.kernels.kinds import NO_KINDS, Kinds
from attmemo.kernels.linear8 import LinearName
from attmemo.models import Adapter
from attmemo.packed.check import check_stack, check_whole
from attmemo.packed.head_check import reads_first_row
from attmemo.packed.runner import Packed
from attmemo.rows.check import check_rows
from attmemo.rows.layout import RowLayout
from attmemo.rows.live_store import GrowingRows
from attmemo.rows.planner import THRESHOLD, RowPlanner
from attmemo.rows.serve import Rows
from attmemo.rows.store import DatabaseRows
from attmemo.rows.token_kinds import find_tokenizer, kinds_of
from attmemo.system.memory import free_memory

_LOG = logging.getLogger("attmemo")

UNGUARDED: Final = (
    "reuse='rows' with budget=None answers from rows of similar inputs, and nothing guards the answers: measure them "
    "on your own data with attmemo evaluate"
)
NO_TOKENIZER: Final = (
    "no tokenizer was found, so numbers and words cannot be told apart: only the very changes that were verified are "
    "served. Give memoize(…, tokenizer=…)"
)

VECTORS: Final = "vectors", "mean", "neighbours"

ATTACKS: Final = (
    "labels are about attacks ({}): only equal inputs are reused, since who writes an input may know what others "
    "wrote; reuse='rows' reuses similar ones all the same"
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
    shadow : bool
        Every answer is exact; what would have been reused is counted.
    log : ChangeLog or None
        Has verified answers that had changed.
    """

    budget: float
    confidence: float
    answers: Answers
    tokenizer: Any
    shadow: bool = False
    log: ChangeLog | None = None

    @classmethod
    def of(
        cls, budget: float | None, confidence: float, answer: AnswerRule, min_cosine: float, tokenizer: Any,
        shadow: bool = False, log_changes: str | os.PathLike[str] | None = None,
    ) -> Guarding | None:  # fmt: skip
        """From the arguments of `memoize`, checked; None: answers are not guarded. ArgumentError: a wrong argument."""
        answers = Answers(answer, min_cosine)
        check_tokenizer(tokenizer)
        if not budget:
            return None
        Guard(budget, confidence)  # it checks its numbers
        log = None if log_changes is None else ChangeLog(log_changes)
        return cls(budget, confidence, answers, tokenizer, shadow, log)


@dataclass(frozen=True, slots=True)
class Records:
    """Where records come from, and where new ones go.

    Parameters
    ----------
    prepared : Database or None
        Records that were built before.
    owned : bool
        Whether the handle closes it.
    folder : path or None
        Of a database that fills itself; None: in memory.
    fills : bool
        Whether new records are kept.
    max_bytes : int or None
        Most bytes of new records.
    fields : mapping
        Those of the model's fingerprint; needed with a folder.
    """

    prepared: Database | None = None
    owned: bool = False
    folder: Path | None = None
    fills: bool = True
    max_bytes: int | None = None
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def grow(self) -> bool:
        """Whether there may be more records than the prepared ones."""
        return self.fills or self.folder is not None


def prepare_rows(
    encoder: nn.Module, outer: Any, adapter: Adapter, records: Records, *, threshold: Any, rule: Rule, gate: bool,
    guarding: Guarding | None, linear: LinearName, vectors: bool = True, chooses: bool = False,
    insists: bool = True,
) -> StackMemoization:  # fmt: skip
    """Check everything and make the handle for rows; the model is not changed yet.

    `outer` is what the caller holds: the model itself, or a wrapper around it. `vectors`: whether answers that are
    vectors may come from rows of similar inputs; if not, AnswerError is raised for them.
    `chooses`: 8-bit layers may be proven beside, with half of the budget. `insists`: similar inputs are reused,
    whatever a classifier's labels are about.
    """
    share = _share(threshold)
    tokenizer = None if guarding is None else guarding.tokenizer or find_tokenizer(outer) or find_tokenizer(encoder)
    blocks, opened = blocks_of(encoder, adapter, "rows"), records.prepared
    if opened is not None and opened.manifest.layers_kept(KIND_ROWS) != len(blocks.blocks):
        raise DatabaseError(
            f"{opened.path} keeps no rows of {len(blocks.blocks)} blocks.",
            "attmemo build-database --reuse rows --model … --data …",
        )
    whole = answering_of(outer, encoder)
    if guarding is not None:  # first of all: a head that cannot be read must leave no folder behind
        check_answers(whole, guarding.answers, adapter, encoder, tokenizer)
        if guarding.answers.are_vectors and not vectors:
            kind, name, kept = ("scores", "score", "an order") if guarding.answers.are_scores else VECTORS
            what = f"{type(outer).__name__} gives {kind}, and rows of similar inputs pull {kind} towards each other."
            hint = f"reuse='rows' or answer='{name}' reuses rows all the same, where {kept} need not be kept"
            raise AnswerError(what, hint)
    packed = packed_of(encoder, adapter, "rows", linear)  # behind: it takes as much memory as the weights
    blocks = packed.blocks
    with ExitStack() as undo:
        prepared = None if opened is None else DatabaseRows(opened)
        store: DatabaseRows | GrowingRows
        if prepared is not None and (guarding is None or not records.grow):
            store = prepared
        else:
            if guarding is None and records.fills:
                raise ArgumentError(
                    "new records are what the guard verifies, and budget=None is without a guard.",
                    "give a budget; or only read a database, with fill=False",
                )
            store = _growing(encoder, adapter, packed, records, prepared, tokenizer, undo)
        undo.callback(store.close)
        storage = store.storage
        growing = store if isinstance(store, GrowingRows) else None
        if guarding is None:
            rule = rule.for_unguarded()
            planner = RowPlanner(store.index, share, rule, relative=blocks.relative, gated=gate)
        else:
            kinds = _kinds(tokenizer)
            planner = GuardedPlanner(
                store.index, share, rule, relative=blocks.relative, gated=gate,
                guard=Guard(guarding.budget, guarding.confidence, free=len(kinds) > 0), kinds=kinds,
                rounds=storage[1] not in (packed.dtype, torch.float32),
                store=growing,
            )  # fmt: skip
        reuse = Rows(blocks, packed, store, guarded=guarding is not None)
        handle = handle_of(encoder, adapter, packed, reuse, planner, opened, owned=records.owned)
        handle.folder = store.folder if isinstance(store, GrowingRows) else None
        check_stack(handle, adapter, encoder, packed)
        check_rows(handle, adapter, encoder, storage, packed)
        handle.first_row = reads_first_row(handle, adapter, encoder)
        handle.parts = check_whole(handle, adapter, encoder, packed.dtype)
        if guarding is not None:  # only now: what the checks ask must not be learned
            assert isinstance(planner, GuardedPlanner)
            if guarding.answers.are_vectors:
                planner.guard.compare_vectors()
            elif guarding.answers.spans is None and is_class_of_first_row(
                guarding.answers.rule, getattr(encoder, "config", None)
            ):
                planner.rule = rule = rule.for_classes()
            labels = [] if insists else attack_labels(getattr(encoder, "config", None))
            if labels:
                planner.guard.equal_only = True
                _LOG.warning("attmemo: %s", ATTACKS.format(", ".join(labels[:3])))
            named = isinstance(guarding.answers.rule, str)  # a function may be another one next time
            answering = {
                "head": head_of(whole, adapter.host(encoder)), "vectors": guarding.answers.are_vectors,
                "answer": guarding.answers.name,
            }  # fmt: skip
            keeper = None
            folder = handle.folder if opened is None else opened.path
            if folder is not None and named:
                settings = answering | {
                    "min_cosine": guarding.answers.min_cosine,
                    "budget": guarding.budget, "confidence": guarding.confidence, "threshold": share,
                    "near": rule.near, "near_numbers": rule.near_where(words=False),
                    "most_moved": rule.most_moved, "rules": digest_of_rules(),
                    "dtype": arithmetic(str(packed.dtype), linear),
                    "kinds": hashlib.sha256(planner.kinds.tobytes()).hexdigest(),
                }  # fmt: skip
                keeper = Keeper(planner.guard, ledger_of(folder, settings))
                undo.callback(keeper.close)
            sureness = Sureness(guarding.answers, growing)
            if named:
                sureness.key = _digest(answering).digest()[:KEY]
            if growing is not None:
                growing.know(sureness.of_note)
            guarded = Guarded(
                planner.guard, guarding.answers, planner, handle.engine, growing, sureness,
                Deferred(whole, handle.engine.watch), Shadow() if guarding.shadow else None, guarding.log,
            )  # fmt: skip
            handle.guard(whole, guarded, keeper)
            if chooses:
                _choose_linear(handle, encoder, adapter, whole, guarding, planner, gate)
        undo.pop_all()
    if guarding is None:
        _LOG.warning("attmemo: %s", UNGUARDED)
    return handle


def _choose_linear(
    handle: StackMemoization, encoder: nn.Module, adapter: Adapter, outer: nn.Module, guarding: Guarding,
    planner: GuardedPlanner, gate: bool,
) -> None:  # fmt: skip
    """Have 8-bit layers proven within half of the budget; rows have all of it before, and the other half then."""
    half = guarding.budget / 2

    def begin() -> None:
        own = Guard(half, guarding.confidence, free=len(planner.kinds) > 0)
        own.equal_only = planner.guard.equal_only
        own.verified.merge(planner.guard.verified.state())
        handle.guard_anew(own)

    choose_linear(
        handle, encoder, adapter, outer, guarding.answers, half, guarding.confidence, served=begin, rows=planner,
        gate=gate,
    )  # fmt: skip


def _growing(
    encoder: nn.Module, adapter: Adapter, packed: Packed, records: Records, prepared: DatabaseRows | None,
    tokenizer: Any, undo: ExitStack,
) -> GrowingRows:  # fmt: skip
    """The store of records that come while the model serves."""
    own = str(packed.dtype).removeprefix("torch.")
    storage = (packed.dtype, packed.dtype) if prepared is None else prepared.storage

    def describe() -> Filling:
        word = own if records.prepared is None else records.prepared.manifest.storage
        return Filling.of(model_info(encoder, adapter, records.fields, tokenizer), word)

    pool: Pool
    shared = None if records.folder is None else _shared_pool(records, records.folder, describe)
    if shared is None:
        most = bound_of(records.max_bytes)
        pool = Pool(most if records.folder is None else min(most, bound_of(None)))  # what was said is for a disk
    else:
        pool = shared
    undo.callback(pool.close)
    if shared is not None:
        check_fields(shared.filling.model.fields, records.fields, shared.path)
        kinds = ROW_STORAGE[shared.filling.storage]
        storage = TYPES[kinds[0]], TYPES[kinds[1]]
        if prepared is not None and prepared.storage != storage:
            raise DatabaseError(
                f"{records.folder} keeps rows in {shared.filling.storage}, the prepared database in others.",
                "fill another folder",
            )
    blocks = packed.blocks
    layout = RowLayout(len(blocks.blocks), blocks.heads * blocks.width, blocks.heads, storage)
    return GrowingRows(pool, layout, prepared, fills=records.fills and (shared is None or shared.fills))


def _shared_pool(records: Records, folder: Path, describe: Callable[[], Filling]) -> SharedPool | None:
    """The pool of a folder. None: the disk takes nothing now, which is said; records are kept in memory then."""
    bound = bound_of(records.max_bytes, folder)
    if not records.fills:
        return SharedPool(folder, bound, fills=False)
    try:
        return open_to_fill(folder, bound, describe)
    except DatabaseError as error:
        read_only = _is_read_only(error)
        if not (read_only or isinstance(error, (StorageFullError, DatabaseLockedError, *DAMAGED))):
            raise
        found = _readable(folder, bound) if read_only else None
        where = "kept in memory only" if found is None else "not kept"
        _LOG.warning("attmemo: new records are %s: %s", where, error)
        return found


def _readable(folder: Path, bound: int) -> SharedPool | None:
    """The pool of a folder, only to be read; None: it cannot be."""
    with ExitStack() as undo, suppress(DatabaseError):
        pool = SharedPool(folder, bound, fills=False)
        undo.callback(pool.close)
        pool.look()
        undo.pop_all()
        return pool
    return None


def _is_read_only(error: BaseException) -> bool:
    """Whether the disk was mounted to be read only: the kernel does so after an error."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno == errno.EROFS


def bound_of(max_bytes: int | None, folder: Path | None = None) -> int:
    """Most bytes of new records.

    By default an eighth of the free memory, and if they lie in a folder also at most a tenth of the disk's free bytes;
    never less than the bytes that are in the folder already.
    """
    if max_bytes is None:
        free = free_memory() // 8
        while folder is not None and not folder.exists():
            folder = folder.parent
        if folder is None:
            return free
        own = 0
        for file in (folder / SEGMENTS).glob("*"):
            with suppress(FileNotFoundError):  # another process has dropped it
                own += file.stat().st_size
        return max(own, min(free, shutil.disk_usage(folder).free // 10))
    return max_bytes


def model_info(encoder: nn.Module, adapter: Adapter, fields: Mapping[str, str], tokenizer: Any = None) -> ModelInfo:
    """What a database that fills itself says about its model."""
    host = adapter.host(encoder)
    config: Any = host.config
    longest = getattr(config, "max_position_embeddings", None)
    longest = longest if isinstance(longest, int) and longest > 0 else 1 << 20
    words = None
    if tokenizer is not None:
        with suppress(Exception):  # a tokenizer of another make: it is not known then
            words = tokenizer_digest(tokenizer)
    return describe(encoder, adapter, adapter.sites(encoder), type(host).__name__, longest, words, fields)


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
