"""What this machine does at most: measured, as no data sheet knows its clocks, its memory and who shares them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from octavo import _native
from octavo.machine import detect_machine

Sample = TypeVar("Sample")

_CPUS = Path("/sys/devices/system/cpu")
_SMALLEST_READ, _LARGEST_READ = 64 << 20, 2 << 30
_READ_UNIT = 256
_UNKNOWN_CACHE = 32 << 20
_SAMPLE_S = 0.002  # of products: long beside the start of the threads
_FEWEST_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Roofline:
    """Medians over short samples. Products have their operands in registers; a multiplication and an addition are two
    operations."""

    isa: str
    num_threads: int
    read_bytes: int  # of memory, each read once a sample
    read_1_stream_gb_s: float  # every thread reads one place after the other
    read_4_streams_gb_s: float  # every thread reads four places side by side, as products read weights
    f32_gflop_s: float
    bf16_gflop_s: float
    int8_gop_s: float

    @property
    def read_gb_s(self) -> float:
        return max(self.read_1_stream_gb_s, self.read_4_streams_gb_s)


def measure(num_threads: int, *, isa: str = "auto", seconds: float = 1.0) -> Roofline:
    """Takes about `seconds`, and memory twice the size of the last cache. What else runs lowers the figures."""
    read_bytes = _read_bytes()
    probe = _native.RooflineProbe(isa, _native.Team(num_threads), read_bytes)
    share_s = seconds / 5

    def read_gb_s(streams: int) -> float:
        return read_bytes / median(_samples(lambda: probe.read(streams), share_s)) / 1e9

    def giga_ops_s(kind: str) -> float:
        rounds = 256
        while probe.multiply(kind, rounds)[0] < _SAMPLE_S:
            rounds *= 2
        samples = _samples(lambda: probe.multiply(kind, rounds), share_s)
        return median(operations / taken for taken, operations in samples) / 1e9

    return Roofline(
        isa=_native.usable_isas()[-1] if isa == "auto" else isa,
        num_threads=num_threads,
        read_bytes=read_bytes,
        read_1_stream_gb_s=read_gb_s(1),
        read_4_streams_gb_s=read_gb_s(4),
        f32_gflop_s=giga_ops_s("f32"),
        bf16_gflop_s=giga_ops_s("bf16"),
        int8_gop_s=giga_ops_s("int8"),
    )


def last_cache_bytes() -> int:
    """The last-level caches that this process' cores have, added up."""
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    caches: dict[str, int] = {}
    for cpu in cpus:
        last = max((_CPUS / f"cpu{cpu}" / "cache").glob("index[0-9]"), default=None)
        try:
            if last is not None:
                shared_by = (last / "shared_cpu_list").read_text()
                caches[shared_by] = int((last / "size").read_text().strip().removesuffix("K")) << 10
        except (OSError, ValueError):
            continue
    return sum(caches.values()) or _UNKNOWN_CACHE


def _read_bytes() -> int:
    wanted = min(max(2 * last_cache_bytes(), _SMALLEST_READ), _LARGEST_READ)
    affordable = max(detect_machine().memory_available_bytes // 4, _READ_UNIT)
    return min(wanted, affordable) // _READ_UNIT * _READ_UNIT


def _samples(take: Callable[[], Sample], seconds: float) -> list[Sample]:
    """What `take` returns, again and again for so long; the first time only warms up."""
    take()
    samples: list[Sample] = []
    end = time.perf_counter() + seconds
    while len(samples) < _FEWEST_SAMPLES or time.perf_counter() < end:
        samples.append(take())
    return samples
