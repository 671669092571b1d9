"""A builder killed at every system call that changes a file, its own and those of LMDB."""

from __future__ import annotations

import importlib.util
import subprocess
from pathlib import Path

from helpers import compiler, preloaded, run_child
from test_db_tools import memory_directory

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

EVERYWHERE = r"""
import ctypes, signal
from pathlib import Path
import torch
from test_db_crash import _acknowledging, _check_left
from test_db_tools import contents, end_of, fill, findings, start_child
from helpers import SHORT

torch.set_num_threads(1)
shim = ctypes.CDLL(killer)
folder, oracle = Path(folder), Path(folder) / "told"
_acknowledging(folder / "straight", oracle)
expected = contents(folder / "straight")
told = folder / "counted"
result = {"kills": 0, "calls": 0, "lmdb": 0}
for after in (0, 1):
    at = 1
    while True:
        path = folder / f"db-{after}-{at}"
        oracle.unlink(missing_ok=True)

        def build():
            shim.arm(at, after, lmdb.encode())
            _acknowledging(path, oracle)
            calls, foreign = shim.count(), shim.count_foreign()
            told.write_text(f"{calls} {foreign}")

        code = end_of(start_child(build))
        if code == 0:
            break
        assert code == -signal.SIGKILL, (after, at, code)
        _check_left(path, oracle, expected)
        fill(path, SHORT)
        assert contents(path) == expected, (after, at)
        assert findings(path) == [], (after, at)
        result["kills"] += 1
        at += 1
    result["calls"], result["lmdb"] = map(int, told.read_text().split())
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


def test_a_builder_killed_at_any_system_call_never_loses_what_it_acknowledged(tmp_path: Path) -> None:
    """Before the call, and half-way through or after it; then opened, checked, and built to its end."""
    killer, lmdb = killer_in(tmp_path)
    with memory_directory() as folder:
        found = run_child(
            EVERYWHERE,
            timeout=300,
            environment=preloaded(killer),
            killer=str(killer),
            folder=str(folder),
            lmdb=lmdb,
        ).result
    assert found["lmdb"] > 10, "LMDB's own calls were not seen"
    assert found["calls"] > found["lmdb"] + 30
    assert found["kills"] >= 2 * (found["calls"] - 4)  # the child tells its count with a few calls of its own
