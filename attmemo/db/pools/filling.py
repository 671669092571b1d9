"""What a database that fills itself says about itself: a file that is written once."""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from attmemo.db.encodings import ROW_STORAGE
from attmemo.db.files import ANEW, FILLING, MANIFEST, sync
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

    @classmethod
    def of(cls, model: ModelInfo, storage: str) -> Filling:
        """For a new pool."""
        return cls(uuid.uuid4().hex, model, storage, time.time())

    def write(self, path: Path) -> None:
        """Write it durably, unless another process was first: then the folder is of that one."""
        text = json.dumps({"format": FORMAT, "version": VERSION} | asdict(self), indent=1, sort_keys=True)
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
        file = path / FILLING
        try:
            raw = file.read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            what, hint = f"it has no {FILLING}", f"memoize(model, fill={str(path)!r}, budget=0.01) makes one"
            if (path / MANIFEST).is_file():
                what, hint = "it is a prepared one", f"attmemo inspect {path}; what is to go, a new build leaves out"
            raise DatabaseNotFoundError(f"{path} is no database that fills itself: {what}.", hint) from error
        except OSError as error:
            if error.errno in (errno.EIO, errno.EISDIR):
                raise DatabaseCorruptError(f"{file} cannot be read: {error.strerror}.", ANEW) from error
            raise DatabaseError(f"cannot read {file}: {error.strerror}", f"ls -l {file}") from error
        body = Field.parse(unsealed(raw, file, ANEW), str(file), ANEW)
        if body["format"].value != FORMAT:
            body["format"].refuse(repr(FORMAT))
        if body.object().get("version") != VERSION:
            what = f"{file} has format version {body.object().get('version')!r}; this attmemo reads {VERSION}."
            raise FormatVersionError(what, "use the version that wrote it, or begin anew in another folder")
        model, storage = ModelInfo.read(body["model"]), body["storage"].text(among=ROW_STORAGE)
        made = body.object().get("made")
        return cls(body["uuid"].text(), model, storage, float(made) if isinstance(made, int | float) else 0.0)


def is_filling(path: os.PathLike[str] | str) -> bool:
    """Whether a folder is a database that fills itself."""
    return (Path(path) / FILLING).is_file()
