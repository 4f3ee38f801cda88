"""Philox4x32-10, a counter-based generator: every random number is a pure function of what it is for.

Nothing is drawn in sequence, so no number depends on what else shares the batch, on preemption or on
retries. Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123).
"""

from __future__ import annotations

import enum

import numpy as np

_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_WEYL = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = np.arange(10, dtype=np.uint64)[:, None, None]


class Purpose(enum.IntEnum):
    """Why a number is drawn: one request may need several at one position. Part of the counter."""

    SAMPLE = 0  # the token itself
    ACCEPT = 1  # whether a draft token is accepted
    RESIDUAL = 2  # the token that replaces a rejected draft


def philox4x32(counters: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Encrypt counters [N, 4] with keys [N, 2], all below 2**32. Returns [N, 4] uint32."""
    words = counters.astype(np.uint64).T
    even, odd = words[0::2], words[1::2]  # each [2, N]: words (0, 2) and (1, 3)
    round_keys = (keys.astype(np.uint64).T + _ROUNDS * _WEYL) & _MASK  # [10, 2, N]
    for key in round_keys:
        product = even * _MULTIPLIERS
        even, odd = (product >> _HALF)[::-1] ^ odd ^ key, (product & _MASK)[::-1]
    return np.stack([even[0], odd[0], even[1], odd[1]], axis=1).astype(np.uint32)


def uniforms(
    seeds: np.ndarray, choices: np.ndarray, positions: np.ndarray, purpose: Purpose = Purpose.SAMPLE
) -> np.ndarray:
    """One number in [0, 1) per row, a multiple of 2**-53. Returns [N] float64.

    Key: seed (uint64), low word first. Counter: (position, choice, purpose, 0). The number is made of the
    high 27 bits of output word 0, then the high 26 bits of word 1.
    """
    counters = np.zeros((len(seeds), 4), np.uint64)
    counters[:, 0] = positions
    counters[:, 1] = choices
    counters[:, 2] = purpose
    words = philox4x32(counters, np.stack([seeds & _MASK, seeds >> _HALF], axis=1)).astype(np.float64)
    return (np.floor(words[:, 0] / 32) * 2.0**26 + np.floor(words[:, 1] / 64)) * 2.0**-53
