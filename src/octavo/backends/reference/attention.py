"""Paged attention in plain PyTorch: the definition, request by request, and the form that serves.

Letters: R requests and T tokens of a segment, H query heads, K KV heads, G = H / K, D head size, L keys,
P keys of a partition.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.backends.ops import AttentionParams, ForwardBatch

PARTITION = 64  # keys whose products are summed at once; partitions start at multiples of it
MAX_SEGMENT_TOKENS = 128
SCORE_VALUES = 1 << 23  # scores of a segment held at once
KV_VALUES = 1 << 25  # keys and values of a segment held at once


class ReferenceKvCache:
    """Blocks [layer, key or value, KV head, slot, D] in one tensor, and one more block that stays zero."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        layers_per_block: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = num_kv_heads
        shape = (num_blocks + 1, layers_per_block, 2, num_kv_heads, block_size, head_dim)
        self.blocks = torch.empty(shape, dtype=dtype, device=device)
        self.blocks[num_blocks].zero_()
        self.rows = self.blocks.view(-1, head_dim)
        self.rows_per_kind = num_kv_heads * block_size
        self.rows_per_block = layers_per_block * 2 * self.rows_per_kind
        self.zero_row = num_blocks * self.rows_per_block
        # Row of each KV head, counted from that of head 0.
        self.head_rows = np.arange(num_kv_heads) * block_size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, destination in pairs:
            self.blocks[destination].copy_(self.blocks[source])

    def first_row(self, layer_in_block: int, kind: int) -> int:
        """What leads from a row of (layer 0, keys) to that of `layer_in_block`, keys (0) or values (1)."""
        return (2 * layer_in_block + kind) * self.rows_per_kind


