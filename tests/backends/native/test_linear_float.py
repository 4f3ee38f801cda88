"""Products with f32, bf16 and f16 weights: the bits that csrc/ops/linear.h defines, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Literal

import ml_dtypes
import numpy as np
import pytest

from octavo import _native
from octavo.backends.ops import DType, best_columns

Format = Literal["f32", "bf16", "f16"]
FORMATS: dict[Format, DType] = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}
NUMPY = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
TEAM = _native.Team(2)


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    with np.errstate(over="ignore"):
        return x.astype(NUMPY[dtype]).astype(np.float32)


def random(shape: tuple[int, ...], dtype: DType, seed: int) -> np.ndarray:
    """At most 12 significant bits, so that a product of two is exact in float32 and fma may be formed in float64."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if dtype != "float32":
        return rounded(x, dtype)
    return (x.view(np.uint32) & np.uint32(0xFFFFF000)).view(np.float32)


def fma(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return (x.astype(np.float64) * y + z).astype(np.float32)


def multiplied(x: np.ndarray, w: np.ndarray, format_: Format) -> np.ndarray:
    """x W^T in the order of linear.h."""
    acc = np.zeros((len(x), len(w)), np.float32)
    if format_ != "bf16":
        for k in range(x.shape[1]):
            acc = fma(x[:, k, None], w[None, :, k], acc)
        return acc
    for start in range(0, x.shape[1], 32):
        chains = [np.zeros_like(acc), np.zeros_like(acc)]
        for k in range(start, min(start + 32, x.shape[1])):
            chains[k % 2] = fma(x[:, k, None], w[None, :, k], chains[k % 2])
        acc = acc + (chains[0] + chains[1])
    return acc


def packed(w: np.ndarray, format_: Format, *, gated: bool = False) -> _native.PackedMatrix:
    n, k = w.shape
    size = _native.packed_bytes(format_, n, k, gated=gated)
    space = np.zeros(size + 64, np.uint8)
    memory = space[-space.ctypes.data % 64 :][:size]
    matrix = _native.PackedMatrix(memory, format_, n, k, gated=gated)
    _native.pack_values(matrix, memory, [("F32", np.ascontiguousarray(w).view(np.uint8))], TEAM)
    return matrix


@dataclass(frozen=True)
class Epilogue:
    bias: np.ndarray | None = None
    scale: float = 1.0
    softcap: float = 0.0
    activation: str = "none"
    gated: bool = False
    residual: np.ndarray | None = None
    residual_scale: float = 1.0
    is_logits: bool = False


class Product:
    """One linear operator in a plan of its own; its rows of x lie between others that are NaN."""

    def __init__(
        self,
        matrix: _native.PackedMatrix,
        dtype: DType,
        epilogue: Epilogue = Epilogue(),
        *,
        isa: str = "auto",
        num_threads: int = 2,
    ) -> None:
        self._plan = plan = _native.Plan(isa, _native.Team(num_threads), dtype)
        e = epilogue
        self._epilogue = e
        columns = matrix.n // 2 if e.gated else matrix.n
        extent = "logits_rows" if e.is_logits else "tokens"
        self._x = (plan.slot(matrix.k + 5, extent), 2, matrix.k)
        self._around_x = (self._x[0], 0, matrix.k + 5)
        self._y = (plan.slot(columns, extent), 0, columns)
        self._residual = None if e.residual is None else (plan.slot(columns, extent), 0, columns)
        plan.linear(
            x=self._x,
            weight=matrix,
            is_quantized=False,
            is_logits=e.is_logits,
            bias=e.bias,
            scale=e.scale,
            softcap=e.softcap,
            activation=e.activation,
            gated=e.gated,
            residual=self._residual,
            residual_scale=e.residual_scale,
            y=self._y,
        )
        for slot in (self._x, self._y, *([self._residual] if self._residual else [])):
            plan.keep(slot[0])

    def _set(self, x: np.ndarray) -> None:
        self._plan.set_rows(len(x))
        self._plan.reserve()
        self._plan.values(self._around_x)[:] = np.nan
        self._plan.values(self._x)[:] = x
        if self._residual is not None:
            self._plan.values(self._residual)[:] = self._epilogue.residual[: len(x)]

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self._set(x)
        self._plan.run(0, 1)
        return self._plan.values(self._y).copy()

    def best(self, x: np.ndarray) -> np.ndarray:
        self._set(x)
        best = np.empty(len(x), np.int32)
        self._plan.run_rows(0, 1, np.arange(len(x), dtype=np.int32), best)
        return best


def assert_same_bits(actual: np.ndarray, expected: np.ndarray, what: object = "") -> None:
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32), err_msg=str(what))


