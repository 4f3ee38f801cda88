"""Figures are positive, and in the order that the instructions give them. How fast a machine is, no test says."""

from __future__ import annotations

import dataclasses

import pytest

from octavo import _native
from octavo.backends.native.roofline import last_cache_bytes, measure


@pytest.mark.parametrize("isa", _native.usable_isas())
def test_every_figure_is_positive_on_every_instruction_set(isa: str) -> None:
    measured = measure(1, isa=isa, seconds=0.02)
    assert (measured.isa, measured.num_threads) == (isa, 1)
    assert measured.read_bytes >= 1 << 20
    figures = {name: value for name, value in dataclasses.asdict(measured).items() if name.endswith("_s")}
    assert len(figures) == 5
    assert all(value > 0 for value in figures.values()), figures
    assert measured.read_gb_s == max(measured.read_1_stream_gb_s, measured.read_4_streams_gb_s)


@pytest.mark.skipif(len(_native.usable_isas()) == 1, reason="the processor has no vector instructions that kernels use")
def test_vectors_multiply_more_than_plain_code_and_integers_more_than_floats() -> None:
    plain, best = measure(1, isa="portable", seconds=0.05), measure(1, seconds=0.05)
    assert best.isa == _native.usable_isas()[-1]
    assert best.f32_gflop_s > plain.f32_gflop_s
    assert best.int8_gop_s > plain.int8_gop_s
    assert best.int8_gop_s > best.f32_gflop_s


def test_operations_are_counted() -> None:
    probe = _native.RooflineProbe("portable", _native.Team(2), 256)
    _, once = probe.multiply("f32", 1)
    _, thrice = probe.multiply("f32", 3)
    assert 0 < 3 * once == thrice


def test_the_probe_refuses_what_it_cannot_measure() -> None:
    team = _native.Team(1)
    with pytest.raises(ValueError, match="multiple of 256"):
        _native.RooflineProbe("auto", team, 300)
    probe = _native.RooflineProbe("auto", team, 1 << 16)
    with pytest.raises(ValueError, match="1 stream or 4"):
        probe.read(2)
    with pytest.raises(ValueError, match="no products of 'f8'"):
        probe.multiply("f8", 1)


def test_the_last_cache_has_a_size() -> None:
    assert 1 << 16 <= last_cache_bytes() <= 1 << 34
