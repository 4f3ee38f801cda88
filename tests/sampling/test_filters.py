"""The selections without a sort equal their definitions with one, exactly."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.sampling.filters import draw, largest, likeliest, scale, weigh, weight_bits


def logits(size: int, kind: str, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    values = {
        "normal": lambda: random.standard_normal(size) * 4,
        "ties": lambda: random.integers(-3, 4, size).astype(float),
        "equal": lambda: np.ones(size),
        "peaked": lambda: np.where(np.arange(size) == size // 3, 90.0, random.standard_normal(size)),
        "masked": lambda: np.where(random.random(size) < 0.9, -np.inf, random.standard_normal(size)),
    }[kind]()
    values[-1] = max(values[-1], 0.0)  # at least one finite
    return values.astype(np.float32)


KINDS = ("normal", "ties", "equal", "peaked", "masked")
SIZES = (1, 2, 63, 64, 65, 1000, 40_000)


def ranking(values: np.ndarray) -> np.ndarray:
    return np.lexsort((np.arange(len(values)), -values))


@pytest.mark.parametrize(("kind", "size"), [*itertools.product(KINDS, SIZES)])
def test_largest_equals_a_stable_sort(kind, size):
    values = logits(size, kind)
    order = ranking(values)
    for count in (1, 2, 40, 64, 300, size - 1, size, size + 1):
        if count >= 1:
            assert np.array_equal(largest(values, count), np.sort(order[:count])), count


@pytest.mark.parametrize(("kind", "size"), [*itertools.product(KINDS, SIZES)])
def test_likeliest_equals_a_stable_sort(kind, size):
    values = logits(size, kind)
    order = ranking(values)
    peak = float(values.max())
    for temperature in (0.01, 0.7, 1.0, 100.0):
        weights = weigh(scale(values, peak, temperature), size).astype(np.float64)
        sums = np.cumsum(weights[order])
        for share in (0.0, 1e-9, 0.5, 0.95, 0.999999, 1.0):
            mass = share * sums[-1]
            expected = np.sort(order[: int(np.argmax(sums >= mass)) + 1])
            chosen = likeliest(values, mass, peak, temperature, size)
            assert np.array_equal(chosen, expected), (temperature, share)


def test_weights_are_integers_whose_sums_are_exact_in_any_order():
    random = np.random.default_rng(0)
    for size in (1, 2, 8, 49_152, 262_144):
        values = (random.standard_normal(size) * 3).astype(np.float32)
        weights = weigh(scale(values, float(values.max()), 0.8), size)
        assert np.array_equal(weights, np.rint(weights))
        total = sum(int(weight) for weight in weights.tolist())
        assert total <= 2**52
        for order in (np.arange(size), np.argsort(values), random.permutation(size)):
            assert float(weights[order].sum(dtype=np.float64)) == total
            assert float(np.cumsum(weights[order].astype(np.float64))[-1]) == total


def test_a_weight_depends_on_its_value_alone_and_not_on_its_place():
    # What the sampler relies on: exp of a whole row, of a few candidates and of one element agree bit by bit.
    values = logits(5000, "normal")
    peak = float(values.max())
    weights = weigh(scale(values, peak, 0.9), 5000)
    random = np.random.default_rng(1)
    for size in (1, 2, 3, 7, 8, 17, 100, 4999):
        some = random.choice(5000, size, replace=False)
        assert np.array_equal(weigh(scale(values[some], peak, 0.9), 5000), weights[some])
    for start in range(1, 17):
        assert np.array_equal(weigh(scale(values[start:], peak, 0.9), 5000), weights[start:])


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 3000])
def test_draw_inverts_the_running_sum(size):
    random = np.random.default_rng(size)
    weights = random.integers(0, 5, size).astype(np.float32)
    weights[random.integers(size)] = 5
    ends = np.cumsum(weights.astype(np.float64))
    for uniform in (0.0, 2.0**-53, *random.random(50), 1 - 2.0**-24, 1 - 2.0**-53, 1.0):
        index = draw(weights, float(uniform))
        before = ends[index] - weights[index]
        target = min(np.floor(uniform * ends[-1]), ends[-1] - 1)
        assert weights[index] > 0 and before <= target < ends[index]


@pytest.mark.parametrize("size", [1, 2, 1000, 262_144])
def test_weights_are_the_exponentials_to_float32_accuracy(size):
    scaled = -np.concatenate([np.linspace(0, 24, 40_001), np.geomspace(1e-30, 30, 10_000)]).astype(np.float32)
    exact = np.exp(scaled.astype(np.float64)) * 2.0 ** weight_bits(size)
    weights = weigh(scaled, size).astype(np.float64)
    assert np.all(np.abs(weights - exact) <= 2e-7 * exact + 0.5)
    assert weigh(np.array([0, -0.0, -64, -1e30, -np.inf], np.float32), size).tolist() == [
        2.0 ** weight_bits(size),
        2.0 ** weight_bits(size),
        0,
        0,
        0,
    ]


# SMP-10: rounding at the end of the running sum must not lead out of the support.
@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 3000),
    st.integers(0, 2**32),
    st.sampled_from([0.0, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0]),
    st.integers(0, 2999),
)
def test_draw_stays_in_the_support_for_every_uniform(size, seed, uniform, tail):
    random = np.random.default_rng(seed)
    values = (random.standard_normal(size) * 10).astype(np.float32)
    values[max(1, size - tail) :] = -np.inf
    weights = weigh(scale(values, float(values.max()), 1.0), size)
    assert weights[draw(weights, uniform)] > 0
