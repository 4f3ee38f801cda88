"""Rotary position embedding: one frozen class for each kind, from its parameters to a `RopeTable`.

Formulas are those of `transformers.modeling_rope_utils`, in float32 and in its order: far positions multiply
every difference, and a smooth band such as Llama 3's magnifies roundings by cancellation. A kind whose
frequencies depend on whether a sequence is longer than the native context has two variants: 0 for sequences up
to `native_len`, 1 for longer ones. A sequence has one variant for all its keys, so that they are comparable;
`transformers` switches in mid-sequence and leaves the old keys as they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from octavo.backends.ops import RopeTable

Frequencies = tuple[np.ndarray, float]  # inv_freq [rotary_dim / 2] float32, attention factor


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Plain RoPE (arXiv:2104.09864), and the base of the scaled kinds."""

    theta: float
    rotary_dim: int
    context_len: int  # the longest sequence that the frequencies are meant for

    @property
    def native_len(self) -> int | None:
        """Requests longer than this run in variant 1; None where there is one variant."""
        return None

    def variants(self, max_model_len: int) -> tuple[Frequencies, ...]:
        """The frequencies of every variant when sequences of up to `max_model_len` tokens are served."""
        return ((plain_inv_freq(self.theta, self.rotary_dim), 1.0),)

    def table(self, max_model_len: int) -> RopeTable:
        variants = self.variants(max_model_len)
        return RopeTable(
            self.rotary_dim,
            tuple(inv_freq for inv_freq, _ in variants),
            tuple(factor for _, factor in variants),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope(RopeSpec):
    """Position interpolation (arXiv:2306.15595): every frequency divided by `factor`."""

    factor: float

    def variants(self, max_model_len: int) -> tuple[Frequencies, ...]:
        return ((plain_inv_freq(self.theta, self.rotary_dim) / self.factor, 1.0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRope(RopeSpec):
    """Dynamic NTK: beyond the native context, the base grows with the sequence.

    Variant 1 takes the base of the longest sequence served, where `transformers` takes that of the current one:
    keys in the cache were rotated once and cannot follow a base that moves.
    """

    factor: float
    native_context_len: int

    @property
    def native_len(self) -> int | None:
        return self.native_context_len

    def variants(self, max_model_len: int) -> tuple[Frequencies, ...]:
        dim, native = self.rotary_dim, self.native_context_len
        growth = self.factor * max(max_model_len, native) / native - (self.factor - 1)
        scaled_theta = self.theta * growth ** (dim / (dim - 2))
        return ((plain_inv_freq(self.theta, dim), 1.0), (plain_inv_freq(scaled_theta, dim), 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope(RopeSpec):
    """YaRN (arXiv:2309.00071): fast dimensions as trained, slow ones interpolated, a ramp between them."""

    factor: float
    native_context_len: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def variants(self, max_model_len: int) -> tuple[Frequencies, ...]:
        low, high = self._turning_index(self.beta_fast), self._turning_index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_dim - 1)
        ramp = (np.arange(self.rotary_dim // 2, dtype=np.float32) - low) / ((high - low) or 0.001)
        kept = 1 - np.clip(ramp, 0, 1)
        plain = plain_inv_freq(self.theta, self.rotary_dim)
        inv_freq = plain / self.factor * (1 - kept) + plain * kept
        return ((inv_freq, self.attention_factor),)

    def _turning_index(self, num_turns: float) -> float:
        """The (fractional) pair of dimensions that turns `num_turns` times over the native context."""
        length = math.log(self.native_context_len / (num_turns * 2 * math.pi))
        return self.rotary_dim * length / (2 * math.log(self.theta))


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope(RopeSpec):
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a smooth band between them."""

    factor: float
    native_context_len: int
    low_freq_factor: float
    high_freq_factor: float

    def variants(self, max_model_len: int) -> tuple[Frequencies, ...]:
        plain = plain_inv_freq(self.theta, self.rotary_dim)
        num_turns = self.native_context_len / (2 * math.pi / plain)
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = np.clip((num_turns - low) / (high - low), 0, 1)
        return (((1 - kept) * plain / self.factor + kept * plain, 1.0),)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRope(RopeSpec):
    """LongRoPE (arXiv:2402.13753): a divisor for each frequency, one list up to the native context, one beyond."""

    native_context_len: int
    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    attention_factor: float

    @property
    def native_len(self) -> int | None:
        return None if self.short_factor == self.long_factor else self.native_context_len

    def variants(self, max_model_len: int) -> tuple[Frequencies, ...]:
        plain = plain_inv_freq(self.theta, self.rotary_dim)
        short = (plain / np.array(self.short_factor, np.float32), self.attention_factor)
        if self.native_len is None:
            return (short,)
        return (short, (plain / np.array(self.long_factor, np.float32), self.attention_factor))


def plain_inv_freq(theta: float, rotary_dim: int) -> np.ndarray:
    """[rotary_dim / 2] float32"""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    return np.asarray(1 / np.float32(theta) ** exponents)


def yarn_attention_factor(factor: float, mscale: float | None = None, mscale_all_dim: float | None = None) -> float:
    """What YaRN multiplies cos and sin by, where the checkpoint does not say it."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0

    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def longrope_attention_factor(factor: float, native_context_len: int) -> float:
    """What LongRoPE multiplies cos and sin by, where the checkpoint does not say it."""
    return 1.0 if factor <= 1.0 else math.sqrt(1.0 + math.log(factor) / math.log(native_context_len))
