"""The native attention kernels: their bits do not depend on what shares the step, on how it is cut, on the threads or
on the instruction set. That they attend at all is tested with the operators of every backend."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from tests.backends import definitions as define
from tests.backends.definitions import EPS, Rows, heads, make_batch, poison, rounded
from tests.native.emulator import KERNEL_FLAGS, Emulator, Unavailable, core

from octavo import _native
from octavo.backends.native.ops import NativeOps
from octavo.backends.ops import AttentionParams, DType

DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
Part = tuple[int, int, int]  # request, first position, end


@dataclass
class Prompts:
    """Random queries, keys and values of requests, computed in steps on a poisoned cache."""

    params: AttentionParams
    dtype: DType
    lengths: Sequence[int]
    block_size: int = 16
    sinks: np.ndarray | None = None
    seed: int = 0
    qkv: list[list[np.ndarray]] = field(init=False)
    tables: list[np.ndarray] = field(init=False)
    num_blocks: int = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        p = self.params
        sizes = (p.num_heads, p.num_kv_heads, p.num_kv_heads)
        self.qkv = [
            [rounded(rng.normal(size=(n, size, p.head_dim)), self.dtype).astype(np.float32) for size in sizes]
            for n in self.lengths
        ]
        counts = [-(-n // self.block_size) for n in self.lengths]
        self.num_blocks = sum(counts) + 2
        free = rng.permutation(self.num_blocks)[: sum(counts)].astype(np.int32)
        self.tables = np.split(free, np.cumsum(counts)[:-1])

    def whole(self) -> list[list[Part]]:
        return [[(r, 0, n) for r, n in enumerate(self.lengths)]]

    def alone(self) -> list[list[Part]]:
        return [[(r, 0, n)] for r, n in enumerate(self.lengths)]

    def in_chunks(self, *sizes: int) -> list[list[Part]]:
        """Every request advances by the sizes in turn, the n-th request starting with the n-th size."""
        steps: list[list[Part]] = []
        done = [0] * len(self.lengths)
        while any(d < n for d, n in zip(done, self.lengths, strict=True)):
            step = []
            for r, n in enumerate(self.lengths):
                if done[r] < n:
                    end = min(n, done[r] + sizes[(len(steps) + r) % len(sizes)])
                    step.append((r, done[r], end))
                    done[r] = end
            steps.append(step)
        return steps

    def batch(self, parts: Sequence[Part]) -> list[Rows]:
        rows = []
        for r, first, end in parts:
            table = self.tables[r].copy()
            if self.params.window is not None:
                table[: max(0, first - self.params.window + 1) // self.block_size] = -1
            table[-(-end // self.block_size) :] = -1
            rows.append(Rows(end - first, end, table[None]))
        return rows

    def compute(self, steps: Sequence[Sequence[Part]], *, isa: str = "auto", num_threads: int = 1) -> list[np.ndarray]:
        """The output of every token of every request, as bits."""
        run = Run(self, isa, num_threads)
        for parts in steps:
            run.step(parts)
        return [out.view(np.int32) for out in run.out]


class Run:
    """One cache and what was computed with it."""

    def __init__(self, prompts: Prompts, isa: str = "auto", num_threads: int = 1) -> None:
        self.prompts = prompts
        p = prompts.params
        self.ops = NativeOps(dtype=prompts.dtype, num_threads=num_threads, isa=isa)
        self.cache = self.ops.kv_cache(
            num_blocks=prompts.num_blocks,
            block_size=prompts.block_size,
            layers_per_block=1,
            num_kv_heads=p.num_kv_heads,
            head_dim=p.head_dim,
        )
        plain = AttentionParams(p.num_heads, p.num_kv_heads, p.head_dim, p.scale)
        poison(self.ops, self.cache, plain, layers=1)
        self.sinks = None
        if prompts.sinks is not None:
            self.sinks = self.ops.weight([prompts.sinks.astype(np.float32)], kind="vector")
        self.out = [np.zeros((n, p.num_heads * p.head_dim), np.float32) for n in prompts.lengths]

    def step(self, parts: Sequence[Part], qkv: list[list[np.ndarray]] | None = None) -> None:
        ops, source = self.ops, qkv or self.prompts.qkv
        q, k, v = (
            heads(ops, np.concatenate([source[r][i][first:end] for r, first, end in parts]).astype(np.float64))
            for i in range(3)
        )
        batch = make_batch(self.prompts.batch(parts))
        params = self.prompts.params
        got = ops.to_numpy(ops.attend(q, k, v, self.cache, batch, params, group=0, layer_in_block=0, sinks=self.sinks))
        at = 0
        for r, first, end in parts:
            self.out[r][first:end] = got[at : at + end - first]
            at += end - first


def same(left: Sequence[np.ndarray], right: Sequence[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


def params_of(num_heads: int, num_kv_heads: int, head_dim: int, **options: float) -> AttentionParams:
    return AttentionParams(num_heads, num_kv_heads, head_dim, head_dim**-0.5, **options)  # type: ignore[arg-type]


# Query heads, KV heads, head size; block size; options.
CASES = [
    ((6, 2, 32), 16, {}),
    ((3, 1, 64), 32, {"window": 20, "softcap": 3.0}),
    ((4, 4, 16), 1, {}),
    ((7, 1, 19), 4, {"window": 7}),
    ((2, 1, 1), 20, {}),
    ((13, 1, 80), 48, {"softcap": 5.0}),
    ((2, 2, 256), 64, {}),
    ((50, 1, 17), 16, {"window": 1}),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "block_size", "options"), CASES, ids=str)
def test_every_instruction_set_gives_the_same_bits(dtype, shape, block_size, options):
    sinks = np.linspace(-2, 2, shape[0]) if "window" in options else None
    prompts = Prompts(params_of(*shape, **options), dtype, [37, 5], block_size, sinks)
    expected = prompts.compute(prompts.in_chunks(9, 1), isa="portable")
    for isa in _native.usable_isas():
        assert same(expected, prompts.compute(prompts.in_chunks(9, 1), isa=isa)), isa


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "block_size", "options"), CASES, ids=str)
def test_a_request_alone_or_in_any_batch_and_in_any_chunks_gives_the_same_bits(dtype, shape, block_size, options):
    prompts = Prompts(params_of(*shape, **options), dtype, [90, 16, 33], block_size)
    expected = prompts.compute(prompts.whole())
    assert same(expected, prompts.compute(prompts.alone()))
    assert same(expected, prompts.compute(prompts.in_chunks(7, 1, 30)))
    assert same(expected, prompts.compute(prompts.in_chunks(1)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", [{}, {"window": 300}], ids=str)
def test_long_contexts_cut_over_threads_give_the_same_bits(dtype, options):
    # One KV head: with two threads a decode is cut by partitions, with one thread it is not.
    prompts = Prompts(params_of(3, 1, 48, **options), dtype, [1300, 257, 256], 16, np.array([-1.0, 0.0, 4.0]))
    steps = [[(r, 0, n - 5) for r, n in enumerate(prompts.lengths)]]
    steps += [[(0, 1295, 1296)], [(0, 1296, 1299), (1, 252, 253)], [(0, 1299, 1300), (1, 253, 257), (2, 251, 256)]]
    expected = prompts.compute(prompts.whole())
    assert same(expected, prompts.compute(steps, num_threads=2))
    assert same(expected, prompts.compute(steps, num_threads=5))
    assert same(expected, prompts.compute(prompts.in_chunks(256, 100, 44), num_threads=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_partitions_add_up_to_the_definition(dtype):
    params = AttentionParams(2, 1, 40, 0.6, window=900)
    prompts = Prompts(params, dtype, [1100], 32, np.array([0.5, 30.0]))
    run = Run(prompts, num_threads=2)
    run.step([(0, 0, 1090)])
    run.step([(0, 1090, 1100)])
    q, k, v = (x.astype(np.float64) for x in prompts.qkv[0])
    got = run.out[0][1090:].reshape(10, 2, 40)
    expected = define.attend(q[1090:], k, v, params, prompts.sinks)
    # Of a bfloat16 cache the weights are rounded, too: each moves the result by its share of the values.
    bound = 1e-5 + EPS[dtype] * np.abs(expected)
    if dtype == "bfloat16":
        bound += EPS[dtype] / 2 * (define.attend(q[1090:], k, np.abs(v), params, prompts.sinks) + np.abs(expected))
    assert (np.abs(got - expected) <= bound).all()


# -- slots that a token does not see ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_token_that_overflowed_leaves_the_tokens_before_it_alone(dtype, block_size, bad):
    prompts = Prompts(params_of(6, 2, 32), dtype, [60, 20], block_size)
    expected = prompts.compute(prompts.whole())
    for position in (21, 40):
        spoilt = [[x.copy() for x in qkv] for qkv in prompts.qkv]
        spoilt[0][1][position] = bad
        spoilt[0][2][position] = bad
        run = Run(prompts)
        run.step(prompts.whole()[0], spoilt)
        assert np.array_equal(run.out[0][:position].view(np.int32), expected[0][:position])
        assert np.isnan(run.out[0][position:]).all()
        assert np.array_equal(run.out[1].view(np.int32), expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 11])
def test_a_token_that_overflowed_is_forgotten_behind_the_window(dtype, window):
    prompts = Prompts(params_of(2, 1, 16, window=window), dtype, [80], 16)
    expected = prompts.compute(prompts.whole())
    spoilt = [[x.copy() for x in prompts.qkv[0]]]
    spoilt[0][2][30] = np.nan
    run = Run(prompts)
    run.step([(0, 0, 80)], spoilt)
    end = 80 if window is None else 30 + window
    assert np.isnan(run.out[0][30:end]).all()
    assert np.array_equal(run.out[0][end:].view(np.int32), expected[0][end:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_rejected_drafts_leave_no_trace(dtype, block_size):
    prompts = Prompts(params_of(4, 2, 24), dtype, [50], block_size)
    expected = prompts.compute(prompts.whole())
    other = Prompts(params_of(4, 2, 24), dtype, [50], block_size, seed=1).qkv
    drafts = [[np.concatenate([x[:31], y[31:]]) for x, y in zip(prompts.qkv[0], other[0], strict=True)]]
    drafts[0][2][33] = np.nan
    run = Run(prompts)
    run.step([(0, 0, 30)])
    run.step([(0, 30, 36)], drafts)  # the drafts from 31 on are rejected
    assert np.array_equal(run.out[0][30].view(np.int32), expected[0][30])
    run.step([(0, 31, 32)])
    run.step([(0, 32, 50)])
    assert same(expected, [run.out[0].view(np.int32)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_copied_block_continues_like_its_source(dtype):
    prompts = Prompts(params_of(4, 2, 40), dtype, [40], 16)
    expected = prompts.compute(prompts.whole())
    run = Run(prompts)
    run.step([(0, 0, 21)])
    unused = next(iter(set(range(prompts.num_blocks)) - set(prompts.tables[0].tolist())))
    run.cache.copy_blocks([(int(prompts.tables[0][1]), unused)])
    prompts.tables[0][1] = unused
    run.step([(0, 21, 40)])
    assert same(expected, [run.out[0].view(np.int32)])


# -- instruction sets that this processor lacks ----------------------------------------------------------------

CSRC = Path(__file__).parents[3] / "csrc"
HARNESS = r"""
#include "ops/functions.h"

