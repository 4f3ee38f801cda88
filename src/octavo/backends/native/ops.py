"""The native backend's operators: they record a plan for the extension, or run one by one.

While `compile`d functions are recorded, every operator appends a node and returns a view. Otherwise each runs at once,
as a plan of its own, which `--enforce-eager` and the operators' tests do. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.backends.native.fusion import PASSES, fuse
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
    Vector,
    View,
    inputs,
    views,
)
from octavo.backends.native.lowering import Lowering
from octavo.backends.native.sampler import NativeSampler
from octavo.backends.native.weights import PackedWeight, WeightStore
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
from octavo.errors import ConfigError, UnsupportedModel

MAX_THREADS = 1024
MAX_HEAD_DIM = 256  # kMaxHeadDim of csrc/ops/attention.h
_NUMPY_DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


class NativeKvCache:
    """The arena of the extension; the layout is its own (csrc/ops/attention.h)."""

    def __init__(
        self, *, dtype: DType, num_blocks: int, block_size: int, layers_per_block: int, num_kv_heads: int, head_dim: int
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.arena = _native.KvArena(
            dtype=dtype,
            num_blocks=num_blocks,
            block_size=block_size,
            num_layers=layers_per_block,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self.arena.copy_blocks(list(pairs))


@dataclass(frozen=True, slots=True)
class Program:
    """What `NativeOps.compile` makes of a forward pass and its head: one call of the extension a step."""

    plan: _native.Plan
    num_forward_nodes: int
    hidden: View
    logits_place: tuple[int, int, int]
    has_argmax: bool
    # For plan_report.py:
    nodes: tuple[Node, ...]  # as fused
    fusion: dict[str, int]  # passes that ran, and the nodes that each saved
    dtype: DType
    quantizes_activations: bool

    def forward(self, batch: ForwardBatch, cache: KvCache) -> View:
        """Compute the tokens of a step. What it returns is good until the next one."""
        assert isinstance(cache, NativeKvCache)
        _set_step(self.plan, batch, cache)
        self.plan.run(0, self.num_forward_nodes)
        return self.hidden

    def logits(self, hidden: View, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [N, V], overwritten by the next call."""
        assert hidden is self.hidden
        if not len(rows):
            return np.empty((0, self.logits_place[2]), np.float32)
        self.plan.run_rows(self.num_forward_nodes, self.plan.num_nodes, rows, None)
        return self.plan.values(self.logits_place)

    def argmax(self, hidden: View, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """The column of each row's largest logit, the lowest among equals; -1 where it is not finite."""
        if not self.has_argmax:
            return best_columns(self.logits(hidden, rows))
        best = np.empty(len(rows), np.int32)
        if len(rows):
            self.plan.run_rows(self.num_forward_nodes, self.plan.num_nodes, rows, best)
        return best


class EagerProgram:
    """The same, operator by operator from Python."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch, KvCache], View],
        logits: Callable[[View, NDArray[np.int32]], View],
        to_numpy: Callable[[View], NDArray[np.float32]],
    ) -> None:
        self.forward = forward
        self._logits = logits
        self._to_numpy = to_numpy

    def logits(self, hidden: View, rows: NDArray[np.int32]) -> NDArray[np.float32]:
        return self._to_numpy(self._logits(hidden, rows))

    def argmax(self, hidden: View, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        return best_columns(self.logits(hidden, rows))


class NativeOps:
    """Implements `backends.ops.Ops`.

    `isa` is one of `_native.usable_isas()` or auto. `fusion` names passes of `fusion.PASSES`. With
    `quantizes_activations`, integer weights meet activations in int8 (csrc/ops/linear.h).
    """

    name = "native"

    def __init__(
        self,
        *,
        dtype: DType,
        num_threads: int,
        isa: str = "auto",
        quantization: Literal["auto", "none", "int8", "int4"] = "auto",
        quantizes_activations: bool = False,
        enforce_eager: bool = False,
        fusion: Sequence[str] = tuple(PASSES),
        repack_cache: Path | None = None,
        repack_cache_bytes: int = 16 << 30,
        identity: bytes | None = None,
    ) -> None:
        self.dtype: DType = dtype
        self._isa = isa
        if num_threads > MAX_THREADS:
            raise ConfigError(f"--threads is {num_threads}; the native backend runs at most {MAX_THREADS}.")
        try:
            self._team = _native.Team(num_threads)
        except (MemoryError, RuntimeError) as error:
            raise ConfigError(f"--threads is {num_threads}: they cannot be started ({error}). Lower it.") from None
        self._quantizes_activations = quantizes_activations
        self._enforce_eager = enforce_eager
        self._fusion = tuple(fusion)
        self._weights = WeightStore(
            dtype=dtype,
            quantization=quantization,
            team=self._team,
            cache=repack_cache,
            cache_bytes=repack_cache_bytes,
            identity=identity,
        )
        self._recording: list[Node] | None = None

    # -- weights ---------------------------------------------------------------------------------------
    def weight(
        self,
        parts: Sequence[HostTensor | np.ndarray],
        *,
        kind: WeightKind,
    ) -> Weight:
        return self._weights.pack(parts, kind)

    def kv_cache(
        self, *, num_blocks: int, block_size: int, layers_per_block: int, num_kv_heads: int, head_dim: int
    ) -> KvCache:
        if head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(
                f"attention heads of {head_dim} values; the native backend has kernels for up to "
                f"{MAX_HEAD_DIM}. Use --backend reference."
            )
        try:
            return NativeKvCache(
                dtype=self.dtype,
                num_blocks=num_blocks,
                block_size=block_size,
                layers_per_block=layers_per_block,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
            )
        except MemoryError:
            raise ConfigError(
                f"the system does not give the memory for a KV cache of {num_blocks} blocks of {block_size} tokens. "
                "Lower --kv-cache-memory-bytes."
            ) from None

    # -- programs --------------------------------------------------------------------------------------
    def compile(
        self,
        forward: Callable[[ForwardBatch, KvCache], View],
        logits: Callable[[View, NDArray[np.int32]], View],
    ) -> Program | EagerProgram:
        self._weights.finish()
        if self._enforce_eager:
            return EagerProgram(forward, logits, self.to_numpy)
        # Operators only pass the step's arrays on: while recording, nobody looks into them.
        batch, cache, rows = _SYMBOLIC_BATCH, _SYMBOLIC_CACHE, _SYMBOLIC_BATCH.logits_rows
        recorded: list[Node] = []
        self._recording = recorded
        try:
            hidden = forward(batch, cache)
            num_forward_nodes = len(recorded)
            scores = logits(hidden, rows)
        finally:
            self._recording = None
        fused, saved = recorded[:num_forward_nodes], {}
        for name in self._fusion:
            num_before = len(fused)
            fused = fuse(fused, [hidden], [name])
            saved[name] = num_before - len(fused)
        head = recorded[num_forward_nodes:]
        lowering = self._lowering()
        lowering.add(fused)
        num_plan_nodes = lowering.plan.num_nodes
        lowering.plan.keep(lowering.place(hidden)[0])
        lowering.add(head)
        last = head[-1]
        return Program(
            plan=lowering.plan,
            num_forward_nodes=num_plan_nodes,
            hidden=hidden,
            logits_place=lowering.place(scores),
            has_argmax=isinstance(last, Linear) and len(last.weight.segments) == 1,
            nodes=(*fused, *head),
            fusion=saved,
            dtype=self.dtype,
            quantizes_activations=self._quantizes_activations,
        )

    def _lowering(self) -> Lowering:
        return Lowering(self._isa, self._team, self.dtype, quantizes_activations=self._quantizes_activations)

    def _emit(self, node: Node, batch: ForwardBatch | None = None, cache: KvCache | None = None) -> View:
        """Record the node, or run it now."""
        if self._recording is not None:
            self._recording.append(node)
        else:
            self._run(node, batch, cache)
        return node.out

    def _run(self, node: Node, batch: ForwardBatch | None, cache: KvCache | None) -> None:
        """As a plan of its own, whose slots are filled from and emptied into the buffers' own arrays."""
        read = inputs(node)
        num_rows = len(_values(read[0])) if read else len(batch.token_ids) if batch is not None else 0
        for _, view in views(node):
            if view.buffer.values is None:
                view.buffer.values = np.empty((num_rows, view.buffer.width), np.float32)
        if num_rows == 0:
            return
        lowering = self._lowering()
        lowering.add([node])
        plan = lowering.plan
        if batch is None:
            plan.set_rows(num_rows)
        else:
            _set_step(plan, batch, cache)
        places = {view.buffer: lowering.place(View(view.buffer, 0, view.buffer.width)) for _, view in views(node)}
        for slot, _, _ in places.values():
            plan.keep(slot)  # each is filled before the first node, even where that does not read it
        plan.reserve()
        for buffer, place in places.items():
            plan.values(place)[:] = buffer.values
        plan.run(0, plan.num_nodes)
        for buffer, place in places.items():
            assert buffer.values is not None
            buffer.values[:] = plan.values(place)

    # -- operators -------------------------------------------------------------------------------------
    def embedding(self, batch: ForwardBatch, table: PackedWeight, *, scale: float = 1.0) -> View:
        rounded = float(np.asarray(scale, _NUMPY_DTYPES[self.dtype]))
        return self._emit(Embedding(table, rounded, View.new(table.k, "tokens")), batch)

    def rms_norm(self, x: View, weight: Vector, *, eps: float, offset: float = 0.0) -> View:
        return self._emit(Norm("rms", x, weight, None, eps, offset, View.new(x.width, x.extent, x.heads)))

    def layer_norm(self, x: View, weight: Vector, bias: Vector | None, *, eps: float) -> View:
        return self._emit(Norm("layer", x, weight, bias, eps, 0.0, View.new(x.width, x.extent, x.heads)))

    def linear(self, x: View, weight: PackedWeight, bias: Vector | None = None) -> View:
        return self._emit(Linear(x, weight, bias, View.new(weight.n, x.extent)))

    def split(self, x: View, sizes: Sequence[int]) -> tuple[View, ...]:
        starts = np.cumsum([0, *sizes]).tolist()
        assert starts[-1] == x.width, (sizes, x.width)
        return tuple(View(x.buffer, x.offset + start, size) for start, size in zip(starts[:-1], sizes, strict=True))

    def split_heads(self, x: View, head_dim: int) -> View:
        return replace(x, heads=x.width // head_dim)

    def rope(self, x: View, batch: ForwardBatch, table: RopeTable) -> View:
        assert x.heads is not None, "rotation is of heads"
        return self._emit(Rope(x, table, x.width // x.heads, View.new(x.width, x.extent, x.heads)), batch)

    def attend(
        self,
        q: View,
        k: View,
        v: View,
        cache: KvCache,
        batch: ForwardBatch,
        params: AttentionParams,
        *,
        group: int,
        layer_in_block: int,
        sinks: Vector | None = None,
    ) -> View:
        out = View.new(q.width, q.extent)
        return self._emit(Attend(q, k, v, params, group, layer_in_block, sinks, out), batch, cache)

    def activation(self, x: View, kind: Activation) -> View:
        return self._emit(Activate(x, kind, False, View.new(x.width, x.extent)))

    def gated_activation(self, x: View, kind: Activation) -> View:
        return self._emit(Activate(x, kind, True, View.new(x.width // 2, x.extent)))

    def add(self, x: View, y: View, *, scale: float = 1.0) -> View:
        return self._emit(Add(x, y, scale, View.new(x.width, x.extent)))

    def rows(self, x: View, rows: NDArray[np.int32]) -> View:
        out = View.new(x.width, "logits_rows")
        if self._recording is None:
            out.buffer.values = _values(x)[rows]
            return out
        return self._emit(PickRows(x, out))

    def logits(
        self,
        x: View,
        head: PackedWeight,
        *,
        bias: Vector | None = None,
        scale: float = 1.0,
        softcap: float | None = None,
    ) -> View:
        out = View.new(head.n, x.extent)
        return self._emit(Linear(x, head, bias, out, is_logits=True, scale=scale, softcap=softcap))

    def to_numpy(self, x: View) -> NDArray[np.float32]:
        values = _values(x)
        return values if x.heads is None else values.reshape(len(values), x.heads, -1)

    def weight_report(self) -> list[str]:
        return self._weights.report()

    def sampler_kernels(self, vocab_size: int) -> NativeSampler:
        return NativeSampler(self._team, vocab_size, isa=self._isa)


_NO_INDICES = np.empty(0, np.int32)
_SYMBOLIC_BATCH = ForwardBatch(
    token_ids=_NO_INDICES,
    positions=_NO_INDICES,
    query_starts=_NO_INDICES,
    context_lens=_NO_INDICES,
    block_tables=(),
    rope_variants=_NO_INDICES,
    logits_rows=_NO_INDICES,
)


class _SymbolicCache:
    num_blocks = 0
    block_size = 0

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        raise AssertionError("blocks are not copied while recording")


_SYMBOLIC_CACHE = _SymbolicCache()


def _values(view: View) -> NDArray[np.float32]:
    assert view.buffer.values is not None, "the values of a recorded buffer live in the plan"
    return view.buffer.values[:, view.offset : view.offset + view.width]


def _set_step(plan: _native.Plan, batch: ForwardBatch, cache: KvCache | None) -> None:
    plan.set_step(
        batch.token_ids,
        batch.positions,
        batch.rope_variants,
        batch.query_starts,
        batch.context_lens,
        [np.ascontiguousarray(table, np.int32) for table in batch.block_tables],
        cache.arena if isinstance(cache, NativeKvCache) else None,
        int(batch.context_lens.max(initial=1)),
    )
