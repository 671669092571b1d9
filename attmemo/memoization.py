"""`memoize` and `unmemoize`: put the engine into a model, in place, and take it out again."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from torch import nn

from attmemo.arguments import (
    AUTO,
    MEMORY,
    NAMESPACES,
    check_budget,
    check_choices,
    check_namespaces,
    check_places,
    check_together,
    is_auto,
)
from attmemo.db import Database, filling_path, find_database
from attmemo.db.pools.filling import is_filling, is_pool, is_sealed
from attmemo.db.pools.prepared import open_prepared
from attmemo.db.pools.shared_pool import SharedPool
from attmemo.embed.lookup import LookupName
from attmemo.errors import (
    AdapterCheckError,
    AnswerError,
    ArgumentError,
    DatabaseError,
    DatabaseNotFoundError,
    UnsupportedModelError,
)
from attmemo.fingerprint import check_fields, fingerprint, model_fields
from attmemo.forward.finite_weights import weights_first
from attmemo.forward.handle import Memoization
from attmemo.forward.hooks import Hook
from attmemo.guard.answers import AnswerRule, answer_of
from attmemo.guard.check import check_answers
from attmemo.handle.equal import prepare_equal
from attmemo.handle.growing import Records
from attmemo.handle.rows import Guarding, answering_of, prepare_rows
from attmemo.handle.stack import StackMemoization, blocks_of, choose_linear, prepare_stack
from attmemo.kernels.align import Rule
from attmemo.kernels.linear8 import LinearName
from attmemo.maps.handle import Threshold, prepare_maps
from attmemo.mmap import FetcherName, Residency
from attmemo.models import Adapter, Site, adapter_for, encoder_of, makes_answers_outside
from attmemo.system.machine import trim
from attmemo.system.precision import warn_if_slow
from attmemo.system.sizes import bytes_of

_LOG = logging.getLogger("attmemo")

_PRIVACY = "database=':memory:' keeps nothing behind, fill=False nothing at all; attmemo forget takes records out"

Model = TypeVar("Model")
ReuseName = Literal["auto", "maps", "rows", "prefix", "local", "none"]


def memoize(
    model: Model,
    threshold: Threshold = "auto",
    database: str | os.PathLike[str] | Database | None = None,
    *,
    reuse: ReuseName = "auto",
    budget: float | None = 0,
    confidence: float = 0.95,
    answer: AnswerRule = "auto",
    min_cosine: float = 0.98,
    tokenizer: Any = None,
    fill: bool | str | os.PathLike[str] = True,
    max_bytes: int | str | None = None,
    near: int | None = None,
    most_moved: int | None = None,
    lookup: LookupName | None = None,
    gate: bool = True,
    fetch: FetcherName = "auto",
    residency: Residency = "page-cache",
    linear: Literal["auto"] | LinearName = "auto",
    shadow: bool = False,
    log_changes: str | os.PathLike[str] | None = None,
    namespaces: int = NAMESPACES,
) -> Model:
    """Make a transformers model faster on CPUs, in place.

    ``memoize(model)`` is exact and keeps nothing: its blocks run without padding. ``memoize(model, budget=0.01)`` also
    reuses what earlier, similar inputs have computed, and changes at most 1 % of the answers.

    Parameters
    ----------
    model : transformers model
        On the CPU. A wrapper that holds one (sentence-transformers, pipeline) is accepted.
    threshold : float, sequence of float, or "auto"
        For maps, and in the cache directory if no database is given: similarity score (Eq. 1 of arXiv 2301.09262, in
        [0, 1]) that a record is predicted to have at least, for all layers or one for each; ``"auto"`` takes the
        result of ``attmemo tune`` for this database. For rows: the share of its tokens that a record must supply to a
        sequence; ``"auto"`` is 0.5.
    database : path-like or Database, optional
        Where records are. A path: of a prepared database, or of one that fills itself with rows, which a budget begins
        there if the path does not exist. A `Database` object (of maps) stays yours: once you close it, the model is
        exact. ``":memory:"``: rows of what was computed exactly, in memory. ``"auto"``: the database of this model in
        the user's cache directory; with a budget one is made there that fills itself, if there is none. Default: with
        a budget ``":memory:"``, else nothing. Nothing is written to a disk unless a path or ``"auto"`` is given.
    reuse : {"auto", "maps", "rows", "prefix", "local", "none"}
        What records supply: attention maps, rows (K and V of every layer, and the last hidden states), or nothing.
        ``"prefix"``, for causal models: rows of what inputs begin with, in memory. ``"local"``, for encoders all of
        whose layers are local: rows of what lies beyond their reach from every edit. Both are exact, without a budget.
        ``"none"`` computes all blocks without padding, and is exact up to rounding. ``"auto"``: what the database
        keeps; without a database, rows if there is a budget and the answers are classes, else nothing. A classifier
        whose labels are about attacks (injection, spam, toxic) reuses rows of similar inputs with ``"rows"`` alone;
        else those of equal inputs.
    budget : float or None
        The share of all answers that may change, at most; it guards reuse of rows. Until it is proven that records
        keep it, requests are computed exactly and verified. 0: no answer changes. None: rows of a prepared database
        are reused, and nothing guards the answers.
    confidence : float
        For rows: how sure the budget is kept.
    answer : {"auto", "class", "spans", "score", "mean", "cls"}, callable or classifier
        What an answer is. ``"auto"`` is the class of a model with logits, the list of ``"spans"`` of a model that tags
        tokens, the ``"score"`` of one with one logit (moved by at most 0.05, from 0 to 1), the embedding of a
        sentence-transformers model, or else ``"mean"``: the mean of the last hidden states. A function gets the
        model's output and returns classes, whole numbers ``[B]``, or vectors ``[B, H]``. A fitted classifier of
        scikit-learn: the class of the vector that a sentence-transformers model gives, else of the mean.
    min_cosine : float
        Vectors with a lower cosine are different answers.
    tokenizer : transformers tokenizer, optional
        For rows: tells numbers from words. Default: that of the wrapper, or the one saved beside the weights.
    fill : bool or path-like
        For rows: whether what is computed exactly becomes a record. True: in the database, if it fills itself; in
        memory, in front of a prepared one. A path: beside a prepared database, in the folder there, which is made if
        there is none. False: nothing is kept, records are only read.
    max_bytes : int or str, optional
        For all rows that are kept: bytes that they may take, also as ``"4GiB"``; what is used least goes. Default:
        an eighth of the free memory, and in a folder at most a tenth of the disk's free bytes.
    near : int, optional
        For rows: so many neighbours of a token that the record does not supply are computed too, on both sides. More
        of them cost time and bring the answers nearer to the exact ones. Default: 1; under a guard 0 where only
        numbers changed and the answer is the class of a head that reads the first row; without a guard one more in
        front of three and more such tokens.
    most_moved : int, optional
        For rows: how far a token may have moved between the record and the sequence. Default: any distance.
    lookup : {"layer", "sequence"}, optional
        For maps: a lookup in every layer, or one for each sequence, whose record is reused in all layers. Default: the
        tuned one, else ``"sequence"``.
    gate : bool
        Leave out lookups that do not pay. Under a guard collecting evidence costs 1 % of the time, and half of what
        reuse saves; False always tries, and verifies. For maps the performance model (Eq. 3) is asked.
    fetch : {"auto", "direct", "map", "view", "copy"}
        How maps are read from the arena; results are the same but for the order of sums.
    residency : {"page-cache", "hugepages"}
        Where the arena is served from. Ignored for a `Database` object, which has its own.
    linear : {"auto", "exact", "int8"}
        Arithmetic of the blocks' linear layers, with reuse of rows or of nothing. ``"int8"`` rounds weights and rows
        to 8 bits: faster, and answers are near the exact ones only; what else this says of exact answers then means
        those of int8 layers. Records of one arithmetic never serve the other. ``"auto"`` is ``"exact"`` without a
        budget. With one, and no database but ``":memory:"``, 8-bit layers are timed, and where they are faster they
        are compared with exact ones, now and then, until they are proven to keep the budget. Rows get half of it then.
    shadow : bool
        Give exact answers only; find in idle times what the budget would reuse and change: ``stats()["shadow"]``.
    log_changes : path-like, optional
        A file that gets a line of JSON for each verified answer that had changed: hashes and numbers, no text.
    namespaces : int
        So many namespaces may be named by `Memoization.namespace`. Each has records and a guard of its own; all share
        `max_bytes`.

    Returns
    -------
    The same model; ``model.attmemo`` is its `Memoization`.

    Notes
    -----
    During the checks the model is in evaluation mode and computes attention without fused kernels: let no other
    thread use it meanwhile.

    After a change of its weights, or with an adapter attached, the model stays exact until it is memoized anew.

    Raises
    ------
    UnsupportedModelError
        No adapter knows the model, or it is not on the CPU. Nothing was changed.
    AdapterCheckError
        The path that serves does not reproduce this model's own output, or a weight is not finite. Nothing was
        changed.
    DatabaseError
        There is no usable database: missing, damaged, of another model, untrained, or never tuned (``"auto"``).
    ArgumentError
        An argument is none of the values above, or two make no sense together. It is a `ValueError` too.
    AnswerError
        `answer`, or rows by name (``reuse="rows"``), and the guard finds no answer in what the model gives out. Where
        rows were not asked for by name, its blocks run without padding, and the log says why.
    """
    check_choices(reuse=(reuse, get_args(ReuseName)))
    check_choices(lookup=(lookup, (None, *get_args(LookupName))), fetch=(fetch, get_args(FetcherName)))
    check_choices(residency=(residency, get_args(Residency)), linear=(linear, ("auto", *get_args(LinearName))))
    check_choices(shadow=(shadow, (True, False)))
    check_places(None if isinstance(database, Database) else database, fill)
    check_budget(budget)
    check_namespaces(namespaces)
    rule = Rule.of(near, most_moved)
    own: LinearName = "exact" if linear == "auto" else linear
    chooses = linear == "auto" and bool(budget) and not shadow and (database is None or database == MEMORY)
    check_together(
        reuse=reuse, database=database, fill=fill, budget=budget, linear=own, threshold=threshold, lookup=lookup,
        fetch=fetch, near=near, most_moved=most_moved, shadow=shadow, log_changes=log_changes,
    )  # fmt: skip
    guarding = Guarding.of(budget, confidence, answer_of(model, answer), min_cosine, tokenizer, shadow, log_changes)
    bound = bytes_of(max_bytes)
    encoder, outer = encoder_of(model), getattr(model, "model_body", model)  # that of SetFit gives vectors
    before = _handles(encoder)
    serving = [handle for handle in before if handle.enabled]
    try:
        for earlier in serving:
            earlier.disable()  # the checks look at the bare model
        try:
            if answer == "auto" and guarding is not None and makes_answers_outside(outer, encoder):
                what = f"{type(model).__name__} makes answers of what its {type(encoder).__name__} gives out"
                raise AnswerError(f"{what}: they are not known.", "give answer= a function of what that gives out")
            with weights_first(outer if isinstance(outer, nn.Module) else encoder):
                handle = _prepare(
                    encoder, outer, threshold, database, reuse, rule, lookup, gate, fetch, residency, guarding, fill,
                    bound, own, budget, chooses, namespaces,
                )  # fmt: skip
        except AnswerError as error:
            if reuse == "rows" or answer != "auto":
                raise
            chooses &= not makes_answers_outside(outer, encoder)
            handle = _whole(encoder, outer, _adapter(encoder)[0], own, guarding if chooses else None, gate)
            _LOG.warning("attmemo: nothing is reused, the model's blocks run without padding: %s", error)
        warn_if_slow(next(p.dtype for p in encoder.parameters() if p.is_floating_point()))
    except BaseException:
        for earlier in serving:
            earlier.enable()
        raise
    if any(earlier.host is not handle.host for earlier in serving):
        _LOG.warning("attmemo: another memoized model shares layers with this one, and is no longer memoized")
    for earlier in before:
        if earlier.database is not None and earlier.database is handle.database and earlier.owns_database:
            earlier.owns_database, handle.owns_database = False, True
    unmemoize(model)
    handle.caller = model
    handle.enable()
    # A plain attribute, not a module: state_dict and save_pretrained do not see it.
    object.__setattr__(encoder, "attmemo", handle)
    if model is not encoder:
        object.__setattr__(model, "attmemo", handle)
    trim()  # what weights were made ready from, and what the checks took: as much as the weights
    return model


def unmemoize(model: Model) -> Model:
    """Undo `memoize`; a model that is not memoized is left as it is."""
    encoder = encoder_of(model)
    for handle in _handles(encoder):
        handle.undo()
    for holder in (encoder, model):
        holder.__dict__.pop("attmemo", None)
    trim()
    return model


def _adapter(encoder: nn.Module) -> tuple[Adapter, list[Site]]:
    """The adapter of a model on the CPU, and its attention layers."""
    found = adapter_for(encoder)
    weight = next(p for p in encoder.parameters() if p.is_floating_point())
    if weight.device.type != "cpu":
        where = f"the model is on {weight.device}; attmemo serves models on the CPU."
        raise UnsupportedModelError(where, "model.to('cpu')")
    return found


def _prepare(
    encoder: nn.Module,
    outer: Any,
    threshold: Threshold,
    database: str | os.PathLike[str] | Database | None,
    reuse: ReuseName,
    rule: Rule,
    lookup: LookupName | None,
    gate: bool,
    fetch: FetcherName,
    residency: Residency,
    guarding: Guarding | None,
    fill: bool | str | os.PathLike[str],
    max_bytes: int | None,
    linear: LinearName,
    budget: float | None,
    chooses: bool,
    namespaces: int,
) -> Memoization:
    """Check everything and make the handle; the model is not changed yet."""
    adapter, sites = _adapter(encoder)
    if reuse == "prefix" or reuse == "local":
        return prepare_equal(encoder, adapter, linear, max_bytes, namespaces, reuse)
    if linear != "exact":
        blocks_of(encoder, adapter, reuse)  # or refused by name, whatever else could serve the model
    folder = None if isinstance(fill, bool) else Path(fill)
    asks_for_prepared = reuse == "maps" or (guarding is None and (reuse == "rows" or not is_auto(threshold)))
    if database is None and folder is None and asks_for_prepared:
        database = AUTO
    by_itself = database is None and folder is None and reuse == "auto"
    whole = partial(_whole, encoder, outer, adapter, linear, guarding if chooses else None, gate)
    if reuse == "none" or (by_itself and guarding is None):
        return whole()
    fills = fill is not False
    fields = {} if database in (None, MEMORY) and folder is None else model_fields(adapter.host(encoder), linear)

    def rows(prepared: SharedPool | None, folder: Path | None) -> StackMemoization:
        return prepare_rows(
            encoder, outer, adapter, Records(prepared, folder, fills, max_bytes, fields),
            threshold=threshold, rule=rule, gate=gate, guarding=guarding, linear=linear,
            vectors=not by_itself or (guarding is not None and guarding.answers.rule != "auto"),
            chooses=chooses and folder is None and prepared is None, insists=reuse == "rows",
            namespaces=namespaces,
        )  # fmt: skip

    if by_itself:
        try:
            return rows(None, None)
        except (UnsupportedModelError, AdapterCheckError) as error:
            packed = whole()
            _LOG.warning("attmemo: nothing is reused, the model's blocks run without padding: %s", error)
            return packed
    if database is None or database == MEMORY:
        return rows(None, folder)
    if database == AUTO:
        kind = reuse if reuse != "auto" or budget is None else "maps" if guarding is None else "rows"
        try:
            database = find_database(fingerprint(fields), kind)
        except DatabaseNotFoundError:
            own = filling_path(fingerprint(fields))
            if guarding is None or not (fills or is_filling(own)):
                raise
            return _rows_by_themselves(lambda folder: rows(None, folder), own, fills)
    elif isinstance(database, str | os.PathLike) and not Path(database).exists():
        if guarding is None or not fills or folder is not None:
            raise _not_there(str(database), reuse)
        return rows(None, Path(database))
    if not isinstance(database, Database) and is_pool(database):
        place = Path(database)
        if reuse == "maps":
            raise ArgumentError(f"{place} keeps rows, and no maps.", f"leave out reuse; attmemo inspect {place}")
        if budget == 0:
            what = f"{place} keeps rows: to reuse them can change answers, and budget=0 allows no change."
            raise ArgumentError(what, "budget=0.01 allows at most 1 % of the answers to change")
        if is_sealed(place):
            prepared = open_prepared(place)
            check_fields(prepared.filling.model.fields, fields, place)
            return rows(prepared, folder)
        if folder is not None:
            what = f"{place} fills itself with rows, and fills no other folder."
            raise ArgumentError(what, f"database={str(place)!r} alone")
        return rows(None, place)
    with ExitStack() as undo:
        opened = database if isinstance(database, Database) else Database(database)
        if opened is not database:
            undo.callback(opened.close)
        check_fields(opened.manifest.model.fields, fields, opened.path)
        if reuse == "rows":
            blocks_of(encoder, adapter, reuse)  # a family that has none is the first reason
            what = f"{opened.path} keeps maps, and no rows."
            raise DatabaseError(what, "attmemo build-database --reuse rows --model … --data …")
        if budget:
            what = f"{opened.path} keeps maps, which no budget guards: they have a threshold."
            raise ArgumentError(what, f"leave out budget; attmemo tune {opened.path} --budget {budget:g} …")
        owned = opened is not database
        handle = prepare_maps(
            encoder, adapter, sites, opened,
            owned=owned, threshold=threshold, lookup=lookup, gate=gate, fetch=fetch,
        )  # fmt: skip
        if owned:
            _reside(opened, residency)  # last: it may take minutes and gigabytes
        undo.pop_all()
    return handle


def _whole(
    encoder: nn.Module, outer: Any, adapter: Adapter, linear: LinearName, guarding: Guarding | None, gate: bool
) -> StackMemoization:
    """Packed blocks; with a budget, 8-bit layers are proven where they are faster."""
    handle = prepare_stack(encoder, adapter, linear, outer)
    if guarding is not None:
        answering = answering_of(outer, encoder)
        try:
            tokenizer = guarding.tokenizer or getattr(outer, "tokenizer", None)
            check_answers(answering, guarding.answers, adapter, encoder, tokenizer)
        except (AnswerError, AdapterCheckError) as error:
            _LOG.info("attmemo: linear layers stay exact, nothing can be compared: %s", error)
        else:
            choose_linear(
                handle, encoder, adapter, answering, guarding.answers, guarding.budget, guarding.confidence, gate=gate
            )
    return handle


def _not_there(path: str, reuse: ReuseName) -> DatabaseNotFoundError:
    """The error for a database that does not exist: mostly one was to be begun."""
    build = f"attmemo build-database --output {path} --model … --data …"
    begin = f"budget=0.01 (attmemo serve: --budget 0.01) begins one there that fills itself; or {build}"
    return DatabaseNotFoundError(f"{path} does not exist.", build if reuse == "maps" else begin)


def _rows_by_themselves(rows: Callable[[Path | None], StackMemoization], folder: Path, fills: bool) -> Memoization:
    """In the cache directory, or in memory if the database there cannot be used."""
    new = not is_filling(folder)
    try:
        found = rows(folder)
    except DatabaseError as error:
        if not fills:
            raise
        _LOG.warning("attmemo: new records are kept in memory only: %s", error)
        return rows(None)
    if new and found.folder is not None:
        _LOG.warning("attmemo: %s keeps tokens and hidden states of inputs from now on: %s", folder, _PRIVACY)
    return found


def _handles(encoder: nn.Module) -> list[Memoization]:
    """All that serve this model or layers in it, also through a model around or inside this one."""
    found = {encoder.__dict__.get("attmemo")}
    for module in encoder.modules():
        forward = module.__dict__.get("forward")
        found.add(forward.owner if isinstance(forward, Hook) else None)
    return [handle for handle in found if isinstance(handle, Memoization)]


def _reside(database: Database, residency: Residency) -> None:
    if residency == "page-cache":
        return
    from tqdm.auto import tqdm

    with tqdm(unit="B", unit_scale=True, desc="loading records", leave=False, disable=None) as bar:

        def tell(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        database.reside(residency, tell)