using namespace octavo;

extern "C" {

Team* make_team() { return new Team(1); }
int64_t block_bytes(const int64_t* n) {
    return make_kv_layout(static_cast<KvFormat>(n[0]), n[1], 1, n[2], n[3]).block_bytes;
}
int64_t workspace_bytes(const int64_t* n) { return attention_workspace(n[5], n[8], n[4], n[3], 1); }
void step(Team* team, const int64_t* n, void* const* p, float scale, float softcap) {
    const KvLayout layout = make_kv_layout(static_cast<KvFormat>(n[0]), n[1], 1, n[2], n[3]);
    const auto ints = [&](int i) { return static_cast<const int32_t*>(p[i]); };
    const auto floats = [&](int i) { return static_cast<const float*>(p[i]); };
    const Rows rows{n[5], n[6], ints(0), ints(1), ints(2), ints(3), n[7]};
    uint8_t* blocks = static_cast<uint8_t*>(p[4]);
    OCTAVO_ISA::store_kv({floats(6), floats(7), n[2] * n[3], n[2] * n[3], &layout, blocks, 0, rows}, *team);
    OCTAVO_ISA::attend({floats(5), n[4] * n[3], static_cast<float*>(p[8]), n[4] * n[3], &layout, blocks, 0, rows, n[4],
                        scale, n[9], softcap, floats(9), static_cast<Rounding>(n[0]), static_cast<uint8_t*>(p[10])},
                       *team);
}

}
"""
FORMATS = {"float32": 0, "bfloat16": 1, "float16": 2}  # of KvFormat and of Rounding


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
    kernel = [
        *common,
        *KERNEL_FLAGS[request.param],
        "-c",
        str(CSRC / "ops/attention.cpp"),
        "-o",
        str(folder / "kernel.o"),
    ]
    subprocess.run(kernel, check=True, timeout=300)
    rest = [str(folder / "harness.cpp"), str(CSRC / "ops/attention_workspace.cpp"), str(CSRC / "core/team.cpp")]
    library = str(folder / "attention.so")
    subprocess.run(
        [*common, "-shared", "-pthread", *rest, str(folder / "kernel.o"), "-o", library], check=True, timeout=300
    )
    lib = ctypes.CDLL(library)
    lib.make_team.restype = ctypes.c_void_p
    for name in ("block_bytes", "workspace_bytes"):
        getattr(lib, name).restype = ctypes.c_int64
        getattr(lib, name).argtypes = [ctypes.c_void_p]
    return Emulator(request.param), lib


def aligned(size: int, fill: int) -> np.ndarray:
    raw = np.full(size + 64, fill, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


def compute_emulated(prompts: Prompts, steps: Sequence[Sequence[Part]], emulator: Emulator, lib: ctypes.CDLL):
    p = prompts.params
    team = lib.make_team()
    shape = [FORMATS[prompts.dtype], prompts.block_size, p.num_kv_heads, p.head_dim, p.num_heads]
    block_bytes = lib.block_bytes(np.array(shape, np.int64).ctypes.data)
    blocks = aligned(prompts.num_blocks * block_bytes, 0xFF)  # NaN in every format
    outputs = [np.zeros((n, p.num_heads * p.head_dim), np.float32) for n in prompts.lengths]
    sinks = None if prompts.sinks is None else prompts.sinks.astype(np.float32)
    for parts in steps:
        batch = make_batch(prompts.batch(parts))
        q, k, v = (np.concatenate([prompts.qkv[r][i][a:b] for r, a, b in parts]) for i in range(3))
        out = np.zeros((len(q), p.num_heads * p.head_dim), np.float32)
        table = batch.block_tables[0]
        numbers = np.array(
            [*shape, len(q), len(parts), table.shape[1], batch.context_lens.max(), p.window or 0], np.int64
        )
        workspace = aligned(lib.workspace_bytes(numbers.ctypes.data), 0xFF)
        arrays = [
            batch.positions,
            batch.query_starts,
            batch.context_lens,
            table,
            blocks,
            q,
            k,
            v,
            out,
            sinks,
            workspace,
        ]
        pointers = np.array([0 if x is None else x.ctypes.data for x in arrays], np.int64)
        scale, softcap = ctypes.c_float(p.scale), ctypes.c_float(p.softcap or 0.0)
        emulator.call(lib.step, team, numbers, pointers, scale, softcap)
        at = 0
        for r, first, end in parts:
            outputs[r][first:end] = out[at : at + end - first]
            at += end - first
    return [out.view(np.int32) for out in outputs]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "block_size", "options"), CASES, ids=str)
def test_emulated_instruction_sets_give_the_same_bits(emulated, dtype, shape, block_size, options):
    sinks = np.linspace(-2, 2, shape[0]) if "window" in options else None
    prompts = Prompts(params_of(*shape, **options), dtype, [37, 5], block_size, sinks)
    steps = prompts.in_chunks(21, 1)
    assert same(prompts.compute(steps), compute_emulated(prompts, steps, *emulated))


# Several groups of sixteen rows, the last one incomplete, over two partitions.
def test_emulated_tiles_give_the_same_bits_over_partitions(emulated):
    prompts = Prompts(params_of(3, 1, 48), "bfloat16", [291], 16)
    prompts.qkv[0][2][270] = np.nan
    steps: list[list[Part]] = [[(0, 0, 256)], [(0, 256, 291)]]
    expected = [out.view(np.float32) for out in prompts.compute(steps)]
    got = [out.view(np.float32) for out in compute_emulated(prompts, steps, *emulated)]
    assert np.isnan(expected[0][270:]).all() and not np.isnan(expected[0][:270]).any()
    assert np.array_equal(got[0], expected[0], equal_nan=True)
