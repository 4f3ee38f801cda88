"""The AVX-512 and AMX builds of the float products give the bits of the definition: run by an emulated processor."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tests.backends.native.test_linear_float import (
    FORMATS,
    Format,
    assert_same_bits,
    multiplied,
    packed,
    random,
    rounded,
)
from tests.native.emulator import KERNEL_FLAGS, Emulator, Unavailable, core

from octavo import _native
from octavo.backends.ops import DType

CSRC = Path(__file__).parents[3] / "csrc"
GLUE = r"""
#include "ops/linear.h"

namespace octavo::OCTAVO_ISA { void linear_float(const LinearArgs&, Team&); }
using namespace octavo;

static Team* team = new Team(1);
static PackedMatrix matrix;
static LinearArgs args;

extern "C" {

void set_args(void** arrays, const int64_t* sizes) {
    matrix.format = static_cast<WeightFormat>(sizes[0]), matrix.gated = sizes[1] != 0, matrix.n = sizes[2];
    matrix.k = sizes[3], matrix.padded_k = sizes[4], matrix.num_panels = sizes[5], matrix.data = arrays[0];
    args = {.weight = &matrix, .rows = sizes[6]};
    args.x = static_cast<float*>(arrays[1]), args.x_stride = sizes[7], args.x_is_bf16 = sizes[8] != 0;
    args.y = static_cast<float*>(arrays[2]), args.y_stride = sizes[9];
    args.best = static_cast<int32_t*>(arrays[3]), args.best_scratch = static_cast<LinearArgs::Best*>(arrays[4]);
    args.epilogue.bias = static_cast<float*>(arrays[5]);
    args.epilogue.residual = static_cast<float*>(arrays[6]), args.epilogue.residual_stride = sizes[9];
    args.epilogue.rounding = static_cast<Rounding>(sizes[10]);
}

void run() { OCTAVO_ISA::linear_float(args, *team); }

}
"""


class Kernel:
    """`linear_float` of one instruction set on the emulated processor."""

    def __init__(self, folder: Path, isa: Literal["avx512", "amx"]) -> None:
        (folder / "glue.cpp").write_text(GLUE)
        options = ["-fPIC", "-std=c++20", "-ffp-contract=off", f"-I{CSRC}", f"-DOCTAVO_ISA={isa}", "-pthread"]
        compiler = [os.environ.get("CXX", "c++"), "-O1", *options]
        kernel, team = CSRC / "ops/linear_float.cpp", CSRC / "core/team.cpp"
        for source, flags in ((kernel, ["-w", *KERNEL_FLAGS[isa]]), (team, []), (Path("glue.cpp"), [])):
            subprocess.run([*compiler, *flags, "-c", str(source)], cwd=folder, check=True, timeout=300)
        objects = "linear_float.o", "team.o", "glue.o"
        subprocess.run([*compiler, "-shared", *objects, "-o", "kernel.so"], cwd=folder, check=True, timeout=100)
        self._library = ctypes.CDLL(str(folder / "kernel.so"))
        self._emulator = Emulator(isa)

    def __call__(
        self,
        x: np.ndarray,
        matrix: _native.PackedMatrix,
        dtype: DType,
        *,
        bias: np.ndarray | None = None,
        residual: np.ndarray | None = None,
        wants_best: bool = False,
    ) -> np.ndarray:
        rows, k = x.shape
        wide = np.full((rows, k + 5), np.nan, np.float32)
        wide[:, :k] = x
        y = np.full((rows, matrix.n), np.nan, np.float32)
        best = np.empty(rows, np.int32) if wants_best else None
        best_scratch = np.empty((matrix.num_panels, rows, 2), np.float32)
        arrays = [matrix.memory, wide, y, best, best_scratch, bias, residual]
        pointers = [None if array is None else array.ctypes.data for array in arrays]
        formats, dtypes = list(FORMATS), list(FORMATS.values())
        sizes = [formats.index(matrix.format), matrix.gated, matrix.n, k, matrix.padded_k, matrix.num_panels]
        sizes += [rows, k + 5, dtype == "bfloat16", matrix.n, dtypes.index(dtype)]
        self._library.set_args((ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * len(sizes))(*sizes))
        self._emulator.call(self._library.run)
        return y if best is None else best


@pytest.fixture(scope="module", params=list(KERNEL_FLAGS))
def kernel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    try:
        core()
    except Unavailable as reason:
        pytest.skip(str(reason))
    return Kernel(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("format_", FORMATS)
def test_products_of_any_number_of_rows_have_the_bits_of_the_definition(kernel: Kernel, format_: Format) -> None:
    dtype = FORMATS[format_]
    for k, n in [(70, 40), (32, 100)]:
        x, w = random((49, k), dtype, k), random((n, k), dtype, n)
        matrix, expected = packed(w, format_), rounded(multiplied(x, w, format_), dtype)
        for rows in (1, 2, 3, 4, 7, 12, 16, 17, 33, 49):
            assert_same_bits(kernel(x[-rows:], matrix, dtype), expected[-rows:], (k, n, rows))


def test_a_long_k_is_taken_in_blocks_of_rows(kernel: Kernel) -> None:
    x, w = random((37, 9000), "bfloat16", 1), random((16, 9000), "bfloat16", 2)
    y = kernel(x, packed(w, "bf16"), "bfloat16")
    assert_same_bits(y, rounded(multiplied(x, w, "bf16"), "bfloat16"))


def test_float32_activations_do_not_go_through_bfloat16(kernel: Kernel) -> None:
    x, w = random((20, 64), "float32", 3), random((20, 64), "bfloat16", 4)
    assert_same_bits(kernel(x, packed(w, "bf16"), "float32"), multiplied(x, w, "bf16"))


def test_subnormal_factors_count_as_zero(kernel: Kernel) -> None:
    x, w = random((20, 64), "bfloat16", 5), random((40, 64), "bfloat16", 6)
    expected = multiplied(np.where(np.arange(64) == 9, np.float32(0), x), w, "bf16")
    x[:, 9] = 1e-39
    assert_same_bits(kernel(x, packed(w, "bf16"), "bfloat16"), rounded(expected, "bfloat16"))


def test_gated_panels_bias_residual_and_best(kernel: Kernel) -> None:
    x, w = random((21, 64), "bfloat16", 7), random((74, 64), "bfloat16", 8)
    bias, residual = random((74,), "bfloat16", 9), random((21, 74), "bfloat16", 10)
    acc = multiplied(x, w, "bf16")
    both = rounded(residual + rounded(acc + bias, "bfloat16"), "bfloat16")
    for gated in (False, True):
        y = kernel(x, packed(w, "bf16", gated=gated), "bfloat16", bias=bias, residual=residual)
        assert_same_bits(y, both, gated)
    best = kernel(x, packed(w, "bf16"), "bfloat16", wants_best=True)
    np.testing.assert_array_equal(best, np.argmax(rounded(acc, "bfloat16"), axis=1))
