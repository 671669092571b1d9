"""Child processes that may die: what they end with is told, and never taken for something else."""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import traceback
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

LIMIT = 600
"""Seconds until a child is given up: far more than any takes on a busy machine. A test has 900."""


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
    timeout: int = LIMIT,
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


def start_child(
    body: Callable[[], object], seconds: int = LIMIT, quiet: bool = False, first: Callable[[], object] | None = None
) -> int:
    """Run in a forked child, whose pid is returned: it exits with 0, or 1 after an exception.

    `first` runs while the child has one thread only.
    """
    sys.stdout.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of fork in a process with threads
        pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.alarm(seconds)
            if first is not None:
                first()
            torch.set_num_threads(1)  # OpenMP's threads did not come along: waiting for them would be for ever
            body()
            os._exit(0)
        except BaseException:
            if not quiet:
                traceback.print_exc()
                sys.stderr.flush()
            os._exit(1)
    return pid


def end_of(pid: int) -> int:
    """Wait for a child: its exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_child(
    body: Callable[[], object], seconds: int = LIMIT, quiet: bool = False, first: Callable[[], object] | None = None
) -> int:
    """Run in a forked child to its end: 0, 1 after an exception, negative for a signal."""
    return end_of(start_child(body, seconds, quiet, first))
