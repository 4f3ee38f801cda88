"""What a plan is said to consist of and to cost, against the weights that it holds and counts by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tiny import VOCAB_SIZE, save_tiny_llama

from octavo.backends.native.graph import Attend, Embedding, Linear, Norm
from octavo.backends.native.ops import Program
from octavo.backends.native.plan_report import layer_starts, node_cost, plan_cost, report
from octavo.backends.native.roofline import Roofline
from octavo.backends.ops import DType
from octavo.backends.registry import NativeOptions, create_ops, fusion_passes
from octavo.backends.step_cost import StepRequest
from octavo.bench.roofline import step_cost
from octavo.kv_cache.cache_spec import LayerKv, make_cache_spec
from octavo.loader.checkpoint import Ledger
from octavo.loader.source import LocalModel, open_checkpoint
from octavo.models.decoder import Decoder
from octavo.models.registry import build_spec
from octavo.models.spec import DecoderSpec

LIMITS = Roofline("avx2", 2, 1 << 26, 10.0, 20.0, 100.0, 300.0, 600.0)
DECODE = [StepRequest(1, 100), StepRequest(1, 60)]
# E = 64, F = 96: no format pads them, so that stored sizes are those of the shapes.
SIZES = {"hidden_size": 64, "intermediate_size": 96}
LAYER_MATRICES = (64 + 2 * 32) * 64 + 64 * 64 + 3 * 96 * 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"), num_hidden_layers=3, vocab_size=VOCAB_SIZE, **SIZES)


def compiled(model: Path, dtype: DType = "float32", **options: Any) -> tuple[Program, DecoderSpec]:
    checkpoint = open_checkpoint(LocalModel("tiny", model, "safetensors"))
    spec = build_spec(checkpoint.config)
    layers = [LayerKv(a.num_kv_heads, a.head_dim, a.window) for a in (layer.attention for layer in spec.layers)]
    places = make_cache_spec(layers, block_size=16, dtype_bytes=4).places
    ops = create_ops("native", dtype=dtype, num_threads=1, native=NativeOptions(**options))
    decoder = Decoder(spec, ops, Ledger(checkpoint), max_model_len=256, kv_places=places)
    assert isinstance(decoder.program, Program)
    return decoder.program, spec


def linears(program: Program) -> Iterator[Linear]:
    return (node for node in program.nodes if isinstance(node, Linear))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_plain_weights_cost_what_the_shapes_say(model: Path, dtype: DType) -> None:
    program, spec = compiled(model, dtype)
    value_bytes = 4 if dtype == "float32" else 2
    for requests in (DECODE, [StepRequest(50, 50)], [StepRequest(7, 90), StepRequest(1, 3)]):
        cost = plan_cost(program, requests)
        ideal = step_cost(spec, requests, weight_value_bytes=value_bytes, kv_value_bytes=value_bytes)
        assert cost.flops == ideal.flops
        assert cost.kv_bytes == ideal.kv_bytes
        # Panels have sixteen rows, and the vocabulary is no multiple of sixteen.
        assert ideal.weight_bytes <= cost.weight_bytes < ideal.weight_bytes + 16 * 64 * 4 + len(requests) * 64 * 4


@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("quantizes", [True, False])
def test_bytes_are_the_packed_ones_and_operations_two_for_each_weight_and_row(
    model: Path, quantization: str, quantizes: bool
) -> None:
    program, _ = compiled(model, "bfloat16", quantization=quantization, quantizes_activations=quantizes)
    requests: Sequence[StepRequest] = [StepRequest(5, 5), StepRequest(1, 9)]
    for node in linears(program):
        cost = node_cost(program, node, requests)
        rows = 2 if node.is_logits else 6
        assert cost.weight_bytes == sum(len(segment.matrix.memory) for segment in node.weight.segments)
        assert cost.flops == 2 * node.weight.n * node.weight.k * rows
        if quantization == "none":
            assert cost.flops == cost.bf16_flops
        else:
            assert cost.flops == (cost.int8_flops if quantizes else cost.f32_flops)
    total = plan_cost(program, requests)
    attended = sum(node_cost(program, node, requests).flops for node in program.nodes if isinstance(node, Attend))
    assert total.flops - attended == 2 * 3 * LAYER_MATRICES * 6 + 2 * VOCAB_SIZE * 64 * 2


def test_smaller_formats_are_fewer_bytes(model: Path) -> None:
    sizes = {
        name: plan_cost(compiled(model, quantization=name)[0], DECODE).weight_bytes for name in ("none", "int8", "int4")
    }
    assert sizes["none"] > 3 * sizes["int8"] > 3 * sizes["int4"]


def test_a_decode_reads_a_row_of_the_embedding_for_each_token(model: Path) -> None:
    program, _ = compiled(model)
    (embedding,) = (node for node in program.nodes if isinstance(node, Embedding))
    assert node_cost(program, embedding, DECODE).weight_bytes == pytest.approx(2 * embedding.table.nbytes / VOCAB_SIZE)


@pytest.mark.parametrize("fusion", ["on", "off", "gate", "residual,rope"])
def test_layers_are_found_whatever_is_fused(model: Path, fusion: str) -> None:
    program, _ = compiled(model, fusion=fusion)
    starts = layer_starts(program.nodes)
    assert len(starts) == 4
    for first, end in zip(starts, starts[1:], strict=False):
        layer = program.nodes[first:end]
        assert isinstance(layer[0], Norm)
        assert [isinstance(node, Attend) for node in layer].count(True) == 1
        assert [isinstance(node, Linear) for node in layer].count(True) == 4
    assert [type(node).__name__ for node in program.nodes[: starts[0]]] == ["Embedding"]
    assert [type(node).__name__ for node in program.nodes[starts[-1] :]] == ["Norm", "PickRows", "Linear"]


def test_fusion_saves_the_nodes_that_it_says(model: Path) -> None:
    whole, _ = compiled(model, fusion="off")
    fused, _ = compiled(model, fusion="on")
    assert whole.fusion == {}
    assert tuple(fused.fusion) == fusion_passes("on")
    assert fused.fusion["gate"] == 3 and fused.fusion["residual"] == 6
    assert len(whole.nodes) - len(fused.nodes) == sum(fused.fusion.values())
    before, after = plan_cost(whole, DECODE), plan_cost(fused, DECODE)
    assert (before.bytes, before.flops) == (after.bytes, after.flops)
    assert after.activation_bytes < before.activation_bytes


def test_the_report_counts_layers_that_are_alike_and_adds_up(model: Path) -> None:
    program, _ = compiled(model, quantization="int4", quantizes_activations=True)
    made = report(program, LIMITS, context_len=100, prefill_len=200)
    assert [group.layers for group in made.groups] == [(), (0, 1, 2), ()]
    names = [node.name for node in made.groups[1].nodes]
    assert names == [
        "rms norm", "linear", "rope", "attend", "linear + residual", "rms norm", "linear + silu gate",
        "linear + residual",
    ]  # fmt: skip
    assert "int4 g32 + min, activations int8" in made.groups[1].nodes[1].detail
    shown = sum(max(1, len(group.layers)) * node.cost.bytes for group in made.groups for node in group.nodes)
    assert shown == pytest.approx(made.steps[0].cost.bytes)
    assert [(step.num_requests, step.num_tokens) for step in made.steps] == [(1, 1), (8, 8), (32, 32), (1, 200)]
    for step in made.steps:
        assert step.floor_s == max(step.cost.read_s(LIMITS), step.cost.products_s(LIMITS)) > 0
    floors = [step.floor_s / step.num_tokens for step in made.steps[:3]]
    assert floors == sorted(floors, reverse=True)
    assert sum(made.weight_bytes.values()) == sum(
        segment.nbytes for node in linears(program) for segment in node.weight.segments
    ) + sum(node.table.nbytes for node in program.nodes if isinstance(node, Embedding))
