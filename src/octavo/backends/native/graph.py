"""A forward pass as data: what the decoder did, operator by operator, over columns of buffers.

`ops.NativeOps` appends nodes while it records, `fusion` rewrites the list, `lowering` turns it into a plan of the
extension. A buffer holds one row for each token of a step, or for each row that needs logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.backends.native.weights import PackedWeight
from octavo.backends.ops import Activation, AttentionParams, RopeTable

Extent = Literal["tokens", "logits_rows"]
Vector = NDArray[np.float32]


@dataclass(eq=False, slots=True)
class Buffer:
    """`width` float32 values for each row. `values` are there when operators run one by one."""

    width: int
    extent: Extent
    values: NDArray[np.float32] | None = None  # [rows, width]


@dataclass(frozen=True, slots=True)
class View:
    """Columns [offset, offset + width) of a buffer, as `heads` slices. What operators take and return."""

    buffer: Buffer
    offset: int
    width: int
    heads: int | None = None  # None where the last dimension is not cut into heads

    @classmethod
    def new(cls, width: int, extent: Extent, heads: int | None = None) -> View:
        return cls(Buffer(width, extent), 0, width, heads)

    @property
    def extent(self) -> Extent:
        return self.buffer.extent

    def follows(self, other: View) -> bool:
        """Whether these columns stand right behind the other's."""
        return self.buffer is other.buffer and self.offset == other.offset + other.width


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    table: PackedWeight
    scale: float
    out: View


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """With `addend`: x + addend_scale * addend is normalized, and stored to `sum`."""

    kind: Literal["rms", "layer"]
    x: View
    weight: Vector
    bias: Vector | None
    eps: float
    offset: float
    out: View
    addend: View | None = None
    addend_scale: float = 1.0
    sum: View | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """x @ weight.T + bias, then what fusion moved into it: an activation, and the residual that it is added to.

    Logits are scaled and soft-capped instead, and not rounded.
    """

    x: View
    weight: PackedWeight
    bias: Vector | None
    out: View
    activation: Activation | None = None
    gated: bool = False
    residual: View | None = None
    residual_scale: float = 1.0
    is_logits: bool = False
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Activate:
    x: View
    kind: Activation
    gated: bool
    out: View


@dataclass(frozen=True, slots=True, eq=False)
class Add:
    """x + scale * y"""

    x: View
    y: View
    scale: float
    out: View


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    x: View
    table: RopeTable
    head_dim: int
    out: View


@dataclass(frozen=True, slots=True, eq=False)
class Attend:
    q: View
    k: View
    v: View
    params: AttentionParams
    group: int
    layer_in_block: int
    sinks: Vector | None
    out: View


@dataclass(frozen=True, slots=True, eq=False)
class PickRows:
    x: View
    out: View


Node = Embedding | Norm | Linear | Activate | Add | Rope | Attend | PickRows

_OUTPUTS = ("out", "sum")


def views(node: Node) -> Iterator[tuple[str, View]]:
    """Every view that the node names, by field."""
    for field in fields(node):
        value = getattr(node, field.name)
        if isinstance(value, View):
            yield field.name, value


def inputs(node: Node) -> list[View]:
    return [view for name, view in views(node) if name not in _OUTPUTS]


def with_views(node: Node, moved: dict[Buffer, View]) -> Node:
    """The node, reading and writing elsewhere: a view of a moved buffer lies in that buffer's new place."""

    def move(view: View) -> View:
        base = moved.get(view.buffer)
        return view if base is None else View(base.buffer, base.offset + view.offset, view.width, view.heads)

    changes: dict[str, Any] = {name: move(view) for name, view in views(node) if view.buffer in moved}
    return replace(node, **changes) if changes else node
