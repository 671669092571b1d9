"""What a pool of rows in a folder says about itself.

A database that fills itself is described once, in `FILLING.json`. A prepared one is sealed: processes that serve only
read it. It is described in `PREPARED.json`, anew with each change, so that copies of it can be told apart.
"""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from attmemo.db.encodings import ROW_STORAGE
from attmemo.db.files import ANEW, FILLING, MANIFEST, PREPARED, RESTORE, sync, write_durably
from attmemo.db.manifest import ModelInfo, sealed, unsealed
from attmemo.errors import DatabaseCorruptError, DatabaseError, DatabaseNotFoundError, FormatVersionError
from attmemo.system.json_fields import Field

FORMAT: Final = "attmemo-filling"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Filling:
    """What the records of a pool are."""

    uuid: str
    model: ModelInfo
    storage: str  # of rows: a word of `ROW_STORAGE`
    made: float  # seconds of the Unix epoch
    sealed: bool = False  # builds alone write
    edition: str = ""  # another one with each change, if it is sealed
    records: int = 0  # the same

    @classmethod
    def of(cls, model: ModelInfo, storage: str, *, sealed: bool = False) -> Filling:
        """For a new pool."""
        return cls(uuid.uuid4().hex, model, storage, time.time(), sealed)

    @property
    def file(self) -> str:
        """Name of the file that says this."""
        return PREPARED if self.sealed else FILLING

    def write(self, path: Path) -> None:
        """Write it durably. If it is not sealed: unless another process was first; then the folder is of that one."""
        text = json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=1, sort_keys=True)
        if self.sealed:
            write_durably(path / PREPARED, sealed(text))
            return
        temporary = path / f"{FILLING}.{self.uuid}"
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
                stream.write(sealed(text))
                stream.flush()
                os.fsync(stream.fileno())
            with suppress(FileExistsError):
                os.link(temporary, path / FILLING)
        finally:
            temporary.unlink(missing_ok=True)
        sync(path)

    @classmethod
    def read(cls, path: Path) -> Filling:
        """Of a folder. DatabaseNotFoundError: it is no pool; DatabaseCorruptError, FormatVersionError."""
        is_sealed = (path / PREPARED).exists()
        file, mend = path / (PREPARED if is_sealed else FILLING), RESTORE if is_sealed else ANEW
        try:
            raw = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            what, hint = f"it has no {FILLING}", f"memoize(model, fill={str(path)!r}, budget=0.01) makes one"
            if (path / MANIFEST).is_file():
                what, hint = "it has maps", f"attmemo inspect {path}; what is to go, a new build leaves out"
            raise DatabaseNotFoundError(f"{path} is no database of rows: {what}.", hint) from error
        except OSError as error:
            if error.errno in (errno.EIO, errno.EISDIR):
                raise DatabaseCorruptError(f"{file} cannot be read: {error.strerror}.", mend) from error
            raise DatabaseError(f"cannot read {file}: {error.strerror}", f"ls -l {file}") from error
        return cls.parse(raw, file, sealed=is_sealed)

    @classmethod
    def parse(cls, raw: bytes, file: Path, *, sealed: bool) -> Filling:
        """From the bytes of its file. DatabaseCorruptError, FormatVersionError."""
        mend = RESTORE if sealed else ANEW
        body = Field.parse(unsealed(raw, file, mend), str(file), mend)
        if body["format"].value != FORMAT:
            body["format"].refuse(repr(FORMAT))
        if body.object().get("version") != VERSION:
            what = f"{file} has format version {body.object().get('version')!r}; this attmemo reads {VERSION}."
            raise FormatVersionError(what, "use the version that wrote it, or begin anew in another folder")
        model, storage = ModelInfo.read(body["model"]), body["storage"].text(among=ROW_STORAGE)
        made = body.object().get("made")
        found = cls(body["uuid"].text(), model, storage, float(made) if isinstance(made, int | float) else 0.0)
        if not sealed:
            return found
        return replace(found, sealed=True, edition=body["edition"].text(), records=body["records"].integer())


def is_filling(path: os.PathLike[str] | str) -> bool:
    """Whether a folder is a database that fills itself."""
    return (Path(path) / FILLING).is_file()


def is_sealed(path: os.PathLike[str] | str) -> bool:
    """Whether a folder is a prepared database of rows."""
    return (Path(path) / PREPARED).exists()


def is_pool(path: os.PathLike[str] | str) -> bool:
    """Whether a folder is a database of rows: it fills itself, or it is prepared."""
    return is_filling(path) or is_sealed(path)
