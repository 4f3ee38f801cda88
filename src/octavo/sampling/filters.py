"""Which tokens of one row stay, what they weigh, and which one a uniform number picks.

Rows are contiguous float32 logits with a finite maximum (`peak`) and no NaN or +inf. Every function is equal to its
plain definition by a full stable sort (`reference.py`), without the sort. That equality is exact because
weights are integers: their sums carry no rounding, in whatever order they are formed.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Indices = NDArray[np.int64]

_BLOCK = 64  # elements under one block maximum
_CHUNK = 256  # weights under one partial sum
_FIRST_NUCLEUS = 256  # tokens that top_p looks at first, then 8 times as many

_LOG2_E = np.float32(1.44269504)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
# (exp(x) - 1 - x) / x^2 for |x| <= ln(2) / 2
_EXP_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (1.3934544519920112e-3, 8.36377646663759e-3, 4.166645677792509e-2, 1.6666573358081568e-1, 0.5)
)


def scale(values: Floats, peak: float, temperature: float) -> Floats:
    """(values - peak) * (1 / temperature) in float32: the logits of the scaled distribution, at most 0."""
    scaled: Floats = values - np.float32(peak)
    return np.multiply(scaled, np.float32(1) / np.float32(temperature), out=scaled)


def weigh(scaled: Floats, vocab_size: int) -> Floats:
    """Integer weights proportional to exp(scaled), as float32: rint(exp(scaled) * 2**k).

    k = weight_bits(vocab_size), so any sum of weights of a row is exact in float64. The likeliest token weighs 2**k;
    what is below 2**-(k + 1) of it weighs 0 and cannot be drawn. The exponential is spelled out, so that kernels
    (csrc/ops/sampler.cpp) can have the same bits: no operation is fused, its relative error is below 2e-7.
    """
    x = np.maximum(scaled, np.float32(-64))
    power = np.rint(x * _LOG2_E)
    x -= power * _LN2_HIGH  # exact
    x -= power * _LN2_LOW
    weights: Floats = np.full_like(x, _EXP_COEFFICIENTS[0])
    for coefficient in _EXP_COEFFICIENTS[1:]:
        weights *= x
        weights += coefficient
    weights *= x
    weights *= x
    weights += x
    weights += np.float32(1)
    exponent = power.astype(np.int32)
    exponent += 127 + weight_bits(vocab_size)
    exponent <<= 23
    weights *= exponent.view(np.float32)
    return np.rint(weights, out=weights)


def weight_bits(vocab_size: int) -> int:
    """The likeliest token weighs 2 to this power: the weights of `vocab_size` tokens sum up to at most 2**52."""
    return 52 - (vocab_size - 1).bit_length()


def largest(values: Floats, count: int) -> Indices:
    """Indices of the `count` largest values, lowest index first on ties. Ascending."""
    size = len(values)
    if count >= size:
        return np.arange(size)
    candidates = np.flatnonzero(values >= _reached_by(values, count))
    kept = values[candidates]
    return candidates[_cut(kept, _nth_largest(kept, count), count)]


def likeliest(values: Floats, mass: float, peak: float, temperature: float, vocab_size: int) -> Indices:
    """Indices of the fewest largest values whose weights reach `mass`, at least one. Ascending.

    Lowest index first on ties. `mass` is at most the weight of all values.
    """
    count = _FIRST_NUCLEUS
    while True:
        bound = _reached_by(values, count) if count < len(values) else np.float32(-np.inf)
        candidates = np.flatnonzero(values >= bound)
        kept = values[candidates]
        descending = np.sort(kept)[::-1]
        # Weights are a function of the value alone, so they need not be carried through the sort.
        sums = np.cumsum(weigh(scale(descending, peak, temperature), vocab_size).astype(np.float64))
        if sums[-1] >= mass:
            last = int(np.searchsorted(sums, mass, side="left"))
            return candidates[_cut(kept, descending[last], last + 1)]
        count *= 8


def draw(weights: Floats, uniform: float) -> int:
    """The first index at which the running sum of weights exceeds floor(uniform * total).

    It always has a weight above 0: the target is an integer clamped below the total.
    """
    starts = np.arange(0, len(weights), _CHUNK)
    chunk_ends = np.cumsum(np.add.reduceat(weights, starts, dtype=np.float64))
    total = float(chunk_ends[-1])
    target = min(math.floor(uniform * total), total - 1.0)
    chunk = int(np.searchsorted(chunk_ends, target, side="right"))
    start = chunk * _CHUNK
    before = float(chunk_ends[chunk - 1]) if chunk else 0.0
    sums = before + np.cumsum(weights[start : start + _CHUNK].astype(np.float64))
    return start + int(np.searchsorted(sums, target, side="right"))


def _reached_by(values: Floats, count: int) -> np.float32:
    """A value that at least `count` elements reach, and not many more: the count-th largest block maximum."""
    num_blocks = len(values) // _BLOCK
    if num_blocks < 2 * count:
        return _nth_largest(values, count)
    # Block b holds elements b, b + num_blocks, ...: maxima are formed by whole vectors.
    return _nth_largest(values[: _BLOCK * num_blocks].reshape(_BLOCK, num_blocks).max(axis=0), count)


def _nth_largest(values: Floats, n: int) -> np.float32:
    nth: np.float32 = np.partition(values, len(values) - n)[len(values) - n]
    return nth


def _cut(values: Floats, threshold: np.float32, count: int) -> Indices:
    """Indices of all values above `threshold`, and of its first equals up to `count` in all. Ascending."""
    kept = np.flatnonzero(values >= threshold)
    surplus = len(kept) - count
    if surplus > 0:
        equals = np.flatnonzero(values[kept] == threshold)
        kept = np.delete(kept, equals[-surplus:])
    return kept
