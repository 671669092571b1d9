"""Build a database from the user's data: run, capture, store, publish; resumable at any point."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

from torch import Tensor, nn

from attmemo.adapters import Adapter, Site, adapter_for, check_adapter, encoder_of
from attmemo.db import SPLIT_HELD_OUT, SPLIT_TRAIN, DatabaseWriter, ModelInfo, Provenance, default_path
from attmemo.db.files import ARENA
from attmemo.errors import AttmemoError, DatabaseError, DataError, StorageFullError
from attmemo.fingerprint import fingerprint, model_fields, tokenizer_digest
from attmemo.mmap import page_size
from attmemo.profiler.admit import Admission
from attmemo.profiler.capture import Capture, Captured
from attmemo.profiler.data import Row, count_rows, digest, read_texts
from attmemo.profiler.models import LoadedModel, batches, collate, greatest_length, tokenize
from attmemo.reuse.maps import Maps

Progress = Callable[[int, int], None]
PUBLISH_SECONDS = 10.0  # unpublished work that a crash may cost
CHUNK = 256  # rows tokenized, sorted by length and captured together
_WHEN_FULL = "free space and run the same command again, it resumes; or use --max-bytes or --limit"


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
    Errors are those of `read_texts` and `DatabaseWriter`; what was published stays, and the same call resumes.
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
    with DatabaseWriter(path, info, storage, settings, when_full=_WHEN_FULL) as writer:
        build = _Build(writer, files, options)
        try:
            with Capture(loaded.model, adapter, sites) as capture:
                while build.stopped is None and (chunk := list(islice(rows, CHUNK))):
                    fresh = build.choose(chunk)
                    tokens = tokenize(loaded, [row.text for row in fresh], max_length)
                    for batch in batches(tokens, options.batch_size):
                        captured = capture.run(collate(loaded, batch))
                        if not build.store([fresh[item.row] for item in batch], captured):
                            break
                        if progress is not None:
                            progress(build.added + build.skipped + build.alike, total)
                        build.publish(now=False)
        except StorageFullError:
            raise  # nothing more can be written, a publication neither; the last one stays
        except (KeyboardInterrupt, Exception):
            if writer.records > writer.manifest.records:
                build.publish()
            raise
        if writer.records == 0:
            if build.stopped is not None:
                raise _too_few(options.max_bytes)
            raise DataError("the data holds no text to build from.", "check --text-column and the files")
        build.publish()
        counts, seconds = (build.added, build.skipped, build.held_out), time.monotonic() - start
        return BuildResult(path, writer.records, *counts, writer.stored_bytes, seconds, build.stopped, build.alike)


def check_place(path: Path | None, max_bytes: int | None) -> None:
    """Refuse a place or a size that no database can have, before a model is loaded. `DatabaseWriter` checks more."""
    if max_bytes is not None and max_bytes < page_size():
        raise _too_few(max_bytes)
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise DatabaseError(f"{path} is a file; a database is a directory.", "choose another --output")
    if path.is_dir() and any(path.iterdir()) and not (path / ARENA).is_dir():
        raise DatabaseError(f"{path} is not empty and is not a database.", "choose another --output")


def _too_few(max_bytes: int | None) -> StorageFullError:
    return StorageFullError(f"--max-bytes {max_bytes} does not hold a single record.", "allow more bytes")


class _Build:
    """One run of a build: which rows are new, which of them are stored, and how many there were of each."""

    def __init__(self, writer: DatabaseWriter, files: Sequence[str | Path], options: BuildOptions) -> None:
        self._writer, self._options = writer, options
        self._known = writer.stored_rows()  # rows by source: stored, or chosen in this run
        self._digests = {str(f): digest(f) for f in files}
        self._numbers = {name: writer.add_source(Path(name).name, found) for name, found in self._digests.items()}
        self._admission = None if options.admit is None else Admission(options.admit, writer)
        self._published = time.monotonic()
        self.added = self.skipped = self.held_out = self.alike = 0
        self.stopped: str | None = None

    def choose(self, chunk: Sequence[Row]) -> list[Row]:
        """The rows that the model has to be asked about; the others are counted."""
        fresh = []
        for row in chunk:
            known = self._known.setdefault(self._numbers[row.source], set())
            if row.row in known:
                self.skipped += 1
                continue
            known.add(row.row)  # the same file may have been given twice
            admission = self._judges(row)
            if admission is not None and admission.left_out(self._digests[row.source], row.row):
                self.alike += 1
            else:
                fresh.append(row)
        return fresh

    def store(self, rows: Sequence[Row], captured: Captured) -> bool:
        """Store a batch; False: it was not stored to its end, because there is no more room."""
        most, writer = self._options.max_bytes, self._writer
        for row, (maps, hidden) in zip(rows, captured, strict=True):
            if most is not None and writer.stored_bytes + writer.cost(len(hidden[0])) > most:
                self.stopped = f"--max-bytes {most} reached"
                return False
            admission = self._judges(row)
            if admission is not None and not admission.admits(maps, hidden[0]):
                admission.leave_out(self._digests[row.source], row.row)
                self.alike += 1
                continue
            source = self._numbers[row.source]
            split = _split(source, row.row, self._options.held_out)
            record = writer.add(Maps.slots(hidden, maps), len(hidden[0]), Provenance(source, row.row, split))
            if self._admission is not None:
                self._admission.remember(record, hidden[0])
            self.added += 1
            self.held_out += split == SPLIT_HELD_OUT
        return True

    def publish(self, now: bool = True) -> None:
        """Publish what was stored; if not `now`, then only when a crash would cost too much."""
        if not now and time.monotonic() - self._published <= PUBLISH_SECONDS:
            return
        self._writer.publish()
        if self._admission is not None:
            self._admission.save()
        self._published = time.monotonic()

    def _judges(self, row: Row) -> Admission | None:
        """What may leave a row out. Held-out rows all stay: without near ones predictions would look too bad."""
        split = _split(self._numbers[row.source], row.row, self._options.held_out)
        return None if split == SPLIT_HELD_OUT else self._admission


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
        What the attention layers' part of the model is called with (the encoder, of models that have one):
        ``input_ids`` and ``attention_mask``, or ``pixel_values``, or ``input_features``.
    output, storage, inputs, held_out
        As `build_database` and `BuildOptions` have them.
    name : str
        What the database says about where the inputs come from.

    Returns
    -------
    Path
        The database, published. `attmemo.profiler.train.train_database` comes next.

    Raises
    ------
    UnsupportedModelError, AdapterCheckError, DataError
        The model is not known, or not as it should be; there was no input.
    """
    model = encoder_of(model)
    if getattr(getattr(model, "attmemo", None), "enabled", False):
        raise AttmemoError("the model is being served: its maps would be another text's.", "attmemo.unmemoize(model)")
    adapter, sites = adapter_for(model)
    check_adapter(adapter, model, sites)
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise DataError("there is no input to build from.", "give at least one batch")
    with Capture(model, adapter, sites) as capture:
        captured = capture.run(dict(first))
        longest = int(getattr(adapter.host(model).config, "max_position_embeddings", 0) or 0)
        info = describe(model, adapter, sites, name, max(longest, captured.inputs[0].shape[1]), None)
        kind, settings = resolve_storage(info.dtype, storage, inputs)
        with DatabaseWriter(output or default_path(info.fingerprint), info, kind, settings) as writer:
            source = writer.add_source(name, f"rows from {writer.records}")
            rest = (capture.run(dict(batch)) for batch in stream)
            for row, (maps, hidden) in enumerate(chain(captured, chain.from_iterable(rest))):
                writer.add(Maps.slots(hidden, maps), len(hidden[0]), Provenance(source, row, _split(0, row, held_out)))
            writer.publish()
            return writer.path


def describe(
    model: nn.Module, adapter: Adapter, sites: Sequence[Site], name: str, max_length: int, tokenizer: str | None
) -> ModelInfo:
    """What a database says about the model it belongs to."""
    host = adapter.host(model)
    fields = model_fields(host)
    return ModelInfo(
        name=name, family=adapter.family, mask_kind=adapter.mask_kind, layers=len(sites),
        heads=adapter.shape(sites[0].module)[0],
        hidden=int(host.config.hidden_size),  # type: ignore[union-attr,arg-type]
        dtype=str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch."),
        max_length=max_length, fingerprint=fingerprint(fields), fields=fields, tokenizer=tokenizer,
    )  # fmt: skip


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


def _split(source: int, row: int, held_out: float) -> int:
    """Stretches of 20 rows, every few held out: decided by file and row alone, so that a resumed build agrees.

    Files are offset against each other, so that many short ones hold out their share too.
    """
    if held_out <= 0.0:
        return SPLIT_TRAIN
    period = max(2, round(1.0 / held_out))
    return SPLIT_HELD_OUT if (row // 20 + source) % period == period - 1 else SPLIT_TRAIN
