"""What the processor offers the kernels, as the extension found it when the process started."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from octavo import _native


@dataclass(frozen=True, slots=True)
class Cpu:
    model_name: str
    features: tuple[str, ...]  # present, and permitted by the operating system; oldest first
    isas: tuple[str, ...]  # instruction sets that kernels can run with here, best last


def detect_cpu() -> Cpu:
    present = tuple(name for name, is_present in _native.cpu_features().items() if is_present)
    return Cpu(_native.cpu_model_name() or _model_name_from_kernel(), present, _native.usable_isas())


def _model_name_from_kernel() -> str:
    """For processors without a brand string (Arm, or a hypervisor that hides it)."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    names = {key.strip().lower(): value.strip() for key, value in fields.items()}
    return names.get("model name") or names.get("hardware") or platform.processor() or platform.machine()
