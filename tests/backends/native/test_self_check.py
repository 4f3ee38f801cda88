"""The instruction set is chosen among those that compute on this processor what they promise."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.backends.native.cpu import detect_cpu
from octavo.backends.native.self_check import best_isa, probe

ISAS = ("portable", "avx2", "avx512", "amx")


def probe_with(wrong: dict[str, float]):
    def found(isa: str) -> list[NDArray[np.float32]]:
        return [np.array([1.0, wrong.get(isa, 2.0)], np.float32), np.zeros((2, 3), np.float32)]

    return found


def test_every_usable_instruction_set_gives_the_portable_bits() -> None:
    expected = probe("portable")
    assert all(np.isfinite(values).all() and values.any() for values in expected)
    for isa in detect_cpu().isas:
        for found, values in zip(probe(isa), expected, strict=True):
            assert (found.view(np.int32) == values.view(np.int32)).all(), isa


def test_the_best_one_that_agrees_is_taken() -> None:
    assert best_isa(ISAS, probe_with({})) == "amx"
    assert best_isa(ISAS[:3], probe_with({"amx": 3.0})) == "avx512"


@pytest.mark.parametrize("value", [2.0000002, -2.0, np.nan])
def test_one_that_does_not_agree_is_named_and_left_out(value: float, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert best_isa(ISAS, probe_with({"amx": value})) == "avx512"
        assert best_isa(ISAS, probe_with({"amx": value, "avx512": value})) == "avx2"
    assert "The amx kernels do not give the expected results" in caplog.text


def test_nothing_is_compared_where_only_trusted_ones_are_usable() -> None:
    def never(isa: str) -> list[NDArray[np.float32]]:
        raise AssertionError(isa)

    assert best_isa(("portable", "avx2"), never) == "avx2"
    assert best_isa(("portable",), never) == "portable"
