"""Bit-exact against ml_dtypes, on every instruction set that this processor can run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from octavo.backends.native.bf16 import bf16_to_float32, float32_to_bf16
from octavo.backends.native.cpu import detect_cpu

ISAS = detect_cpu().isas
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 1000]  # around every lane count


def every_bf16() -> np.ndarray:
    return np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)


def interesting_float32() -> np.ndarray:
    """Every bfloat16 value, each with low halves around the rounding point, and random patterns."""
    high = np.arange(1 << 16, dtype=np.uint32)[:, None] << 16
    low = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint32)
    return np.concatenate([(high | low).reshape(-1), random]).view(np.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_widening_every_bf16_value_is_exact(isa: str) -> None:
    x = every_bf16()
    np.testing.assert_array_equal(
        bf16_to_float32(x, isa=isa).view(np.uint32), x.view(np.uint16).astype(np.uint32) << 16
    )


@pytest.mark.parametrize("isa", ISAS)
def test_narrowing_rounds_as_ml_dtypes_does(isa: str) -> None:
    x = interesting_float32()
    with np.errstate(all="ignore"):
        expected = x.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(float32_to_bf16(x, isa=isa).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("size", SIZES)
def test_odd_sizes_and_unaligned_starts_give_the_same_values(isa: str, size: int) -> None:
    whole = np.random.default_rng(1).standard_normal(size + 3).astype(np.float32)
    x = whole[3:]
    narrow = float32_to_bf16(x, isa=isa)
    np.testing.assert_array_equal(narrow.view(np.uint16), x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(bf16_to_float32(narrow, isa=isa), narrow.astype(np.float32))


def test_shape_is_kept_and_strided_input_is_read_in_order() -> None:
    x = np.random.default_rng(2).standard_normal((6, 10)).astype(np.float32)[::2, ::-1]
    narrow = float32_to_bf16(x)
    assert narrow.shape == (3, 10)
    np.testing.assert_array_equal(narrow.astype(np.float32), x.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(bf16_to_float32(narrow.T), narrow.T.astype(np.float32))


def test_an_instruction_set_that_cannot_run_here_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'avx9000' is not usable"):
        float32_to_bf16(np.zeros(1, np.float32), isa="avx9000")
