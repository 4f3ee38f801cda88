"""Octavo: LLM inference serving. `LLM` runs in this process, `AsyncLLM` beside it; imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.llm import LLM, AsyncLLM
    from octavo.request import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_HOMES = {"LLM": "octavo.engine.llm", "AsyncLLM": "octavo.engine.llm", "SamplingParams": "octavo.request"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
