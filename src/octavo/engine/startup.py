"""The phases of a process' start, for --startup-report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Phase(NamedTuple):
    name: str
    wall_s: float
    cpu_s: float  # of the whole process, all threads


class StartupClock:
    """Cuts the life of this process, from its very beginning, into named phases."""

    def __init__(self, first: str) -> None:
        self._done: list[Phase] = []
        self._name = first
        self._wall_s = time.monotonic() - _process_age_s()
        self._cpu_s = 0.0

    def begin(self, name: str) -> None:
        """The phase so far ends here, unless it has the same name."""
        if name == self._name:
            return
        wall_s, cpu_s = time.monotonic(), time.process_time()
        self._done.append(Phase(self._name, wall_s - self._wall_s, cpu_s - self._cpu_s))
        self._name, self._wall_s, self._cpu_s = name, wall_s, cpu_s

    def phases(self) -> tuple[Phase, ...]:
        """Those that have ended."""
        return tuple(self._done)


def startup_report(processes: Sequence[tuple[str, Sequence[Phase]]]) -> list[str]:
    """One line a phase, and the sum, of each named process."""
    lines = []
    for name, phases in processes:
        wall_s, cpu_s = sum(phase.wall_s for phase in phases), sum(phase.cpu_s for phase in phases)
        for phase in (*phases, Phase("total", wall_s, cpu_s)):
            lines.append(f"startup {name}: {phase.name:<34} {phase.wall_s:7.3f} s {phase.cpu_s:7.3f} s of CPU")
    return lines


def _process_age_s() -> float:
    """Seconds since this process was started; those since its first instruction where the system does not tell."""
    try:
        # The command's name, in brackets, may hold spaces: fields are counted from behind it.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
