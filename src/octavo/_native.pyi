"""The C++ extension (csrc/bindings.cpp). Only backends.native imports it."""

import numpy as np
from numpy.typing import NDArray

def cpu_features() -> dict[str, bool]: ...
def cpu_model_name() -> str: ...
def usable_isas() -> tuple[str, ...]: ...
def kernel_address(isa: str, kernel: str) -> int:
    """Where a kernel of csrc/kernels.h lies, whether or not this processor can run it."""

def bf16_to_f32(source: NDArray[np.uint16], target: NDArray[np.float32], isa: str = "auto") -> None: ...
def f32_to_bf16(source: NDArray[np.float32], target: NDArray[np.uint16], isa: str = "auto") -> None: ...

PACK_VERSION: int

class Team:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class PackedMatrix:
    """See csrc/ops/linear.h. Keeps `memory` alive, which takes `packed_bytes` and begins at a multiple of 64."""

    def __init__(
        self,
        memory: NDArray[np.uint8],
        format: str,
        n: int,
        k: int,
        group: int = 0,
        scale_format: str = "f32",
        has_min: bool = False,
        gated: bool = False,
    ) -> None: ...
    @property
    def format(self) -> str: ...
    @property
    def scale_format(self) -> str: ...
    @property
    def has_min(self) -> bool: ...
    @property
    def gated(self) -> bool: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def padded_k(self) -> int: ...
    @property
    def num_panels(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def memory(self) -> NDArray[np.uint8]:
        """Data, scales and minima, as they lie there. Not writable."""

RowBytes = tuple[str, NDArray[np.uint8]]  # 'F32', 'Q4_K' ..., and [rows, bytes of a row]

def packed_bytes(
    format: str,
    n: int,
    k: int,
    group: int = 0,
    scale_format: str = "f32",
    has_min: bool = False,
    gated: bool = False,
) -> int: ...
def integer_form(type_name: str) -> tuple[str, int, bool] | None: ...
def values_fit(format: str, parts: list[RowBytes], k: int, team: Team) -> bool: ...
def scales_fit_f16(parts: list[RowBytes], k: int) -> bool: ...
def pack_values(target: PackedMatrix, memory: NDArray[np.uint8], parts: list[RowBytes], team: Team) -> int: ...
def pack_blocks(target: PackedMatrix, memory: NDArray[np.uint8], parts: list[RowBytes], team: Team) -> None: ...
def quantize_values(target: PackedMatrix, memory: NDArray[np.uint8], parts: list[RowBytes], team: Team) -> float: ...
def map_over(memory: NDArray[np.uint8], fd: int, offset: int) -> None: ...

class Sampler:
    """See csrc/ops/sampler.h and backends/sampler.py, whose arrays it takes. Keeps `team` alive."""

    def __init__(self, isa: str, team: Team, vocab_size: int) -> None: ...
    def sample(
        self,
        logits: NDArray[np.float32],
        options: NDArray[np.uint8],  # [N, bytes of ROW_OPTIONS]
        positions: NDArray[np.int64],
        sources: NDArray[np.int32],
        edits: tuple[NDArray[np.generic], ...] | None,
        masks: tuple[NDArray[np.int32], NDArray[np.uint32]] | None,
        given: NDArray[np.int32] | None,
        processed: bool,
        token_ids: NDArray[np.int32],  # filled, as are those behind it
        statuses: NDArray[np.uint8],
        described: tuple[NDArray[np.generic], ...] | None,
    ) -> None: ...

class KvArena:
    """The paged keys and values of all layers (csrc/ops/attention.h)."""

    def __init__(
        self, *, dtype: str, num_blocks: int, block_size: int, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> None: ...
    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None: ...
    @property
    def block_bytes(self) -> int: ...

_View = tuple[int, int, int]  # slot, offset, width
_Vector = NDArray[np.float32]
_Indices = NDArray[np.int32]

class Plan:
    """A recorded forward pass (csrc/plan/plan.h). Nodes are appended in the order in which they run."""

    def __init__(self, isa: str, team: Team, dtype: str) -> None: ...
    def slot(self, width: int, extent: str) -> int: ...
    def keep(self, slot: int) -> None: ...
    @property
    def num_nodes(self) -> int: ...
    @property
    def arena_bytes(self) -> int: ...
    def embedding(self, *, table: list[PackedMatrix], scale: float, y: _View) -> None: ...
    def norm(
        self,
        *,
        is_layer_norm: bool,
        x: _View,
        heads: int,
        weight: _Vector,
        bias: _Vector | None,
        eps: float,
        offset: float,
        addend: _View | None,
        addend_scale: float,
        sum: _View | None,
        y: _View,
    ) -> None: ...
    def quantize(self, *, x: _View, padded_k: int, group: int, y: _View) -> None: ...
    def linear(
        self,
        *,
        x: _View,
        weight: PackedMatrix,
        is_quantized: bool,
        is_logits: bool,
        bias: _Vector | None,
        scale: float,
        softcap: float,
        activation: str,
        gated: bool,
        residual: _View | None,
        residual_scale: float,
        y: _View,
    ) -> None: ...
    def activation(self, *, x: _View, kind: str, gated: bool, y: _View) -> None: ...
    def add(self, *, x: _View, addend: _View, scale: float, y: _View) -> None: ...
    def angles(self, *, inv_freq: list[_Vector], attention_factor: list[float], y: _View) -> None: ...
    def rope(self, *, x: _View, angles: _View, head_dim: int, rotary_dim: int, y: _View) -> None: ...
    def attend(
        self,
        *,
        q: _View,
        k: _View,
        v: _View,
        group: int,
        layer: int,
        num_heads: int,
        head_dim: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: _Vector | None,
        y: _View,
    ) -> None: ...
    def pick_rows(self, *, x: _View, y: _View) -> None: ...
    def set_step(
        self,
        token_ids: _Indices,
        positions: _Indices,
        rope_variants: _Indices,
        query_starts: _Indices,
        context_lens: _Indices,
        block_tables: list[_Indices],
        cache: KvArena | None,
        max_context: int,
    ) -> None: ...
    def set_rows(self, num_tokens: int) -> None: ...
    def reserve(self) -> None: ...
    def run(self, first: int, end: int) -> None: ...
    def run_rows(self, first: int, end: int, rows: _Indices, best: _Indices | None) -> None: ...
    def values(self, view: _View) -> _Vector: ...

class RooflineProbe:
    """Memory of `read_bytes`, and the kernels that measure (csrc/ops/roofline.h). Keeps `team` alive."""

    def __init__(self, isa: str, team: Team, read_bytes: int) -> None: ...
    def read(self, streams: int) -> float:
        """Seconds that one pass over the memory takes."""

    def multiply(self, kind: str, rounds: int) -> tuple[float, int]:
        """Seconds, and how many multiplications and additions they were; `kind` is f32, bf16 or int8."""
