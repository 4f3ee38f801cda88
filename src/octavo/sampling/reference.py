"""The definition of sampling: one row, everything recomputed from the request, by a full stable sort.

Slow and obvious; the oracle of every faster sampler. It shares with them only the weights (`weigh`) and
the uniform numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from octavo.request import SamplingParams
from octavo.sampling.filters import scale, weigh
from octavo.sampling.philox import uniforms


def process(
    logits: np.ndarray,
    params: SamplingParams,
    prompt_token_ids: Sequence[int],
    output_token_ids: Sequence[int],
    *,
    eos_token_ids: Sequence[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
) -> np.ndarray:
    """Logits [V] after masks, bias and penalties, before temperature."""
    values = logits.astype(np.float32)
    if params.allowed_token_ids is not None:
        allowed = np.isin(np.arange(len(values)), params.allowed_token_ids)
        values = np.where(allowed, values, np.float32(-np.inf))
    output = list(output_token_ids)
    for word in bad_words_token_ids:
        *prefix, last = word
        if output[len(output) - len(prefix) :] == prefix and len(prefix) <= len(output):
            values[last] = -np.inf
    if len(output) < params.min_tokens:
        for token_id in (*eos_token_ids, *params.stop_token_ids):
            values[token_id] = -np.inf
    for token_id, bias in params.logit_bias.items():
        values[token_id] += np.float32(bias)
    counts = Counter(output)
    for token_id in {*prompt_token_ids, *output}:
        value = float(values[token_id])
        value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * counts[token_id]
        value -= params.presence_penalty * (counts[token_id] > 0)
        values[token_id] = value
    return values


def distribution(values: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Ids that may be drawn, ascending, and their integer weights, from processed logits [V]."""
    ids = np.arange(len(values))
    order = np.lexsort((ids, -values))  # likeliest first, lowest id on ties
    if params.is_greedy or params.top_k == 1 or params.top_p == 0 or params.min_p == 1:
        return order[:1], np.ones(1)
    scaled = scale(values, float(values.max()), params.temperature)
    weights = weigh(scaled, len(values)).astype(np.float64)
    kept = np.ones(len(values), bool)
    if params.min_p > 0:
        kept &= scaled >= np.float32(math.log(params.min_p))
    if params.top_k > 0:
        kept &= np.isin(ids, order[: params.top_k])
    if params.top_p < 1:
        order = order[kept[order]]
        sums = np.cumsum(weights[order])
        enough = int(np.argmax(sums >= params.top_p * sums[-1]))
        kept = np.isin(ids, order[: enough + 1])
    return np.flatnonzero(kept), weights[kept]


def sample(values: np.ndarray, params: SamplingParams, *, choice: int, position: int) -> int:
    """The token at index `position` of choice `choice`, from processed logits [V]."""
    ids, weights = distribution(values, params)
    assert params.seed is not None
    seed = np.array([params.seed % 2**64], np.uint64)
    uniform = uniforms(seed, np.array([choice]), np.array([position]))[0]
    sums = np.cumsum(weights)
    target = min(math.floor(uniform * sums[-1]), sums[-1] - 1)
    return int(ids[np.argmax(sums > target)])
