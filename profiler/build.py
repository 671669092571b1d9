"""Build a database from the user's data: run, capture, store, publish; resumable at any point."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from torch import Tensor, nn

from attmemo.adapters import Adapter, Site, adapter_for, check_adapter, encoder_of
from attmemo.db import SPLIT_HELD_OUT, SPLIT_TRAIN, DatabaseWriter, ModelInfo, Provenance, default_path
from attmemo.errors import AttmemoError, DataError, StorageFullError
from attmemo.fingerprint import fingerprint, model_fields, tokenizer_digest
from attmemo.profiler.admit import Admission, LeftOut
from attmemo.profiler.capture import Capture
from attmemo.profiler.data import Row, count_rows, digest, read_texts
from attmemo.profiler.models import LoadedModel, Tokens, batches, collate, greatest_length, tokenize

PUBLISH_SECONDS = 10.0  # unpublished work that a crash may cost
CHUNK = 256  # rows tokenized, sorted by length and captured together
_WHEN_FULL = "free space and run the same command again, it resumes; or use --max-bytes or --limit"
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BuildOptions:
    """What `build_database` was asked for."""

    max_length: int | None = None
    limit: int | None = None
    storage: str = "auto"
    max_bytes: int | None = None
    batch_size: int = 16
    held_out: float = 0.15
    text_column: str | None = None
    inputs: str = "auto"
    admit: float | None = None


@dataclass(frozen=True)
class BuildResult:
    """What was stored."""

    path: Path
    records: int
    added: int
    skipped: int
    held_out: int
    bytes: int
    seconds: float
    stopped: str | None  # why it ended before the data did
    alike: int = 0  # not stored, since a record has nearly the same maps


def build_database(
    loaded: LoadedModel,
    files: Sequence[str | Path],
    output: Path | None,
    options: BuildOptions,
    progress: Progress | None = None,
) -> BuildResult:
    """Store the attention maps of every text in `files`.

    Every ``1 / held_out``-th stretch of rows is marked as held out: it is stored and will serve, but the embedder
    is trained without it and calibrated on it. Stretches, not single rows: neighbouring log lines are near copies.

    Raises
    ------
    DataError
        The data cannot be read, or holds no text.
    DatabaseLockedError, StorageFullError, DatabaseError
        See `DatabaseWriter`. What was published stays, and the same call resumes.
    """
    start = time.monotonic()
    adapter, sites = adapter_for(loaded.model)
    check_adapter(adapter, loaded.model, sites)
    max_length = greatest_length(loaded, options.max_length)
    info = describe(loaded.model, adapter, sites, loaded.name, max_length, tokenizer_digest(loaded.tokenizer))
    path = output or default_path(info.fingerprint)
    storage, settings = resolve_storage(info.dtype, options.storage, options.inputs)
    rows = read_texts(files, text_column=options.text_column, limit=options.limit)
    total = count_rows(files, limit=options.limit)
    added = skipped = held = done = alike = 0
    stopped = None
    with DatabaseWriter(path, info, storage, settings, when_full=_WHEN_FULL) as writer:
        known = writer.stored_rows()
        admission = None if options.admit is None else Admission(options.admit, writer.maps)
        if admission is not None:
            for record in range(writer.records):
                admission.remember(record, writer.first_input(record))
        digests = {str(f): digest(f) for f in files}
        numbers = {str(f): writer.add_source(Path(f).name, digests[str(f)]) for f in files}
        left_out = None if options.admit is None else LeftOut(path, writer.manifest.uuid, options.admit)
        published = time.monotonic()

        def publish() -> None:
            writer.publish()
            if left_out is not None:
                left_out.save()

        try:
            with Capture(loaded.model, adapter, sites) as capture:
                while stopped is None and (chunk := list(islice(rows, CHUNK))):
                    fresh, before = [], alike
                    for row in chunk:
                        rows_of = known.setdefault(numbers[row.source], set())
                        if row.row in rows_of:
                            continue
                        rows_of.add(row.row)  # the same file may have been given twice
                        was_alike = left_out is not None and (digests[row.source], row.row) in left_out
                        if was_alike and _split(numbers[row.source], row.row, options.held_out) != SPLIT_HELD_OUT:
                            alike += 1
                        else:
                            fresh.append(row)
                    skipped += len(chunk) - len(fresh) - (alike - before)
                    done += len(chunk) - len(fresh)
                    for batch in batches(_tokens(loaded, fresh, max_length), options.batch_size):
                        captured = capture.run(collate(loaded, batch))
                        for item, (maps, hidden) in zip(batch, captured, strict=True):
                            if (
                                options.max_bytes is not None
                                and writer.stored_bytes + writer.cost(len(item)) > options.max_bytes
                            ):
                                stopped = f"--max-bytes {options.max_bytes} reached"
                                break
                            row = fresh[item.row]
                            split = _split(numbers[row.source], row.row, options.held_out)
                            # Held-out texts are all kept: without those that have a near record the others would make
                            # every prediction look worse than it is.
                            if (
                                admission is not None
                                and split != SPLIT_HELD_OUT
                                and not admission.admits(maps, hidden[0])
                            ):
                                alike += 1
                                if left_out is not None:
                                    left_out.add(digests[row.source], row.row)
                                continue
                            record = writer.add_maps(maps, hidden, Provenance(numbers[row.source], row.row, split))
                            if admission is not None:
                                admission.remember(record, hidden[0])
                            added += 1
                            held += split == SPLIT_HELD_OUT
                        done += len(batch)
                        if progress is not None:
                            progress(min(done, total), total)
                        if stopped is not None:
                            break
                        if time.monotonic() - published > PUBLISH_SECONDS:
                            publish()
                            published = time.monotonic()
        except StorageFullError:
            raise  # nothing more can be written, a publication neither; the last one stays
        except (KeyboardInterrupt, Exception):
            if writer.records > writer.manifest.records:
                publish()
            raise
        if stopped is not None and writer.records == 0:
            raise StorageFullError(
                f"--max-bytes {options.max_bytes} does not hold a single record.", "allow more bytes"
            )
        if writer.records == 0:
            raise DataError("the data holds no text to build from.", "check --text-column and the files")
        publish()
        spent = time.monotonic() - start
        return BuildResult(path, writer.records, added, skipped, held, writer.stored_bytes, spent, stopped, alike)


def build_from_inputs(
    model: nn.Module,
    batches: Iterable[Mapping[str, Tensor]],
    output: Path | None = None,
    *,
    storage: str = "auto",
    inputs: str = "auto",
    held_out: float = 0.15,
    name: str = "given",
) -> Path:
    """Store the attention maps of inputs that are tensors already: images, audio, or text tokenized elsewhere.

    Parameters
    ----------
    model : transformers model
        In memory; training and tuning from the command line will want it as a directory.
    batches : iterable of mapping of str to Tensor
        What the attention layers' part of the model is called with: ``input_ids`` and ``attention_mask``, or
        ``pixel_values``, or ``input_features``; the encoder's, of models that have one.
    output : Path, optional
        Default: in the user's cache directory, by the model's fingerprint.
    storage, inputs, held_out
        As `BuildOptions` has them.
    name : str
        What the database says about where the inputs come from.

    Returns
    -------
    Path
        The database, published. `attmemo.profiler.train.train_database` comes next.

    Raises
    ------
    UnsupportedModelError, AdapterCheckError
        The model is not known, or not as it should be.
    DataError
        There was no input.
    """
    model = encoder_of(model)
    if getattr(getattr(model, "attmemo", None), "enabled", False):
        raise AttmemoError("the model is being served: its maps would be another text's.", "attmemo.unmemoize(model)")
    adapter, sites = adapter_for(model)
    check_adapter(adapter, model, sites)
    first = None
    with ExitStack() as stack:
        capture = stack.enter_context(Capture(model, adapter, sites))
        row = 0
        for batch in batches:
            captured = capture.run(dict(batch))
            if first is None:
                longest = int(getattr(adapter.host(model).config, "max_position_embeddings", 0) or 0)
                length = max(longest, captured.inputs[0].shape[1])
                info = describe(model, adapter, sites, name, length, None)
                path = output or default_path(info.fingerprint)
                kind, settings = resolve_storage(info.dtype, storage, inputs)
                writer = stack.enter_context(DatabaseWriter(path, info, kind, settings))
                first = writer.add_source(name, f"rows from {writer.records}")
            for maps, hidden in captured:
                writer.add_maps(maps, hidden, Provenance(first, row, _split(0, row, held_out)))
                row += 1
        if first is None:
            raise DataError("there is no input to build from.", "give at least one batch")
        writer.publish()
    return path


def describe(
    model: nn.Module, adapter: Adapter, sites: Sequence[Site], name: str, max_length: int, tokenizer: str | None
) -> ModelInfo:
    """What a database says about the model it belongs to."""
    host = adapter.host(model)
    fields = model_fields(host)
    return ModelInfo(
        name=name,
        family=adapter.family,
        mask_kind=adapter.mask_kind,
        layers=len(sites),
        heads=adapter.shape(sites[0].module)[0],
        hidden=int(host.config.hidden_size),  # type: ignore[union-attr,arg-type]
        dtype=str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch."),
        max_length=max_length,
        fingerprint=fingerprint(fields),
        fields=fields,
        tokenizer=tokenizer,
    )


def resolve_storage(dtype: str, storage: str, inputs: str) -> tuple[str, dict[str, str]]:
    """Storage type and settings for a model that computes in `dtype`, of what was asked for ("auto": what suits it).

    Probabilities lie in [0, 1], where float16 has eight times the resolution of bfloat16; but a bfloat16 model
    multiplies bfloat16 maps as they lie, on the matrix unit.
    """
    if storage == "auto":
        storage = "bfloat16" if dtype == "bfloat16" else "float16"
    if inputs == "auto":
        inputs = "first" if storage == "uint8" else "all"
    return storage, {} if inputs == "all" else {"inputs": inputs}


def _tokens(loaded: LoadedModel, rows: Sequence[Row], max_length: int) -> list[Tokens]:
    return tokenize(loaded, [row.text for row in rows], max_length) if rows else []


def _split(source: int, row: int, held_out: float) -> int:
    """Stretches of 20 rows, every few held out: decided by file and row alone, so that a resumed build agrees.

    Files are offset against each other, so that many short ones hold out their share too.
    """
    if held_out <= 0.0:
        return SPLIT_TRAIN
    period = max(2, round(1.0 / held_out))
    return SPLIT_HELD_OUT if (row // 20 + source) % period == period - 1 else SPLIT_TRAIN
