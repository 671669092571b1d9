"""The doctor: what it reads of a machine, what it says attmemo uses, and the one command for each thing to change."""

from __future__ import annotations

import copy
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from attmemo.cli.app import app
from attmemo.kernels import _row_attention
from attmemo.profiler import doctor
from attmemo.profiler.doctor import advise, examine, plan
from attmemo.system import memory

GIB = 1 << 30
FILES = {
    "proc/cpuinfo": "processor : 0\nmodel name : Fast One\nflags : fpu avx2 avx512f avx512_bf16 amx_bf16\n",
    "proc/meminfo": "MemTotal: 16777216 kB\nMemAvailable:    8388608 kB\n",
    "proc/self/cgroup": "0::/pod/box\n",
    "proc/self/environ": "HOME=/h\0OMP_NUM_THREADS=4\0GOMP_SPINCOUNT=30000\0",
    "proc/self/mountinfo": (
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n23 22 0:40 / /far\\040away rw shared:1 - nfs4 host:/x rw\n"
    ),
    "proc/sys/vm/max_map_count": "1048576\n",
    "proc/sys/vm/nr_hugepages": "0\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
    "sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force\n",
    "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/pod/box/cpu.max": "max 100000\n",
    "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/pod/box/memory.max": "max\n",
}


def machine(root: Path, files: dict[str, str]) -> Path:
    """A folder with these files below proc and sys."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def facts(tmp_path: Path) -> dict[str, Any]:
    return examine(machine(tmp_path / "root", FILES))


class TestExamine:
    def test_reads_processor_memory_and_pages(self, facts: dict[str, Any]) -> None:
        assert facts["cpu"] == "Fast One"
        assert facts["features"] == ["avx2", "avx512f", "avx512_bf16", "amx_bf16"]
        assert facts["memory"] == 16 * GIB
        assert facts["huge_pages"] == {"anonymous": "madvise", "files": "advise", "reserved": 0}
        assert facts["max_map_count"] == 1 << 20

    def test_the_tightest_control_group_counts(self, facts: dict[str, Any]) -> None:
        assert facts["quota"] == 1.5
        assert facts["memory_limit"] == 4 * GIB

    def test_version_1_of_control_groups_is_read_too(self, tmp_path: Path) -> None:
        files = {
            "proc/self/cgroup": "5:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/x\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        }
        found = examine(machine(tmp_path / "root", files))
        assert (found["quota"], found["memory_limit"]) == (2.0, 2 * GIB)

    def test_the_settings_are_those_the_process_was_started_with(self, facts: dict[str, Any]) -> None:
        assert facts["settings"] == {"OMP_NUM_THREADS": "4", "GOMP_SPINCOUNT": "30000"}

    def test_the_file_system_is_that_of_the_longest_mount(self, tmp_path: Path) -> None:
        root = machine(tmp_path / "root", FILES)
        assert doctor._filesystem(root, Path("/somewhere/else")) == "ext4"
        assert doctor._filesystem(root, Path("/far away/folder")) == "nfs4"

    def test_a_machine_that_says_nothing_is_no_error(self, tmp_path: Path) -> None:
        found = examine(tmp_path)
        assert found["features"] == []
        assert [found[name] for name in ("quota", "memory", "memory_limit", "max_map_count")] == [None] * 4
        assert isinstance(advise(found, plan(found)), list)


class TestPlan:
    def test_names_the_kernel_that_is_used(self, facts: dict[str, Any]) -> None:
        assert plan(facts)["attention"] == _row_attention.instruction_sets()[0]

    @pytest.mark.parametrize(("features", "expected"), [(["avx2"], "float32"), (["avx2", "amx_bf16"], "bfloat16")])
    def test_bfloat16_is_for_processors_that_multiply_it(
        self, facts: dict[str, Any], features: list[str], expected: str
    ) -> None:
        assert plan({**facts, "features": features})["precision"] == expected

    def test_the_bound_is_the_one_that_memoize_takes(
        self, facts: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(memory, "_PROC", tmp_path / "root" / "proc")
        monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "nothing")
        planned = plan(facts)
        assert planned["max_bytes"] <= 8 * GIB // 8
        assert planned["database"].startswith(str(tmp_path))


class TestAdvice:
    @pytest.fixture
    def well(self, facts: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """A machine with nothing to change."""
        cache = {"path": "/c", "writable": True, "filesystem": "ext4", "bytes": 1 << 40, "free": 1 << 40}
        packages = dict.fromkeys(facts["packages"], True)
        given = {**facts, "cores": 4, "cores_to_use": 4, "threads": 4, "cache": cache, "packages": packages}
        return given, {"precision": "float32", "max_bytes": GIB}

    def test_a_good_machine_gets_none(self, well: tuple[dict[str, Any], dict[str, Any]]) -> None:
        assert advise(*well) == []

    @pytest.mark.parametrize(
        ("change", "said", "command"),
        [
            ({"cores_to_use": 2}, "4 threads share 2 cores", "export OMP_NUM_THREADS=2"),
            ({"settings": {}}, "idle threads spin", "export GOMP_SPINCOUNT=30000"),
            ({"cache.writable": False}, "cannot be written", "export ATTMEMO_CACHE=/a/folder/of/yours"),
            ({"cache.filesystem": "nfs4"}, "is on nfs4", "export ATTMEMO_CACHE=/a/local/folder"),
            ({"max_map_count": 65530}, "few mappings", "sudo sysctl -w vm.max_map_count=1048576"),
            ({"huge_pages.files": "never"}, "no huge pages",
             "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"),
            ({"plan.max_bytes": 1 << 20}, "1 MiB: there is little free memory",
             f"memoize(model, budget=0.01, max_bytes={doctor.FEW_BYTES})   # after freeing memory"),
            ({"plan.precision": "bfloat16"}, "multiplies bfloat16",
             "AutoModel.from_pretrained(MODEL, dtype=torch.bfloat16)"),
        ],
    )  # fmt: skip
    def test_each_thing_to_change_has_one_command(
        self, well: tuple[dict[str, Any], dict[str, Any]], change: dict[str, Any], said: str, command: str
    ) -> None:
        facts, planned = copy.deepcopy(well)
        for name, value in change.items():
            where, _, field = name.rpartition(".")
            {"": facts, "plan": planned}.get(where, facts.get(where, facts))[field] = value
        (item,) = advise(facts, planned)
        assert said in item["what"]
        assert item["command"] == command
        if not command.startswith(("memoize", "AutoModel")):
            assert shlex.split(command)


def test_the_command_shows_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ROOT", machine(tmp_path / "root", {**FILES, "proc/sys/vm/max_map_count": "65530"}))
    file = tmp_path / "found.json"
    done = CliRunner().invoke(app, ["doctor", "--json", str(file)])
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_text())
    assert found["machine"]["cpu"] == "Fast One"
    assert found["advice"]
    assert found.keys() == {"machine", "plan", "advice"}
    for item in found["advice"]:
        assert item["command"] in done.stdout
    assert found["plan"]["attention"] in done.stdout
    own = [line for line in done.stdout.splitlines() if "/" not in line]
    assert max(map(len, own)) <= 80
