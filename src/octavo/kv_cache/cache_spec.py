"""How the layers of a model share one arena of equal KV blocks.

A block id names the KV of `block_size` tokens for `layers_per_block` layers of one group; all layers of a
group have the same attention window, so they need the same tokens and share one block table. Blocks of every
group come from one pool: what sliding windows give back, full attention may use.

Conversions between positions and blocks have one function each, here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError, UnsupportedModel

MAX_GROUPS = 16  # each group costs a block table per request and step


@dataclass(frozen=True, slots=True)
class LayerKv:
    """The KV of one attention layer: its shape, and how far back a query looks (None: to the start)."""

    num_kv_heads: int
    head_dim: int
    window: int | None = None  # keys that a query sees, itself included


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers that share a block table; fewer than `layers_per_block` of them when the last places are padding."""

    window: int | None
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvCacheSpec:
    """The shape of a block and which layers it serves. Made by `make_cache_spec`."""

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    layers_per_block: int
    groups: tuple[KvGroup, ...]
    places: tuple[tuple[int, int], ...]  # by layer: (group, layer within the block)

    @property
    def bytes_per_block(self) -> int:
        return self.layers_per_block * 2 * self.num_kv_heads * self.block_size * self.head_dim * self.dtype_bytes

    @property
    def bytes_per_token(self) -> int:
        """Of a token that every group still holds, padding included."""
        return len(self.groups) * self.bytes_per_block // self.block_size

    def num_blocks_for(self, memory_bytes: int) -> int:
        return memory_bytes // self.bytes_per_block

    def max_blocks_per_request(self, max_model_len: int, max_chunk: int) -> int:
        """Most blocks that a request of up to `max_model_len` tokens holds while it computes up to `max_chunk` a step.

        A group with a window holds what its oldest query still sees, the chunk, and no more.
        """
        return sum(
            min(num_blocks(max_model_len, self.block_size), window_blocks(group.window, max_chunk, self.block_size))
            if group.window is not None
            else num_blocks(max_model_len, self.block_size)
            for group in self.groups
        )


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks that hold the first `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def first_visible_block(position: int, window: int | None, block_size: int) -> int:
    """The first block in which a query at `position` sees a key. Blocks before it serve no later query either."""
    return 0 if window is None or position < window else (position - window + 1) // block_size


def window_blocks(window: int, num_tokens: int, block_size: int) -> int:
    """Most blocks touched by `num_tokens` consecutive queries and the keys that they see, wherever they start."""
    return (window - 1 + num_tokens + block_size - 2) // block_size + 1


def make_cache_spec(layers: Sequence[LayerKv], *, block_size: int, dtype_bytes: int) -> KvCacheSpec:
    """Group `layers` by window into equal groups, so that a token takes the fewest bytes.

    Layers of one window are cut, in order, into groups of `layers_per_block`; the last may be padded. The
    fewest padded layers win, then the fewest groups; at most `MAX_GROUPS` groups (or one per window, if
    there are more windows than that). Gemma 3 270M, 15 sliding and 3 full layers: 6 groups of 3.
    """
    if block_size < 1:
        raise ConfigError(f"--block-size is {block_size}; it must be at least 1.")
    shapes = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(shapes) != 1:
        raise UnsupportedModel(
            f"its attention layers have {len(shapes)} KV shapes (heads, head size): {sorted(shapes)}; "
            "layers that share the KV arena must have one."
        )
    by_window: dict[int | None, list[int]] = {}
    for index, layer in enumerate(layers):
        if layer.window is not None and layer.window < 1:
            raise UnsupportedModel(f"layer {index} has an attention window of {layer.window}; it must be at least 1.")
        by_window.setdefault(layer.window, []).append(index)

    def num_groups(layers_per_block: int) -> int:
        return sum(num_blocks(len(indices), layers_per_block) for indices in by_window.values())

    layers_per_block = min(
        (n for n in range(1, len(layers) + 1) if num_groups(n) <= max(MAX_GROUPS, len(by_window))),
        key=lambda n: (num_groups(n) * n, num_groups(n)),
    )
    groups = tuple(
        KvGroup(window, tuple(indices[first : first + layers_per_block]))
        for window, indices in by_window.items()
        for first in range(0, len(indices), layers_per_block)
    )
    places = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
    (num_kv_heads, head_dim), *_ = shapes
    return KvCacheSpec(
        block_size=block_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
        layers_per_block=layers_per_block,
        groups=groups,
        places=tuple(places[layer] for layer in range(len(layers))),
    )
