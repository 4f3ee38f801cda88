"""The statistics of the arrival process."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.bench.arrivals import arrival_times

COUNT, RATE = 20_000, 8.0


def gaps(burstiness: float, seed: int = 0) -> np.ndarray:
    return np.diff(arrival_times(COUNT, RATE, burstiness, np.random.default_rng(seed)), prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_of_a_gamma_distribution(burstiness: float) -> None:
    found = gaps(burstiness)
    assert (found >= 0).all()
    assert found.mean() == pytest.approx(1 / RATE)
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)


def test_a_burstiness_of_one_is_a_poisson_process() -> None:
    found = np.sort(gaps(1.0))
    expected = 1 - np.exp(-found * RATE)
    distance = np.abs(np.arange(1, COUNT + 1) / COUNT - expected).max()  # Kolmogorov and Smirnov's
    assert distance < 1.63 / math.sqrt(COUNT)
    by_second = np.bincount(np.cumsum(gaps(1.0)).astype(int))[:-1]
    assert by_second.var() / by_second.mean() == pytest.approx(1.0, rel=0.1)


def test_the_load_is_the_same_for_every_seed() -> None:
    ends = [arrival_times(50, 2.0, 1.0, np.random.default_rng(seed))[-1] for seed in range(5)]
    assert ends == pytest.approx([25.0] * 5)


def test_the_same_seed_gives_the_same_times() -> None:
    one, two = (arrival_times(9, 2.0, 0.5, np.random.default_rng(3)) for _ in range(2))
    assert one == two != arrival_times(9, 2.0, 0.5, np.random.default_rng(4))


def test_an_infinite_burstiness_makes_equal_gaps() -> None:
    assert arrival_times(4, 2.0, math.inf, np.random.default_rng(0)) == [0.5, 1.0, 1.5, 2.0]


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert arrival_times(3, math.inf, 1.0, np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_gaps_too_small_for_numbers_are_one_burst_at_the_end() -> None:
    assert arrival_times(2, 4.0, 0.001, np.random.default_rng(1)) == pytest.approx([0.5, 0.5], abs=0.5)
