"""Checkpoint tensors in packed form: bit for bit where that is claimed, within a derived bound elsewhere."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from tests.backends.native.packed import (
    HALVES,
    Tensor,
    integers,
    padded_values,
    random_blocks,
    values,
)

from octavo import _native
from octavo.backends.native.weights import PackedSegment, PackedWeight, WeightStore
from octavo.errors import CheckpointError
from octavo.quantization.gguf_blocks import TYPES_BY_NAME, dequantize

FORMS = {
    "Q4_0": "int4 g32",
    "Q4_1": "int4 g32 + min",
    "Q5_0": "int8 g32",
    "Q5_1": "int8 g32 + min",
    "Q8_0": "int8 g32",
    "Q2_K": "int4 g16 + min",
    "Q3_K": "int4 g16",
    "Q4_K": "int4 g32 + min",
    "Q5_K": "int8 g32 + min",
    "Q6_K": "int8 g16",
    "IQ4_NL": "int8 g32",
    "IQ4_XS": "int8 g32",
    "MXFP4": "int8 g32",
}
SIMPLE = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL"}  # their scales are float16 numbers

TEAM = _native.Team(2)


def store(dtype: str = "float32", quantization: str = "auto") -> WeightStore:
    return WeightStore(dtype=dtype, team=TEAM, quantization=quantization)


def pack(parts: list[Tensor | np.ndarray], kind: str = "linear", **settings: str) -> PackedWeight:
    weight = store(**settings).pack(parts, kind)
    assert isinstance(weight, PackedWeight)
    return weight


def normal(n: int, k: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((n, k)) * scale).astype(np.float32)


# -- blocks --------------------------------------------------------------------------------------------


def test_every_readable_block_type_has_an_integer_form() -> None:
    readable = {type_.name for type_ in TYPES_BY_NAME.values() if type_.is_block and type_.is_supported}
    assert readable == FORMS.keys() == HALVES.keys()


@pytest.mark.parametrize("type_name", FORMS)
@pytest.mark.parametrize("n", [1, 16, 37])
def test_a_block_type_keeps_every_weight_bit_for_bit(type_name: str, n: int) -> None:
    tensor = random_blocks(type_name, n, 3 * TYPES_BY_NAME[type_name].block_size, seed=n)
    weight = pack([tensor])
    assert weight.description == FORMS[type_name]
    assert weight.segments[0].matrix.scale_format == ("f16" if type_name in SIMPLE else "f32")
    assert (weight.n, weight.k) == tensor.shape
    assert np.array_equal(values(weight), dequantize(type_name, tensor.blocks))


@pytest.mark.parametrize("type_name", FORMS)
def test_blocks_of_random_bits_keep_every_weight(type_name: str) -> None:
    # Scales are any float16 but infinity and NaN, subnormal ones among them.
    tensor = random_blocks(type_name, 64, 256, seed=7)
    blocks = tensor.blocks.reshape(-1, TYPES_BY_NAME[type_name].block_bytes)
    halves = np.random.default_rng(8).integers(0, 0x7C00, (len(blocks), 2), dtype=np.uint16)
    halves |= np.random.default_rng(9).integers(0, 2, halves.shape, dtype=np.uint16) << 15
    for i, at in enumerate(HALVES[type_name]):
        blocks[:, at : at + 2] = halves[:, i, None].view(np.uint8)
    tensor.blocks = blocks.reshape(64, -1)
    assert np.array_equal(values(pack([tensor])), dequantize(type_name, tensor.blocks))


@pytest.mark.parametrize("type_name", FORMS)
def test_dequantized_blocks_are_those_of_the_definition(type_name: str) -> None:
    tensor = random_blocks(type_name, 19, 512)
    expected = dequantize(type_name, tensor.blocks)
    assert np.array_equal(values(pack([tensor], quantization="none")), expected)
    rounded = values(pack([tensor], dtype="bfloat16", quantization="none"))
    assert np.array_equal(rounded, expected.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_the_lowest_integer_of_q8_0_is_kept() -> None:
    tensor = random_blocks("Q8_0", 16, 64)
    blocks = tensor.blocks.reshape(-1, 34)
    blocks[:, 2:] = 0x80
    tensor.blocks = blocks.reshape(16, -1)
    assert (integers(pack([tensor]).segments[0]) == -128).all()


def test_scales_that_all_are_float16_numbers_are_stored_so() -> None:
    tensor = random_blocks("Q4_K", 16, 256)
    tensor.blocks[:, 0:4] = np.array([0.25, 0.5], np.float16).view(np.uint8)
    weight = pack([tensor])
    assert weight.segments[0].matrix.scale_format == "f16"
    assert np.array_equal(values(weight), dequantize("Q4_K", tensor.blocks))
    tensor.blocks[15, 0:2] = np.array([1 / 3], np.float16).view(np.uint8)
    weight = pack([tensor])
    assert weight.segments[0].matrix.scale_format == "f32"
    assert np.array_equal(values(weight), dequantize("Q4_K", tensor.blocks))


def test_parts_with_the_same_integers_are_one_matrix() -> None:
    parts = [random_blocks(name, n, 64, seed=n) for name, n in (("Q5_0", 24), ("Q8_0", 8), ("IQ4_NL", 9))]
    weight = pack(parts)
    assert weight.description == "int8 g32" and len(weight.segments) == 1
    assert np.array_equal(values(weight), np.concatenate([part.numpy() for part in parts]))


def test_parts_with_other_integers_become_segments() -> None:
    parts = [random_blocks(name, n, 256, seed=n) for name, n in (("Q4_K", 40), ("Q4_K", 8), ("Q6_K", 8), ("Q4_K", 3))]
    weight = pack(parts)
    assert weight.description == "int4 g32 + min | int8 g16"
    assert [segment.n for segment in weight.segments] == [48, 8, 3] and weight.n == 59
    assert weight.nbytes == sum(segment.nbytes for segment in weight.segments)
    assert np.array_equal(values(weight), np.concatenate([part.numpy() for part in parts]))


def test_a_part_in_plain_type_beside_blocks_is_a_segment() -> None:
    parts = [random_blocks("Q4_0", 16, 64), Tensor.plain(normal(16, 64).astype(np.float16))]
    weight = pack(parts)
    assert weight.description == "int4 g32 | f16"
    assert np.array_equal(values(weight), np.concatenate([part.numpy().astype(np.float32) for part in parts]))


# -- gate and up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [16, 5, 41])
@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K", "float"])
def test_panels_of_gate_and_up_alternate(type_name: str, half: int) -> None:
    if type_name == "float":
        gate, up = (Tensor.plain(normal(half, 256, seed)) for seed in (1, 2))
    else:
        gate, up = (random_blocks(type_name, half, 256, seed) for seed in (1, 2))
    weight = pack([gate, up], "gated")
    assert weight.gated and (weight.n, weight.k) == (2 * half, 256)
    panels = padded_values(weight.segments[0]).reshape(-1, 2, 16, 256)
    for which, part in enumerate((gate, up)):
        rows = panels[:, which].reshape(-1, 256)
        assert np.array_equal(rows[:half], part.numpy()) and not rows[half:].any()


def test_gate_and_up_in_one_tensor_equal_two_tensors() -> None:
    both = normal(2 * 21, 40)
    one, two = pack([both], "gated"), pack([both[:21], both[21:]], "gated")
    assert one.gated and np.array_equal(one.segments[0].matrix.memory, two.segments[0].matrix.memory)


def test_gate_and_up_of_other_formats_are_plain_segments() -> None:
    gate, up = random_blocks("Q4_1", 24, 64), random_blocks("Q8_0", 24, 64)
    weight = pack([gate, up], "gated")
    assert not weight.gated and [segment.gated for segment in weight.segments] == [False, False]
    assert np.array_equal(values(weight), np.concatenate([gate.numpy(), up.numpy()]))


# -- plain types ---------------------------------------------------------------------------------------

SPECIAL = np.array(
    [0.0, -0.0, 1.0, -1.0, 65504.0, -65504.0, 1e-40, -1e-40, 6e-8, 5.9e-8, 3e-8, 2.9e-8, 6.1e-5, 6.0e-5, 1.00048828125,
     1.001, 1.00390625, 1.01171875, 3.3e38, np.inf, -np.inf, np.nan, 1 / 3, 2048.5],
    np.float32,
)  # fmt: skip


@pytest.mark.parametrize(
    ("source", "dtype", "format_name"),
    [
        (np.float32, "float32", "f32"),
        (ml_dtypes.bfloat16, "float32", "bf16"),
        (np.float16, "float32", "f16"),
        (np.float32, "bfloat16", "bf16"),
        (ml_dtypes.bfloat16, "bfloat16", "bf16"),
        (np.float16, "bfloat16", "bf16"),
        (np.float32, "float16", "f16"),
        (ml_dtypes.bfloat16, "float16", "f16"),
        (np.float16, "float16", "f16"),
    ],
)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (17, 33), (50, 300)])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_plain_types_are_rounded_to_the_nearest_of_dtype(source: type, dtype: str, format_name: str, n: int, k: int):
    array = normal(n, k)
    array.ravel()[: min(n * k, len(SPECIAL))] = SPECIAL[: n * k]
    array = array.astype(source)
    weight = pack([Tensor.plain(array)], dtype=dtype)
    stored = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}[format_name]
    if n * k > 1:
        assert weight.description == format_name
    assert np.array_equal(values(weight), array.astype(stored).astype(np.float32), equal_nan=True)


def test_float32_weights_that_are_bfloat16_numbers_are_stored_so() -> None:
    array = normal(20, 700).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert pack([array]).description == "bf16"
    array[19, 699] = 1 / 3
    weight = pack([array])
    assert weight.description == "f32" and np.array_equal(values(weight), array)


def test_parts_in_several_plain_types_are_one_matrix_that_holds_them_all() -> None:
    parts = [normal(8, 48).astype(np.float16), normal(24, 48).astype(ml_dtypes.bfloat16)]
    weight = pack(parts)
    assert weight.description == "f32"
    assert np.array_equal(values(weight), np.concatenate([part.astype(np.float32) for part in parts]))


@pytest.mark.parametrize("dtype", [np.float64, np.int8, ml_dtypes.float8_e4m3fn])
def test_other_types_become_numbers_of_dtype(dtype: type) -> None:
    array = np.arange(-48, 48).reshape(4, 24).astype(dtype)
    assert np.array_equal(values(pack([array])), array.astype(np.float32))


def test_what_is_not_16_rows_or_whole_groups_is_zero() -> None:
    for tensor in (
        Tensor.plain(normal(18, 35)),
        Tensor.plain(normal(18, 35).astype(np.float16)),
        Tensor.plain(normal(18, 35).astype(ml_dtypes.bfloat16)),
        random_blocks("Q4_0", 18, 32),
        random_blocks("Q4_1", 18, 32),
        random_blocks("Q6_K", 18, 256),
        random_blocks("Q5_1", 18, 96),
    ):
        segment = pack([tensor]).segments[0]
        padded = padded_values(segment)
        step = 64 if segment.is_integer else 32
        assert padded.shape == (32, -(-segment.k // step) * step)
        assert not padded[18:].any() and not padded[:, segment.k :].any()
    for quantization in ("int8", "int4"):
        assert not padded_values(pack([normal(18, 64)], quantization=quantization).segments[0])[18:].any()
    padded = padded_values(pack([normal(18, 70)], quantization="int8").segments[0])
    assert padded.shape == (32, 128) and not padded[:, 70:].any()


def test_matrices_begin_at_a_cache_line() -> None:
    many = store()
    for i in range(1, 20):
        weight = many.pack([normal(i, i)], "linear")
        assert weight.segments[0].matrix.memory.ctypes.data % 64 == 0


def test_parts_of_other_widths_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"rows of \[8, 16\] values"):
        pack([normal(4, 8), normal(4, 16)])


def test_vectors_are_float32_and_follow_each_other() -> None:
    parts = [Tensor.plain(normal(1, 9)[0].astype(ml_dtypes.bfloat16)), normal(1, 4)[0]]
    vector = store(dtype="bfloat16").pack(parts, "vector")
    assert isinstance(vector, np.ndarray) and vector.dtype == np.float32
    assert np.array_equal(vector, np.concatenate([parts[0].values.astype(np.float32), parts[1]]))


def test_bytes_do_not_depend_on_the_number_of_threads() -> None:
    array, blocks = normal(100, 320), random_blocks("Q4_K", 100, 512)
    for quantization in ("auto", "int8", "int4"):
        packed = [
            WeightStore(dtype="bfloat16", team=_native.Team(threads), quantization=quantization).pack([part], "linear")
            for part in (array, blocks)
            for threads in (1, 3)
        ]
        memory = [weight.segments[0].matrix.memory for weight in packed]
        assert np.array_equal(memory[0], memory[1]) and np.array_equal(memory[2], memory[3])


# -- round to nearest ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), [(1, 1), (33, 70), (48, 1000)])
def test_int8_errs_by_half_a_step_of_its_row(n: int, k: int) -> None:
    array = normal(n, k)
    array[0] *= 1e-6
    array[n // 2] = 0.0
    weight = pack([array], quantization="int8")
    assert weight.description == "int8 per row"
    largest = np.abs(array).max(axis=1, keepdims=True)
    # Half a step of max / 127; the scale, its product and the quotient add rounding of float32.
    assert (np.abs(values(weight) - array) <= largest / 254 * (1 + 1e-4)).all()
    q = integers(weight.segments[0])
    assert q.min() >= -127 and q.max() <= 127
    assert np.array_equal(np.abs(q).max(axis=1)[:n], np.where(largest[:, 0] > 0, 127, 0))


@pytest.mark.parametrize("shift", [0.0, 3.0, -0.5])
@pytest.mark.parametrize(("n", "k"), [(1, 3), (33, 70), (48, 1000)])
def test_int4_errs_by_half_a_step_of_its_group(n: int, k: int, shift: float) -> None:
    array = normal(n, k) + np.float32(shift)
    weight = pack([array], quantization="int4")
    assert weight.description == "int4 g32 + min" and weight.segments[0].matrix.scale_format == "f16"
    error = np.abs(values(weight) - array)
    for start in range(0, k, 32):
        group = array[:, start : start + 32]
        low, high = group.min(axis=1, keepdims=True), group.max(axis=1, keepdims=True)
        step = (high - low) / 15
        # At the ends of the range: what rounding to float16 (2^-11) moved the minimum and fifteen steps.
        bound = step / 2 + 2**-11 * (np.abs(low) + 15 * step) + 2**-24
        assert (error[:, start : start + 32] <= bound * (1 + 1e-4)).all()


def test_symmetric_int4_errs_by_half_a_step_but_opposite_to_the_largest_weight() -> None:
    array = normal(16, 64)
    shape = ("int4", 16, 64, 32, "f32", False, False)
    memory = _aligned(_native.packed_bytes(*shape))
    matrix = _native.PackedMatrix(memory, *shape)
    largest = _native.quantize_values(matrix, memory, [("F32", array.view(np.uint8))], TEAM)
    assert largest == np.abs(array).max()
    groups, found = array.reshape(-1, 32), padded_values(PackedSegment(matrix)).reshape(-1, 32)
    most = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)
    step = np.abs(most) / 8
    assert (np.abs(found - groups) <= np.where(groups * np.sign(most) < -7.5 * step, step, step / 2) * 1.0001).all()
    assert np.array_equal(np.take_along_axis(found, np.abs(groups).argmax(axis=1)[:, None], axis=1), most)


def _aligned(size: int) -> np.ndarray:
    memory = np.zeros(size + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:size]


def test_constant_groups_are_exact() -> None:
    array = np.repeat(np.array([[0.0], [0.5], [-3.0]], np.float32), 64, axis=1)
    for quantization in ("int4", "int8"):
        found = values(pack([array], quantization=quantization))
        assert np.allclose(found, array, rtol=1e-6, atol=0)


def test_weights_beyond_float16_are_quantized_with_float32_scales() -> None:
    array = normal(16, 64, scale=1e6)
    weight = pack([array], quantization="int4")
    assert weight.segments[0].matrix.scale_format == "f32"
    assert np.abs(values(weight) - array).max() <= np.ptp(array) / 30 * 1.001


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_what_is_not_a_number_is_not_quantized(bad: float, quantization: str) -> None:
    array = normal(20, 40)
    array[19, 39] = bad
    with pytest.raises(CheckpointError, match="infinity or NaN"):
        pack([array], quantization=quantization)


def test_embeddings_are_int8_in_int4_models() -> None:
    assert pack([normal(20, 40)], "embedding", quantization="int4").description == "int8 per row"
    assert pack([normal(20, 40)], "gated", quantization="int4").gated


# -- the report ----------------------------------------------------------------------------------------


def test_the_report_tells_formats_and_nothing_else_where_all_is_exact() -> None:
    model = store()
    model.pack([random_blocks("Q4_K", 16, 256), random_blocks("Q6_K", 16, 256)], "linear")
    model.pack([normal(16, 64).astype(ml_dtypes.bfloat16)], "linear")
    model.pack([normal(1, 64)[0]], "vector")
    (line,) = model.report()
    assert all(part in line for part in ("int4 g32 + min", "int8 g16", "bf16", "float32 vectors", "packed in"))


def test_the_report_tells_what_was_rounded() -> None:
    model = store(dtype="float16")
    model.pack([normal(4, 8)], "linear")
    model.pack([normal(4, 8)], "linear")
    model.pack([np.full((4, 8), 1e6, np.float32)], "linear")
    model.pack([np.full((4, 8), 0.5, ml_dtypes.bfloat16)], "linear")
    assert model.report()[1:] == [
        "weights: float32 exceeds the range of float16, and became infinite (1 parameter)",
        "weights: float32 rounded to float16 (3 parameters)",
    ]


def test_the_report_warns_of_blocks_that_are_quantized_again() -> None:
    model = store(quantization="int8")
    model.pack([random_blocks("Q4_1", 16, 64)], "linear")
    model.pack([normal(16, 64)], "linear")
    assert model.report()[1:] == [
        "weights: Q4_1 rounded to the nearest int8: quantized a second time, which costs quality; --quantization auto "
        "keeps it exact (1 parameter)",
        "weights: float32 rounded to the nearest int8 (1 parameter)",
    ]


# -- the extension's own checks ------------------------------------------------------------------------


def test_the_extension_refuses_what_does_not_fit() -> None:
    memory = _aligned(_native.packed_bytes("int8", 16, 64, 32))
    matrix = _native.PackedMatrix(memory, "int8", 16, 64, 32)
    rows = np.zeros((16, 68), np.uint8)
    with pytest.raises(ValueError, match="the matrix lies elsewhere"):
        _native.pack_blocks(matrix, memory.copy(), [("Q8_0", rows)], TEAM)
    with pytest.raises(ValueError, match="15 rows for a matrix of 16"):
        _native.pack_blocks(matrix, memory, [("Q8_0", rows[1:])], TEAM)
    with pytest.raises(ValueError, match="rows of 34 bytes for 64 values"):
        _native.pack_blocks(matrix, memory, [("Q8_0", rows[:, :34].copy())], TEAM)
    with pytest.raises(ValueError, match="another integer form"):
        _native.pack_blocks(matrix, memory, [("Q4_0", np.zeros((16, 36), np.uint8))], TEAM)
    with pytest.raises(ValueError, match="wrong kind of format"):
        _native.pack_values(matrix, memory, [("Q8_0", rows)], TEAM)
    with pytest.raises(ValueError, match="unknown type 'Q9'"):
        _native.pack_blocks(matrix, memory, [("Q9", rows)], TEAM)
    with pytest.raises(ValueError, match="takes .* bytes at a multiple of 64"):
        _native.PackedMatrix(memory[:-64], "int8", 16, 64, 32)
    with pytest.raises(ValueError, match="groups of 48 in rows of 64"):
        _native.packed_bytes("int8", 16, 64, 48)
    with pytest.raises(ValueError, match="gated matrix of 15 rows"):
        _native.packed_bytes("f32", 15, 64, gated=True)
    read_only = memory.view()
    read_only.flags.writeable = False
    with pytest.raises(TypeError):
        _native.pack_blocks(matrix, read_only, [("Q8_0", rows)], TEAM)
