"""What this machine offers: cores in the affinity mask, memory as the cgroup allows it. Read once at start."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")
_UNLIMITED = 1 << 60  # cgroup v1 writes a huge number for "no limit"


@dataclass(frozen=True, slots=True)
class Machine:
    num_cores: int  # in the affinity mask of this process
    memory_total_bytes: int
    memory_available_bytes: int


def detect_machine() -> Machine:
    """Cores and memory that this process may use: the smaller of what the kernel and the cgroup say."""
    total, available = _kernel_memory()
    limit, used = _cgroup_memory()
    if limit is not None:
        total = min(total, limit)
        available = min(available, max(0, limit - used))
    return Machine(_num_cores(), total, available)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kernel_memory() -> tuple[int, int]:
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines() if ":" in line)
        return _kib(fields["MemTotal"]), _kib(fields["MemAvailable"])
    except (OSError, KeyError, ValueError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return total, total // 2


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _cgroup_memory() -> tuple[int | None, int]:
    for folder, limit_name, used_name in (
        (_CGROUP_V2, "memory.max", "memory.current"),
        (_CGROUP_V1, "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            limit_text = (folder / limit_name).read_text().strip()
            used = int((folder / used_name).read_text())
        except (OSError, ValueError):
            continue
        if limit_text == "max" or int(limit_text) >= _UNLIMITED:
            return None, used
        return int(limit_text), used
    return None, 0
