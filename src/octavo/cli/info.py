"""`octavo info`: what a report of a problem should begin with."""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict, dataclass

import msgspec

from octavo import __version__
from octavo.backends.native.cpu import Cpu, detect_cpu
from octavo.backends.ops import BackendInfo
from octavo.backends.registry import BACKENDS, backend_info
from octavo.cli.flags import Parser
from octavo.config import GIB, MIB, cache_dir
from octavo.loader.catalogue import pulled_models
from octavo.machine import Machine, detect_machine


@dataclass(frozen=True, slots=True)
class PulledModel:
    name: str
    path: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Info:
    version: str
    python: str
    platform: str
    cpu: Cpu
    machine: Machine
    backends: tuple[BackendInfo, ...]
    cache_folder: str
    models: tuple[PulledModel, ...]


def add_flags(parser: Parser) -> None:
    parser.add_argument("--json", action="store_true", help="as one JSON object")


def run(args: argparse.Namespace) -> int:
    info = gather()
    print(msgspec.json.format(msgspec.json.encode(asdict(info))).decode() if args.json else as_text(info))
    return 0


def gather() -> Info:
    cache = cache_dir()
    return Info(
        version=__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=detect_cpu(),
        machine=detect_machine(),
        backends=tuple(map(backend_info, BACKENDS)),
        cache_folder=str(cache),
        models=tuple(PulledModel(model.name, str(model.path), model.size_bytes) for model in pulled_models(cache)),
    )


def as_text(info: Info) -> str:
    machine = info.machine
    rows = [
        ("octavo", f"{info.version}, Python {info.python}, {info.platform}"),
        ("processor", f"{info.cpu.model_name}; {machine.num_cores} cores usable"),
        ("features", " ".join(info.cpu.features) or "none that the kernels know"),
        ("kernels", f"{info.cpu.isas[-1]} (of {', '.join(info.cpu.isas)})"),
        (
            "memory",
            f"{machine.memory_total_bytes / GIB:.1f} GiB, {machine.memory_available_bytes / GIB:.1f} GiB available",
        ),
    ]
    for backend in info.backends:
        rows.append(("backend", f"{backend.name}: {'' if backend.available else 'not available: '}{backend.detail}"))
    rows.append(("cache", info.cache_folder))
    rows += [("model", f"{model.name}, {model.size_bytes / MIB:.0f} MiB, {model.path}") for model in info.models]
    if not info.models:
        rows.append(("model", "none pulled yet; octavo pull lists what there is"))
    return "\n".join(f"{label:<10} {text}" for label, text in rows)
