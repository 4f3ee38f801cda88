"""`octavo info`: what a report of a problem should begin with; with --plan, what a step of a model costs."""

from __future__ import annotations

import argparse
import platform
from dataclasses import asdict, dataclass

import msgspec

from octavo import __version__
from octavo.backends.native.cpu import Cpu, detect_cpu
from octavo.backends.ops import BackendInfo
from octavo.backends.registry import BACKENDS, backend_info
from octavo.cli.flags import Parser, add_config_flags, config_from, given_options
from octavo.config import GIB, MIB, Config, cache_dir
from octavo.errors import ConfigError
from octavo.loader.catalogue import pulled_models
from octavo.machine import Machine, detect_machine

_PLAN_OPTIONS = (
    *("model", "revision", "dtype", "quantization", "act_dtype", "max_model_len", "rope_scaling", "isa", "threads"),
    *("fusion", "repack_cache", "repack_cache_bytes", "kv_cache_memory_bytes"),
)
_CONTEXT_LEN = 512  # of the steps that are reported, where the model has it


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
    parser.add_argument(
        "--plan",
        action="store_true",
        help="load MODEL and show the operators of its plan, what they read and compute, and how fast this machine, "
        "which is measured, could be",
    )
    add_config_flags(parser, _PLAN_OPTIONS)


def run(args: argparse.Namespace) -> int:
    if args.plan:
        print(_plan(config_from(args), as_json=args.json))
        return 0
    given = given_options(args)
    if given or args.config is not None:
        name = "--config" if not given else "MODEL" if "model" in given else f"--{next(iter(given))}".replace("_", "-")
        raise ConfigError(f"{name} is for octavo info --plan.")
    info = gather()
    print(msgspec.json.format(msgspec.json.encode(asdict(info))).decode() if args.json else as_text(info))
    return 0


def _plan(config: Config, *, as_json: bool) -> str:
    # Heavy: the machine is told without them.
    from octavo.backends.native.ops import Program
    from octavo.backends.native.plan_report import report
    from octavo.backends.native.roofline import measure
    from octavo.cli.plan_text import plan_text
    from octavo.engine.build import build_engine

    core, engine = build_engine(config)
    if not isinstance(core.program, Program):
        why = "--enforce-eager makes none" if config.model.enforce_eager else f"backend {engine.backend!r} has none"
        raise ConfigError(f"--plan shows a plan of the native backend; {why}.")
    roofline = measure(config.model.threads or detect_machine().num_cores, isa=config.model.isa)
    context_len = min(_CONTEXT_LEN, engine.max_model_len)
    plan = report(core.program, roofline, context_len=context_len, prefill_len=context_len)
    if not as_json:
        return plan_text(engine.model, plan, roofline)
    facts = {"model": engine.model, "plan": asdict(plan), "roofline": asdict(roofline)}
    return msgspec.json.format(msgspec.json.encode(facts)).decode()


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
