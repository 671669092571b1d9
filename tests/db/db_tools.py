"""What the tests of databases share: damage, writes that fail, disks that are full, and builders that are killed."""

from __future__ import annotations

import ctypes
import errno
import importlib.util
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch
import xxhash
from children import in_child
from databases import (
    LENGTHS,
    MODEL,
    Contents,
    add_maps,
    contents,
    fill,
    findings,
    sequence,
    train_by_hand,
)
from refused_calls import compiler

from attmemo.db import SEQUENCE, Database, DatabaseWriter, Provenance, file_digest, read_manifest
from attmemo.db.catalogue import Catalogue, Record, add_to_digest, read_records
from attmemo.db.files import MANIFEST
from attmemo.embed.siamese import load_embedders
from attmemo.errors import AttmemoError, DatabaseCorruptError, DatabaseNotFoundError

Body = dict[str, Any]
GOLDEN = Path(__file__).with_name("golden")
SHORT = LENGTHS[:5]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small database with embedders and indexes. Tests put back what they change."""
    return train_by_hand(fill(tmp_path_factory.mktemp("reliability") / "db"))


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged for good."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def use(path: Path) -> None:
    """Everything a server and `check` do with a database: open, embed, search, read."""
    with Database(path) as database:
        if database.manifest.embedder is not None:
            ref = database.embedder_ref()
            embedders = load_embedders(database.derived(ref.weights), database.manifest.model.hidden)
            for layer in range(SEQUENCE, database.manifest.model.layers):
                index = database.index(layer)
                if layer not in embedders:
                    raise DatabaseCorruptError("an embedder is missing", "train")
                for length in sorted(index.lengths & set(database.lengths)):
                    if length <= embedders[layer].longest:
                        hidden = torch.zeros((1, length, database.manifest.model.hidden))
                        vector = embedders[layer].embed(hidden, [length]).numpy()
                        if vector.shape[1] == ref.report.get("dimension", 128):
                            ids, _ = index.search(length, vector, 2)
                            assert set(ids.ravel().tolist()) <= {-1, *range(len(database))}
        for finding in database.check():
            raise DatabaseCorruptError(finding.where, "restore")


def outcome(work: Callable[[], object]) -> str:
    """What a use ends with: "fine", or the name of an error of this library, which says what to do next."""
    seen: AttmemoError | None = None
    try:
        work()
    except AttmemoError as error:
        seen = error
    assert seen is None or seen.hint, f"no next step: {seen}"
    return "fine" if seen is None else type(seen).__name__


def body_of(path: Path) -> Body:
    """The manifest as JSON."""
    found: Body = json.loads((path / MANIFEST).read_text().rsplit("\n", 2)[0])
    return found


def seal(path: Path, body: object) -> None:
    """Write a manifest with a checksum that fits, whatever it says."""
    text = body if isinstance(body, str) else json.dumps(body, indent=1, sort_keys=True)
    (path / MANIFEST).write_bytes(f"{text}\n{xxhash.xxh3_64_hexdigest(text.encode())}\n".encode())


def reseal(path: Path) -> None:
    """Make the manifest's digests those of the derived files as they are now."""
    body = body_of(path)
    for ref in (body["embedder"]["weights"], *body["embedder"]["indexes"].values()):
        ref["digest"] = file_digest(path / ref["file"])
    seal(path, body)


def records_of(path: Path) -> list[Record]:
    """The catalogue's records."""
    found = read_records(path, read_manifest(path))
    return [found.record(number) for number in range(len(found))]


def rewrite(path: Path, records: list[Record]) -> None:
    """Put other entries into the catalogue, under the ids 0, 1, …; count and digest fit."""
    body = body_of(path)
    entries = [(number, record.dump()) for number, record in enumerate(records)]
    with closing(Catalogue(path, write=True)) as catalogue:
        catalogue.delete()
        catalogue.put(entries)
    body |= {"records_digest": add_to_digest(None, entries), "records": len(entries)}
    seal(path, body)


# -- writes that fail


