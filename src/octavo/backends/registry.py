"""Which backends exist, whether they can run here, and how one is made. Heavy imports stay in the creators."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from octavo.backends.native.cpu import detect_cpu
from octavo.backends.ops import BackendInfo, DType, Ops
from octavo.errors import ConfigError
from octavo.options import did_you_mean

BACKENDS = ("native", "reference")  # best first


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """What only the native backend knows."""

    isa: str = "auto"
    quantization: Literal["auto", "none", "int8", "int4"] = "auto"
    quantizes_activations: bool = False
    enforce_eager: bool = False
    fusion: str = "on"  # or off, or the names of passes
    repack_cache: Path | None = None  # folder
    repack_cache_bytes: int = 16 << 30
    identity: bytes | None = None  # of the checkpoint; without one nothing is kept on disk


def backend_info(name: str) -> BackendInfo:
    """Whether backend `name` can run here, without importing it."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}.")
    if name == "native":
        return BackendInfo(name, True, f"kernels for {', '.join(detect_cpu().isas)}")
    if importlib.util.find_spec("torch") is None:
        return BackendInfo(
            name,
            False,
            "PyTorch is not installed: pip install 'octavo[torch]' (without a GPU, a CPU build of it is enough)",
        )
    from importlib.metadata import version

    return BackendInfo(name, True, f"torch {version('torch')}")


def available_backends() -> list[str]:
    """The backends that can run here, best first."""
    return [name for name in BACKENDS if name == "native" or importlib.util.find_spec("torch") is not None]


def create_ops(name: str, *, dtype: DType, num_threads: int, native: NativeOptions = NativeOptions()) -> Ops:
    """The operators of backend `name`; raises ConfigError with the way out when it cannot run here."""
    info = backend_info(name)
    if not info.available:
        raise ConfigError(f"backend {name!r} is not available: {info.detail}.")
    return _native_ops(dtype, num_threads, native) if name == "native" else _reference_ops(dtype, num_threads)


def _native_ops(dtype: DType, num_threads: int, options: NativeOptions) -> Ops:
    from octavo.backends.native.ops import NativeOps
    from octavo.backends.native.self_check import best_isa, probe

    isas = detect_cpu().isas
    if options.isa != "auto" and options.isa not in isas:
        raise ConfigError(f"--isa {options.isa}: this processor runs {', '.join(isas)}.")
    return NativeOps(
        dtype=dtype,
        num_threads=num_threads,
        isa=best_isa(isas, probe) if options.isa == "auto" else options.isa,
        quantization=options.quantization,
        quantizes_activations=options.quantizes_activations,
        enforce_eager=options.enforce_eager,
        fusion=fusion_passes(options.fusion),
        repack_cache=options.repack_cache,
        repack_cache_bytes=options.repack_cache_bytes,
        identity=options.identity,
    )


def fusion_passes(fusion: str) -> tuple[str, ...]:
    """The passes that `--fusion` names, in the order in which they run."""
    from octavo.backends.native.fusion import PASSES

    if fusion in ("on", "off"):
        return tuple(PASSES) if fusion == "on" else ()
    names = [name.strip() for name in fusion.split(",")]
    for name in names:
        if name not in PASSES:
            hint = did_you_mean(name, PASSES) or "."
            raise ConfigError(
                f"--fusion: there is no pass {name!r}; it is on, off, or some of {', '.join(PASSES)}{hint}"
            )
    return tuple(name for name in PASSES if name in names)


def _reference_ops(dtype: DType, num_threads: int) -> Ops:
    # PyTorch's OpenMP reads this when it is loaded. By default its threads spin for milliseconds at every barrier:
    # on cores that they share with the server, a step then took ten times as long as with one thread.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    from octavo.backends.reference.ops import ReferenceOps

    return ReferenceOps(dtype=dtype, num_threads=num_threads)
