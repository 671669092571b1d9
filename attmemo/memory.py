"""How much memory this process can still take. Imports nothing of attmemo.

Linux counts memory in several places, and the smallest count decides: a process beyond the limit of its control group
is killed without an error to catch. Both versions of control groups are read.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_NO_LIMIT = 1 << 60  # version 1 writes a number close to 2^63
_UNKNOWN = 4 << 30


def available_memory() -> int | None:
    """Bytes that this process can take without swapping or being killed; None if unknown.

    The least of: what the kernel calls available, the rest under the limit of each control group of the process
    (containers), the rest of the address space (``ulimit -v``).
    """
    left = [*_system(), *_control_groups(), *_address_space()]
    return max(0, min(left)) if left else None


def free_memory(device: torch.device | str = "cpu") -> int:
    """Bytes that can be allocated on a device now (driver and torch's own pool of a GPU); 4 GiB if it is unknown."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    left = available_memory()
    return _UNKNOWN if left is None else left


def _system() -> Iterator[int]:
    if found := re.search(r"^MemAvailable:\s+(\d+) kB", _read(_PROC / "meminfo"), re.MULTILINE):
        yield int(found[1]) * 1024


def _control_groups() -> Iterator[int]:
    """The rest under each limit. The kernel gives up clean page cache first, so that cache counts as free."""
    for line in _read(_PROC / "self/cgroup").splitlines():
        number, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if number == "0":
            root, names = _CGROUPS, _V2
        elif "memory" in controllers.split(","):
            root, names = _CGROUPS / "memory", _V1
        else:
            continue
        # In a container the path may be the host's. The container's own group is then the root.
        group = root / path.strip("/") if (root / path.strip("/")).is_dir() else root
        while True:
            limit, used = _number(group / names[0]), _number(group / names[1])
            if limit is not None and used is not None and limit < _NO_LIMIT:
                cached = re.search(rf"^{names[2]} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
                yield limit - used + (int(cached[1]) if cached else 0)
            if group == root or root not in group.parents:
                break
            group = group.parent


def _address_space() -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = _read(_PROC / "self/statm").split()
        yield limit - (int(pages[0]) * resource.getpagesize() if pages else 0)


def _number(file: Path) -> int | None:
    text = _read(file).strip()
    return int(text) if text.isdigit() else None  # "max": no limit


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
