"""Products with int4 and int8 weights against csrc/ops/linear.h, word by word: the same bits on every instruction set,
for any number of rows and threads, with each kind of scale."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.native.emulator import KERNEL_FLAGS, Emulator, Unavailable, core

from octavo import _native

PANEL = 16
ROW = 0  # the group of a scale for a whole row
GROUPS = (16, 32, 64, 128, ROW)
ISAS = _native.usable_isas()


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b is exact in float64."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(np.float32)


def aligned(values: np.ndarray) -> np.ndarray:
    raw = np.zeros(values.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    raw[start : start + values.nbytes] = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    return raw[start : start + values.nbytes]


def padded(parts: list[np.ndarray]) -> np.ndarray:
    """Bytes of the parts, each from a multiple of 64 on."""
    pieces = []
    for part in parts:
        data = np.ascontiguousarray(part).view(np.uint8).reshape(-1)
        pieces += [data, np.zeros(-len(data) % 64, np.uint8)]
    return aligned(np.concatenate(pieces))


@dataclass
class Weight:
    """Random integers, -128 among those of int8, in the order of the packed columns."""

    format: str
    n: int
    k: int
    group: int
    scale_format: str = "f32"
    has_min: bool = False
    gated: bool = False
    q: np.ndarray = field(init=False)  # [packed columns, padded_k]
    scales: np.ndarray = field(init=False)  # [packed columns, groups]
    mins: np.ndarray = field(init=False)
    memory: np.ndarray = field(init=False)
    matrix: _native.PackedMatrix = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.n * 1000 + self.k)
        self.padded_k = -(-self.k // 64) * 64
        self.group = self.group or self.padded_k
        columns = len(self.columns())
        low, high = (0, 16) if self.format == "int4" else (-128, 128)
        self.q = rng.integers(low, high, (columns, self.padded_k))
        self.q[:, :: self.padded_k // 7] = low
        shape = (columns, self.padded_k // self.group)
        dtype = np.float16 if self.scale_format == "f16" else np.float32
        self.scales, self.mins = (
            (rng.standard_normal(shape) * size).astype(dtype).astype(np.float32) for size in (0.01, 0.1)
        )
        self.pack()

    def pack(self) -> None:
        dtype = np.float16 if self.scale_format == "f16" else np.float32
        parts = [part.astype(dtype).reshape(-1, PANEL, part.shape[1]) for part in (self.scales, self.mins)]
        self.memory = padded([self._codes(), *(part.transpose(0, 2, 1) for part in parts[: 1 + self.has_min])])
        self.matrix = _native.PackedMatrix(
            self.memory, self.format, self.n, self.k, self.group, self.scale_format, self.has_min, self.gated
        )

    def columns(self) -> np.ndarray:
        """The output column of each packed one; -1 for padding."""
        half = self.n // 2 if self.gated else self.n
        own = np.arange(-(-half // PANEL) * PANEL)
        own[half:] = -1
        if not self.gated:
            return own
        panels = own.reshape(-1, 1, PANEL)
        return np.concatenate([panels, np.where(panels < 0, -1, panels + half)], axis=1).reshape(-1)

    def _codes(self) -> np.ndarray:
        if self.format == "int8":
            return self.q.astype(np.int8).reshape(-1, PANEL, self.padded_k // 4, 4).transpose(0, 2, 1, 3)
        eight = self.q.astype(np.uint8).reshape(-1, PANEL, self.padded_k // 8, 2, 4).transpose(0, 2, 1, 3, 4)
        return eight[:, :, :, 0] | eight[:, :, :, 1] << 4

    def integers(self) -> np.ndarray:
        return self.q - 8 if self.format == "int4" and not self.has_min else self.q

    def values(self) -> np.ndarray:
        """float32 [packed columns, k]"""
        scales, mins = (np.repeat(part, self.group, axis=1) for part in (self.scales, self.mins))
        q = self.integers().astype(np.float32)
        return (fma(scales, q, mins) if self.has_min else scales * q)[:, : self.k]

    def in_order(self, packed: np.ndarray) -> np.ndarray:
        """[rows, packed columns] as the [rows, n] of the product."""
        out = np.empty((len(packed), self.n), np.float32)
        at = self.columns()
        out[:, at[at >= 0]] = packed[:, at >= 0]
        return out


def quantized(x: np.ndarray, padded_k: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q, scales and sums of rows, as `QuantizedRows` says."""
    rows = np.zeros((len(x), padded_k), np.float32)
    rows[:, : x.shape[1]] = x
    groups = rows.reshape(len(x), -1, group)
    scales = np.abs(groups).max(axis=2) / np.float32(127)
    bad = ~np.isfinite(groups).all(axis=2)
    dead = bad | (scales == 0)
    q = np.rint(np.where(dead[:, :, None], 0, groups / np.where(dead, 1, scales)[:, :, None])).astype(np.int32)
    return q, np.where(bad, np.float32(np.nan), scales), q.sum(axis=2, dtype=np.int32)


