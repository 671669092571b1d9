"""What tests of failures share: builders that fail, children that may die, and system calls that are refused."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from test_db_tools import LENGTHS, Contents, contents, findings

SHORT = LENGTHS[:5]


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


def check_published(path: Path, expected: Contents) -> int:
    """The database is the beginning of what was expected, and whole. The number of its records."""
    seen = contents(path)
    assert seen == {key: expected[key] for key in sorted(expected)[: len(seen)]}
    assert findings(path) == []
    return len(seen)


# -- children that may die


@dataclass(frozen=True)
class Child:
    """How a child process ended: with a result, with an exception, or by a signal."""

    result: Any = None
    error: str | None = None
    signal: str | None = None


_FRESH = r"""
import json, os, resource, signal, sys, traceback

order = json.load(sys.stdin)
sys.path[:] = order["path"]
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
signal.alarm(order["timeout"])
scope = {"__name__": "child", **order["values"]}
try:
    exec(compile(order["code"], "<code of the child>", "exec"), scope)
    answer = json.dumps({"result": scope.get("result")})
except BaseException:
    answer = json.dumps({"error": traceback.format_exc()})
with open(int(sys.argv[1]), "w") as pipe:
    pipe.write(answer)
sys.stdout.flush()
os._exit(0)
"""


def run_child(
    body: Callable[[], Any] | str,
    *,
    signals: Collection[str] = (),
    may_raise: bool = False,
    timeout: int = 60,
    environment: dict[str, str] | None = None,
    **values: Any,
) -> Child:
    """Run something in a process of its own, which it may wreck.

    Parameters
    ----------
    body : callable or str
        A function runs in a fork of this process: it sees everything, but no other thread came along. Code runs in a
        fresh interpreter with the same search path; its result is what it assigns to ``result``.
    signals : collection of str
        Names of the signals that may end the child, such as "SIGSEGV". Any other fails the caller.
    may_raise : bool
        Whether an exception may end the child. If not it fails the caller.
    timeout : int
        Seconds until the child gets SIGALRM.
    environment : dict, optional
        For code: what to add to the environment.
    **values
        For code: its global variables, anything JSON can carry.

    Returns
    -------
    Child
        The result (anything JSON can carry), or the traceback, or the name of the signal.
    """
    if not isinstance(body, str) and not signals and not may_raise and os.environ.get("ATTMEMO_TEST_NO_FORK"):
        return Child(json.loads(json.dumps(body())))  # the thread sanitizer knows no threads after a fork
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as answers:
        if isinstance(body, str):
            command = [sys.executable, "-I", "-X", "faulthandler", "-c", _FRESH, str(writer)]
            child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                env={**os.environ, **(environment or {})},
                pass_fds=[writer],
                text=True,
            )
            os.close(writer)
            assert child.stdin is not None
            with child.stdin as orders:
                code_ = textwrap.dedent(body)
                json.dump({"path": sys.path, "timeout": timeout, "code": code_, "values": values}, orders)
            answer = answers.read()
            code = child.wait()
        else:
            pid = _forked(body, writer, timeout, quiet=bool(signals))
            os.close(writer)
            answer = answers.read()
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        name = signal.Signals(-code).name
        assert name in signals, f"the child was ended by {name}"
        return Child(signal=name)
    assert code == 0, f"the child ended itself with code {code}; its standard error says why"
    outcome = Child(**json.loads(answer))
    assert may_raise or outcome.error is None, f"in the child:\n{outcome.error}"
    return outcome


def _forked(body: Callable[[], Any], writer: int, timeout: int, quiet: bool) -> int:
    """Fork a child that runs `body` and writes how it ended; returns its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of fork in a process with threads
        pid = os.fork()
    if pid:
        return pid
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.alarm(timeout)
        torch.set_num_threads(1)  # OpenMP's threads did not come along: waiting for them would be for ever
        if quiet:
            faulthandler.disable()  # the signal is expected; its traceback would only look like a failure
        try:
            answer = json.dumps({"result": body()})
        except BaseException:
            answer = json.dumps({"error": traceback.format_exc()})
        with open(writer, "w", encoding="utf-8") as pipe:
            pipe.write(answer)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


# -- system calls that are refused

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


def die_at(at: int, after: bool) -> None:
    """From now on the at-th system call of the builder ends it: before its effect, or half-way through a write."""
    calls = 0

    def die(write: Write) -> Any:
        nonlocal calls
        calls += 1
        if calls - 1 == at:
            if after:
                write.half() if write.name == "pwrite" else write.do()
            os.kill(os.getpid(), signal.SIGKILL)
        return write.do()

    intercept_writes(pytest.MonkeyPatch(), die)
