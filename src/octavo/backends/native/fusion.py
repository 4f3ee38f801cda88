"""Rewrites of a recorded forward pass that save passes over memory. Results are the same bits with or without.

gate      act(gate) * up moves into the product that made gate and up
activation  act(x) moves into the product that made x
residual  x + scale * y moves into the product that made y
norm      a sum that is normalized next is made by the norm
rope      queries and keys that lie next to each other are rotated in place, at once
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

from octavo.backends.native.graph import Activate, Add, Buffer, Linear, Node, Norm, Rope, View, inputs, with_views

Pass = Callable[[list[Node], frozenset[Buffer]], list[Node]]


def fuse(nodes: Sequence[Node], kept: Sequence[View], passes: Sequence[str]) -> list[Node]:
    """`nodes` after the named passes. Buffers of `kept` are read from outside and stay."""
    outside = frozenset(view.buffer for view in kept)
    fused = list(nodes)
    for name in passes:
        fused = PASSES[name](fused, outside)
    return fused


def _gate(nodes: list[Node], kept: frozenset[Buffer]) -> list[Node]:
    return _into_linear(nodes, kept, is_gated=True)


def _activation(nodes: list[Node], kept: frozenset[Buffer]) -> list[Node]:
    return _into_linear(nodes, kept, is_gated=False)


def _into_linear(nodes: list[Node], kept: frozenset[Buffer], *, is_gated: bool) -> list[Node]:
    makers, readers = _makers(nodes), _readers(nodes)
    fused: dict[int, Node | None] = {}
    for i, node in enumerate(nodes):
        if not isinstance(node, Activate) or node.gated != is_gated:
            continue
        at = makers.get(node.x.buffer)
        maker = None if at is None else nodes[at]
        if (
            not isinstance(maker, Linear)
            or maker.weight.gated != is_gated
            or not _is_only_use(readers, kept, maker.out)
        ):
            continue
        assert at is not None
        fused[at], fused[i] = replace(maker, activation=node.kind, gated=is_gated, out=node.out), None
    return _apply(nodes, fused)


def _residual(nodes: list[Node], kept: frozenset[Buffer]) -> list[Node]:
    makers, readers = _makers(nodes), _readers(nodes)
    fused: dict[int, Node | None] = {}
    for i, node in enumerate(nodes):
        if not isinstance(node, Add):
            continue
        at = makers.get(node.y.buffer)
        maker = None if at is None else nodes[at]
        if not isinstance(maker, Linear) or not _is_only_use(readers, kept, maker.out):
            continue
        assert at is not None
        if makers.get(node.x.buffer, -1) > at:
            continue  # the residual is not there yet when the product is
        fused[at], fused[i] = replace(maker, residual=node.x, residual_scale=node.scale, out=node.out), None
    return _apply(nodes, fused)


def _norm(nodes: list[Node], kept: frozenset[Buffer]) -> list[Node]:
    fused: dict[int, Node | None] = {}
    for i, (node, following) in enumerate(zip(nodes, nodes[1:], strict=False)):
        if isinstance(node, Add) and isinstance(following, Norm) and following.x == node.out:
            fused[i] = None
            fused[i + 1] = replace(following, x=node.x, addend=node.y, addend_scale=node.scale, sum=node.out)
    return _apply(nodes, fused)


def _rope(nodes: list[Node], kept: frozenset[Buffer]) -> list[Node]:
    readers = _readers(nodes)
    fused: dict[int, Node | None] = {}
    moved: dict[Buffer, View] = {}
    for i, (node, following) in enumerate(zip(nodes, nodes[1:], strict=False)):
        if i in fused or not isinstance(node, Rope) or not isinstance(following, Rope):
            continue
        q, k = node, following
        if q.table is not k.table or q.head_dim != k.head_dim or not k.x.follows(q.x) or q.x.buffer in kept:
            continue
        rotated = (q.x, k.x)
        if any(at >= i + 2 and view in rotated for at, view in readers[q.x.buffer]):
            continue  # somebody still wants them as they were
        both = View(q.x.buffer, q.x.offset, q.x.width + k.x.width, None)
        fused[i], fused[i + 1] = replace(q, x=both, out=both), None
        moved[q.out.buffer], moved[k.out.buffer] = q.x, k.x
    return [with_views(node, moved) for node in _apply(nodes, fused)]


PASSES: dict[str, Pass] = {
    "gate": _gate,
    "activation": _activation,
    "residual": _residual,
    "norm": _norm,
    "rope": _rope,
}


def _makers(nodes: list[Node]) -> dict[Buffer, int]:
    """The last node that writes each buffer."""
    return {node.out.buffer: i for i, node in enumerate(nodes)}


def _readers(nodes: list[Node]) -> dict[Buffer, list[tuple[int, View]]]:
    """Who reads each buffer, and what of it, in order."""
    readers: dict[Buffer, list[tuple[int, View]]] = defaultdict(list)
    for i, node in enumerate(nodes):
        for view in inputs(node):
            readers[view.buffer].append((i, view))
    return readers


def _is_only_use(readers: dict[Buffer, list[tuple[int, View]]], kept: frozenset[Buffer], view: View) -> bool:
    """Whether exactly one node reads the view's buffer, and the whole of it."""
    found = readers[view.buffer]
    return view.buffer not in kept and len(found) == 1 and found[0][1].width == view.width


def _apply(nodes: list[Node], fused: dict[int, Node | None]) -> list[Node]:
    changed = [fused.get(i, node) for i, node in enumerate(nodes)]
    return [node for node in changed if node is not None]