@dataclass(frozen=True)
class Write:
    """A system call that changes a file, and was not made yet."""

    name: str
    call: Callable[..., Any]
    arguments: tuple[Any, ...]

    def do(self) -> Any:
        return self.call(*self.arguments)

    def half(self) -> Any:
        """Of a `pwrite`: its first half."""
        fd, body, offset = self.arguments
        return self.call(fd, body[: len(body) // 2], offset)


def intercept_writes(patch: pytest.MonkeyPatch, instead: Callable[[Write], Any]) -> None:
    """From now on `instead` is called for every system call by which a builder changes a file."""

    def wrapped(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: instead(Write(name, call, arguments))

    for name in ("pwrite", "fdatasync", "fsync", "ftruncate", "replace"):
        patch.setattr(os, name, wrapped(name, getattr(os, name)))


class Fails:
    """The `at`-th system call that changes a file fails with a code, or all from then on.

    Where there is no room, a write takes its first half, and the next call fails.
    """

    def __init__(self, patch: pytest.MonkeyPatch, at: int, code: int, forever: bool = False) -> None:
        self.calls, self.at, self.code, self.forever, self.failed = 0, at, code, forever, ""
        self.full = code in (errno.ENOSPC, errno.EDQUOT)
        intercept_writes(patch, self._write)

    def _write(self, write: Write) -> Any:
        behind = self.calls - self.at
        self.calls += 1
        if self.full and behind == 0 and write.name == "pwrite" and len(write.arguments[1]) > 1:
            return write.half()
        if behind >= 0 and (self.forever or behind <= self.full):
            self.failed = self.failed or write.name
            raise OSError(self.code, os.strerror(self.code))
        return write.do()


def check_published(path: Path, expected: Contents) -> int:
    """The database is the beginning of what was expected, and whole. The number of its records."""
    seen = contents(path)
    assert seen == {key: expected[key] for key in sorted(expected)[: len(seen)]}
    assert findings(path) == []
    return len(seen)


def build_and_tell(path: Path, oracle: Path, lengths: Sequence[int] = SHORT, every: int = 2) -> None:
    """Build, and tell what was published to a file that outlives the process; first what earlier builders left."""
    with DatabaseWriter(path, MODEL, "float32") as writer, oracle.open("a") as told:
        # Two builders in a row may die between publishing and telling: the second would be two generations ahead.
        told.write(f"{writer.manifest.generation} {writer.manifest.records}\n")
        told.flush()
        source = writer.add_source("synthetic.log", "d" * 32)
        for row, length in list(enumerate(lengths))[writer.records :]:
            add_maps(writer, *sequence(row, length), Provenance(source, row, row % 2))
            if row % every == every - 1 or row == len(lengths) - 1:
                manifest = writer.publish()
                told.write(f"{manifest.generation} {manifest.records}\n")
                told.flush()


def check_left(path: Path, oracle: Path, expected: Contents) -> int:
    """What was acknowledged is there and exact; at most the publication under way is there too, whole.

    Returns how many records were acknowledged.
    """
    lines = oracle.read_text().split("\n")[:-1] if oracle.exists() else []
    generation, records = map(int, lines[-1].split()) if lines else (0, 0)
    try:
        with Database(path) as database:
            assert generation <= database.manifest.generation <= generation + 1
            assert len(database) >= records
            assert (len(database) == records) == (database.manifest.generation == generation)
    except DatabaseNotFoundError:
        assert generation == 0
    else:
        check_published(path, expected)
    return records


# -- disks

REMOUNT, READ_ONLY = 32, 1


class Tmpfs:
    """For a forked child: a private tmpfs, which may be resized and made read-only."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.libc = ctypes.CDLL(None, use_errno=True)

    def unshare(self) -> None:
        owner, group = os.getuid(), os.getgid()
        if self.libc.unshare(0x10000000 | 0x00020000):  # CLONE_NEWUSER | CLONE_NEWNS
            raise PermissionError(ctypes.get_errno(), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {owner} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")

    def mount(self, options: str, flags: int = 0) -> None:
        if self.libc.mount(b"tmpfs", os.fsencode(self.folder), b"tmpfs", flags, options.encode()):
            raise PermissionError(ctypes.get_errno(), "mount")

    def unmount(self) -> None:
        assert self.libc.umount2(os.fsencode(self.folder), 0) == 0


def need_tmpfs(folder: Path) -> Tmpfs:
    tmpfs = Tmpfs(folder)
    if in_child(lambda: tmpfs.mount("size=64k"), quiet=True, first=tmpfs.unshare):
        pytest.skip("a tmpfs cannot be mounted here: unshare or mount is not permitted")
    return tmpfs


# -- what LMDB writes, and where that is ended

KEY = struct.Struct(">Q")


def write_entries(folder: Path, batches: list[tuple[int, int, int]], nbytes: int) -> None:
    """Batches of (first, count, cut): entries are put, then everything from `cut` on is deleted, as a builder does."""
    for first, count, cut in batches:
        with lmdb.open(str(folder), map_size=1 << 28) as environment:
            with environment.begin(write=True) as transaction:
                for number in range(first, first + count):
                    transaction.put(KEY.pack(number), bytes([number % 251]) * nbytes)
            with environment.begin(write=True) as transaction:
                cursor = transaction.cursor()
                found = cursor.set_range(KEY.pack(cut))
                while found:
                    found = cursor.delete()


KILLER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static int armed, seen, at, late, foreign;
static const char *library; /* part of the name of the library whose calls are counted apart */

/* From now on count; the `first`-th call kills the process: before its effect (0), half-way through or after it (1),
   or after it (2). */
void arm(int first, int after, const char *name)
{
    seen = foreign = 0; at = first; late = after; library = name ? strdup(name) : NULL; armed = 1;
}
int count(void) { return seen; }
int count_foreign(void) { return foreign; }

static int reached(void *from)
{
    Dl_info info;
    if (!armed)
        return 0;
    foreign += library && dladdr(from, &info) && info.dli_fname && strstr(info.dli_fname, library);
    return ++seen == at;
}
static void die(void) { kill(getpid(), SIGKILL); for (;;) pause(); }
#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define CALL(whole, half) \
    do { \
        if (!reached(__builtin_return_address(0))) return whole; \
        if (late) { __typeof__(whole) ignored = late == 2 ? whole : half; (void)ignored; } \
        die(); \
        return whole; \
    } while (0)

ssize_t write(int fd, const void *data, size_t size)
{ REAL(write); if (fd < 3) return real(fd, data, size); CALL(real(fd, data, size), real(fd, data, size / 2)); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t place)
{ REAL(pwrite); CALL(real(fd, data, size, place), real(fd, data, size / 2, place)); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t place)
{ REAL(pwrite64); CALL(real(fd, data, size, place), real(fd, data, size / 2, place)); }
ssize_t writev(int fd, const struct iovec *parts, int number)
{ REAL(writev); CALL(real(fd, parts, number), real(fd, parts, (number + 1) / 2)); }
ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t place)
{ REAL(pwritev); CALL(real(fd, parts, number, place), real(fd, parts, (number + 1) / 2, place)); }
ssize_t pwritev64(int fd, const struct iovec *parts, int number, off64_t place)
{ REAL(pwritev64); CALL(real(fd, parts, number, place), real(fd, parts, (number + 1) / 2, place)); }
int fsync(int fd) { REAL(fsync); CALL(real(fd), real(fd)); }
int fdatasync(int fd) { REAL(fdatasync); CALL(real(fd), real(fd)); }
int msync(void *place, size_t size, int flags)
{ REAL(msync); CALL(real(place, size, flags), real(place, size, flags)); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); CALL(real(fd, size), real(fd, size)); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); CALL(real(fd, size), real(fd, size)); }
int fallocate64(int fd, int mode, off64_t place, off64_t size)
{ REAL(fallocate64); CALL(real(fd, mode, place, size), real(fd, mode, place, size)); }
int posix_fallocate64(int fd, off64_t place, off64_t size)
{ REAL(posix_fallocate64); CALL(real(fd, place, size), real(fd, place, size)); }
int rename(const char *old, const char *name) { REAL(rename); CALL(real(old, name), real(old, name)); }
int unlink(const char *name) { REAL(unlink); CALL(real(name), real(name)); }
int mkdir(const char *name, mode_t mode) { REAL(mkdir); CALL(real(name, mode), real(name, mode)); }
"""


def killer_in(folder: Path) -> tuple[Path, str]:
    """`KILLER` as a library to be loaded before all others, and the name of LMDB's extension."""
    source, killer = folder / "killer.c", folder / "killer.so"
    source.write_text(KILLER)
    subprocess.run(
        [compiler(), "-shared", "-fPIC", "-O1", "-w", "-o", str(killer), str(source), "-ldl"], check=True
    )
    extension = importlib.util.find_spec("lmdb.cpython") or importlib.util.find_spec("lmdb_cffi")
    assert extension is not None
    assert extension.origin is not None
    return killer, Path(extension.origin).name
