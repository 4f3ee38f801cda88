"""Packed matrices read back by the words of csrc/ops/linear.h, and tensors that count how often they are read."""

from __future__ import annotations

from dataclasses import dataclass, field

import ml_dtypes
import numpy as np

from octavo.backends.native.weights import PackedSegment, PackedWeight
from octavo.quantization.gguf_blocks import TYPES_BY_NAME, dequantize

PANEL = 16
PLAIN = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
TYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Where the float16 numbers of a block are.
HALVES = {
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q8_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ4_NL": [0],
    "IQ4_XS": [0],
    "MXFP4": [],
}


@dataclass(eq=False)
class Tensor:
    """A `HostTensor` over plain values or over blocks."""

    name: str
    type_name: str
    values: np.ndarray | None = None
    blocks: np.ndarray | None = None
    num_reads: int = field(default=0)

    @classmethod
    def plain(cls, values: np.ndarray, name: str = "plain") -> Tensor:
        return cls(name, TYPE_NAMES[str(values.dtype)], values)

    @property
    def identity(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        if self.values is not None:
            return self.values.shape
        type_ = TYPES_BY_NAME[self.type_name]
        return len(self.blocks), self.blocks.shape[1] // type_.block_bytes * type_.block_size

    def numpy(self) -> np.ndarray:
        self.num_reads += 1
        return self.values if self.values is not None else dequantize(self.type_name, self.blocks)

    def stored_blocks(self) -> np.ndarray | None:
        self.num_reads += 1
        return self.blocks


def random_blocks(type_name: str, n: int, k: int, seed: int = 0) -> Tensor:
    """Every bit of the integers is random; the scales are ordinary numbers of either sign."""
    rng = np.random.default_rng(seed)
    type_ = TYPES_BY_NAME[type_name]
    assert k % type_.block_size == 0
    blocks = rng.integers(0, 256, (n * k // type_.block_size, type_.block_bytes), dtype=np.uint8)
    for at in HALVES[type_name]:
        blocks[:, at : at + 2] = (rng.standard_normal((len(blocks), 1)) * 0.02).astype(np.float16).view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(90, 140, len(blocks))
    return Tensor(f"{type_name} {n} {k} {seed}", type_name, blocks=blocks.reshape(n, -1))


def padded_values(segment: PackedSegment) -> np.ndarray:
    """The weights of a segment in the order of its panels, padding included. float32 [16 panels, padded_k]"""
    matrix, memory = segment.matrix, segment.matrix.memory
    panels, k = matrix.num_panels, matrix.padded_k
    if matrix.format in PLAIN:
        dtype = np.dtype(PLAIN[matrix.format])
        per = 2 if matrix.format == "bf16" else 1
        data = memory[: panels * k * PANEL * dtype.itemsize].view(dtype).reshape(panels, k // per, PANEL, per)
        return data.transpose(0, 2, 1, 3).reshape(panels * PANEL, k).astype(np.float32)
    q, num_bytes = _integers(segment)
    groups = k // matrix.group
    scales, minima = _scales(segment, num_bytes)
    # Products are exact in float64, so that the sum is rounded as a fused multiply-add rounds it.
    values = scales.astype(np.float64)[:, :, None] * q.reshape(len(q), groups, matrix.group)
    return (values + minima.astype(np.float64)[:, :, None]).astype(np.float32).reshape(len(q), k)


def integers(segment: PackedSegment) -> np.ndarray:
    return _integers(segment)[0]


def _integers(segment: PackedSegment) -> tuple[np.ndarray, int]:
    matrix, memory = segment.matrix, segment.matrix.memory
    panels, k = matrix.num_panels, matrix.padded_k
    if matrix.format == "int8":
        num_bytes = panels * k * PANEL
        codes = memory[:num_bytes].view(np.int8).reshape(panels, k // 4, PANEL, 4)
        return codes.transpose(0, 2, 1, 3).reshape(panels * PANEL, k).astype(np.int32), num_bytes
    num_bytes = panels * k * PANEL // 2
    packed = memory[:num_bytes].reshape(panels, k // 8, PANEL, 4)
    codes = np.stack([packed & 15, packed >> 4], axis=3).transpose(0, 2, 1, 3, 4).reshape(panels * PANEL, k)
    return codes.astype(np.int32) - (0 if matrix.has_min else 8), num_bytes


def _scales(segment: PackedSegment, start: int) -> tuple[np.ndarray, np.ndarray]:
    matrix = segment.matrix
    groups = matrix.padded_k // matrix.group
    dtype = np.dtype(PLAIN[matrix.scale_format])
    size = matrix.num_panels * groups * PANEL * dtype.itemsize
    arrays = []
    for at in (start, start + (size + 63) // 64 * 64):
        if at >= len(matrix.memory):
            arrays.append(np.zeros_like(arrays[0]))
            continue
        array = matrix.memory[at : at + size].view(dtype).reshape(matrix.num_panels, groups, PANEL)
        arrays.append(array.transpose(0, 2, 1).reshape(-1, groups).astype(np.float32))
    return arrays[0], arrays[1]


def values(weight: PackedWeight) -> np.ndarray:
    """The weights [n, k] of a parameter, in float32."""
    return np.concatenate([_rows(segment) for segment in weight.segments])


def _rows(segment: PackedSegment) -> np.ndarray:
    padded = padded_values(segment)[:, : segment.k]
    if not segment.gated:
        return padded[: segment.n]
    half = segment.n // 2
    panels = padded.reshape(-1, 2, PANEL, segment.k)
    return np.concatenate([panels[:, which].reshape(-1, segment.k)[:half] for which in (0, 1)])
