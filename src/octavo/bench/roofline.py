"""What a step must read and compute at least, and the share of the machine's limits that was reached.

The bytes are those of an ideal step: every weight once, whatever the number of tokens, and the keys and values that
its tokens see. FLOPs count a multiplication and an addition as two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.models.decoder import parameters
from octavo.models.spec import DecoderSpec

_VECTOR_VALUE_BYTES = 4  # norms and biases are kept in float32


class Roofline(Protocol):
    """The machine's limits, measured: bandwidth of reading memory, and products a second by number format."""

    @property
    def read_gb_s(self) -> float: ...
    @property
    def f32_gflop_s(self) -> float: ...
    @property
    def bf16_gflop_s(self) -> float: ...
    @property
    def int8_gop_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class StepRequest:
    """One request's part in a step: how many tokens it computes, and how many it then has KV of."""

    num_tokens: int
    context_len: int


@dataclass(frozen=True, slots=True)
class StepCost:
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    flops: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(
            self.weight_bytes + other.weight_bytes, self.kv_bytes + other.kv_bytes, self.flops + other.flops
        )

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


def step_cost(
    spec: DecoderSpec, requests: Sequence[StepRequest], *, weight_value_bytes: float, kv_value_bytes: float
) -> StepCost:
    """The cost of one step in which every request wants the logits of its last token."""
    num_tokens = sum(request.num_tokens for request in requests)
    shapes = [parameter.shape for parameter in parameters(spec) if parameter != spec.embedding]
    matrix_values = sum(math.prod(shape) for shape in shapes if len(shape) > 1)
    vector_values = sum(math.prod(shape) for shape in shapes if len(shape) == 1)
    head_values = math.prod(spec.head.shape)
    embedded_values = num_tokens * spec.hidden_size  # rows of the table, not the table
    kv_bytes = attention_flops = 0.0
    for layer in spec.layers:
        attention = layer.attention
        token_bytes = 2 * attention.num_kv_heads * attention.head_dim * kv_value_bytes
        for request in requests:
            first = request.context_len - request.num_tokens
            reach = request.context_len
            if attention.window is not None:
                reach = min(reach, attention.window + request.num_tokens - 1)
            kv_bytes += reach * token_bytes
            seen = _keys_seen(first, request.context_len, attention.window)
            attention_flops += 4 * attention.num_heads * attention.head_dim * seen
    return StepCost(
        weight_bytes=(matrix_values + head_values + embedded_values) * weight_value_bytes
        + vector_values * _VECTOR_VALUE_BYTES,
        kv_bytes=kv_bytes,
        flops=2 * matrix_values * num_tokens + 2 * head_values * len(requests) + attention_flops,
    )


def peak_gflop_s(roofline: Roofline, dtype: str) -> float:
    """The peak of products in `dtype`; float16 is computed as float32."""
    return roofline.bf16_gflop_s if dtype == "bfloat16" else roofline.f32_gflop_s


def _keys_seen(first: int, end: int, window: int | None) -> float:
    """Keys over the tokens at positions first ... end - 1, each seeing itself, what is before it, and no more than
    `window`."""
    if window is None or end <= window:
        return (first + 1 + end) * (end - first) / 2
    if first >= window:
        return float(window * (end - first))
    return _keys_seen(first, window, None) + window * (end - window)
