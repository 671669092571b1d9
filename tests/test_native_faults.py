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

from helpers import build_shim, preloaded

CHILD = r"""
import ctypes, errno, importlib.util, itertools, json, os, sys
from array import array

spec = importlib.util.spec_from_file_location("attmemo.mmap._window", sys.argv[1])
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
shim = ctypes.CDLL(sys.argv[2])
PAGE = native.page_size()
MMAP, MPROTECT, MUNMAP = 1 | 2, 8, 16  # of memory that is replaced, see helpers.py

fd = os.memfd_create("pages")
os.write(fd, b"".join(bytes([i + 1]) * PAGE for i in range(32)))
offsets = lambda pages: array("q", [page * PAGE for page in pages])
reader, writer = os.pipe()

def readable(address):
    try:
        os.write(writer, (ctypes.c_char * 1).from_address(address))
    except OSError:
        return False
    os.read(reader, 1)
    return True

def seen(window):
    with memoryview(window) as view:
        return [view[i] - 1 for i in range(0, len(view), PAGE)]

def dark(window):
    return not any(readable(a) for a in range(window.address, window.address + window.capacity, PAGE))

report = {"failures": 0, "broken": 0}
old, new = [1, 3, 5, 7, 9, 11], [30, 28, 26, 24]
for calls, code, forever in itertools.product(
    (MMAP, MMAP | MPROTECT, MMAP | MUNMAP, MMAP | MPROTECT | MUNMAP), (errno.ENOMEM, errno.EAGAIN), (0, 1)
):
    for at in itertools.count(1):
        assert at < 50
        window = native.Window(8 * PAGE, PAGE)
        window.map(fd, offsets(old), PAGE)
        shim.arm(calls, at, forever, code)
        try:
            window.map(fd, offsets(new), PAGE)
            error = None
        except OSError as caught:
            error = caught
        hit = shim.disarm()
        where = (calls, code, forever, at)
        if error is None:
            assert seen(window) == new, where
            assert not readable(window.address + len(new) * PAGE), where
        else:
            report["failures"] += 1
            assert error.errno == code, where
            assert window.mapped_bytes == 0, where
            try:
                with memoryview(window) as view:
                    assert len(view) == 0
                assert dark(window), where
            except ValueError as refusal:  # the pages could not even be taken away: then nobody may look
                assert "unknown state" in str(refusal)
                assert calls & MPROTECT, where  # which would have made the window dark
                report["broken"] += 1
                for use in (window.lease, lambda: window.map(fd, offsets(new), PAGE)):
                    try:
                        use()
                    except ValueError:
                        continue
                    raise AssertionError(where)
                window.collapse()
                assert dark(window), where
        window.map(fd, offsets(old), PAGE)  # and with the kernel in order again, so is the window
        assert seen(window) == old, where
        window.close()
        if not hit:
            break

for how in ("collapse", "darken"):
    window = native.Window(8 * PAGE, PAGE)
    window.map(fd, offsets(old), PAGE)
    shim.arm(MMAP | MPROTECT, 1, 1, errno.ENOMEM)
    try:
        getattr(window, how)()
        raise AssertionError(how + " reported success")
    except OSError as error:
        assert error.errno == errno.ENOMEM
    shim.disarm()
    for show in (memoryview, lambda window: window.show((1,), PAGE, 1, 8)):
        try:
            show(window)
            raise AssertionError("a window in an unknown state was shown")
        except ValueError:
            pass
    window.close()
window = native.Window(8 * PAGE, PAGE)
window.map(fd, offsets(old), PAGE)
shim.arm(MPROTECT, 1, 1, errno.ENOMEM)  # then darkened by taking the mappings away
window.darken()
assert shim.disarm()
assert dark(window)
window.close()
shim.arm(MUNMAP, 1, 0, errno.ENOMEM)
window = native.Window(8 * PAGE, PAGE)
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
        [sys.executable, "-I", "-c", textwrap.dedent(CHILD), extension.origin, str(shim)],
        env={**os.environ, **preloaded(shim)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    report = json.loads(child.stdout)
    assert report["failures"] > 50, "the shim did not come between the extension and libc"
    assert report["broken"] > 5, "the case where nothing can be taken away was never reached"
