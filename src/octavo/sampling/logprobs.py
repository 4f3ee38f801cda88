"""Log-probabilities of one row: the token's own, its rank, and the likeliest alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from octavo.backends.sampler import Described
from octavo.batch import TokenLogprobs
from octavo.sampling.filters import Floats, largest, weigh, weight_bits


def describe(
    described: Described,
    row: int,
    values: Floats,
    index: int,
    num_top: int,
    vocab_size: int,
    token_ids: np.ndarray | None = None,
) -> None:
    """Note in `described` the softmax of `values` (float32 logits, finite maximum) at `index`.

    `token_ids` names the tokens that `values` stand for, ascending; without it they are 0, 1, 2 ...
    Exponentials are the weights of `weigh`, whose sum is exact. Alternatives of probability 0 (masked) are left out,
    so there may be fewer than `num_top`.
    """
    peak, value = values.max(), values[index]
    top = largest(values, num_top) if num_top else np.empty(0, np.int64)
    top = top[np.argsort(-values[top], kind="stable")]
    top = top[values[top] > -np.inf]
    described.values[row] = value
    described.peaks[row] = peak
    described.totals[row] = weigh(values - peak, vocab_size).sum(dtype=np.float64) * 2.0 ** -weight_bits(vocab_size)
    described.ranks[row] = 1 + np.count_nonzero(values > value)
    described.num_top[row] = len(top)
    described.top_ids[row, : len(top)] = top if token_ids is None else token_ids[top]
    described.top_values[row, : len(top)] = values[top]


def token_logprobs(described: Described, rows: Sequence[int], token_ids: Sequence[int]) -> list[TokenLogprobs]:
    """What `rows` were described as, in float64; `token_ids` are those of all rows."""
    values, peaks = described.values.tolist(), described.peaks.tolist()
    totals, ranks, nums_top = described.totals.tolist(), described.ranks.tolist(), described.num_top.tolist()
    all_ids, all_values = described.top_ids.tolist(), described.top_values.tolist()
    entries = []
    for row in rows:
        peak, log_total, num_top = peaks[row], math.log(totals[row]), nums_top[row]
        entries.append(
            TokenLogprobs(
                token_ids[row],
                values[row] - peak - log_total,
                ranks[row],
                tuple(all_ids[row][:num_top]),
                tuple([value - peak - log_total for value in all_values[row][:num_top]]),
            )
        )
    return entries
