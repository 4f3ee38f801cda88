"""Log-probabilities of one row: the token's own, its rank, and the likeliest alternatives."""

from __future__ import annotations

import math

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


def token_logprobs(described: Described, row: int, token_id: int) -> TokenLogprobs:
    """What a row was described as, in float64."""
    peak, log_total = float(described.peaks[row]), math.log(described.totals[row])
    num_top = int(described.num_top[row])
    top_values = described.top_values[row, :num_top].tolist()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(described.values[row]) - peak - log_total,
        rank=int(described.ranks[row]),
        top_token_ids=tuple(described.top_ids[row, :num_top].tolist()),
        top_logprobs=tuple([value - peak - log_total for value in top_values]),
    )
