"""When requests are sent: seconds after the start, one for each request, never decreasing."""

from __future__ import annotations

import math

import numpy as np


def arrival_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> list[float]:
    """Arrivals of a renewal process with `rate` requests a second; all 0 for an infinite rate.

    The gaps are gamma-distributed with shape `burstiness`: 1 is a Poisson process. They are stretched so that the
    last request leaves at exactly count / rate, which makes runs with different seeds offer the same load.
    """
    if math.isinf(rate):
        return [0.0] * count
    if math.isinf(burstiness):
        return [(i + 1) / rate for i in range(count)]
    times = np.cumsum(rng.gamma(burstiness, 1.0, count))
    if times[-1] == 0.0:  # gaps of tiny shapes underflow
        return [count / rate] * count
    scaled: list[float] = (times * (count / rate / times[-1])).tolist()
    return scaled