def expected(x: np.ndarray, weight: Weight, quantizes: bool) -> np.ndarray:
    columns = len(weight.q)
    acc = np.zeros((len(x), columns), np.float32)
    if not quantizes:
        values = weight.values()
        for k in range(weight.k):
            acc = fma(x[:, k, None], values[None, :, k], acc)
        return weight.in_order(acc)
    q, scales, sums = quantized(x, weight.padded_k, weight.group)
    integers = weight.integers().reshape(columns, -1, weight.group)
    for g in range(q.shape[1]):
        dot = (q[:, g].astype(np.float64) @ integers[:, g].astype(np.float64).T).astype(np.float32)
        acc = fma(scales[:, g, None] * weight.scales[None, :, g], dot, acc)
        if weight.has_min:
            acc = fma((scales[:, g] * sums[:, g].astype(np.float32))[:, None], weight.mins[None, :, g], acc)
    return weight.in_order(acc)


def product(
    x: np.ndarray,
    weight: Weight,
    *,
    quantizes: bool = True,
    isa: str = "auto",
    num_threads: int = 1,
    dtype: str = "float32",
    bias: np.ndarray | None = None,
    activation: str = "none",
    gated: bool = False,
    residual: np.ndarray | None = None,
) -> np.ndarray:
    plan = _native.Plan(isa, _native.Team(num_threads), dtype)
    source = (plan.slot(weight.k, "tokens"), 0, weight.k)
    width = weight.n // 2 if gated else weight.n
    target, base = ((plan.slot(width, "tokens"), 0, width) for _ in range(2))
    operand = source
    if quantizes:
        width = weight.padded_k // 4 + 2 * (weight.padded_k // weight.group)
        operand = (plan.slot(width, "tokens"), 0, width)
        plan.quantize(x=source, padded_k=weight.padded_k, group=weight.group, y=operand)
    plan.linear(
        x=operand,
        weight=weight.matrix,
        is_quantized=quantizes,
        is_logits=False,
        bias=bias,
        scale=1.0,
        softcap=0.0,
        activation=activation,
        gated=gated,
        residual=None if residual is None else base,
        residual_scale=0.5,
        y=target,
    )
    for place in (source, target, base):
        plan.keep(place[0])
    plan.set_rows(len(x))
    plan.reserve()
    plan.values(source)[:] = x
    if residual is not None:
        plan.values(base)[:] = residual
    plan.run(0, plan.num_nodes)
    return plan.values(target).copy()


