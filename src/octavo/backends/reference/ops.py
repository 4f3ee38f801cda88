"""Every operator in plain PyTorch: the definition, and what serves where no faster backend runs.

Operators compute in float32 and round once. Rows are independent bit for bit on the CPU: products are packed for
oneDNN or have their rows padded (see `attention`), and functions whose vector and scalar forms differ in the last
bit (silu, gelu) are spelled out in terms of those that do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from octavo.backends.ops import (
    Activation,
    AttentionParams,
    DType,
    ForwardBatch,
    HostTensor,
    KvCache,
    RopeTable,
    Weight,
    WeightKind,
    best_columns,
)
from octavo.backends.reference.attention import (
    ReferenceKvCache,
    Segment,
    attend_naive,
    attend_segment,
    plan_segments,
    written_rows,
)
from octavo.backends.reference.weights import EmbeddingWeight, LinearWeight, load_rounded

DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class ReferenceProgram:
    """The functions themselves."""

    forward: Callable[[ForwardBatch, KvCache], torch.Tensor]
    logits: Callable[[torch.Tensor, np.ndarray], np.ndarray]

    def argmax(self, hidden: torch.Tensor, rows: np.ndarray) -> np.ndarray:
        return best_columns(self.logits(hidden, rows))


class ReferenceOps:
    """Implements `backends.ops.Ops`. `naive_attention` computes attention by its definition, request by request."""

    name = "reference"

    def __init__(self, *, dtype: DType, num_threads: int, device: str = "cpu", naive_attention: bool = False) -> None:
        torch.set_num_threads(num_threads)
        self.dtype: DType = dtype
        self._dtype = DTYPES[dtype]
        self._device = torch.device(device)
        self._naive_attention = naive_attention
        self._step: _Step | None = None

    # -- weights ---------------------------------------------------------------------------------------
    def weight(
        self,
        parts: Sequence[HostTensor | np.ndarray],
        *,
        kind: WeightKind,
    ) -> Weight:
        if kind == "vector":
            return load_rounded(parts, "float32").to(self._device)
        values = load_rounded(parts, self.dtype).to(self._device)
        return EmbeddingWeight(values, self._dtype) if kind == "embedding" else LinearWeight(values)

    def kv_cache(
        self, *, num_blocks: int, block_size: int, layers_per_block: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        return ReferenceKvCache(
            num_blocks=num_blocks,
            block_size=block_size,
            layers_per_block=layers_per_block,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=self._dtype,
            device=self._device,
        )

    # -- programs --------------------------------------------------------------------------------------
    def compile(
        self,
        forward: Callable[[ForwardBatch, KvCache], torch.Tensor],
        logits: Callable[[torch.Tensor, np.ndarray], torch.Tensor],
    ) -> ReferenceProgram:
        return ReferenceProgram(forward, lambda hidden, rows: self.to_numpy(logits(hidden, rows)))

    # -- operators -------------------------------------------------------------------------------------
    def embedding(self, batch: ForwardBatch, table: EmbeddingWeight, *, scale: float = 1.0) -> torch.Tensor:
        x = table.table.index_select(0, torch.from_numpy(batch.token_ids).to(self._device))
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=self._dtype, device=self._device)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float, offset: float = 0.0) -> torch.Tensor:
        y = x.float()
        y = y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        return self._rounded(y.mul_(weight if offset == 0.0 else weight + offset))

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, eps: float
    ) -> torch.Tensor:
        y = x.float()
        y = y - y.mean(-1, keepdim=True)
        y = y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        y.mul_(weight)
        return self._rounded(y if bias is None else y.add_(bias))

    def linear(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
        y = weight.product(x.float())
        return self._rounded(y if bias is None else y.add_(bias))

    def split(self, x: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return torch.split(x, list(sizes), dim=-1)

    def split_heads(self, x: torch.Tensor, head_dim: int) -> torch.Tensor:
        return x.view(len(x), x.shape[-1] // head_dim, head_dim)

    def rope(self, x: torch.Tensor, batch: ForwardBatch, table: RopeTable) -> torch.Tensor:
        cos, sin = self._step_of(batch).rotations(table, self._device)
        y = x.float()
        turned = y[..., : table.rotary_dim]
        # (x1, x2) cos + (x2, x1) (-sin, sin)
        turned = (turned * cos).add_(turned.roll(table.rotary_dim // 2, dims=-1).mul_(sin))
        if table.rotary_dim < y.shape[-1]:
            turned = torch.cat([turned, y[..., table.rotary_dim :]], dim=-1)
        return self._rounded(turned)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cache: KvCache,
        batch: ForwardBatch,
        params: AttentionParams,
        *,
        group: int,
        layer_in_block: int,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert isinstance(cache, ReferenceKvCache)
        step = self._step_of(batch)
        rows = step.written_rows(cache, group)
        cache.rows.index_copy_(0, rows + cache.first_row(layer_in_block, 0), k.reshape(-1, params.head_dim))
        cache.rows.index_copy_(0, rows + cache.first_row(layer_in_block, 1), v.reshape(-1, params.head_dim))
        if self._naive_attention:
            out = attend_naive(q, cache, batch, params, group=group, layer_in_block=layer_in_block, sinks_H=sinks)
            return self._rounded(out)
        segments = step.segments(cache, group, params)
        outputs = [
            attend_segment(q, cache, segment, params, layer_in_block=layer_in_block, sinks_H=sinks)
            for segment in segments
        ]
        if len(segments) == 1 and isinstance(segments[0].tokens, slice):
            return self._rounded(outputs[0])
        out = torch.empty((len(q), params.num_heads * params.head_dim), dtype=self._dtype, device=self._device)
        for segment, output in zip(segments, outputs, strict=True):
            out[segment.tokens] = self._rounded(output)
        return out

    def activation(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        return self._rounded(_activate(x.float(), kind))

    def gated_activation(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        gate, up = x.float().chunk(2, dim=-1)
        return self._rounded(_activate(gate, kind).mul_(up))

    def add(self, x: torch.Tensor, y: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self._rounded(torch.add(x.float(), y.float(), alpha=scale))

    def rows(self, x: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        return x.index_select(0, torch.from_numpy(rows).to(self._device))

    def logits(
        self,
        x: torch.Tensor,
        head: LinearWeight | EmbeddingWeight,
        *,
        bias: torch.Tensor | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> torch.Tensor:
        matrix = head.as_head() if isinstance(head, EmbeddingWeight) else head
        y = matrix.product(x.float())
        if bias is not None:
            y.add_(bias)
        if scale != 1.0:
            y.mul_(scale)
        return y if softcap is None else y.div_(softcap).tanh_().mul_(softcap)

    def to_numpy(self, x: torch.Tensor) -> np.ndarray:
        return np.asarray(x.float().cpu().numpy())

    def weight_report(self) -> list[str]:
        """Nothing: every weight is its checkpoint's, in float32."""
        return []

    def sampler_kernels(self, vocab_size: int) -> None:
        """None: the definition of sampling is NumPy's."""

    def _rounded(self, y: torch.Tensor) -> torch.Tensor:
        return y if self._dtype is torch.float32 else y.to(self._dtype)

    def _step_of(self, batch: ForwardBatch) -> _Step:
        if self._step is None or self._step.batch is not batch:
            self._step = _Step(batch)
        return self._step


