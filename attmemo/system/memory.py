"""How much memory this process can still take.

Linux counts memory in several places, and the smallest count decides: a process beyond the limit of its control group
is killed without an error to catch. Both versions of control groups are read.
"""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from attmemo.system.cgroups import PROC, TOP, control_groups, read_number, read_text

if TYPE_CHECKING:
    import torch

_PROC, _CGROUPS = PROC, TOP
_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
_NO_LIMIT = 1 << 60  # version 1 writes a number close to 2^63
_UNKNOWN = 4 << 30


def available_memory() -> int | None:
    """Bytes that this process can take without swapping or being killed; None if unknown.

    The least of: what the kernel calls available, the rest under the limit of each control group of the process
    (containers), the rest of the address space (``ulimit -v``).
    """
    left = [*_system(), *_under_limits(), *_address_space()]
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
    if found := re.search(r"^MemAvailable:\s+(\d+) kB", read_text(_PROC / "meminfo"), re.MULTILINE):
        yield int(found[1]) * 1024


def limit_of(file: Path) -> int | None:
    """The limit that a file of a control group of memory tells; None: there is no limit, or no such file."""
    limit = read_number(file)
    return limit if limit is not None and limit < _NO_LIMIT else None


def _under_limits() -> Iterator[int]:
    """The rest under each limit. The kernel gives up clean page cache first, so that cache counts as free."""
    for group, version in control_groups("memory", _PROC, _CGROUPS):
        most, now, cache = _FILES[version]
        limit, used = limit_of(group / most), read_number(group / now)
        if limit is not None and used is not None:
            cached = re.search(rf"^{cache} (\d+)$", read_text(group / "memory.stat"), re.MULTILINE)
            yield limit - used + (int(cached[1]) if cached else 0)


def _address_space() -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        pages = read_text(_PROC / "self/statm").split()
        yield limit - (int(pages[0]) * resource.getpagesize() if pages else 0)