# -- bits ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", _native.usable_isas())
@pytest.mark.parametrize("format_", FORMATS)
def test_every_product_has_the_bits_of_its_definition(format_: Format, isa: str) -> None:
    dtype = FORMATS[format_]
    for k, n, rows in [(1, 1, 3), (31, 7, 5), (64, 48, 13), (70, 100, 49), (100, 39, 2), (576, 33, 7), (96, 37, 150)]:
        x, w = random((rows, k), dtype, k), random((n, k), dtype, n)
        y = Product(packed(w, format_), dtype, isa=isa)(x)
        assert_same_bits(y, rounded(multiplied(x, w, format_), dtype), (k, n, rows))


@pytest.mark.parametrize("format_", FORMATS)
def test_a_row_has_the_same_bits_alone_and_among_any_number_of_others(format_: Format) -> None:
    dtype = FORMATS[format_]
    x, w = random((700, 70), dtype, 1), random((200, 70), dtype, 2)
    matrix = packed(w, format_)
    expected = rounded(multiplied(x, w, format_), dtype)
    multiply = Product(matrix, dtype)
    for rows in [*range(1, 30), 47, 48, 49, 64, 97, 300, 512, 700]:
        assert_same_bits(multiply(x[-rows:]), expected[-rows:], rows)
    for num_threads in (1, 3):
        assert_same_bits(Product(matrix, dtype, num_threads=num_threads)(x[:100]), expected[:100], num_threads)


@pytest.mark.parametrize("format_", FORMATS)
def test_a_very_long_k_is_summed_in_slices_without_a_trace(format_: Format) -> None:
    dtype = FORMATS[format_]
    x, w = random((48, 9001), dtype, 3), random((20, 9001), dtype, 4)
    matrix = packed(w, format_)
    y = Product(matrix, dtype)(x)
    assert_same_bits(y[:3], rounded(multiplied(x[:3], w, format_), dtype))
    assert_same_bits(y[7:8], Product(matrix, dtype)(x[7:8]))


def test_float32_activations_meet_bfloat16_weights_in_full() -> None:
    x, w = random((9, 64), "float32", 5), random((40, 64), "bfloat16", 6)
    y = Product(packed(w, "bf16"), "float32")(x)
    assert_same_bits(y, multiplied(x, w, "bf16"))


@pytest.mark.parametrize("format_", FORMATS)
def test_subnormal_factors_count_as_zero_and_nan_stays_in_its_row(format_: Format) -> None:
    dtype = FORMATS[format_]
    x, w = random((8, 64), dtype, 7), random((16, 64), dtype, 8)
    x[2, 5] = np.nan
    if format_ != "f16":  # every subnormal float16 is a normal float32
        w[:, 9] = 1e-39
        x[3] = 1e-39
    y = Product(packed(w, format_), dtype)(x)
    counted = np.where(np.abs(x) < 2.0**-126, np.float32(0), x), np.where(np.abs(w) < 2.0**-126, np.float32(0), w)
    expected = rounded(multiplied(*counted, format_), dtype)
    assert np.isnan(y[2]).all()
    others = np.arange(8) != 2
    assert_same_bits(y[others], expected[others])


def test_no_rows_are_no_work() -> None:
    matrix = packed(random((33, 64), "float32", 9), "f32")
    assert Product(matrix, "float32")(np.empty((0, 64), np.float32)).shape == (0, 33)


