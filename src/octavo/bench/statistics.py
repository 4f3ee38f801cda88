"""Means, percentiles and confidence intervals of measured values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# Two-sided 95 % points of Student's t for 1 ... 30 degrees of freedom.
_T_95 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281,
    2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860,
    2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)  # fmt: skip
_Z_95 = 1.959964


def t_95(degrees: int) -> float:
    """The two-sided 95 % point of Student's t, to 0.001."""
    if degrees <= len(_T_95):
        return _T_95[degrees - 1]
    z = _Z_95
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the 95 % confidence interval of it."""

    mean: float
    low: float
    high: float


def confidence_interval(values: Sequence[float]) -> Interval:
    """Student's interval of the mean of two or more independent runs."""
    assert len(values) >= 2, "an interval needs two runs"
    mean = float(np.mean(values))
    half = t_95(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def mean(values: Sequence[float]) -> float:
    """0 for no values, as the result's fields must be numbers."""
    return float(np.mean(values)) if len(values) else 0.0


def median(values: Sequence[float]) -> float:
    return percentile(values, 50)


def std(values: Sequence[float]) -> float:
    return float(np.std(values)) if len(values) else 0.0


def percentile(values: Sequence[float], p: float) -> float:
    return float(np.percentile(values, p)) if len(values) else 0.0
