"""What every operator computes, in float64 NumPy, spelled out; and the batches that tests feed to a backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from octavo.backends.ops import AttentionParams, DType, ForwardBatch, KvCache, Ops, RopeTable, Tensor

NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EPS = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # relative error of one rounding


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    """The values that a backend of `dtype` holds for x, which reaches it as float32; as float64."""
    return x.astype(np.float32).astype(NUMPY_DTYPES[dtype]).astype(np.float64)


def assert_close(
    got: np.ndarray, expected: np.ndarray, dtype: DType, *, terms: int = 1, slack: float | np.ndarray = 0.0
) -> None:
    """Equal up to float32 sums of `terms` values of the result's magnitude, one rounding to `dtype`, and `slack`."""
    assert got.shape == expected.shape
    magnitude = np.abs(expected).max(initial=1e-30)
    sums = 8 * math.sqrt(terms) * EPS["float32"] * magnitude
    error = np.abs(got.astype(np.float64) - expected)
    bound = sums + 1.01 * EPS[dtype] * (np.abs(expected) + sums) + 2.0**-25 + slack
    worst = int(np.argmax(error - bound)) if error.size else 0
    assert (error <= bound).all(), (error.ravel()[worst], bound.ravel()[worst], expected.ravel()[worst])


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float, offset: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (offset + weight)


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, eps: float) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    y = centred / np.sqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight
    return y if bias is None else y + bias


def activation(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    assert kind == "relu"
    return np.maximum(x, 0)


def rope(x: np.ndarray, positions: np.ndarray, variants: np.ndarray, table: RopeTable) -> np.ndarray:
    y = x.copy()
    half = table.rotary_dim // 2
    for t, (position, variant) in enumerate(zip(positions, variants, strict=True)):
        variant = min(int(variant), len(table.inv_freq) - 1)
        for i in range(half):
            # The angle is a float32 product by contract.
            angle = float(np.float32(position) * table.inv_freq[variant][i])
            cos, sin = (f(angle) * table.attention_factor[variant] for f in (math.cos, math.sin))
            first, second = x[t, :, i], x[t, :, half + i]
            y[t, :, i] = first * cos - second * sin
            y[t, :, half + i] = second * cos + first * sin
    return y


def attend(
    q_THD: np.ndarray,
    k_LKD: np.ndarray,
    v_LKD: np.ndarray,
    params: AttentionParams,
    sinks: np.ndarray | None,
) -> np.ndarray:
    """The last T of L positions of one sequence attend. [T, H, D]"""
    num_tokens, num_keys = len(q_THD), len(k_LKD)
    out = np.empty_like(q_THD)
    for t in range(num_tokens):
        position = num_keys - num_tokens + t
        first = 0 if params.window is None else max(0, position - params.window + 1)
        for h in range(params.num_heads):
            kv_head = h // (params.num_heads // params.num_kv_heads)
            scores = k_LKD[first : position + 1, kv_head] @ q_THD[t, h] * params.scale
            if params.softcap is not None:
                scores = params.softcap * np.tanh(scores / params.softcap)
            highest = scores.max() if sinks is None else max(scores.max(), sinks[h])
            weights = np.exp(scores - highest)
            total = weights.sum() + (0.0 if sinks is None else np.exp(sinks[h] - highest))
            out[t, h] = weights / total @ v_LKD[first : position + 1, kv_head]
    return out


def tensor(ops: Ops, x: np.ndarray) -> Tensor:
    """x [T, E] as a tensor of the backend: rows of a table."""
    table = ops.weight([np.ascontiguousarray(x, np.float32)], kind="embedding")
    tokens = np.arange(len(x), dtype=np.int32)
    return ops.embedding(make_batch([Rows(len(x), len(x), np.zeros((1, 1), np.int32))], token_ids=tokens), table)


def heads(ops: Ops, x: np.ndarray) -> Tensor:
    """x [T, H, D] as a tensor of the backend."""
    return ops.split_heads(tensor(ops, x.reshape(len(x), -1)), x.shape[-1])


@dataclass(frozen=True, slots=True)
class Rows:
    """One request's part of a step."""

    num_tokens: int
    context_len: int  # after the step
    block_table: np.ndarray  # [G, blocks]
    rope_variant: int = 0


def make_batch(
    requests: Sequence[Rows], *, token_ids: np.ndarray | None = None, logits_rows: Sequence[int] = ()
) -> ForwardBatch:
    counts = [request.num_tokens for request in requests]
    num_groups = len(requests[0].block_table)
    width = max(request.block_table.shape[1] for request in requests)
    tables = np.full((num_groups, len(requests), width), -1, np.int32)
    for r, request in enumerate(requests):
        tables[:, r, : request.block_table.shape[1]] = request.block_table
    return ForwardBatch(
        token_ids=np.zeros(sum(counts), np.int32) if token_ids is None else token_ids,
        positions=np.concatenate(
            [np.arange(r.context_len - r.num_tokens, r.context_len, dtype=np.int32) for r in requests]
        ),
        query_starts=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array([request.context_len for request in requests], np.int32),
        block_tables=tuple(tables),
        rope_variants=np.repeat(np.array([r.rope_variant for r in requests], np.int32), counts),
        logits_rows=np.array(logits_rows, np.int32),
    )


def poison(ops: Ops, cache: KvCache, params: AttentionParams, layers: int) -> None:
    """Fill every slot of the cache with NaN, as a failed request would leave it."""
    num_tokens = cache.num_blocks * cache.block_size
    everything = np.arange(cache.num_blocks, dtype=np.int32)[None]
    nan = np.full((num_tokens, params.num_kv_heads, params.head_dim), np.nan, np.float32)
    q = np.zeros((num_tokens, params.num_heads, params.head_dim), np.float32)
    batch = make_batch([Rows(num_tokens, num_tokens, everything)])
    for layer in range(layers):
        kv = heads(ops, nan), heads(ops, nan)
        ops.attend(heads(ops, q), *kv, cache, batch, params, group=0, layer_in_block=layer)
