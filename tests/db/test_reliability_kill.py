"""A builder killed at every system call that changes a file, its own and those of LMDB."""

from __future__ import annotations

from pathlib import Path

from children import run_child
from databases import memory_directory
from db_tools import killer_in
from refused_calls import preloaded

EVERYWHERE = r"""
import ctypes, signal
from pathlib import Path
import torch
from children import end_of, start_child
from databases import contents, fill, findings
from db_tools import SHORT, build_and_tell, check_left

torch.set_num_threads(1)
shim = ctypes.CDLL(killer)
folder, oracle = Path(folder), Path(folder) / "told"
build_and_tell(folder / "straight", oracle)
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
            build_and_tell(path, oracle)
            calls, foreign = shim.count(), shim.count_foreign()
            told.write_text(f"{calls} {foreign}")

        code = end_of(start_child(build))
        if code == 0:
            break
        assert code == -signal.SIGKILL, (after, at, code)
        check_left(path, oracle, expected)
        fill(path, SHORT)
        assert contents(path) == expected, (after, at)
        assert findings(path) == [], (after, at)
        result["kills"] += 1
        at += 1
    result["calls"], result["lmdb"] = map(int, told.read_text().split())
"""


def test_a_builder_killed_at_any_system_call_never_loses_what_it_acknowledged(tmp_path: Path) -> None:
    """Before the call, and half-way through or after it; then opened, checked, and built to its end."""
    killer, lmdb = killer_in(tmp_path)
    with memory_directory() as folder:
        found = run_child(
            EVERYWHERE,
            timeout=800,
            environment=preloaded(killer),
            killer=str(killer),
            folder=str(folder),
            lmdb=lmdb,
        ).result
    assert found["lmdb"] > 10, "LMDB's own calls were not seen"
    assert found["calls"] > found["lmdb"] + 30
    assert found["kills"] >= 2 * (found["calls"] - 4)  # the child tells its count with a few calls of its own
