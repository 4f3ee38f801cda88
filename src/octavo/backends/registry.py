"""Which backends exist, whether they can run here, and how one is made. Heavy imports stay in the creators."""

from __future__ import annotations

import importlib.util
import os
from importlib.metadata import version

from octavo.backends.ops import BackendInfo, DType, Ops
from octavo.errors import ConfigError

BACKENDS = ("reference",)


def backend_info(name: str) -> BackendInfo:
    """Whether backend `name` can run here, without importing it."""
    if name != "reference":
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(BACKENDS)}.")
    if importlib.util.find_spec("torch") is None:
        return BackendInfo(
            name,
            False,
            "PyTorch is not installed: pip install 'octavo[torch]' (without a GPU, a CPU build of it is enough)",
        )
    return BackendInfo(name, True, f"torch {version('torch')}")


def available_backends() -> list[str]:
    """The backends that can run here, best first. Raises ConfigError with the way out when none can."""
    infos = [backend_info(name) for name in BACKENDS]
    if not any(info.available for info in infos):
        reasons = "; ".join(f"{info.name}: {info.detail}" for info in infos)
        raise ConfigError(f"no backend can run here. {reasons}.")
    return [info.name for info in infos if info.available]


def create_ops(name: str, *, dtype: DType, num_threads: int) -> Ops:
    """The operators of backend `name`; raises ConfigError with the way out when it cannot run here."""
    info = backend_info(name)
    if not info.available:
        raise ConfigError(f"backend {name!r} is not available: {info.detail}.")
    # PyTorch's OpenMP reads this when it is loaded. By default its threads spin for milliseconds at every barrier:
    # on cores that they share with the server, a step then took ten times as long as with one thread.
    os.environ.setdefault("GOMP_SPINCOUNT", "30000")
    from octavo.backends.reference.ops import ReferenceOps

    return ReferenceOps(dtype=dtype, num_threads=num_threads)
