"""Turns the nodes of a graph into a plan of the extension: views become columns of its slots."""

from __future__ import annotations

from collections.abc import Sequence

from octavo import _native
from octavo.backends.native.graph import (
    Activate,
    Add,
    Attend,
    Buffer,
    Embedding,
    Linear,
    Node,
    Norm,
    PickRows,
    Rope,
    View,
)
from octavo.backends.native.weights import PackedSegment
from octavo.backends.ops import DType, RopeTable

SlotView = tuple[int, int, int]  # slot, offset, width


class Lowering:
    """Appends nodes to one plan. Integer weights meet int8 activations where `quantizes_activations`."""

    def __init__(self, isa: str, team: _native.Team, dtype: DType, *, quantizes_activations: bool) -> None:
        self.plan = _native.Plan(isa, team, dtype)
        self._quantizes_activations = quantizes_activations
        self._slots: dict[Buffer, int] = {}
        self._angles: dict[RopeTable, SlotView] = {}
        # Of views whose rows are there in int8; a later node that overwrites the view ends that.
        self._quantized: dict[tuple[View, int, int], SlotView] = {}

    def place(self, view: View) -> SlotView:
        """Where a view's columns are in the plan."""
        slot = self._slots.get(view.buffer)
        if slot is None:
            slot = self._slots[view.buffer] = self.plan.slot(view.buffer.width, view.buffer.extent)
        return slot, view.offset, view.width

    def add(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._add(node)
            written = {node.out.buffer} | ({node.sum.buffer} if isinstance(node, Norm) and node.sum else set())
            self._quantized = {key: slot for key, slot in self._quantized.items() if key[0].buffer not in written}

    def _add(self, node: Node) -> None:
        plan, place = self.plan, self.place
        match node:
            case Embedding():
                table = [segment.matrix for segment in node.table.segments]
                plan.embedding(table=table, scale=node.scale, y=place(node.out))
            case Norm():
                plan.norm(
                    is_layer_norm=node.kind == "layer",
                    x=place(node.x),
                    heads=node.x.heads or 1,
                    weight=node.weight,
                    bias=node.bias,
                    eps=node.eps,
                    offset=node.offset,
                    addend=None if node.addend is None else place(node.addend),
                    addend_scale=node.addend_scale,
                    sum=None if node.sum is None else place(node.sum),
                    y=place(node.out),
                )
            case Linear():
                self._linear(node)
            case Activate():
                plan.activation(x=place(node.x), kind=node.kind, gated=node.gated, y=place(node.out))
            case Add():
                plan.add(x=place(node.x), addend=place(node.y), scale=node.scale, y=place(node.out))
            case Rope():
                plan.rope(
                    x=place(node.x),
                    angles=self._angles_of(node.table),
                    head_dim=node.head_dim,
                    rotary_dim=node.table.rotary_dim,
                    y=place(node.out),
                )
            case Attend():
                plan.attend(
                    q=place(node.q),
                    k=place(node.k),
                    v=place(node.v),
                    group=node.group,
                    layer=node.layer_in_block,
                    num_heads=node.params.num_heads,
                    head_dim=node.params.head_dim,
                    scale=node.params.scale,
                    window=node.params.window or 0,
                    softcap=node.params.softcap or 0.0,
                    sinks=node.sinks,
                    y=place(node.out),
                )
            case PickRows():
                plan.pick_rows(x=place(node.x), y=place(node.out))

    def _linear(self, node: Linear) -> None:
        """One product for each segment of the weight, side by side in the output."""
        slot, offset, _ = self.place(node.out)
        residual = None if node.residual is None else self.place(node.residual)
        column = 0
        for segment in node.weight.segments:
            width = segment.n // 2 if node.gated else segment.n
            quantizes = self._quantizes_activations and segment.is_integer
            self.plan.linear(
                x=self._quantize(node.x, segment) if quantizes else self.place(node.x),
                weight=segment.matrix,
                is_quantized=quantizes,
                is_logits=node.is_logits,
                bias=None if node.bias is None else node.bias[column : column + segment.n],
                scale=node.scale,
                softcap=node.softcap or 0.0,
                activation=node.activation or "none",
                gated=node.gated,
                residual=None if residual is None else (residual[0], residual[1] + column, width),
                residual_scale=node.residual_scale,
                y=(slot, offset + column, width),
            )
            column += width

    def _quantize(self, x: View, segment: PackedSegment) -> SlotView:
        key = (View(x.buffer, x.offset, x.width), segment.padded_k, segment.group)
        if key not in self._quantized:
            width = segment.padded_k // 4 + 2 * (segment.padded_k // segment.group)
            place = self._quantized[key] = (self.plan.slot(width, x.extent), 0, width)
            self.plan.quantize(x=self.place(x), padded_k=segment.padded_k, group=segment.group, y=place)
        return self._quantized[key]

    def _angles_of(self, table: RopeTable) -> SlotView:
        """cos and sin of a table, made once for all layers of the plan."""
        if table not in self._angles:
            place = self._angles[table] = (self.plan.slot(table.rotary_dim, "tokens"), 0, table.rotary_dim)
            self.plan.angles(inv_freq=list(table.inv_freq), attention_factor=list(table.attention_factor), y=place)
        return self._angles[table]
