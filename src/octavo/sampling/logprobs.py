"""Log-probabilities of one row: the token's own, its rank, and the likeliest alternatives."""

from __future__ import annotations

import math

import numpy as np

from octavo.batch import TokenLogprobs
from octavo.sampling.filters import largest


def describe(values: np.ndarray, index: int, num_top: int, token_ids: np.ndarray | None = None) -> TokenLogprobs:
    """Logprobs of the softmax of `values` (float32 logits, finite maximum) at `index`.

    `token_ids` names the tokens that `values` stand for, ascending; without it they are 0, 1, 2 ...
    Exponentials in float32, their sum in float64. Alternatives of probability 0 (masked) are left out, so
    there may be fewer than `num_top`.
    """
    peak = values.max()
    total = np.exp(values - peak).sum(dtype=np.float64)
    log_total = math.log(total)
    value = values[index]
    top = largest(values, num_top) if num_top else np.empty(0, np.int64)
    top = top[np.argsort(-values[top], kind="stable")]
    top = top[values[top] > -np.inf]
    names = top if token_ids is None else token_ids[top]
    return TokenLogprobs(
        token_id=index if token_ids is None else int(token_ids[index]),
        logprob=float(value) - float(peak) - log_total,
        rank=1 + int(np.count_nonzero(values > value)),
        top_token_ids=tuple(names.tolist()),
        top_logprobs=tuple((values[top].astype(np.float64) - float(peak) - log_total).tolist()),
    )
