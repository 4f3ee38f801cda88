"""The operators that a backend offers: the only tensor vocabulary of models and worker.

A backend's tensors are opaque to its callers (`Tensor`); NumPy arrays go in (weights, indices) and come out
(`to_numpy`). `backends.reference` is the definition of every operator; the other backends are tested
against it. Every operator computes in float32 and rounds its result once to `dtype`. Reductions must not
depend on how many rows share the call.

Letters: T tokens of a step, R scheduled requests, N rows that need logits, H query heads, K KV heads,
D head size, E hidden size, F intermediate size, V vocabulary, G KV groups, B blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from octavo.backends.sampler import SamplerKernels

Tensor = Any
Weight = Any  # what a backend made of a host weight: packed, quantized or plain

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
DType = Literal["float32", "bfloat16", "float16"]
WeightKind = Literal["linear", "gated", "head", "embedding", "vector"]


class HostTensor(Protocol):
    """A tensor of a checkpoint, still in the file: shape and type are known, values are read on demand."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def type_name(self) -> str:
        """'F32', 'BF16', 'F8_E4M3' ..., or a GGUF block type such as 'Q4_1'."""
        ...

    def numpy(self) -> np.ndarray:
        """The values as stored for plain types (bf16 and fp8 as `ml_dtypes`), float32 for block types."""
        ...

    @property
    def identity(self) -> str:
        """Says which values these are within their checkpoint: its name there, and what is done to what is stored."""
        ...

    def stored_blocks(self) -> np.ndarray | None:
        """Of a block type: [rows, bytes of a row] uint8, whose values `numpy` gives. None where there are no such."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """Rotation of the first `rotary_dim` elements of each head, in halves (x1, x2) as in `transformers`.

    Angle of position p and pair i: p * inv_freq[variant][i]; cos and sin are multiplied by
    attention_factor[variant]. Variant 0 is as trained; variant 1, where it exists, serves requests beyond
    the native context (see `ForwardBatch.rope_variants`). A table with one variant serves both.
    """

    rotary_dim: int
    inv_freq: tuple[np.ndarray, ...]  # each [rotary_dim / 2] float32
    attention_factor: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """What one layer's attention does beside the shapes of its inputs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # a query sees at most this many keys, itself included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One ragged step as index arrays: prefill chunks, decodes and draft rows together.

    Request r owns packed tokens [query_starts[r], query_starts[r + 1]), at positions
    [context_lens[r] - its number of tokens, context_lens[r]).
    """

    token_ids: np.ndarray  # [T] int32
    positions: np.ndarray  # [T] int32
    query_starts: np.ndarray  # [R + 1] int32
    context_lens: np.ndarray  # [R] int32, tokens with KV after this step
    block_tables: tuple[np.ndarray, ...]  # G arrays [R, max_blocks] int32, -1 where nothing may be read
    rope_variants: np.ndarray  # [T] int32
    logits_rows: np.ndarray  # [N] int32, packed tokens whose logits are wanted

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class KvCache(Protocol):
    """The paged arena of keys and values, [num_blocks] blocks shared by all groups of layers."""

    num_blocks: int
    block_size: int

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, source to destination, in order."""
        ...


class Program(Protocol):
    """A forward pass and its head, in the form that the backend runs best."""

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Hidden states of the step's tokens. They and what follows from them are good until the next call."""
        ...

    def logits(self, hidden: Tensor, rows: np.ndarray) -> np.ndarray:
        """float32 [N, V] of packed tokens `rows` [N] int32."""
        ...

    def argmax(self, hidden: Tensor, rows: np.ndarray) -> np.ndarray:
        """The column of each row's largest logit, the lowest among equals; -1 where it is not finite. [N] int32"""
        ...


