"""The window when system calls fail, one after the other: run, let call i fail, look, i += 1, until nothing fails.

The kernel is replaced by a shim between the extension and libc (LD_PRELOAD), built here with the C compiler. It fails
the i-th mmap, mprotect or munmap on memory that is being replaced or given back, once or from then on.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from refused_calls import build_shim, preloaded

CHILD = r"""
import ctypes, errno, importlib.util, itertools, json, os, sys

sys.path.insert(0, sys.argv[3])
from window_tools import PAGE, Pages, numbers, readable

spec = importlib.util.spec_from_file_location("attmemo.mmap._window", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
shim = ctypes.CDLL(sys.argv[2])
MMAP, MPROTECT, MUNMAP = 1 | 2, 8, 16  # of memory that is replaced, see refused_calls.py

fd = os.memfd_create("pages")
os.write(fd, b"".join(bytes([i + 1]) * PAGE for i in range(32)))
report = {"failures": 0, "broken": 0}
old, new = [1, 3, 5, 7, 9, 11], [30, 28, 26, 24]
for calls, code, forever in itertools.product(
    (MMAP, MMAP | MPROTECT, MMAP | MUNMAP, MMAP | MPROTECT | MUNMAP), (errno.ENOMEM, errno.EAGAIN), (0, 1)
):
    for at in itertools.count(1):
        assert at < 50
        window = Pages(native, 8 * PAGE)
        window.map(fd, numbers(*old))
        shim.arm(calls, at, forever, code)
        try:
            window.map(fd, numbers(*new))
            error = None
        except OSError as caught:
            error = caught
        hit = shim.disarm()
        where = (calls, code, forever, at)
        if error is None:
            assert window.seen() == new, where
            assert not readable(window.address + len(new) * PAGE), where
        else:
            report["failures"] += 1
            assert error.errno == code, where
            try:
                assert window.dark(), where
            except ValueError as refusal:  # the pages could not even be taken away: then the window must stay dark
                assert "unknown state" in str(refusal)
                assert calls & MPROTECT, where  # which would have made the window dark
                report["broken"] += 1
                for use in (window.look, lambda: window.map(fd, numbers(*new))):
                    try:
                        use()
                    except ValueError:
                        continue
                    raise AssertionError(where)
                window.darken()
                assert window.dark(), where
        window.map(fd, numbers(*old))  # and with the kernel in order again, so is the window
        assert window.seen() == old, where
        window.close()
        if not hit:
            break

window = Pages(native, 8 * PAGE)
window.map(fd, numbers(*old))
shim.arm(MMAP | MPROTECT, 1, 1, errno.ENOMEM)
try:
    window.darken()
    raise AssertionError("darken reported success")
except OSError as error:
    assert error.errno == errno.ENOMEM
shim.disarm()
try:
    window.look()
    raise AssertionError("a window in an unknown state was shown")
except ValueError as refusal:
    assert "unknown state" in str(refusal)
window.close()
window = Pages(native, 8 * PAGE)
window.map(fd, numbers(*old))
shim.arm(MPROTECT, 1, 1, errno.ENOMEM)  # then darkened by taking the mappings away
window.darken()
assert shim.disarm()
assert window.dark()
window.close()
window = Pages(native, 8 * PAGE)
shim.arm(MUNMAP, 1, 0, errno.ENOMEM)
try:
    window.close()
    raise AssertionError("close reported success")
except OSError:
    pass
window.close()
reserved = lambda: int(open("/proc/self/statm").read().split()[0]) * PAGE
before = reserved()
for at in (1, 2):
    shim.arm(MUNMAP, at, 0, errno.ENOMEM)
    try:
        native.Window(8 * PAGE, 1 << 30)  # so aligned that there is something to trim at both ends
        raise AssertionError("a reservation that could not be trimmed was kept")
    except OSError as error:
        assert "trimming" in str(error)
    shim.disarm()
assert reserved() < before + (1 << 20)
print(json.dumps(report))
"""


def test_whatever_call_fails_no_window_is_mixed_and_every_window_recovers(tmp_path: Path) -> None:
    shim = build_shim(tmp_path)
    extension = importlib.util.find_spec("attmemo.mmap._window")
    assert extension is not None
    assert extension.origin is not None
    child = subprocess.run(
        [sys.executable, "-I", "-c", textwrap.dedent(CHILD), extension.origin, str(shim), str(Path(__file__).parent)],
        env={**os.environ, **preloaded(shim)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["failures"] > 50, "the shim did not come between the extension and libc"
    assert report["broken"] > 5, "the case where nothing can be taken away was never reached"
