"""Free memory: of the system, of control groups of both versions, of the address space."""

from __future__ import annotations

import mmap
import resource
from pathlib import Path

import pytest

from attmemo.mmap import hugepages
from attmemo.system import memory
from attmemo.system.memory import available_memory, free_memory

GIB = 1 << 30


def system(root: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """A /proc and a /sys/fs/cgroup with these files only."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(memory, "_PROC", root / "proc")
    monkeypatch.setattr(memory, "_CGROUPS", root / "cgroup")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


MEMINFO = {"proc/meminfo": "MemTotal: 99 kB\nMemAvailable:    8388608 kB\nSwapFree: 0 kB\n"}


class TestAvailableMemory:
    def test_what_the_kernel_calls_available(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        system(tmp_path, monkeypatch, MEMINFO)
        assert available_memory() == 8 * GIB

    @pytest.mark.parametrize("inner", ["max", str(3 * GIB)])
    def test_the_limit_of_a_container_counts(
        self, inner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = {
            "proc/self/cgroup": "0::/pod/box\n",
            "cgroup/pod/memory.max": str(4 * GIB),
            "cgroup/pod/memory.current": str(2 * GIB),
            "cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB // 2}\n",
            "cgroup/pod/box/memory.max": inner,
            "cgroup/pod/box/memory.current": str(2 * GIB),
            "cgroup/pod/box/memory.stat": "inactive_file 0\n",
        }
        system(tmp_path, monkeypatch, {**MEMINFO, **files})
        assert available_memory() == (2.5 * GIB if inner == "max" else GIB)

    def test_the_limit_of_a_container_counts_under_a_path_of_the_host(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        files = {
            "proc/self/cgroup": "0::/docker/0123\n",
            "cgroup/memory.max": str(GIB),
            "cgroup/memory.current": str(GIB // 4),
        }
        system(tmp_path, monkeypatch, {**MEMINFO, **files})
        assert available_memory() == GIB * 3 // 4

    def test_control_groups_of_version_1_count(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {
            "proc/self/cgroup": "9:cpu,cpuacct:/a\n4:memory:/a\n",
            "cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
            "cgroup/memory/memory.usage_in_bytes": str(GIB),
            "cgroup/memory/a/memory.limit_in_bytes": str(2 * GIB),
            "cgroup/memory/a/memory.usage_in_bytes": str(GIB),
            "cgroup/memory/a/memory.stat": f"total_inactive_file {GIB // 2}\n",
        }
        system(tmp_path, monkeypatch, {**MEMINFO, **files})
        assert available_memory() == 1.5 * GIB

    def test_a_limit_of_the_address_space(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        system(tmp_path, monkeypatch, {**MEMINFO, "proc/self/statm": "1000 500 1 1 0 1 0\n"})
        monkeypatch.setattr(resource, "getrlimit", lambda which: (GIB, GIB))
        assert available_memory() == GIB - 1000 * resource.getpagesize()

    def test_a_group_that_is_over_its_limit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        files = {"proc/self/cgroup": "0::/\n", "cgroup/memory.max": "100", "cgroup/memory.current": "200"}
        system(tmp_path, monkeypatch, {**MEMINFO, **files})
        assert available_memory() == 0

    def test_nothing_is_known(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        system(tmp_path, monkeypatch, {"proc/other": ""})
        assert available_memory() is None
        assert free_memory() > 0

    def test_this_machine(self) -> None:
        room = available_memory()
        assert room is not None
        assert 0 < room < 1 << 50
        assert 0 < free_memory() < 1 << 50

    def test_a_copy_in_huge_pages_stays_below_the_limit_of_version_1(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A limit of version 1 that is smaller than the file: nothing is loaded."""
        files = {
            "proc/self/cgroup": "4:memory:/a\n",
            "cgroup/memory/a/memory.limit_in_bytes": "5000",
            "cgroup/memory/a/memory.usage_in_bytes": "1000",
        }
        system(tmp_path, monkeypatch, {**MEMINFO, **files})
        with mmap.mmap(-1, 8192) as mapped:
            touched: list[int] = []
            assert hugepages.reload(-1, mapped, 0, lambda done, total: touched.append(done)) == 0
            assert not touched
