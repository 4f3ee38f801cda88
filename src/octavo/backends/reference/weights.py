"""What the reference backend makes of a host weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from octavo.backends.ops import DType, HostTensor

NUMPY_DTYPES: dict[DType, Any] = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def load_rounded(parts: Sequence[HostTensor | np.ndarray], dtype: DType) -> torch.Tensor:
    """The parts one below the other, rounded to `dtype`, as float32."""
    shapes = [part.shape for part in parts]
    values = np.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), np.float32)
    row = 0
    for part, shape in zip(parts, shapes, strict=True):
        array = part if isinstance(part, np.ndarray) else part.numpy()
        rounded = array if array.dtype == NUMPY_DTYPES[dtype] else array.astype(NUMPY_DTYPES[dtype])
        values[row : row + shape[0]] = rounded
        row += shape[0]
    return torch.from_numpy(values)


def padded_rows(num_rows: int) -> int:
    """`num_rows` itself up to 32, beyond that one of eight sizes (at most) between a power of two and the next."""
    if num_rows <= 32:
        return num_rows
    step = max(16, 1 << ((num_rows - 1).bit_length() - 4))
    return -(-num_rows // step) * step


class LinearWeight:
    """A matrix [out, in] for x @ W.T in float32.

    On the CPU it is packed for oneDNN, whose packed product is twice to six times as fast as `F.linear` at up to
    32 rows, and gives a row the same bits whatever the number of rows (a test holds it to that).

    oneDNN compiles and keeps code for every number of rows that it meets, about 2 ms and 0.6 MB each time. So
    there are few such numbers: see `padded_rows`.
    """

    def __init__(self, matrix: torch.Tensor) -> None:
        self.shape = tuple(matrix.shape)
        has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self._is_packed = matrix.device.type == "cpu" and has_onednn
        self._matrix = torch.ops.mkldnn._reorder_linear_weight(matrix, None) if self._is_packed else matrix

    def product(self, x: torch.Tensor) -> torch.Tensor:
        if not self._is_packed:
            return torch.nn.functional.linear(x, self._matrix)
        num_rows = len(x)
        padding = padded_rows(num_rows) - num_rows
        if padding:
            x = torch.nn.functional.pad(x, (0, 0, 0, padding))
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._matrix, None, "none", [], "")
        return y[:num_rows]


class EmbeddingWeight:
    """A table [V, E], kept in the backend's dtype; packed a second time when it serves as a tied head."""

    def __init__(self, table: torch.Tensor, dtype: torch.dtype) -> None:
        self.table = table.to(dtype)
        self._head: LinearWeight | None = None

    def as_head(self) -> LinearWeight:
        if self._head is None:
            self._head = LinearWeight(self.table.float())
        return self._head
