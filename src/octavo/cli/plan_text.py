"""A plan and its cost as the text of `octavo info --plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from octavo.backends.native.plan_report import NodeGroup, PlanReport
from octavo.backends.native.roofline import Roofline
from octavo.backends.step_cost import StepCost
from octavo.config import MIB

_COSTS = ("weights MB", "KV MB", "activations MB", "MFLOP")


def plan_text(model: str, plan: PlanReport, roofline: Roofline) -> str:
    return "\n".join([*_head(model, plan, roofline), "", *_nodes(plan), "", *_steps(plan)])


def layer_numbers(layers: Sequence[int]) -> str:
    """0-3, 5"""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _head(model: str, plan: PlanReport, roofline: Roofline) -> Iterator[str]:
    weights = ", ".join(f"{name} {size / MIB:.1f} MiB" for name, size in plan.weight_bytes.items())
    saved = ", ".join(f"{name} {count}" for name, count in plan.fusion.items())
    yield f"{'model':<10} {model}"
    yield f"{'weights':<10} {weights}"
    yield f"{'plan':<10} {plan.num_nodes} nodes, {plan.dtype}"
    yield f"{'fusion':<10} {f'nodes saved: {saved}' if saved else 'off'}"
    yield f"{'machine':<10} {roofline.isa}, {roofline.num_threads} threads; measured:"
    yield (
        f"{'':<10} reads {roofline.read_gb_s:.1f} GB/s ({roofline.read_1_stream_gb_s:.1f} in one stream a thread, "
        f"{roofline.read_4_streams_gb_s:.1f} in four)"
    )
    yield (
        f"{'':<10} products: float32 {roofline.f32_gflop_s:.0f} GFLOP/s, bfloat16 {roofline.bf16_gflop_s:.0f} GFLOP/s, "
        f"int8 {roofline.int8_gop_s:.0f} GOP/s"
    )


def _nodes(plan: PlanReport) -> Iterator[str]:
    """With the costs of a decode step of one request."""
    nodes = [node for group in plan.groups for node in group.nodes]
    name_width = max(len(node.name) for node in nodes)
    detail_width = max(len(node.detail) for node in nodes)
    title = f"a decode step of one request with {plan.steps[0].context_len} tokens"
    yield f"{title:<{name_width + detail_width + 4}}  " + "  ".join(_COSTS)
    for i, group in enumerate(plan.groups):
        yield _group_title(group, is_first=i == 0)
        for node in group.nodes:
            yield f"  {node.name:<{name_width}}  {node.detail:<{detail_width}}  {_costs(node.cost)}"


def _group_title(group: NodeGroup, *, is_first: bool) -> str:
    if not group.layers:
        return "before the layers" if is_first else "behind the layers"
    count = len(group.layers)
    return f"layer {group.layers[0]}" if count == 1 else f"each of {count} layers ({layer_numbers(group.layers)})"


def _costs(cost: StepCost) -> str:
    values = (
        cost.weight_bytes / 1e6,
        cost.kv_bytes / 1e6,
        cost.activation_bytes / 1e6,
        cost.flops / 1e6,
    )
    return "  ".join(
        f"{f'{value:.3f}' if value else '-':>{len(title)}}" for title, value in zip(_COSTS, values, strict=True)
    )


def _steps(plan: PlanReport) -> Iterator[str]:
    rows = [("step", "weights MB", "KV MB", "activations MB", "GFLOP", "floor ms", "bound by", "tokens/s at most")]
    for step in plan.steps:
        cost = step.cost
        rows.append(
            (
                step.name,
                f"{cost.weight_bytes / 1e6:.1f}",
                f"{cost.kv_bytes / 1e6:.1f}",
                f"{cost.activation_bytes / 1e6:.1f}",
                f"{cost.flops / 1e9:.2f}",
                f"{1000 * step.floor_s:.2f}",
                "memory" if step.is_bound_by_memory else "products",
                f"{step.num_tokens / step.floor_s:.0f}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (f"{text:>{width}}" for text, width in zip(row, widths, strict=True))
        yield "  ".join([f"{first.strip():<{widths[0]}}", *others])
    yield (
        "The floor is what this machine needs at least: weights and KV at its bandwidth, or products at their peak. "
        "Activations stay in the caches."
    )
