"""The shipped AVX-512 and AMX kernels give portable's bits: the extension's own code, run by an emulated processor.

Each case is one call of a kernel with arguments as in csrc/ops/*.h; portable computes it on the processor at hand.
Other test files here check more shapes of single kernels, compiled for the purpose; this one checks what users run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from ctypes import Structure, c_bool, c_float, c_int64, c_uint8, c_void_p
from typing import Any

import numpy as np
import pytest
from tests.native.emulator import Emulator, Unavailable, core

from octavo import _native
from octavo.backends.native.weights import WeightStore

ISAS = ("avx512", "amx")
F32, BF16, F16 = 0, 1, 2  # Rounding, and KvFormat
NONE, SILU, GELU, GELU_TANH, RELU = range(5)  # Activation
FORMATS = ("f32", "bf16", "f16", "int8", "int4")
LINE = 64


class Team(Structure):
    """core/team.h with one thread: only its scratch memory is looked at."""

    _fields_ = [("state", c_void_p), ("scratch", c_void_p), ("num_threads", ctypes.c_int)]


class PackedMatrix(Structure):
    _fields_ = [
        ("format", c_uint8), ("scale_format", c_uint8), ("has_min", c_bool), ("gated", c_bool), ("n", c_int64),
        ("k", c_int64), ("padded_k", c_int64), ("num_panels", c_int64), ("group", c_int64), ("data", c_void_p),
        ("scales", c_void_p), ("mins", c_void_p),
    ]  # fmt: skip


class QuantizedRows(Structure):
    _fields_ = [("q", c_void_p), ("scales", c_void_p), ("sums", c_void_p), ("padded_k", c_int64), ("group", c_int64)]


class Epilogue(Structure):
    _fields_ = [
        ("bias", c_void_p), ("scale", c_float), ("softcap", c_float), ("activation", c_uint8), ("gated", c_bool),
        ("residual", c_void_p), ("residual_stride", c_int64), ("residual_scale", c_float), ("rounding", c_uint8),
    ]  # fmt: skip


class LinearArgs(Structure):
    _fields_ = [
        ("weight", c_void_p), ("rows", c_int64), ("x", c_void_p), ("x_stride", c_int64), ("x_is_bf16", c_bool),
        ("quantized", c_void_p), ("epilogue", Epilogue), ("y", c_void_p), ("y_stride", c_int64), ("best", c_void_p),
        ("best_scratch", c_void_p),
    ]  # fmt: skip


class QuantizeArgs(Structure):
    _fields_ = [
        ("x", c_void_p), ("x_stride", c_int64), ("rows", c_int64), ("k", c_int64), ("padded_k", c_int64),
        ("group", c_int64), ("q", c_void_p), ("scales", c_void_p), ("sums", c_void_p),
    ]  # fmt: skip


class NormArgs(Structure):
    _fields_ = [
        ("rows", c_int64), ("heads", c_int64), ("width", c_int64), ("x", c_void_p), ("x_stride", c_int64),
        ("addend", c_void_p), ("addend_stride", c_int64), ("addend_scale", c_float), ("sum", c_void_p),
        ("sum_stride", c_int64), ("weight", c_void_p), ("bias", c_void_p), ("offset", c_float), ("eps", c_float),
        ("y", c_void_p), ("y_stride", c_int64), ("rounding", c_uint8),
    ]  # fmt: skip


class RopeArgs(Structure):
    _fields_ = [
        ("rows", c_int64), ("heads", c_int64), ("head_dim", c_int64), ("rotary_dim", c_int64), ("x", c_void_p),
        ("x_stride", c_int64), ("cos_sin", c_void_p), ("y", c_void_p), ("y_stride", c_int64), ("rounding", c_uint8),
    ]  # fmt: skip


class AddArgs(Structure):
    _fields_ = [
        ("rows", c_int64), ("width", c_int64), ("x", c_void_p), ("x_stride", c_int64), ("addend", c_void_p),
        ("addend_stride", c_int64), ("scale", c_float), ("y", c_void_p), ("y_stride", c_int64), ("rounding", c_uint8),
    ]  # fmt: skip


class ActivationArgs(Structure):
    _fields_ = [
        ("rows", c_int64), ("width", c_int64), ("gated", c_bool), ("kind", c_uint8), ("x", c_void_p),
        ("x_stride", c_int64), ("y", c_void_p), ("y_stride", c_int64), ("rounding", c_uint8),
    ]  # fmt: skip


class ScaleArgs(Structure):
    _fields_ = [
        ("rows", c_int64), ("width", c_int64), ("x", c_void_p), ("x_stride", c_int64), ("scale", c_float),
        ("rounding", c_uint8),
    ]  # fmt: skip


class KvLayout(Structure):
    _fields_ = [
        ("format", c_uint8), ("block_size", c_int64), ("padded_tokens", c_int64), ("num_layers", c_int64),
        ("num_kv_heads", c_int64), ("head_dim", c_int64), ("padded_head_dim", c_int64), ("key_bytes", c_int64),
        ("head_bytes", c_int64), ("layer_bytes", c_int64), ("block_bytes", c_int64),
    ]  # fmt: skip


class Rows(Structure):
    _fields_ = [
        ("num_tokens", c_int64), ("num_requests", c_int64), ("positions", c_void_p), ("query_starts", c_void_p),
        ("context_lens", c_void_p), ("block_table", c_void_p), ("max_blocks", c_int64),
    ]  # fmt: skip


class StoreKvArgs(Structure):
    _fields_ = [
        ("k", c_void_p), ("v", c_void_p), ("k_stride", c_int64), ("v_stride", c_int64), ("layout", c_void_p),
        ("blocks", c_void_p), ("layer", c_int64), ("rows", Rows),
    ]  # fmt: skip


class AttentionArgs(Structure):
    _fields_ = [
        ("q", c_void_p), ("q_stride", c_int64), ("out", c_void_p), ("out_stride", c_int64), ("layout", c_void_p),
        ("blocks", c_void_p), ("layer", c_int64), ("rows", Rows), ("num_heads", c_int64), ("scale", c_float),
        ("window", c_int64), ("softcap", c_float), ("sinks", c_void_p), ("rounding", c_uint8),
        ("workspace", c_void_p),
    ]  # fmt: skip


def aligned(size: int, fill: int = 0) -> np.ndarray:
    raw = np.full(size + LINE, fill, np.uint8)
    return raw[-raw.ctypes.data % LINE :][:size]


_scratch = aligned(1 << 20, 0xFF)
TEAM = Team(None, _scratch.ctypes.data, 1)


class Processor:
    """Runs kernels of one instruction set: portable here, the others emulated."""

    def __init__(self, isa: str) -> None:
        self.isa = isa
        self._emulator = None if isa == "portable" else Emulator(isa)  # type: ignore[arg-type]

    def call(self, kernel: str, *arguments: Any) -> None:
        """With structures by address, and the team last."""
        address = _native.kernel_address(self.isa, kernel)
        values = [ctypes.addressof(a) if isinstance(a, Structure) else a for a in arguments]
        values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in values]
        if self._emulator is not None:
            self._emulator.call(address, *values)
        else:
            ctypes.CFUNCTYPE(None, *[c_void_p if isinstance(a, int) else type(a) for a in values])(address)(*values)


@pytest.fixture(scope="module", params=ISAS)
def processors(request: pytest.FixtureRequest) -> Iterator[tuple[Processor, Processor]]:
    try:
        core()
    except Unavailable as reason:
        pytest.skip(str(reason))
    try:
        _native.kernel_address(request.param, "add")
    except ValueError as reason:
        pytest.skip(str(reason))
    yield Processor("portable"), Processor(request.param)


def check(processors: Sequence[Processor], compute: Callable[[Processor], list[np.ndarray]], case: object) -> None:
    """The arrays that `compute` returns are the same bits on both."""
    expected, found = (compute(processor) for processor in processors)
    for wanted, got in zip(expected, found, strict=True):
        assert wanted.any() and wanted.tobytes() == got.tobytes(), case
        assert not np.isnan(wanted.view(np.float32) if wanted.itemsize == 4 else 0).any(), case


def random(*shape: int, rounding: int = F32, seed: int = 0) -> np.ndarray:
    x = np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)
    if rounding == BF16:
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    return x.astype(np.float16).astype(np.float32) if rounding == F16 else x


@pytest.mark.parametrize("rounding", [F32, BF16, F16])
def test_row_operators(processors: tuple[Processor, Processor], rounding: int) -> None:
    for rows, width, heads in ((1, 5, 1), (3, 24, 3), (19, 40, 1)):
        total = width * heads
        x, addend, weight, bias = (random(rows, total, rounding=rounding, seed=s) for s in range(4))

        def norms(processor: Processor, rows=rows, width=width, heads=heads, x=x, addend=addend, w=weight, b=bias):
            total = width * heads
            found = []
            for kernel in ("rms_norm", "layer_norm"):
                for with_sum in (False, True):
                    y, sums = np.zeros_like(x), np.zeros_like(x)
                    args = NormArgs(rows=rows, heads=heads, width=width, x=x.ctypes.data, x_stride=total, eps=1e-5)
                    args.weight, args.bias, args.offset = w.ctypes.data, b.ctypes.data, 1.0
                    args.y, args.y_stride, args.rounding = y.ctypes.data, total, rounding
                    if with_sum:
                        args.addend, args.addend_stride, args.addend_scale = addend.ctypes.data, total, 0.5
                        args.sum, args.sum_stride = sums.ctypes.data, total
                    processor.call(kernel, args, TEAM)
                    found += [y, sums] if with_sum else [y]
            return found

        def sums(processor: Processor, rows=rows, total=total, x=x, addend=addend):
            y, scaled = np.zeros_like(x), x.copy()
            args = AddArgs(rows, total, x.ctypes.data, total, addend.ctypes.data, total, 0.3, y.ctypes.data, total)
            args.rounding = rounding
            processor.call("add", args, TEAM)
            processor.call("scale_rows", ScaleArgs(rows, total, scaled.ctypes.data, total, 0.7, rounding), TEAM)
            return [y, scaled]

        check(processors, norms, ("norm", rows, width, heads))
        check(processors, sums, ("add", rows, width, heads))


@pytest.mark.parametrize("rounding", [F32, BF16])
def test_activations_and_rotation(processors: tuple[Processor, Processor], rounding: int) -> None:
    for rows, width in ((1, 7), (18, 33)):
        x = 4 * random(rows, 2 * width, rounding=rounding)

        def activations(processor: Processor, rows=rows, width=width, x=x):
            found = []
            for kind in (SILU, GELU, GELU_TANH, RELU):
                for gated in (False, True):
                    y = np.zeros((rows, width), np.float32)
                    args = ActivationArgs(rows, width, gated, kind, x.ctypes.data, 2 * width, y.ctypes.data, width)
                    args.rounding = rounding
                    processor.call("activation", args, TEAM)
                    found.append(y)
            return found

        check(processors, activations, ("activation", rows, width))
    for rows, heads, head_dim, rotary_dim in ((1, 2, 8, 8), (17, 3, 40, 24), (4, 1, 64, 64)):
        x, angles = random(rows, heads * head_dim, rounding=rounding), random(rows, rotary_dim, seed=1)

        def rotated(processor: Processor, shape=(rows, heads, head_dim, rotary_dim), x=x, angles=angles):
            y, stride = np.zeros_like(x), x.shape[1]
            args = RopeArgs(*shape, x.ctypes.data, stride, angles.ctypes.data, y.ctypes.data, stride, rounding)
            processor.call("rope", args, TEAM)
            return [y]

        check(processors, rotated, ("rope", rows, heads, head_dim, rotary_dim))


def test_bfloat16_conversions(processors: tuple[Processor, Processor]) -> None:
    for size in (1, 15, 16, 70):
        bits = np.random.default_rng(size).integers(0, 2**32, size, np.uint32)
        bits[bits & 0x7F800000 == 0x7F800000] = 0x7F800000  # infinity instead of NaN
        values = bits.view(np.float32)

        def convert(processor: Processor, values=values):
            narrow, wide = np.zeros(len(values), np.uint16), np.zeros(len(values), np.float32)
            processor.call("f32_to_bf16", values, narrow, len(values))
            processor.call("bf16_to_f32", narrow, wide, len(values))
            return [narrow, wide]

        check(processors, convert, size)


def pack(values: np.ndarray, format_: str, *, gated: bool = False) -> tuple[PackedMatrix, _native.PackedMatrix]:
    """In the arguments' form, and the object that owns the memory."""
    dtype = {"bf16": "bfloat16", "f16": "float16"}.get(format_, "float32")
    quantization: Any = format_ if format_.startswith("int") else "none"
    store = WeightStore(dtype=dtype, team=_native.Team(1), quantization=quantization)  # type: ignore[arg-type]
    owner = store.pack([values], kind="gated" if gated else "linear").segments[0].matrix  # type: ignore[union-attr]
    assert owner.format == format_
    memory, group = owner.memory.ctypes.data, owner.group
    matrix = PackedMatrix(format=FORMATS.index(format_), has_min=owner.has_min, gated=owner.gated, n=owner.n, k=owner.k)
    matrix.padded_k, matrix.num_panels, matrix.group, matrix.data = owner.padded_k, owner.num_panels, group, memory
    matrix.scale_format = owner.scale_format == "f16"
    if group:
        lanes = 16 * owner.num_panels
        matrix.scales = memory + -(-lanes * owner.padded_k // (2 if format_ == "int4" else 1) // LINE) * LINE
        scale_bytes = lanes * (owner.padded_k // group) * (2 if owner.scale_format == "f16" else 4)
        matrix.mins = matrix.scales + -(-scale_bytes // LINE) * LINE if owner.has_min else None
    return matrix, owner


@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("quantizes", [False, True])
def test_products(processors: tuple[Processor, Processor], format_: str, quantizes: bool) -> None:
    if quantizes and not format_.startswith("int"):
        pytest.skip("float weights meet float activations")
    rounding = BF16 if format_ == "bf16" else F16 if format_ == "f16" else F32
    # Few rows, many, and more than a tile of them; a k that is no multiple of a block, an n that is none of a panel.
    for rows, n, k, gated in ((1, 24, 70, False), (4, 50, 64, True), (9, 40, 200, False), (33, 34, 64, True)):
        matrix, owner = pack(random(n, k, rounding=rounding, seed=1), format_, gated=gated)
        x = random(rows, k, rounding=rounding, seed=2)
        bias, columns = random(n, rounding=rounding, seed=3), n // 2 if gated else n
        residual = random(rows, columns, rounding=rounding, seed=4)

        def multiply(processor: Processor, rows=rows, k=k, n=n, matrix=matrix, x=x, bias=bias, residual=residual):
            columns = residual.shape[1]
            y, best = np.zeros((rows, columns), np.float32), np.zeros(rows, np.int32)
            scratch = np.zeros((matrix.num_panels, rows, 2), np.float32)
            epilogue = Epilogue(bias=bias.ctypes.data, scale=1.0, activation=SILU, gated=matrix.gated)
            epilogue.residual, epilogue.residual_stride = residual.ctypes.data, columns
            epilogue.residual_scale, epilogue.rounding = 0.5, rounding
            args = LinearArgs(weight=ctypes.addressof(matrix), rows=rows, x=x.ctypes.data, x_stride=k)
            args.x_is_bf16, args.epilogue, args.y, args.y_stride = rounding == BF16, epilogue, y.ctypes.data, columns
            kernel, found = "linear_float", [y]
            if matrix.group:
                kernel = "linear_dequantized"
            if quantizes:
                kernel, groups = "linear_quantized", matrix.padded_k // matrix.group
                q = np.zeros((rows, matrix.padded_k), np.int8)
                scales, sums = np.zeros((rows, groups), np.float32), np.zeros((rows, groups), np.int32)
                padded_k, group, parts = matrix.padded_k, matrix.group, (q.ctypes.data, scales.ctypes.data)
                quantize = QuantizeArgs(x.ctypes.data, k, rows, k, padded_k, group, *parts, sums.ctypes.data)
                processor.call("quantize_rows", quantize, TEAM)
                operand = QuantizedRows(*parts, sums.ctypes.data, padded_k, group)
                args.x, args.quantized = None, ctypes.addressof(operand)
                found += [q, scales]
            processor.call(kernel, args, TEAM)
            if not matrix.gated:  # the best column alone
                args.y, args.epilogue = None, Epilogue(scale=0.5, softcap=9.0, residual_scale=1.0)
                args.best, args.best_scratch = best.ctypes.data, scratch.ctypes.data
                processor.call(kernel, args, TEAM)
                assert len(set(best.tolist())) > (rows > 4)
                found.append(best)
            return found

        check(processors, multiply, (rows, n, k, gated))
        assert owner.n == n


@pytest.mark.parametrize("format_", FORMATS)
def test_rows_of_an_embedding(processors: tuple[Processor, Processor], format_: str) -> None:
    matrix, owner = pack(random(50, 70), format_)
    ids = np.array([49, 0, 16, 17, 49], np.int32)

    def unpack(processor: Processor) -> list[np.ndarray]:
        out = np.zeros((len(ids), 73), np.float32)
        processor.call("unpack_rows", matrix, ids, len(ids), out, 73, TEAM)
        return [out]

    check(processors, unpack, format_)
    assert owner.k == 70


@pytest.mark.parametrize("format_", [F32, BF16, F16])
@pytest.mark.parametrize(("head_dim", "block_size", "window"), [(24, 7, 0), (64, 16, 21)])
def test_attention(
    processors: tuple[Processor, Processor], format_: int, head_dim: int, block_size: int, window: int
) -> None:
    """A chunk of many tokens behind others, then one token of each of two requests."""
    heads, kv_heads, contexts = 4, 2, (40, 23)
    num_blocks = -(-max(contexts) // block_size)
    padded_tokens, padded_dim = -(-block_size // 16) * 16, -(-head_dim // 16) * 16
    key_bytes = padded_tokens * padded_dim * (4 if format_ == F32 else 2)
    layout = KvLayout(format_, block_size, padded_tokens, 2, kv_heads, head_dim, padded_dim, key_bytes, 2 * key_bytes)
    layout.layer_bytes = kv_heads * layout.head_bytes
    layout.block_bytes = 2 * layout.layer_bytes
    table = np.random.default_rng(0).permutation(2 * num_blocks).astype(np.int32).reshape(2, num_blocks)
    sinks = random(heads, seed=5)

    def attend(processor: Processor) -> list[np.ndarray]:
        blocks, found = aligned(2 * num_blocks * layout.block_bytes, 0xFF), []
        workspace = aligned(4 << 20, 0xFF)
        done = [0, 0]
        for chunks in ((5, 22), (34, 0), (1, 1)):
            positions = np.concatenate([np.arange(d, d + c) for d, c in zip(done, chunks, strict=True) if c])
            asking = [i for i, c in enumerate(chunks) if c]
            done = [d + c for d, c in zip(done, chunks, strict=True)]
            starts = np.cumsum([0, *(chunks[i] for i in asking)]).astype(np.int32)
            lens, positions = np.array([done[i] for i in asking], np.int32), positions.astype(np.int32)
            tables, num_tokens = np.ascontiguousarray(table[asking]), len(positions)
            rows = Rows(
                num_tokens, len(asking), *(a.ctypes.data for a in (positions, starts, lens, tables)), num_blocks
            )
            q = random(num_tokens, heads * head_dim, rounding=format_, seed=sum(done))
            k, v = (random(num_tokens, kv_heads * head_dim, rounding=format_, seed=s + sum(done)) for s in (7, 8))
            out = np.zeros_like(q)
            stored = StoreKvArgs(k.ctypes.data, v.ctypes.data, k.shape[1], k.shape[1], ctypes.addressof(layout))
            stored.blocks, stored.layer, stored.rows = blocks.ctypes.data, 1, rows
            processor.call("store_kv", stored, TEAM)
            args = AttentionArgs(q.ctypes.data, q.shape[1], out.ctypes.data, q.shape[1], ctypes.addressof(layout))
            args.blocks, args.layer, args.rows, args.num_heads = blocks.ctypes.data, 1, rows, heads
            args.scale, args.window, args.softcap = head_dim**-0.5, window, 30.0 if window else 0.0
            args.sinks, args.rounding = sinks.ctypes.data if window else None, format_
            args.workspace = workspace.ctypes.data
            processor.call("attend", args, TEAM)
            found.append(out)
        return found

    check(processors, attend, (format_, head_dim, block_size, window))


def test_an_unknown_kernel_or_instruction_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernels for 'sse9'"):
        _native.kernel_address("sse9", "add")
    with pytest.raises(ValueError, match="no kernel 'subtract'"):
        _native.kernel_address("portable", "subtract")
    assert _native.kernel_address("portable", "add") != _native.kernel_address("portable", "rope")