class _Step:
    """Indices that the layers of a step share, made when the first of them asks."""

    def __init__(self, batch: ForwardBatch) -> None:
        self.batch = batch
        self._rotations: dict[RopeTable, tuple[torch.Tensor, torch.Tensor]] = {}
        self._written_rows: dict[int, torch.Tensor] = {}
        self._segments: dict[tuple[int, AttentionParams], list[Segment]] = {}

    def rotations(self, table: RopeTable, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, cos) and (-sin, sin) of every token, each [T, 1, rotary_dim] float32."""
        if table not in self._rotations:
            variants = torch.from_numpy(np.minimum(self.batch.rope_variants, len(table.inv_freq) - 1))
            inv_freq = torch.from_numpy(np.stack(table.inv_freq))[variants]
            factor = torch.tensor(table.attention_factor, dtype=torch.float32)[variants, None]
            angles = torch.from_numpy(self.batch.positions).float()[:, None] * inv_freq
            cos, sin = torch.cos(angles).mul_(factor), torch.sin(angles).mul_(factor)
            pairs = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
            self._rotations[table] = pairs[0][:, None].to(device), pairs[1][:, None].to(device)
        return self._rotations[table]

    def written_rows(self, cache: ReferenceKvCache, group: int) -> torch.Tensor:
        if group not in self._written_rows:
            self._written_rows[group] = written_rows(cache, self.batch, group)
        return self._written_rows[group]

    def segments(self, cache: ReferenceKvCache, group: int, params: AttentionParams) -> list[Segment]:
        key = (group, params)
        if key not in self._segments:
            self._segments[key] = plan_segments(cache, self.batch, group, params.window, params.num_heads)
        return self._segments[key]


def _activate(x: torch.Tensor, kind: Activation) -> torch.Tensor:
    """A new tensor."""
    if kind == "silu":
        return x / torch.exp(-x).add_(1.0)
    if kind == "gelu":
        return torch.erf(x * math.sqrt(0.5)).add_(1.0).mul_(x).mul_(0.5)
    if kind == "gelu_tanh":
        inner = (x * x * x).mul_(0.044715).add_(x).mul_(math.sqrt(2.0 / math.pi))
        return inner.tanh_().add_(1.0).mul_(x).mul_(0.5)
    return torch.relu(x)
