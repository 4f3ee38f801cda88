"""What a step must read and compute at least, whoever computes it.

The bytes are those of an ideal step: every weight once, whatever the number of tokens, and the keys and values that
its tokens see. FLOPs are of products, and count a multiplication and an addition as two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol


class Roofline(Protocol):
    """The machine's limits: bandwidth of reading memory, and products a second by number format."""

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

    @property
    def start(self) -> int:
        return self.context_len - self.num_tokens


@dataclass(frozen=True, slots=True)
class StepCost:
    """`activation_bytes`, what operators hand to each other, stay in the caches; the other bytes come from memory.

    FLOPs are divided by the numbers that are multiplied: of int8 they are integer operations.
    """

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    activation_bytes: float = 0.0
    f32_flops: float = 0.0
    bf16_flops: float = 0.0
    int8_flops: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:
        return StepCost(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    @property
    def flops(self) -> float:
        return self.f32_flops + self.bf16_flops + self.int8_flops

    def read_s(self, roofline: Roofline) -> float:
        return self.bytes / roofline.read_gb_s / 1e9

    def products_s(self, roofline: Roofline) -> float:
        return (
            self.f32_flops / roofline.f32_gflop_s
            + self.bf16_flops / roofline.bf16_gflop_s
            + self.int8_flops / roofline.int8_gop_s
        ) / 1e9

    def floor_s(self, roofline: Roofline) -> float:
        """No machine with this roofline can be faster: it reads and multiplies at once, each as fast as it can."""
        return max(self.read_s(roofline), self.products_s(roofline))


def attention_cost(
    requests: Sequence[StepRequest],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
    kv_value_bytes: float,
) -> StepCost:
    """One layer's scores and weighted values, and the keys and values that they need."""
    token_bytes = 2 * num_kv_heads * head_dim * kv_value_bytes
    kv_bytes = flops = 0.0
    for request in requests:
        reach = request.context_len
        if window is not None:
            reach = min(reach, window + request.num_tokens - 1)
        kv_bytes += reach * token_bytes
        flops += 4 * num_heads * head_dim * _keys_seen(request.start, request.context_len, window)
    return StepCost(kv_bytes=kv_bytes, f32_flops=flops)


def _keys_seen(first: int, end: int, window: int | None) -> float:
    """Keys over the tokens at positions first ... end - 1, each seeing itself, what is before it, and no more than
    `window`."""
    if window is None or end <= window:
        return (first + 1 + end) * (end - first) / 2
    if first >= window:
        return float(window * (end - first))
    return _keys_seen(first, window, None) + window * (end - window)
