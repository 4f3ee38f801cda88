"""Confidence intervals, and what a list without values gives."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.bench.statistics import confidence_interval, mean, median, percentile, std, t_95


@pytest.mark.parametrize(
    ("degrees", "t"), [(1, 12.706), (4, 2.776), (30, 2.042), (31, 2.0395), (60, 2.0003), (1000, 1.9623)]
)
def test_students_t_is_that_of_the_tables(degrees: int, t: float) -> None:
    assert t_95(degrees) == pytest.approx(t, abs=1e-3)


def test_the_interval_is_students() -> None:
    interval = confidence_interval([1.0, 2.0, 3.0, 4.0, 5.0])
    half = 2.7764 * math.sqrt(2.5) / math.sqrt(5)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((3.0, 3.0 - half, 3.0 + half))


def test_the_interval_covers_the_mean_in_95_of_100_samples() -> None:
    rng = np.random.default_rng(0)
    intervals = [confidence_interval(rng.normal(10, 2, 5).tolist()) for _ in range(2000)]
    covering = sum(interval.low <= 10 <= interval.high for interval in intervals)
    assert 0.935 < covering / 2000 < 0.965


def test_no_values_are_zero() -> None:
    assert mean([]) == median([]) == std([]) == percentile([], 99) == 0.0