# -- what follows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", FORMATS)
def test_bias_and_residual_are_rounded_in_order(format_: Format) -> None:
    dtype = FORMATS[format_]
    for rows, n in product((1, 6, 50), (16, 64, 75)):
        x, w = random((rows, 64), dtype, rows), random((n, 64), dtype, n)
        bias, residual = random((n,), dtype, 10), random((rows, n), dtype, 11)
        acc = multiplied(x, w, format_)
        plain = Product(packed(w, format_), dtype, Epilogue(residual=residual, residual_scale=0.5))(x)
        assert_same_bits(plain, rounded(fma(np.float32(0.5), rounded(acc, dtype), residual), dtype), (rows, n))
        both = Product(packed(w, format_), dtype, Epilogue(bias=bias, residual=residual))(x)
        assert_same_bits(both, rounded(residual + rounded(acc + bias, dtype), dtype), (rows, n))


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("half", [16, 48, 37])
def test_a_gated_matrix_multiplies_the_activated_gate_with_up(format_: Format, half: int) -> None:
    dtype = FORMATS[format_]
    x, w = random((50, 96), dtype, 12), random((2 * half, 96), dtype, 13)
    bias = random((2 * half,), dtype, 14)
    matrix = packed(w, format_, gated=True)
    both = Product(matrix, dtype, Epilogue(bias=bias))(x)
    assert_same_bits(both, rounded(multiplied(x, w, format_) + bias, dtype), "without the gate")
    gate, up = both[:, :half].astype(np.float64), both[:, half:]
    activated = rounded(gate / (1 + np.exp(-gate)) * up, dtype)
    y = Product(matrix, dtype, Epilogue(bias=bias, activation="silu", gated=True))(x)
    step = {"float32": 2.0**-21, "bfloat16": 2.0**-7, "float16": 2.0**-9}[dtype]
    np.testing.assert_allclose(y, activated, rtol=step, atol=1e-6)
    for rows in (1, 3, 20):
        few = Product(matrix, dtype, Epilogue(bias=bias, activation="silu", gated=True))(x[:rows])
        assert_same_bits(few, y[:rows], rows)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_instruction_sets_agree_on_every_epilogue(activation: str) -> None:
    x, w = random((20, 64), "bfloat16", 15), random((96, 64), "bfloat16", 16)
    bias, residual = random((96,), "bfloat16", 17), random((20, 96), "bfloat16", 18)
    for dtype, gated in product(NUMPY, (False, True)):
        columns = 48 if gated else 96
        e = Epilogue(bias, 1.0, 0.0, activation, gated, np.ascontiguousarray(residual[:, :columns]), 0.75)
        first, *others = (Product(packed(w, "bf16", gated=gated), dtype, e, isa=i)(x) for i in _native.usable_isas())
        for other in others:
            assert_same_bits(other, first, (dtype, gated))


def test_logits_are_scaled_capped_and_not_rounded() -> None:
    x, w = random((20, 64), "bfloat16", 19), random((50, 64), "bfloat16", 20)
    acc = multiplied(x, w, "bf16")
    e = Epilogue(scale=0.25, softcap=3.0, is_logits=True)
    y = Product(packed(w, "bf16"), "bfloat16", e)(x)
    np.testing.assert_allclose(y, 3 * np.tanh(acc.astype(np.float64) * 0.25 / 3), rtol=2e-6)
    scaled = Product(packed(w, "bf16"), "bfloat16", Epilogue(scale=0.25, is_logits=True))(x)
    assert_same_bits(scaled, acc * np.float32(0.25))


@pytest.mark.parametrize("rows", [1, 2, 7, 40])
@pytest.mark.parametrize("n", [5, 64, 1003])
def test_best_is_the_lowest_column_of_the_largest_logit(rows: int, n: int) -> None:
    rng = np.random.default_rng([rows, n])
    x, w = rng.integers(-2, 3, (rows, 32)).astype(np.float32), rng.integers(-2, 3, (n, 32)).astype(np.float32)
    for isa in _native.usable_isas():
        multiply = Product(packed(w, "bf16"), "bfloat16", Epilogue(is_logits=True), isa=isa)
        np.testing.assert_array_equal(multiply.best(x), np.argmax(x @ w.T, axis=1))


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_best_is_minus_one_where_a_logit_is_nan_or_infinity_or_all_are_minus_infinity(isa: str) -> None:
    matrix = packed(np.zeros((50, 32), np.float32), "f32")
    x = np.ones((3, 32), np.float32)

    def best_with(bias: np.ndarray) -> list[int]:
        found = Product(matrix, "float32", Epilogue(bias=bias, is_logits=True), isa=isa).best(x).tolist()
        assert found == best_columns(np.tile(bias, (3, 1))).tolist()
        return found

    bias = np.full(50, -np.inf, np.float32)
    assert best_with(bias) == [-1] * 3
    bias[[44, 45]] = -1e30
    assert best_with(bias) == [44] * 3
    for bad in (np.nan, -np.nan, np.inf):
        for column in (0, 16, 31, 44, 49):
            spoiled = bias.copy()
            spoiled[column] = bad
            assert best_with(spoiled) == [-1] * 3, (bad, column)
