"""Zeros over what nothing can read in an environment of LMDB: there may be tokens of records that were removed.

LMDB only lists the pages that it no longer needs, and leaves what stood in them; within a page that shrank, what moved
stays behind as a copy. To store zeros through LMDB until all free pages are used makes the file larger each time. So
they are written to the file itself, while the writer's lock of LMDB is held: only where no reader looks.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final

from attmemo.db.files import write_all
from attmemo.db.lmdbfile import unread
from attmemo.errors import DatabaseLockedError

DUE: Final = "scrub.due"
"""A file in a folder from which records were removed, until what is left of them is written over."""
_TURN: Final = b"z"
_PIECE: Final = 1 << 20


def scrub(env: Any, file: Path, patience: float) -> None:
    """Write zeros over all bytes of the file of an environment that nothing can read, and make them durable.

    No other transaction may be open in this process. DatabaseLockedError: a reader has looked at pages that are free
    now for `patience` seconds. OSError: the disk refuses.
    """
    with env.begin(write=True) as transaction:  # from now on readers begin here, also if the last writer was killed
        transaction.put(_TURN, b"")
        transaction.delete(_TURN)
    with env.begin(write=True):
        last, until = env.info()["last_txnid"], time.monotonic() + patience
        while _oldest(env, last) < last:
            if time.monotonic() > until:
                what = f"{file.parent} is being read by another process for more than {patience:g} seconds."
                raise DatabaseLockedError(what, "run the same command again")
            time.sleep(0.005)
            env.reader_check()
        fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
        try:
            for begin, end in unread(file):
                for at in range(begin, end, _PIECE):
                    write_all(fd, bytes(min(_PIECE, end - at)), at)
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _oldest(env: Any, last: int) -> int:
    """The oldest transaction that a reader looks at; `last` if there is none."""
    rows = [row.split() for row in env.readers().splitlines()[1:]]
    return min([int(row[2]) for row in rows if len(row) == 3 and row[2].isdigit()], default=last)
