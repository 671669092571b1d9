"""Build a database from the user's data: run, capture, store, publish; resumable at any point."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from attmemo.db import (
    KIND_INPUT,
    SPLIT_HELD_OUT,
    SPLIT_TRAIN,
    DatabaseWriter,
    ModelInfo,
    Provenance,
    default_path,
)
from attmemo.db.files import MANIFEST
from attmemo.db.pools.filling import is_sealed
from attmemo.db.writer import check_target
from attmemo.errors import AttmemoError, DatabaseError, DataError, StorageFullError
from attmemo.fingerprint import tokenizer_digest
from attmemo.handle.description import describe
from attmemo.mmap import page_size
from attmemo.models import Adapter, Site, adapter_for, check_adapter, encoder_of
from attmemo.profiler.data import Row, count_rows, digest, read_texts
from attmemo.profiler.map_recorder import MapRecorder, map_form
from attmemo.profiler.models import LoadedModel, Tokens, batches, collate, greatest_length, tokenize
from attmemo.profiler.recorder import Place, Recorder
from attmemo.profiler.row_recorder import RowRecorder, RowWriter, row_form
from attmemo.rows.store import Record

Progress = Callable[[int, int], None]
PUBLISH_SECONDS = 10.0  # unpublished work that a crash may cost; of rows a segment
REUSES = ("maps", "rows")
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
    reuse: str = "maps"
    shard: tuple[int, int] = (1, 1)  # (i, n): every n-th text, from the i-th on


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
    alike: int = 0  # not stored, since a record stands for them
    reuse: str = "maps"
    storage: str = ""


def build_database(
    loaded: LoadedModel, files: Sequence[str | Path], output: Path | None, options: BuildOptions,
    progress: Progress | None = None,
) -> BuildResult:  # fmt: skip
    """Store a record of every text in `files`: its attention maps, or its rows.

    Every ``1 / held_out``-th stretch of rows is marked as held out: it is stored and will serve, but the embedder
    is trained without it and calibrated on it. Stretches, not single rows: neighbouring log lines are near copies.
    A text with the tokens of another one is stored once if rows are stored. Shards of the data can be built at the
    same time, each in a database of its own; `attmemo.db.pools.merging.merge_prepared` puts them together.

    Errors are those of `read_texts` and `DatabaseWriter`, and UnsupportedModelError for rows of a model without
    blocks; what was published stays, and the same call resumes.
    """
    start, tell = time.monotonic(), progress or (lambda done, total: None)
    adapter, sites = adapter_for(loaded.model)
    check_adapter(adapter, loaded.model, sites)
    max_length = greatest_length(loaded, options.max_length)
    info = describe(loaded.model, adapter, sites, loaded.name, max_length, tokenizer_digest(loaded.tokenizer))
    path = output or default_path(info.fingerprint, options.reuse)
    recorder = _recorder(options.reuse, options.storage, options.inputs, loaded.model, adapter, sites, info, loaded)
    number, shards = options.shard
    rows = islice(read_texts(files, text_column=options.text_column, limit=options.limit), number - 1, None, shards)
    total = len(range(number - 1, count_rows(files, limit=options.limit), shards))
    with _writer(path, info, recorder, options.max_bytes or 0) as writer:
        build = _Build(writer, recorder, files, options)
        try:
            with recorder:
                while build.stopped is None and (chunk := list(islice(rows, CHUNK))):
                    fresh = build.choose(chunk)
                    tokens = build.admit(fresh, tokenize(loaded, [row.text for row in fresh], max_length))
                    for batch in batches(tokens, options.batch_size):
                        records = recorder.run(collate(loaded, batch))
                        if not build.store([fresh[item.row] for item in batch], records):
                            break
                        tell(build.done, total)
                        build.publish(now=False)
                    if not tokens:
                        tell(build.done, total)
        except StorageFullError:
            raise  # nothing more can be written, a publication neither; the last one stays
        except (KeyboardInterrupt, Exception):
            if build.unpublished:
                build.publish()
            raise
        if writer.records == 0:
            if build.stopped is not None:
                raise _too_few(options.max_bytes)
            if number > 1:
                raise DataError(f"shard {number}/{shards} of the data holds no text.", "make fewer shards")
            raise DataError("the data holds no text to build from.", "check --text-column and the files")
        build.publish()
        counts, seconds = (build.added, build.skipped, build.held_out), time.monotonic() - start
        return BuildResult(
            path, writer.records, *counts, writer.stored_bytes, seconds, build.stopped, build.alike, options.reuse,
            recorder.form.storage,
        )  # fmt: skip


def _recorder(
    reuse: str, storage: str, inputs: str, model: nn.Module, adapter: Adapter, sites: Sequence[Site], info: ModelInfo,
    loaded: LoadedModel | None = None,
) -> Recorder:  # fmt: skip
    if reuse not in REUSES:
        raise ValueError(f"reuse must be one of {', '.join(REUSES)}, got {reuse!r}")
    if reuse == "maps":
        return MapRecorder(model, adapter, sites, map_form(info, storage, inputs))
    if inputs != "auto":
        raise AttmemoError("rows keep no hidden states that entered a layer.", "leave --inputs out")
    return RowRecorder(model, adapter, row_form(storage), loaded)


def _writer(path: Path, info: ModelInfo, recorder: Recorder, expected: int = 0) -> DatabaseWriter | RowWriter:
    of_maps = isinstance(recorder, MapRecorder)
    if (path / MANIFEST).exists() or is_sealed(path):
        kept, asked = "rows" if is_sealed(path) else "maps", "maps" if of_maps else "rows"
        if kept != asked:
            raise DatabaseError(f"{path} keeps {kept}; asked: {asked}.", f"--reuse {kept}, or choose another --output")
    if of_maps:
        return DatabaseWriter(path, info, recorder.form.storage, recorder.form.settings, when_full=_WHEN_FULL)
    return RowWriter(path, info, recorder.form, expected)


def check_place(path: Path | None, max_bytes: int | None) -> None:
    """Refuse a place or a size that no database can have, before a model is loaded. `DatabaseWriter` checks more."""
    if max_bytes is not None and max_bytes < page_size():
        raise _too_few(max_bytes)
    if path is not None and not is_sealed(path):
        check_target(path)


def _too_few(max_bytes: int | None) -> StorageFullError:
    return StorageFullError(f"--max-bytes {max_bytes} does not hold a single record.", "allow more bytes")


class _Build:
    """One run of a build: which rows are new, which of them are stored, and how many there were of each."""

    def __init__(
        self, writer: DatabaseWriter | RowWriter, recorder: Recorder, files: Sequence[str | Path],
        options: BuildOptions,
    ) -> None:  # fmt: skip
        self._writer, self._options = writer, options
        self._known = writer.stored_rows()  # rows by source: stored, or chosen in this run
        self._digests = {str(f): digest(f) for f in files}
        self._numbers = {name: writer.add_source(Path(name).name, found) for name, found in self._digests.items()}
        self._admission = recorder.admission(options.admit, writer)
        self._published = time.monotonic()
        self._paced = isinstance(writer, DatabaseWriter)  # the other one publishes by itself
        self._held_out = options.held_out if self._paced else 0.0  # nothing is trained on rows
        self.added = self.skipped = self.held_out = self.alike = self.unpublished = 0
        self.stopped: str | None = None

    @property
    def done(self) -> int:
        """Rows that are stored or left out."""
        return self.added + self.skipped + self.alike

    def choose(self, chunk: Sequence[Row]) -> list[Row]:
        """The rows that are not stored yet; the others are counted."""
        fresh = []
        for row in chunk:
            known = self._known.setdefault(self._numbers[row.source], set())
            if row.row in known:
                self.skipped += 1
                continue
            known.add(row.row)  # the same file may have been given twice
            fresh.append(row)
        return fresh

    def admit(self, rows: Sequence[Row], tokens: Sequence[Tokens]) -> list[Tokens]:
        """The texts that the model has to be asked about; the others are counted."""
        before = self._admission.there
        chosen = [item for item in tokens if self._admission.before(self._place(rows[item.row]), item)]
        there = self._admission.there - before
        self.skipped += there
        self.alike += len(tokens) - len(chosen) - there
        return chosen

    def store(self, rows: Sequence[Row], records: Sequence[Any]) -> bool:
        """Store a batch; False: it was not stored to its end, because there is no more room."""
        most, writer = self._options.max_bytes, self._writer
        for row, slots in zip(rows, records, strict=True):
            length = _length(slots)
            if most is not None and writer.stored_bytes + writer.cost(length) > most:
                self.stopped = f"--max-bytes {most} reached"
                return False
            place = self._place(row)
            if not self._admission.after(place, slots):
                self.alike += 1
                continue
            split = SPLIT_HELD_OUT if place.held_out else SPLIT_TRAIN
            record = writer.add(slots, length, Provenance(self._numbers[row.source], row.row, split))
            self._admission.stored(record, slots)
            self.added += 1
            self.unpublished += 1
            self.held_out += place.held_out
        return True

    def publish(self, now: bool = True) -> None:
        """Publish what was stored; if not `now`, then only when a crash would cost too much."""
        if not now and (not self._paced or time.monotonic() - self._published <= PUBLISH_SECONDS):
            return
        self._writer.publish()
        self._admission.save()
        self._published, self.unpublished = time.monotonic(), 0

    def _place(self, row: Row) -> Place:
        split = _split(self._numbers[row.source], row.row, self._held_out)
        return Place(self._digests[row.source], row.row, split == SPLIT_HELD_OUT)


def _length(record: Any) -> int:
    """Valid tokens of a record."""
    return len(record.tokens) if isinstance(record, Record) else len(record[KIND_INPUT][0])


def build_from_inputs(
    model: nn.Module, batches: Iterable[Mapping[str, Tensor]], output: str | os.PathLike[str] | None = None, *,
    reuse: str = "maps", storage: str = "auto", inputs: str = "auto", held_out: float = 0.15, name: str = "given",
) -> Path:  # fmt: skip
    """Store records of inputs that are tensors already: images, audio, or text tokenized elsewhere.

    Parameters
    ----------
    model : transformers model
        In memory; training and tuning from the command line will want it as a directory.
    batches : iterable of mapping of str to Tensor
        What the attention layers' part of the model is called with (the encoder, of models that have one):
        ``input_ids`` and ``attention_mask``, or ``pixel_values``, or ``input_features``. Rows need ``input_ids``.
    output, reuse, storage, inputs, held_out
        As `build_database` and `BuildOptions` have them.
    name : str
        What the database says about where the inputs come from.

    Returns
    -------
    Path
        The database, published. For maps `attmemo.profiler.train.train_database` comes next.

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
    known = int(getattr(adapter.host(model).config, "max_position_embeddings", 0) or 0)
    info = describe(model, adapter, sites, name, known, None)
    recorder = _recorder(reuse, storage, inputs, model, adapter, sites, info)
    with recorder:
        begun = recorder.run(first)
        info = replace(info, max_length=max(known, *map(_length, begun)))
        with _writer(Path(output or default_path(info.fingerprint, reuse)), info, recorder) as writer:
            source = writer.add_source(name, f"rows from {writer.records}")
            for row, slots in enumerate(chain(begun, chain.from_iterable(map(recorder.run, stream)))):
                writer.add(slots, _length(slots), Provenance(source, row, _split(0, row, held_out)))
            writer.publish()
            return writer.path


def _split(source: int, row: int, held_out: float) -> int:
    """Stretches of 20 rows, every few held out: decided by file and row alone, so that a resumed build agrees.

    Files are offset against each other, so that many short ones hold out their share too.
    """
    if held_out <= 0.0:
        return SPLIT_TRAIN
    period = max(2, round(1.0 / held_out))
    return SPLIT_HELD_OUT if (row // 20 + source) % period == period - 1 else SPLIT_TRAIN
