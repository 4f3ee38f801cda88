"""What a step must read and compute, counted by hand for a small model."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
from tests.tiny import LLAMA_CONFIG, VOCAB_SIZE

from octavo.backends.step_cost import StepCost, StepRequest
from octavo.bench.roofline import step_cost
from octavo.models.registry import build_spec
from octavo.models.spec import DecoderSpec

# LLAMA_CONFIG: two layers, E = 32, F = 48, H = 4, K = 2, D = 8, untied head.
MATRICES = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 48 * 32)  # q, k and v, output, MLP
HEAD = VOCAB_SIZE * 32
NORMS = (2 * 2 + 1) * 32


@pytest.fixture(scope="module")
def spec() -> DecoderSpec:
    return build_spec(LLAMA_CONFIG)


def cost(spec: DecoderSpec, *requests: tuple[int, int], weight_bytes: float = 2, kv_bytes: float = 2) -> StepCost:
    made = [StepRequest(*request) for request in requests]
    return step_cost(spec, made, weight_value_bytes=weight_bytes, kv_value_bytes=kv_bytes)


def test_a_decode_step_reads_every_weight_once_and_the_kv_of_its_context(spec: DecoderSpec) -> None:
    one = cost(spec, (1, 100))
    assert one.weight_bytes == (MATRICES + HEAD + 32) * 2 + NORMS * 4
    assert one.kv_bytes == 2 * 100 * 2 * 2 * 8 * 2  # layers, tokens, K and V, heads, head size, bytes
    assert one.flops == 2 * MATRICES + 2 * HEAD + 2 * 4 * 4 * 8 * 100
    assert one.bytes == one.weight_bytes + one.kv_bytes


def test_more_requests_share_the_weights_but_not_the_kv(spec: DecoderSpec) -> None:
    one, two = cost(spec, (1, 100)), cost(spec, (1, 100), (1, 60))
    assert two.weight_bytes - one.weight_bytes == 32 * 2  # one more row of the embedding
    assert two.kv_bytes == 1.6 * one.kv_bytes
    assert two.flops == 2 * (2 * MATRICES + 2 * HEAD) + 2 * 4 * 4 * 8 * 160


def test_a_prompt_costs_a_triangle_of_attention_and_one_row_of_logits(spec: DecoderSpec) -> None:
    made = cost(spec, (50, 50))
    assert made.flops == 2 * MATRICES * 50 + 2 * HEAD + 2 * 4 * 4 * 8 * (50 * 51 / 2)
    chunks = cost(spec, (30, 30)) + cost(spec, (20, 50))
    assert chunks.flops - made.flops == 2 * HEAD  # the same work, but for the logits of the first chunk
    assert chunks.weight_bytes > 1.9 * made.weight_bytes - 50 * 32 * 2


def test_smaller_weights_and_kv_are_fewer_bytes_and_the_same_work(spec: DecoderSpec) -> None:
    whole, small = cost(spec, (1, 100)), cost(spec, (1, 100), weight_bytes=0.5, kv_bytes=1)
    assert small.flops == whole.flops
    assert small.kv_bytes == whole.kv_bytes / 2
    assert small.weight_bytes - NORMS * 4 == (whole.weight_bytes - NORMS * 4) / 4


def windowed(spec: DecoderSpec, window: int) -> DecoderSpec:
    layers = [
        dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, window=window))
        for layer in spec.layers
    ]
    return dataclasses.replace(spec, layers=tuple(layers))


@pytest.mark.parametrize(
    ("num_tokens", "context_len"), [(1, 5), (1, 16), (1, 100), (10, 10), (40, 40), (8, 90), (8, 20)]
)
def test_a_window_bounds_what_is_seen(spec: DecoderSpec, num_tokens: int, context_len: int) -> None:
    made = cost(windowed(spec, 16), (num_tokens, context_len))
    positions = range(context_len - num_tokens, context_len)
    seen = sum(min(position + 1, 16) for position in positions)
    assert made.flops == 2 * MATRICES * num_tokens + 2 * HEAD + 2 * 4 * 4 * 8 * seen
    first_seen = max(0, context_len - num_tokens - 15)
    assert made.kv_bytes == 2 * (context_len - first_seen) * 2 * 2 * 8 * 2


@dataclass(frozen=True)
class Measured:
    read_gb_s: float = 20.0
    f32_gflop_s: float = 100.0
    bf16_gflop_s: float = 300.0
    int8_gop_s: float = 600.0


def test_the_floor_is_memory_or_products_each_format_at_its_own_peak() -> None:
    reads = StepCost(weight_bytes=30e9, kv_bytes=10e9, activation_bytes=1e12, f32_flops=100e9)
    assert (reads.read_s(Measured()), reads.products_s(Measured()), reads.floor_s(Measured())) == (2.0, 1.0, 2.0)
    computes = reads + StepCost(bf16_flops=300e9, int8_flops=1200e9)
    assert computes.flops == 1600e9
    assert computes.floor_s(Measured()) == computes.products_s(Measured()) == pytest.approx(4.0)
