"""System calls that are refused: a library that comes between a program and libc."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SHOW, CLEAR, RESERVE, MPROTECT, MUNMAP = 1, 2, 4, 8, 16
"""Calls that the shim tells apart: mmap of a file over memory, of nothing over memory, any other mmap; mprotect that
takes memory away; munmap."""


SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>

enum { SHOW = 1, CLEAR = 2, RESERVE = 4, MPROTECT = 8, MUNMAP = 16 };
static int watched, seen, at, sticky, code;
static const char *callers; /* part of the name of the library whose calls count; NULL: all calls */

/* From now on watch these calls; the `first`-th fails with `error` (0: none), and if `forever` all after it do. */
void arm(int calls, int first, int forever, int error)
{
    seen = 0; at = first; sticky = forever; code = error; watched = calls;
}
int disarm(void) { watched = 0; return at > 0 && seen >= at; } /* whether a call was made to fail */
int count(void) { return seen; }
void only_from(const char *library) { callers = library ? strdup(library) : NULL; }

static int fails(int call, void *from)
{
    Dl_info info;
    if (!(watched & call))
        return 0;
    if (callers && (!dladdr(from, &info) || !info.dli_fname || !strstr(info.dli_fname, callers)))
        return 0;
    seen++;
    if (at > 0 && (seen == at || (sticky && seen > at))) { errno = code; return 1; }
    return 0;
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define KIND (!(flags & MAP_FIXED) ? RESERVE : flags & MAP_ANONYMOUS ? CLEAR : SHOW)
#define FROM __builtin_return_address(0)

void *mmap(void *place, size_t size, int protection, int flags, int fd, off_t offset)
{
    REAL(mmap);
    return fails(KIND, FROM) ? MAP_FAILED : real(place, size, protection, flags, fd, offset);
}
void *mmap64(void *place, size_t size, int protection, int flags, int fd, off64_t offset)
{
    REAL(mmap64);
    return fails(KIND, FROM) ? MAP_FAILED : real(place, size, protection, flags, fd, offset);
}
int mprotect(void *place, size_t size, int protection)
{
    REAL(mprotect);
    return protection == PROT_NONE && fails(MPROTECT, FROM) ? -1 : real(place, size, protection);
}
int munmap(void *place, size_t size)
{
    REAL(munmap);
    return fails(MUNMAP, FROM) ? -1 : real(place, size);
}
"""


def compiler() -> str:
    """The C compiler, or a skip."""
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler to build a library for this test with")
    return found


def build_shim(folder: Path) -> Path:
    """A library that comes between a program and libc, counts some system calls and makes some fail."""
    source, shim = folder / "shim.c", folder / "shim.so"
    source.write_text(SHIM)
    subprocess.run([compiler(), "-shared", "-fPIC", "-O1", "-o", str(shim), str(source), "-ldl"], check=True)
    return shim


def preloaded(shim: Path) -> dict[str, str]:
    """What to add to a child's environment for the shim; before whatever is preloaded already (a sanitizer)."""
    options = ":".join(filter(None, [os.environ.get("ASAN_OPTIONS"), "verify_asan_link_order=0"]))
    return {"LD_PRELOAD": " ".join([str(shim), *os.environ.get("LD_PRELOAD", "").split()]), "ASAN_OPTIONS": options}
