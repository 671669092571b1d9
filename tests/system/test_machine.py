"""Cores that a process may keep busy: those of its affinity, and of the quotas of its control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from attmemo import memoize, unmemoize
from attmemo.cli.app import app
from attmemo.profiler.models import LoadedModel
from attmemo.serve.settings import split_cores
from attmemo.system import machine, precision
from attmemo.system.cgroups import control_groups
from attmemo.system.machine import cores, quota

MOUNT = "30 20 0:30 {root} {place} rw,relatime shared:1 - {kind} {kind} {options}\n"
UNIFIED = MOUNT.format(root="/", place="/sys/fs/cgroup", kind="cgroup2", options="rw,nsdelegate")
HYBRID = (
    MOUNT.format(root="/", place="/sys/fs/cgroup/memory", kind="cgroup", options="rw,memory")
    + MOUNT.format(root="/", place="/sys/fs/cgroup/cpu,cpuacct", kind="cgroup", options="rw,cpu,cpuacct")
    + MOUNT.format(root="/", place="/sys/fs/cgroup/unified", kind="cgroup2", options="rw")
)
DOCKER = MOUNT.format(root="/docker/a1", place="/sys/fs/cgroup/cpu,cpuacct", kind="cgroup", options="ro,cpu,cpuacct")


def machine_of(root: Path, files: dict[str, str]) -> Path:
    """A folder with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_1(group: str, quota_us: int, period_us: int = 100_000) -> dict[str, str]:
    folder = f"sys/fs/cgroup/cpu,cpuacct{group}"
    return {f"{folder}/cpu.cfs_quota_us": f"{quota_us}\n", f"{folder}/cpu.cfs_period_us": f"{period_us}\n"}


def version_2(group: str, text: str) -> dict[str, str]:
    return {f"sys/fs/cgroup{group}/cpu.max": f"{text}\n"}


@pytest.mark.parametrize(
    ("groups", "mounted", "files", "expected"),
    [
        ("0::/\n", UNIFIED, {}, None),
        ("0::/pod/box\n", UNIFIED, version_2("/pod/box", "max 100000"), None),
        ("0::/pod/box\n", UNIFIED, version_2("/pod/box", "250000 100000"), 2.5),
        ("0::/pod/box\n", UNIFIED, version_2("/pod", "100000 50000") | version_2("/pod/box", "max 100000"), 2.0),
        ("0::/pod/box\n", UNIFIED, version_2("/pod", "300000 100000") | version_2("/pod/box", "150000 100000"), 1.5),
        ("0::/pod/box\n", UNIFIED, version_2("/pod", "150000 100000") | version_2("/pod/box", "300000 100000"), 1.5),
        ("0::/\n", "", version_2("", "50000 100000"), 0.5),
        ("0::/../beside\n", UNIFIED, version_2("", "200000 100000") | version_2("/beside", "1 1"), 2.0),
        ("4:cpu,cpuacct:/a/b\n0::/a\n", HYBRID, version_1("/a", 150_000) | version_1("/a/b", -1), 1.5),
        ("4:cpu,cpuacct:/a\n", "", version_1("", -1) | version_1("/a", 400_000, 200_000), 2.0),
        ("4:cpu,cpuacct:/docker/a1\n", DOCKER, version_1("", 200_000), 2.0),
        ("4:cpu,cpuacct:/docker/a1/in\n", DOCKER, version_1("", 300_000) | version_1("/in", 100_000), 1.0),
        ("4:cpu,cpuacct:/docker/other\n", DOCKER, version_1("", 200_000), 2.0),
        ("5:memory:/a\n", HYBRID, version_1("/a", 100_000), None),
        ("4:cpu,cpuacct:/a\n", HYBRID, {"sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "100000\n"}, None),
    ],
)  # fmt: skip
def test_the_least_quota_on_the_way_up_counts(
    groups: str, mounted: str, files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    own = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounted}
    assert quota(machine_of(tmp_path, own | files)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("max 100000", 8), ("50000 100000", 1), ("200000 100000", 2), ("250000 100000", 3), ("9900000 100000", 8)],
)
def test_cores_are_those_of_the_affinity_and_of_the_quota_and_a_part_counts_as_one(
    text: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    own = {"proc/self/cgroup": "0::/box\n", "proc/self/mountinfo": UNIFIED}
    assert cores(machine_of(tmp_path, own | version_2("/box", text))) == expected


def test_control_groups_are_found_where_they_are_mounted(tmp_path: Path) -> None:
    place = MOUNT.format(root="/", place="/far\\040away/groups", kind="cgroup2", options="rw")
    files = {"proc/self/cgroup": "0::/box\n", "proc/self/mountinfo": place, "far away/groups/box/cpu.max": "max 1\n"}
    found = list(control_groups("cpu", machine_of(tmp_path, files) / "proc"))
    assert found == [(tmp_path / "far away/groups/box", 2), (tmp_path / "far away/groups", 2)]


def test_a_machine_that_says_nothing_has_no_quota(tmp_path: Path) -> None:
    assert quota(tmp_path) is None
    assert cores(tmp_path) == len(os.sched_getaffinity(0))


class TestSplit:
    @pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 2), (3, 3)])
    def test_few_cores_are_shared(self, count: int, threads: int) -> None:
        allowed = set(range(count))
        assert split_cores(allowed, count) == (allowed, threads, allowed)

    def test_one_core_in_four_is_left_to_texts(self) -> None:
        assert split_cores({0, 2, 4, 6, 8, 10, 12, 14}, 8) == ({0, 2, 4, 6, 8, 10}, 6, {12, 14})

    @pytest.mark.parametrize(("count", "threads"), [(1, 1), (2, 2), (4, 3), (8, 6)])
    def test_a_quota_gives_time_and_no_certain_cores(self, count: int, threads: int) -> None:
        allowed = set(range(64))
        assert split_cores(allowed, count) == (allowed, threads, allowed)


class TestCommands:
    @pytest.fixture(autouse=True)
    def _quota_of_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "cores", lambda: 1)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
        monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that the test's end puts it back
        monkeypatch.delenv("OMP_NUM_THREADS")

    def test_compute_with_the_cores_of_the_quota(self) -> None:
        CliRunner().invoke(app, ["families"])
        assert os.environ["OMP_NUM_THREADS"] == "1"

    def test_take_the_number_that_was_asked_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        CliRunner().invoke(app, ["families"])
        assert os.environ["OMP_NUM_THREADS"] == "2"

    @pytest.mark.parametrize("command", ["serve", "doctor"])
    def test_that_set_or_show_threads_themselves_are_left_alone(self, command: str) -> None:
        CliRunner().invoke(app, [command, "--no-such-option"])
        assert "OMP_NUM_THREADS" not in os.environ


def test_memoize_leaves_the_number_of_threads_and_warns_where_it_is_more_than_the_cores(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for count, warned in ((2, 0), (1, 1)):
            monkeypatch.setattr(precision, "cores", lambda count=count: count)
            caplog.clear()
            unmemoize(memoize(loaded.model, reuse="none"))
            assert torch.get_num_threads() == 2
            assert sum("torch.set_num_threads(1)" in record.getMessage() for record in caplog.records) == warned
    finally:
        torch.set_num_threads(before)


def test_to_count_cores_loads_no_torch() -> None:
    code = "import sys\nfrom attmemo.system.machine import cores\ncores()\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
