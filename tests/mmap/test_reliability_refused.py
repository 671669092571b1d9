"""A fetch while the kernel refuses mappings."""

from __future__ import annotations

from pathlib import Path

import torch
from children import run_child
from mmap_tools import make_arena
from refused_calls import CLEAR, MPROTECT, MUNMAP, RESERVE, SHOW, build_shim, preloaded

from attmemo.mmap import SlotLayout

FETCHES = r"""
import ctypes, errno, gc, itertools, os
from pathlib import Path
import torch
from attmemo.errors import WindowBusyError
from attmemo.mmap import Arena, CopyFetcher, MapFetcher, SlotLayout
from attmemo.mmap.fetch import RECOUNT

library = ctypes.CDLL(shim)
library.only_from(b"_window")
PAGE = os.sysconf("SC_PAGE_SIZE")
layout = SlotLayout.paged((2, 27, 27), torch.float32, slots=16)
arena = Arena(path, layout)
old, new = [1, 3, 5, 7, 9, 11], [14, 2, 12, 13, 2]
record = lambda tensor: tensor.clone().view(torch.uint8).numpy().tobytes()
def oracle(slots):
    with CopyFetcher().fetch(arena, slots) as batch:
        return record(batch.stacked)
wanted = {"old": oracle(old), "new": oracle(new)}

def dark():
    # Whether no page of the file can be read but through the arena's own mapping.
    lines = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith("arena.bin")]
    return sum(line[1].startswith("r") for line in lines) == 1

def is_leased(window):
    try:
        window.darken()
    except WindowBusyError:
        return True
    return False

for twin in (MapFetcher(), MapFetcher(strict=True)):
    for slots in ([16], [0, -1], [1 << 62, 0], [-(1 << 63)], [1 << 80], [0.5]):
        library.arm(31, 0, 0, 0)
        try:
            twin.fetch(arena, slots)
            raise AssertionError(f"{slots} were accepted")
        except (IndexError, ValueError):
            assert library.count() == 0 and twin.fallbacks == 0, slots
        library.disarm()

result = {"copied": 0, "mapped": 0, "scenes": 0, "lost": 0}
codes = (errno.ENOMEM, errno.EAGAIN, errno.EINVAL)
for calls, code, forever, used in itertools.product(calls_sets, codes, (0, 1), (False, True)):
    for at in itertools.count(1):
        assert at < 50
        where = (calls, code, forever, used, at)
        fetcher = MapFetcher()
        if used:  # so that there is an old batch, which must not be seen beside or instead of the new one
            with fetcher.fetch(arena, old) as batch:
                assert record(batch.stacked) == wanted["old"]
            batch = None
        windows = list(fetcher._all)
        library.arm(calls, at, forever, code)
        batch = fetcher.fetch(arena, new)
        hit = library.disarm()
        windows = windows or list(fetcher._all)
        assert record(batch.stacked) == wanted["new"], where
        assert all(torch.equal(batch[i], arena.slot(slot)) for i, slot in enumerate(new)), where
        assert fetcher.fallbacks in (0, 1), where
        if fetcher.fallbacks:
            result["copied"] += 1
            assert hit, where
            assert os.strerror(code) in fetcher.fallback_reason, (where, fetcher.fallback_reason)
            # All that there is of a window is dark; where not even that could be had, it must not be read.
            if calls & 8 == 0:
                assert dark(), where
        else:
            result["mapped"] += 1
            assert windows and is_leased(windows[0]), where
        if hit and calls == 1:
            assert fetcher.fallbacks == 1, where  # a slot that could not be mapped is never overlooked
        batch.close()
        batch = None
        # The kernel is in order again, and at the latest after the next count so is the fetcher.
        copied = fetcher.fallbacks
        fetcher._mine.fetches = 0
        with fetcher.fetch(arena, old) as batch:
            assert record(batch.stacked) == wanted["old"], where
        batch = None
        result["lost"] += fetcher.fallbacks > copied
        windows = None
        fetcher.close()
        result["scenes"] += 1
        if not hit:
            break
"""


def test_whichever_mmap_is_refused_a_fetch_gives_the_bytes_of_the_copy(tmp_path: Path) -> None:
    make_arena(tmp_path / "arena.bin", SlotLayout.paged((2, 27, 27), torch.float32, slots=16)).close()
    shim = build_shim(tmp_path)
    mmaps = [SHOW, CLEAR, RESERVE, SHOW | CLEAR, SHOW | CLEAR | RESERVE]
    with_others = [SHOW | CLEAR | MPROTECT, SHOW | CLEAR | RESERVE | MPROTECT | MUNMAP]
    seen = run_child(
        FETCHES,
        environment=preloaded(shim),
        shim=str(shim),
        path=str(tmp_path / "arena.bin"),
        calls_sets=mmaps + with_others,
    ).result
    assert seen["copied"] > 100, "the shim did not come between the extension and libc"
    assert seen["mapped"] > 50
    assert seen["lost"] == 0, "a fetcher went on copying when the kernel was in order again"