def activations(num_rows: int, k: int, seed: int = 0) -> np.ndarray:
    """Ordinary rows, one with a group of zeros and one with a large value."""
    x = np.random.default_rng(seed).standard_normal((num_rows, k)).astype(np.float32)
    x[1::5, :64] = 0
    x[2::5, k // 2] = 100
    return x


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return np.array_equal(a.view(np.int32), b.view(np.int32))


# -- what this processor has -----------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_every_kind_of_scale_gives_the_bits_of_the_definition(format: str, group: int, isa: str) -> None:
    for scale_format, has_min in (("f32", False), ("f32", True), ("f16", False), ("f16", True)):
        weight = Weight(format, 70, 200, group, scale_format, has_min)
        x = activations(13, 200)
        for rows in (1, 4, 13):
            assert same_bits(product(x[:rows], weight, isa=isa), expected(x[:rows], weight, True))
        assert same_bits(product(x, weight, isa=isa, quantizes=False), expected(x, weight, False))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("group", [32, ROW])
def test_a_row_has_the_same_bits_however_many_there_are(format: str, group: int, isa: str) -> None:
    weight = Weight(format, 40, 96, group, has_min=format == "int4")
    x = activations(700, 96)
    whole = expected(x, weight, True)
    for rows in (1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 17, 31, 33, 64, 121, 241, 700):
        assert same_bits(product(x[-rows:], weight, isa=isa), whole[-rows:])
    dequantized = product(x, weight, isa=isa, quantizes=False)
    for rows in (1, 7, 241):
        assert same_bits(product(x[-rows:], weight, isa=isa, quantizes=False), dequantized[-rows:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("k", [1, 63, 64, 65, 640, 641, 1300])
def test_every_depth_and_width(k: int, isa: str) -> None:
    for n, group in ((1, ROW), (16, 32), (17, 64), (130, ROW)):
        for format in ("int8", "int4"):
            weight = Weight(format, n, k, group)
            x = activations(9, k)
            for rows in (2, 9):
                assert same_bits(product(x[:rows], weight, isa=isa), expected(x[:rows], weight, True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quantizes", [True, False])
def test_threads_do_not_change_a_bit(quantizes: bool, isa: str) -> None:
    weight = Weight("int4", 300, 320, 32, has_min=True)
    x = activations(150, 320)
    for rows in (1, 3, 150):
        results = [product(x[:rows], weight, isa=isa, quantizes=quantizes, num_threads=t) for t in (1, 2, 3)]
        assert all(same_bits(results[0], result) for result in results)


@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("quantizes", [True, False])
def test_gate_and_up_lie_in_turn_and_are_joined_at_the_end(quantizes: bool, rows: int) -> None:
    weight = Weight("int8", 2 * 45, 130, 32, gated=True)
    x = activations(rows, 130)
    accumulators = expected(x, weight, quantizes)
    gate, up = accumulators[:, :45].astype(np.float64), accumulators[:, 45:].astype(np.float64)
    joined = gate / (1 + np.exp(-gate)) * up
    results = []
    for isa in ISAS:
        assert same_bits(product(x, weight, isa=isa, quantizes=quantizes), accumulators)
        results.append(product(x, weight, isa=isa, quantizes=quantizes, gated=True, activation="silu"))
        np.testing.assert_allclose(results[-1], joined, rtol=1e-5, atol=1e-6)
    assert all(same_bits(results[0], result) for result in results)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("quantizes", [True, False])
def test_bias_rounding_and_residual_follow_the_sum(quantizes: bool, isa: str) -> None:
    weight = Weight("int4", 50, 96, 32)
    x, rng = activations(11, 96), np.random.default_rng(1)
    bias = rng.standard_normal(50).astype(np.float32)
    residual = rng.standard_normal((11, 50)).astype(np.float16).astype(np.float32)
    for rows in (1, 11):
        y = product(
            x[:rows], weight, quantizes=quantizes, isa=isa, dtype="float16", bias=bias, residual=residual[:rows]
        )
        v = (expected(x[:rows], weight, quantizes) + bias).astype(np.float16).astype(np.float32)
        assert same_bits(y, fma(np.float32(0.5), v, residual[:rows]).astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("isa", ISAS)
def test_the_best_column_is_found_in_the_same_pass(isa: str) -> None:
    weight = Weight("int8", 333, 128, ROW)
    weight.q[[40, 200]] = weight.q[[7, 7]]  # equals: the lowest wins
    weight.scales[[7, 40, 200]] = 0.1
    weight.pack()
    x = activations(20, 128)
    plan = _native.Plan(isa, _native.Team(1), "float32")
    tokens, picked = ((plan.slot(128, extent), 0, 128) for extent in ("tokens", "logits_rows"))
    operand = (plan.slot(34, "logits_rows"), 0, 34)
    logits = (plan.slot(333, "logits_rows"), 0, 333)
    plan.pick_rows(x=tokens, y=picked)
    plan.quantize(x=picked, padded_k=128, group=128, y=operand)
    plan.linear(
        x=operand,
        weight=weight.matrix,
        is_quantized=True,
        is_logits=True,
        bias=None,
        scale=1.0,
        softcap=0.0,
        activation="none",
        gated=False,
        residual=None,
        residual_scale=1.0,
        y=logits,
    )
    plan.keep(tokens[0])
    for rows in (1, 20):
        plan.set_rows(rows)
        plan.reserve()
        plan.values(tokens)[:] = x[:rows]
        best = np.empty(rows, np.int32)
        plan.run_rows(0, plan.num_nodes, np.arange(rows, dtype=np.int32), best)
        columns = expected(x[:rows], weight, True).argmax(axis=1).tolist()
        assert best.tolist() == columns
        assert 7 in columns


@pytest.mark.parametrize("isa", ISAS)
def test_a_value_that_is_not_finite_makes_its_own_row_nan_and_no_other(isa: str) -> None:
    weight = Weight("int4", 40, 128, 32)
    x = activations(12, 128)
    x[3, 70], x[5, 0], x[6, 127] = np.nan, np.inf, -np.inf
    for rows in (4, 12):
        y = product(x[:rows], weight, isa=isa)
        nan = np.isnan(x[:rows]).any(axis=1) | np.isinf(x[:rows]).any(axis=1)
        assert np.isnan(y[nan]).all()
        assert same_bits(y[~nan], expected(x[:rows][~nan], weight, True))


@pytest.mark.parametrize("isa", ISAS)
def test_rows_too_small_for_a_scale_are_zeros(isa: str) -> None:
    weight = Weight("int8", 20, 64, ROW)
    x = np.full((2, 64), 1e-38, np.float32)  # over 127 it is subnormal
    assert not product(x, weight, isa=isa).any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [16, ROW])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_rows_of_an_embedding_are_dequantized(format: str, group: int, isa: str) -> None:
    for has_min in (False, True):
        weight = Weight(format, 37, 100, group, "f16", has_min)
        plan = _native.Plan(isa, _native.Team(1), "float32")
        rows = (plan.slot(100, "tokens"), 0, 100)
        plan.embedding(table=[weight.matrix], scale=1.0, y=rows)
        plan.keep(rows[0])
        ids = np.array([36, 0, 17, 16, 36], np.int32)
        none, starts = np.zeros(5, np.int32), np.array([0, 5], np.int32)
        plan.set_step(ids, none, none, starts, starts[1:], [], None, 5)
        plan.run(0, plan.num_nodes)
        assert same_bits(plan.values(rows).copy(), weight.values()[ids])


# -- instruction sets that this processor lacks ----------------------------------------------------------------

CSRC = Path(__file__).parents[3] / "csrc"
HARNESS = r"""
#include "ops/functions.h"

using namespace octavo;

extern "C" {

Team* make_team() { return new Team(1); }
// n: format, scale format, minima, gated, n, k, padded k, panels, group, rows. p: data, scales, minima, x, q, scales,
// sums, y, best, its scratch.
void multiply(Team* team, const int64_t* n, void* const* p, bool quantizes) {
    PackedMatrix w{static_cast<WeightFormat>(n[0]), static_cast<ScaleFormat>(n[1]), n[2] != 0, n[3] != 0};
    w.n = n[4], w.k = n[5], w.padded_k = n[6], w.num_panels = n[7], w.group = n[8];
    w.data = p[0], w.scales = p[1], w.mins = p[2];
    const auto* x = static_cast<const float*>(p[3]);
    auto* q = static_cast<int8_t*>(p[4]);
    auto *scales = static_cast<float*>(p[5]);
    auto* sums = static_cast<int32_t*>(p[6]);
    if (quantizes) OCTAVO_ISA::quantize_rows({x, w.k, n[9], w.k, w.padded_k, w.group, q, scales, sums}, *team);
    const QuantizedRows rows{q, scales, sums, w.padded_k, w.group};
    LinearArgs args;
    args.weight = &w, args.rows = n[9], args.y = static_cast<float*>(p[7]), args.y_stride = w.n;
    args.best = static_cast<int32_t*>(p[8]), args.best_scratch = static_cast<LinearArgs::Best*>(p[9]);
    if (quantizes) {
        args.quantized = &rows;
        OCTAVO_ISA::linear_quantized(args, *team);
    } else {
        args.x = x, args.x_stride = w.k;
        OCTAVO_ISA::linear_dequantized(args, *team);
    }
}

}
"""


@pytest.fixture(scope="module", params=["avx512", "amx"])
def emulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Emulator, ctypes.CDLL]:
    """The kernels of an instruction set, and a processor that has it."""
    try:
        core()
    except Unavailable as error:
        pytest.skip(str(error))
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ to compile the kernels with")
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "harness.cpp").write_text(HARNESS)
    common = [compiler, "-std=c++20", "-O1", "-w", "-fPIC", "-ffp-contract=off", f"-DOCTAVO_ISA={request.param}"]
    common.append(f"-I{CSRC}")
    objects = []
    for name in ("linear_quantized", "linear_dequantized", "quantize"):
        objects.append(str(folder / f"{name}.o"))
        kernel = [*common, *KERNEL_FLAGS[request.param], "-c", str(CSRC / f"ops/{name}.cpp"), "-o", objects[-1]]
        subprocess.run(kernel, check=True, timeout=300)
    library = str(folder / "linear_int.so")
    rest = [str(folder / "harness.cpp"), str(CSRC / "core/team.cpp"), *objects]
    subprocess.run([*common, "-shared", "-pthread", *rest, "-o", library], check=True, timeout=300)
    lib = ctypes.CDLL(library)
    lib.make_team.restype = ctypes.c_void_p
    return Emulator(request.param), lib


@pytest.mark.parametrize("format", ["int8", "int4"])
@pytest.mark.parametrize("group", GROUPS)
def test_other_processors_give_the_bits_of_the_definition(
    emulated: tuple[Emulator, ctypes.CDLL], group: int, format: str
) -> None:
    emulator, lib = emulated
    team = lib.make_team()
    for index, (n, k, rows) in enumerate(
        ((40, 100, 1), (70, 128, 3), (33, 64, 8), (48, 200, 9), (17, 64, 16), (40, 130, 33), (16, 1100, 17))
    ):
        scale_format, has_min, gated = ("f32", "f16")[index % 2], bool(index // 2 % 2), n % 2 == 0 and index % 3 == 0
        k += 64 * (group == 128 and (k + 63) // 64 % 2)  # whole groups
        weight = Weight(format, n, k, group, scale_format, has_min, gated)
        x = activations(rows, k, index)
        panels, groups = len(weight.q) // PANEL, weight.padded_k // weight.group
        codes = weight.memory.ctypes.data
        scales = codes + -(-len(weight.q) * weight.padded_k // (2 if format == "int4" else 1) // 64) * 64
        mins = scales + -(-weight.scales.size * (2 if scale_format == "f16" else 4) // 64) * 64
        q, row_scales = np.zeros((rows, weight.padded_k), np.int8), np.zeros((rows, groups), np.float32)
        sums, best = np.zeros((rows, groups), np.int32), np.zeros(rows, np.int32)
        scratch = np.zeros((panels * rows, 2), np.int32)
        sizes = [scale_format == "f16", has_min, gated, n, k, weight.padded_k, panels, weight.group, rows]
        numbers = np.array([3 if format == "int8" else 4, *sizes], np.int64)
        for quantizes in (True, False):
            y = np.zeros((rows, n), np.float32)
            arrays = (x, q, row_scales, sums, y, best, scratch)
            pointers = np.array([codes, scales, mins, *(array.ctypes.data for array in arrays)], np.uint64)
            emulator.call(lib.multiply, team, numbers, pointers, int(quantizes))
            right = expected(x, weight, quantizes)
            assert same_bits(y, right)
            assert best.tolist() == right.argmax(axis=1).tolist()
        for found, wanted in zip((q, row_scales, sums), quantized(x, weight.padded_k, weight.group), strict=True):
            assert np.array_equal(found.reshape(-1), wanted.reshape(-1))
