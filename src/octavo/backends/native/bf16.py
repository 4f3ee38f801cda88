"""bfloat16 to float32 and back, in the extension: the same bits on every instruction set."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo import _native


def bf16_to_float32(x: NDArray[ml_dtypes.bfloat16], *, isa: str = "auto") -> NDArray[np.float32]:
    """Exact. `isa` is one of `detect_cpu().isas`, or auto for the best."""
    source = np.ascontiguousarray(x).view(np.uint16).reshape(-1)
    target = np.empty(source.size, np.float32)
    _native.bf16_to_f32(source, target, isa)
    return target.reshape(x.shape)


def float32_to_bf16(x: NDArray[np.float32], *, isa: str = "auto") -> NDArray[ml_dtypes.bfloat16]:
    """Rounds to nearest, ties to even; every NaN becomes the quiet NaN of its sign."""
    source = np.ascontiguousarray(x, np.float32).reshape(-1)
    target = np.empty(source.size, np.uint16)
    _native.f32_to_bf16(source, target, isa)
    narrow: NDArray[ml_dtypes.bfloat16] = target.view(ml_dtypes.bfloat16)
    return narrow.reshape(x.shape)