class Ops(Protocol):
    """The operators. All tensors are packed: first dimension T (or N)."""

    name: str  # "reference", "native" ...
    dtype: DType  # of activations

    # -- weights ---------------------------------------------------------------------------------------
    def weight(
        self,
        parts: Sequence[HostTensor | np.ndarray],
        *,
        kind: WeightKind,
    ) -> Weight:
        """Take over a parameter: `parts` are concatenated along the first dimension.

        linear: [out, in], applied as x @ W.T. gated: the same, whose two halves are a gate and what it gates.
        head: [V, E], for `logits`. embedding: [V, E], which `logits` also takes as a tied head. vector: a norm, a bias
        or sinks, kept in float32. Other plain types are converted to `dtype`.
        """
        ...

    def kv_cache(
        self, *, num_blocks: int, block_size: int, layers_per_block: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        """Reserve the arena. Block b holds [layers_per_block, 2, num_kv_heads, block_size, head_dim]."""
        ...

    # -- programs --------------------------------------------------------------------------------------
    def compile(
        self, forward: Callable[[ForwardBatch, KvCache], Tensor], logits: Callable[[Tensor, np.ndarray], Tensor]
    ) -> Program:
        """Prepare two functions of these operators: the forward pass, and the logits of rows of its result.

        They may be called with symbols instead of arrays, and must only pass them on to operators.
        """
        ...

    # -- operators -------------------------------------------------------------------------------------
    def embedding(self, batch: ForwardBatch, table: Weight, *, scale: float = 1.0) -> Tensor:
        """Rows of `table` for `batch.token_ids`, times `scale` (rounded to `dtype` first, as Gemma does). [T, E]"""
        ...

    def rms_norm(self, x: Tensor, weight: Weight, *, eps: float, offset: float = 0.0) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension, in float32, rounded once.

        `offset` is 1 for Gemma. Also normalises each head: x [T, H, D], weight [D].
        """
        ...

    def layer_norm(self, x: Tensor, weight: Weight, bias: Weight | None, *, eps: float) -> Tensor:
        """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension; var divides by its size."""
        ...

    def linear(self, x: Tensor, weight: Weight, bias: Weight | None = None) -> Tensor:
        """x [T, in] @ weight.T [in, out] + bias. [T, out]"""
        ...

    def split(self, x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
        """Cut the last dimension into consecutive pieces."""
        ...

    def split_heads(self, x: Tensor, head_dim: int) -> Tensor:
        """[T, H * D] -> [T, H, D]"""
        ...

    def rope(self, x: Tensor, batch: ForwardBatch, table: RopeTable) -> Tensor:
        """Rotate x [T, H, D] by `batch.positions`, per token in the variant of `batch.rope_variants`.

        Angles are float32 products, as in `transformers`; elements from `rotary_dim` on pass through.
        """
        ...

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KvCache,
        batch: ForwardBatch,
        params: AttentionParams,
        *,
        group: int,
        layer_in_block: int,
        sinks: Weight | None = None,
    ) -> Tensor:
        """Write k, v [T, K, D] to the cache, then causal attention of q [T, H, D] over the paged KV.

        The token at position p sees keys at positions j <= p and, with a window, j > p - window. Query head
        h reads KV head h // (H // K). `sinks` [H] are learned logits that join the softmax's denominator
        only. Softmax in float32; its weights may be rounded to `dtype` first. Block table `group` of the batch
        is used. Returns [T, H * D].

        What no token of the step sees is never used, NaN included: -1 entries, slots that nobody wrote yet.
        """
        ...

    def activation(self, x: Tensor, kind: Activation) -> Tensor: ...

    def gated_activation(self, x: Tensor, kind: Activation) -> Tensor:
        """x [T, 2F] = (gate, up) -> act(gate) * up, [T, F]"""
        ...

    def add(self, x: Tensor, y: Tensor, *, scale: float = 1.0) -> Tensor:
        """x + scale * y (Granite's residual multiplier)."""
        ...

    def rows(self, x: Tensor, rows: np.ndarray) -> Tensor:
        """x[rows], `rows` [N] int32. [N, E]"""
        ...

    def logits(
        self, x: Tensor, head: Weight, *, bias: Weight | None = None, scale: float = 1.0, softcap: float | None = None
    ) -> Tensor:
        """scale * (x @ head.T + bias), then softcap * tanh(. / softcap). float32, [N, V]"""
        ...

    def to_numpy(self, x: Tensor) -> np.ndarray:
        """A host view or copy of x."""
        ...

    def weight_report(self) -> list[str]:
        """Lines for the operator about the weights loaded so far: their formats, and what is not exactly theirs."""
        ...

    def sampler_kernels(self, vocab_size: int) -> SamplerKernels | None:
        """Kernels that sample among `vocab_size` tokens; None where NumPy has to (`sampling.numpy_kernels`)."""
        ...


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """What `octavo info` says about a backend."""

    name: str
    available: bool
    detail: str  # versions when available, else why not and the way out


def best_columns(logits: np.ndarray) -> np.ndarray:
    """The column of each row's largest value, the lowest among equals; -1 where that is no finite number.

    `logits` float32 [N, V]; the result int32 [N].
    """
    if not len(logits):
        return np.empty(0, np.int32)
    with np.errstate(invalid="ignore"):
        best: np.ndarray = logits.argmax(-1).astype(np.int32)
        best[~np.isfinite(logits.max(-1))] = -1  # the maximum with NaN is NaN
    return best
