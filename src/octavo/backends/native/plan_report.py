"""What a compiled plan consists of and what a step of it costs: for `octavo info --plan` and `octavo bench latency`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

from octavo.backends.native.graph import (
    Activate,
    Add,
    Attend,
    Embedding,
    Linear,
    Node,
    Norm,
    PickRows,
    Rope,
    View,
    views,
)
from octavo.backends.native.ops import Program
from octavo.backends.native.weights import PackedSegment, PackedWeight
from octavo.backends.ops import DType
from octavo.backends.step_cost import Roofline, StepCost, StepRequest, attention_cost

_ACTIVATION_BYTES = 4
_KV_BYTES: dict[DType, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class NodeReport:
    """One operator of the plan and its cost in a decode step of one request."""

    name: str  # with what fusion moved into it
    detail: str
    cost: StepCost


@dataclass(frozen=True, slots=True)
class NodeGroup:
    """The nodes of layers that are alike, or (without layers) those before or behind all layers."""

    layers: tuple[int, ...]
    nodes: tuple[NodeReport, ...]


@dataclass(frozen=True, slots=True)
class StepReport:
    """A step of `num_requests` that compute as many tokens each."""

    name: str
    num_requests: int
    num_tokens: int  # together
    context_len: int
    cost: StepCost
    floor_s: float
    is_bound_by_memory: bool


@dataclass(frozen=True, slots=True)
class PlanReport:
    dtype: DType
    fusion: dict[str, int]  # passes that ran, and the nodes that each saved
    weight_bytes: dict[str, int]  # by format; matrices, as they are held
    groups: tuple[NodeGroup, ...]
    num_nodes: int
    steps: tuple[StepReport, ...]


def report(program: Program, roofline: Roofline, *, context_len: int, prefill_len: int) -> PlanReport:
    """Decode steps of 1, 8 and 32 requests with `context_len` tokens each, and the prefill of a prompt."""
    decode = StepRequest(1, context_len)
    steps = [_step(program, roofline, f"decode of {n}", [decode] * n) for n in (1, 8, 32)]
    steps.append(_step(program, roofline, f"prefill of {prefill_len}", [StepRequest(prefill_len, prefill_len)]))
    return PlanReport(
        dtype=program.dtype,
        fusion=program.fusion,
        weight_bytes=_weight_bytes(program.nodes),
        groups=_groups(program, [decode]),
        num_nodes=len(program.nodes),
        steps=tuple(steps),
    )


def plan_cost(program: Program, requests: Sequence[StepRequest]) -> StepCost:
    """The cost of one step in which every request wants the logits of its last token."""
    return reduce(StepCost.__add__, (node_cost(program, node, requests) for node in program.nodes))


def node_cost(program: Program, node: Node, requests: Sequence[StepRequest]) -> StepCost:
    num_tokens = sum(request.num_tokens for request in requests)
    rows = num_tokens if node.out.extent == "tokens" else len(requests)
    cost = StepCost(activation_bytes=sum(rows * view.width * _ACTIVATION_BYTES for _, view in views(node)))
    match node:
        case Embedding():
            # Rows of the table, not the table.
            return cost + StepCost(weight_bytes=min(1.0, rows / node.table.n) * node.table.nbytes)
        case Linear():
            bias_bytes = 0 if node.bias is None else node.bias.nbytes
            products = (_products(segment, rows, program.quantizes_activations) for segment in node.weight.segments)
            return reduce(StepCost.__add__, products, cost + StepCost(weight_bytes=bias_bytes))
        case Norm():
            bias_bytes = 0 if node.bias is None else node.bias.nbytes
            return cost + StepCost(weight_bytes=node.weight.nbytes + bias_bytes)
        case Attend():
            sinks_bytes = 0 if node.sinks is None else node.sinks.nbytes
            attention = attention_cost(
                requests,
                num_heads=node.params.num_heads,
                num_kv_heads=node.params.num_kv_heads,
                head_dim=node.params.head_dim,
                window=node.params.window,
                kv_value_bytes=_KV_BYTES[program.dtype],
            )
            return cost + attention + StepCost(weight_bytes=sinks_bytes)
        case Activate() | Add() | Rope() | PickRows():
            return cost


def describe(node: Node, *, quantizes_activations: bool) -> tuple[str, str]:
    """(name, detail): 'linear + silu gate', '[3072, 576] int4 g32 + min, activations int8'."""
    match node:
        case Embedding():
            return "embedding", _matrix(node.table)
        case Norm():
            name = f"{node.kind} norm"
            return (name if node.addend is None else f"add + {name}"), _heads(node.x)
        case Linear():
            parts = ["logits" if node.is_logits else "linear"]
            parts += ["bias"] if node.bias is not None else []
            parts += [_activation(node.activation, node.gated)] if node.activation is not None else []
            parts += ["residual"] if node.residual is not None else []
            parts += ["softcap"] if node.softcap is not None else []
            is_rounded = quantizes_activations and any(segment.is_integer for segment in node.weight.segments)
            return " + ".join(parts), _matrix(node.weight) + (", activations int8" if is_rounded else "")
        case Activate():
            return _activation(node.kind, node.gated), str(node.x.width)
        case Add():
            return "add", str(node.x.width)
        case Rope():
            num_heads = node.x.width // node.head_dim
            return "rope", f"{num_heads} heads of {node.head_dim}, of which {node.table.rotary_dim} rotate"
        case Attend():
            params = node.params
            detail = f"{params.num_heads} heads of {params.head_dim}, {params.num_kv_heads} of KV"
            detail += "" if params.window is None else f", window {params.window}"
            detail += "" if params.softcap is None else ", softcap"
            return "attend", detail + ("" if node.sinks is None else ", sinks")
        case PickRows():
            return "pick rows", "tokens whose logits are wanted"


def layer_starts(nodes: Sequence[Node]) -> list[int]:
    """The first node of each layer, and behind them the first that is in none."""
    starts = []
    for i, node in enumerate(nodes):
        if isinstance(node, Attend):
            at = _maker(nodes, node.q, i)
            while isinstance(maker := nodes[at], Norm | Rope):
                at = _maker(nodes, maker.x, at)
            starts.append(at - 1 if at and isinstance(nodes[at - 1], Norm) else at)
    end = next((i for i, node in enumerate(nodes) if node.out.extent == "logits_rows"), len(nodes))
    if end and isinstance(nodes[end - 1], Norm):
        end -= 1
    return [*starts, end]


def _maker(nodes: Sequence[Node], view: View, before: int) -> int:
    return max(i for i in range(before) if nodes[i].out.buffer is view.buffer)


def _products(segment: PackedSegment, rows: int, quantizes_activations: bool) -> StepCost:
    flops = 2.0 * segment.n * segment.k * rows
    if segment.is_integer and quantizes_activations:
        return StepCost(weight_bytes=segment.nbytes, int8_flops=flops)
    if segment.format == "bf16":
        return StepCost(weight_bytes=segment.nbytes, bf16_flops=flops)
    return StepCost(weight_bytes=segment.nbytes, f32_flops=flops)


def _step(program: Program, roofline: Roofline, name: str, requests: Sequence[StepRequest]) -> StepReport:
    cost = plan_cost(program, requests)
    return StepReport(
        name=name,
        num_requests=len(requests),
        num_tokens=sum(request.num_tokens for request in requests),
        context_len=requests[0].context_len,
        cost=cost,
        floor_s=cost.floor_s(roofline),
        is_bound_by_memory=cost.read_s(roofline) >= cost.products_s(roofline),
    )


def _groups(program: Program, requests: Sequence[StepRequest]) -> tuple[NodeGroup, ...]:
    """Layers that are alike stand where the first of them is."""
    nodes = program.nodes
    starts = layer_starts(nodes)

    def reports(first: int, end: int) -> tuple[NodeReport, ...]:
        return tuple(
            NodeReport(
                *describe(node, quantizes_activations=program.quantizes_activations),
                node_cost(program, node, requests),
            )
            for node in nodes[first:end]
        )

    layers: dict[tuple[NodeReport, ...], list[int]] = {}
    for layer, (first, end) in enumerate(zip(starts, starts[1:], strict=False)):
        layers.setdefault(reports(first, end), []).append(layer)
    return (
        NodeGroup((), reports(0, starts[0])),
        *(NodeGroup(tuple(same), group) for group, same in layers.items()),
        NodeGroup((), reports(starts[-1], len(nodes))),
    )


def _weight_bytes(nodes: Sequence[Node]) -> dict[str, int]:
    """A tied head is held once."""
    matrices = {id(segment): segment for segment in _segments(nodes)}
    num_bytes: Counter[str] = Counter()
    for segment in matrices.values():
        num_bytes[segment.description] += segment.nbytes
    return dict(num_bytes.most_common())


def _segments(nodes: Sequence[Node]) -> Iterator[PackedSegment]:
    for node in nodes:
        if isinstance(node, Embedding):
            yield from node.table.segments
        elif isinstance(node, Linear):
            yield from node.weight.segments


def _matrix(weight: PackedWeight) -> str:
    return f"[{weight.n}, {weight.k}] {weight.description}"


def _activation(kind: str, gated: bool) -> str:
    return f"{kind} gate" if gated else kind


def _heads(view: View) -> str:
    return str(view.width) if view.heads is None else f"{view.heads} heads of {view.width // view.heads}"