def positions_to_rows(cache: ReferenceKvCache, block_table: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Rows of (layer 0, keys, head 0) that hold `positions` of the request with `block_table`."""
    block_ids = block_table[positions // cache.block_size]
    assert (block_ids >= 0).all(), "a position without a block"
    return np.asarray(block_ids.astype(np.int64) * cache.rows_per_block + positions % cache.block_size)


def written_rows(cache: ReferenceKvCache, batch: ForwardBatch, group: int) -> torch.Tensor:
    """[T * K] rows of (layer 0, keys) that the tokens of the batch write."""
    requests = np.repeat(np.arange(len(batch.context_lens)), np.diff(batch.query_starts))
    block_ids = batch.block_tables[group][requests, batch.positions // cache.block_size]
    assert (block_ids >= 0).all(), "a token without a block to write to"
    rows_T = block_ids.astype(np.int64) * cache.rows_per_block + batch.positions % cache.block_size
    return torch.from_numpy((rows_T[:, None] + cache.head_rows).ravel()).to(cache.blocks.device)


def attend_naive(
    q_THD: torch.Tensor,
    cache: ReferenceKvCache,
    batch: ForwardBatch,
    params: AttentionParams,
    *,
    group: int,
    layer_in_block: int,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """The definition: for each request, softmax over the keys that each token sees. [T, H * D] float32"""
    out = torch.empty_like(q_THD, dtype=torch.float32)
    for r, context_len in enumerate(batch.context_lens.tolist()):
        first, last = batch.query_starts[r : r + 2].tolist()
        queries = torch.arange(context_len - (last - first), context_len)
        start = 0 if params.window is None else max(0, int(queries[0]) - params.window + 1)
        keys = torch.arange(start, context_len)
        rows = positions_to_rows(cache, batch.block_tables[group][r], keys.numpy())
        rows_LK = torch.from_numpy(rows[:, None] + cache.head_rows)
        k_LHD, v_LHD = (
            cache.rows[rows_LK + cache.first_row(layer_in_block, kind)]
            .float()
            .repeat_interleave(params.num_heads // params.num_kv_heads, dim=1)
            for kind in (0, 1)
        )
        scores_HTL = torch.einsum("thd,lhd->htl", q_THD[first:last].float(), k_LHD) * params.scale
        if params.softcap is not None:
            scores_HTL = params.softcap * torch.tanh(scores_HTL / params.softcap)
        hidden_TL = keys > queries[:, None]
        if params.window is not None:
            hidden_TL |= keys <= queries[:, None] - params.window
        scores_HTL = scores_HTL.masked_fill(hidden_TL, -torch.inf)
        if sinks_H is not None:
            column = sinks_H.float()[:, None, None].expand(-1, last - first, 1)
            scores_HTL = torch.cat([scores_HTL, column], dim=-1)
        weights_HTL = torch.softmax(scores_HTL, dim=-1)[:, :, : len(keys)]
        out[first:last] = torch.einsum("htl,lhd->thd", weights_HTL, v_LHD)
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class Segment:
    """Requests that have equally many tokens in this step, so that they are computed as one.

    Keys run from a multiple of PARTITION over whole partitions; those that a request does not see are read from
    the block of zeros and get a bias of -inf.
    """

    tokens: slice | torch.Tensor  # packed tokens, request by request
    num_requests: int
    num_tokens: int  # of each request
    kv_rows: torch.Tensor  # [2 * R * K * L] rows of layer 0, keys then values
    bias: torch.Tensor  # [R, 1, T, 1, L] 0 or -inf


def plan_segments(
    cache: ReferenceKvCache, batch: ForwardBatch, group: int, window: int | None, num_heads: int
) -> list[Segment]:
    """Cut the step into segments: tiles of long chunks, and requests of like lengths together."""
    alike: dict[tuple[int, int], list[_Tile]] = {}
    segments = []
    for tile in _tiles(batch, window, num_heads):
        if tile.num_tokens >= MAX_SEGMENT_TOKENS // 4:
            segments.append(_segment(cache, batch, group, window, [tile], tile.num_partitions))
        else:
            # Up to a power of two: at most half of what is read is padding.
            padded = 1 << (tile.num_partitions - 1).bit_length()
            alike.setdefault((tile.num_tokens, padded), []).append(tile)
    for tiles in alike.values():
        longest = max(tile.num_partitions for tile in tiles)
        values = 2 * longest * PARTITION * cache.num_kv_heads * cache.blocks.shape[-1]
        at_once = max(1, KV_VALUES // values)
        for i in range(0, len(tiles), at_once):
            segments.append(_segment(cache, batch, group, window, tiles[i : i + at_once], longest))
    return segments


@dataclass(frozen=True, slots=True)
class _Tile:
    request: int
    first_token: int  # packed
    num_tokens: int
    first_position: int
    first_key: int  # a multiple of PARTITION

    @property
    def num_partitions(self) -> int:
        return -(-(self.first_position + self.num_tokens - self.first_key) // PARTITION)


def _tiles(batch: ForwardBatch, window: int | None, num_heads: int) -> Iterator[_Tile]:
    for r, context_len in enumerate(batch.context_lens.tolist()):
        token, end = batch.query_starts[r : r + 2].tolist()
        most = min(MAX_SEGMENT_TOKENS, max(16, SCORE_VALUES // (num_heads * context_len)))
        while token < end:
            num_tokens = min(most, end - token)
            position = context_len - (end - token)
            first_seen = 0 if window is None else max(0, position - window + 1)
            yield _Tile(r, token, num_tokens, position, first_seen - first_seen % PARTITION)
            token += num_tokens


def _segment(
    cache: ReferenceKvCache,
    batch: ForwardBatch,
    group: int,
    window: int | None,
    tiles: Sequence[_Tile],
    num_partitions: int,
) -> Segment:
    num_tokens = tiles[0].num_tokens
    positions_RL = np.array([tile.first_key for tile in tiles])[:, None] + np.arange(num_partitions * PARTITION)
    queries_RT = np.array([tile.first_position for tile in tiles])[:, None] + np.arange(num_tokens)
    keys, queries = positions_RL[:, None, :], queries_RT[:, :, None]
    seen_RTL = keys <= queries
    if window is not None:
        seen_RTL &= keys > queries - window
    rows_RL = np.full(positions_RL.shape, cache.zero_row, np.int64)
    for row, tile, positions, seen in zip(rows_RL, tiles, positions_RL, np.any(seen_RTL, axis=1), strict=True):
        row[seen] = positions_to_rows(cache, batch.block_tables[group][tile.request], positions[seen])
    rows_RKL = rows_RL[:, None, :] + cache.head_rows[:, None]
    tokens_RT = np.array([tile.first_token for tile in tiles])[:, None] + np.arange(num_tokens)
    bias_RTL = np.where(seen_RTL, np.float32(0), np.float32(-np.inf))
    device = cache.blocks.device
    return Segment(
        tokens=_as_slice(tokens_RT.ravel(), device),
        num_requests=len(tiles),
        num_tokens=num_tokens,
        kv_rows=torch.from_numpy(np.concatenate([rows_RKL.ravel(), (rows_RKL + cache.rows_per_kind).ravel()])).to(
            device
        ),
        bias=torch.from_numpy(bias_RTL)[:, None, :, None, :].to(device),
    )


def _as_slice(tokens: np.ndarray, device: torch.device) -> slice | torch.Tensor:
    is_consecutive = bool((np.diff(tokens) == 1).all())
    return slice(int(tokens[0]), int(tokens[-1]) + 1) if is_consecutive else torch.from_numpy(tokens).to(device)


def attend_segment(
    q_THD: torch.Tensor,
    cache: ReferenceKvCache,
    segment: Segment,
    params: AttentionParams,
    *,
    layer_in_block: int,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the segment's tokens. [R * T, H * D] float32

    A token's result does not depend on what else is in the step: its keys are cut into partitions by position
    alone, each partition is one product of a fixed size, the sums over partitions run in order, and a partition
    that it does not see adds exact zeros.
    """
    num_kv_heads, head_dim = params.num_kv_heads, params.head_dim
    group_size = params.num_heads // num_kv_heads
    R, T, M = segment.num_requests, segment.num_tokens, segment.num_tokens * group_size
    kv = cache.rows.index_select(0, segment.kv_rows + cache.first_row(layer_in_block, 0)).float()
    k_BLD, v_BLD = kv.view(2, R * num_kv_heads, -1, head_dim)

    q = (q_THD[segment.tokens].float() * params.scale).view(R, T, num_kv_heads, group_size, head_dim)
    q_BMD = pad_rows(q.transpose(1, 2).reshape(R * num_kv_heads, M, head_dim))
    scores_BML = torch.bmm(q_BMD, k_BLD.transpose(1, 2))
    if params.softcap is not None:
        scores_BML.div_(params.softcap).tanh_().mul_(params.softcap)
    scores_BML[:, :M].view(R, num_kv_heads, T, group_size, -1).add_(segment.bias)

    highest_BM1 = scores_BML.amax(-1, keepdim=True)
    sink_BM1 = None
    if sinks_H is not None:
        sinks = sinks_H.float().view(1, num_kv_heads, 1, group_size).expand(R, -1, T, -1)
        sink_BM1 = pad_rows(sinks.reshape(R * num_kv_heads, M, 1))
        highest_BM1 = torch.maximum(highest_BM1, sink_BM1)
    weights_BML = scores_BML.sub_(highest_BM1).exp_()
    # cumsum adds in order, whatever the number of partitions.
    total_BM1 = weights_BML.view(*q_BMD.shape[:2], -1, PARTITION).sum(-1).cumsum(-1)[..., -1:]
    if sink_BM1 is not None:
        total_BM1 = total_BM1 + torch.exp(sink_BM1 - highest_BM1)
    out_BMD = torch.zeros_like(q_BMD)
    for first in range(0, weights_BML.shape[-1], PARTITION):
        part = slice(first, first + PARTITION)
        out_BMD.baddbmm_(weights_BML[:, :, part], v_BLD[:, part])
    out_BMD.div_(total_BM1)
    return out_BMD[:, :M].view(R, num_kv_heads, T, group_size, head_dim).transpose(1, 2).reshape(R * T, -1)


def pad_rows(x_BMD: torch.Tensor) -> torch.Tensor:
    """Zero rows up to a multiple of four: MKL's products of 1 to 11 other numbers of rows round differently."""
    num_rows = x_BMD.shape[1]
    if num_rows >= 12 or num_rows % 4 == 0:
        return x_BMD.contiguous()
    return torch.nn.functional.pad(x_BMD, (0, 0, 0, 4 - num_rows % 4))
