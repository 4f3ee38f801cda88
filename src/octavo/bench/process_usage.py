"""Memory and CPU time of a process and its descendants, from Linux's /proc."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"
_TICKS = os.sysconf("SC_CLK_TCK")
_KIB = 1024


@dataclass(frozen=True, slots=True)
class Usage:
    """Of a whole tree of processes.

    `peak_rss_bytes` adds up the high-water marks of the processes since each began, so pages that they share
    count more than once; `pss_bytes`, of this moment, counts them once.
    """

    num_processes: int
    peak_rss_bytes: int
    pss_bytes: int
    cpu_s: float


def usage_of(pids: Iterable[int]) -> Usage:
    """Of `pids` and their descendants. Processes that end meanwhile, or may not be read, count as nothing."""
    tree = _with_descendants(pids)
    peak = pss = 0
    cpu_s = 0.0
    for pid in tree:
        try:
            peak += _kib_field(_PROC / str(pid) / "status", "VmHWM")
            cpu_s += _cpu_seconds(pid)
            pss += _kib_field(_PROC / str(pid) / "smaps_rollup", "Pss")
        except (OSError, ValueError):
            continue
    return Usage(len(tree), peak, pss, cpu_s)


def is_local(host: str) -> bool:
    """Whether `host` is an address of this machine: one that a socket can be bound to."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def listeners(port: int) -> list[int]:
    """The processes of this machine that listen on `port`, as far as they may be looked at."""
    inodes = {inode for table in ("tcp", "tcp6") for inode in _listening_inodes(_PROC / "net" / table, port)}
    wanted = {f"socket:[{inode}]" for inode in inodes}
    return [pid for pid in _pids() if wanted and not wanted.isdisjoint(_open_files(pid))]


def _listening_inodes(table: Path, port: int) -> Iterable[str]:
    try:
        lines = table.read_text().splitlines()[1:]
    except OSError:
        return
    for line in lines:
        columns = line.split()
        if columns[3] == _LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
            yield columns[9]


def _open_files(pid: int) -> set[str]:
    folder = _PROC / str(pid) / "fd"
    targets = set()
    with suppress(OSError):  # it has ended, or belongs to somebody else
        for name in os.listdir(folder):
            with suppress(OSError):  # closed meanwhile
                targets.add(os.readlink(folder / name))
    return targets


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()] if _PROC.is_dir() else []


def _with_descendants(pids: Iterable[int]) -> set[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid in _pids():
        try:
            children[int(_stat(pid)[1])].append(pid)
        except (OSError, ValueError):
            continue
    found: set[int] = set()
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children[pid]
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third, the state, on: a name may hold spaces and brackets."""
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


def _cpu_seconds(pid: int) -> float:
    """User and system time, with that of children that have ended and been waited for."""
    return sum(map(int, _stat(pid)[11:15])) / _TICKS


def _kib_field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * _KIB
    return 0
