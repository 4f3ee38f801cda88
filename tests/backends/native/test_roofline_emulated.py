"""What the AVX-512 and AMX builds of csrc/ops/roofline.cpp compute while they are timed, on an emulated processor."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.native.emulator import KERNEL_FLAGS, Emulator, Isa, Unavailable, core

CSRC = Path(__file__).parents[3] / "csrc"
GLUE = r"""
#include "core/team.h"
#include "ops/roofline.h"

namespace octavo::OCTAVO_ISA {
void read_memory(const ReadArgs&, Team&);
int64_t multiply(const ProductsArgs&, Team&);
}
using namespace octavo;

static Team* team = new Team(1);
static const ProductKind kinds[] = {ProductKind::f32, ProductKind::bf16, ProductKind::int8};

extern "C" {
uint8_t* scratch() { return team->scratch(0); }
void read_memory(const uint8_t* data, int64_t bytes, int64_t streams) {
    OCTAVO_ISA::read_memory({data, bytes, streams}, *team);
}
int64_t multiply(int kind, int64_t rounds) { return OCTAVO_ISA::multiply({kinds[kind], rounds}, *team); }
}
"""
NUM_CHUNKS = 8
OPERAND = np.frombuffer(b"\x3f" * 4, np.float32)[0]  # what registers are filled with
BYTE = 0x3F
Load = Callable[[str], tuple[ctypes.CDLL, np.ndarray]]


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Of an instruction set: the library, and the scratch memory of its only thread."""
    try:
        core()
    except Unavailable as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("roofline")
    (folder / "glue.cpp").write_text(GLUE)
    compiler = os.environ.get("CXX", "c++"), "-O3", "-fPIC", "-std=c++20", "-ffp-contract=off", f"-I{CSRC}", "-pthread"
    loaded: dict[str, tuple[ctypes.CDLL, np.ndarray]] = {}

    def make(isa: str) -> tuple[ctypes.CDLL, np.ndarray]:
        if isa not in loaded:
            of_isa = ["-w", *KERNEL_FLAGS[isa], f"-DOCTAVO_ISA={isa}"]
            for source, flags in (
                (CSRC / "ops/roofline.cpp", of_isa),
                (CSRC / "core/team.cpp", []),
                (Path("glue.cpp"), of_isa[-1:]),
            ):
                subprocess.run([*compiler, *flags, "-c", str(source)], cwd=folder, check=True, timeout=200)
            objects = "roofline.o", "team.o", "glue.o"
            subprocess.run([*compiler, "-shared", *objects, "-o", f"{isa}.so"], cwd=folder, check=True, timeout=100)
            library = ctypes.CDLL(str(folder / f"{isa}.so"))
            library.scratch.restype = ctypes.POINTER(ctypes.c_uint8)
            loaded[isa] = library, np.ctypeslib.as_array(library.scratch(), (1 << 20,))
        return loaded[isa]

    return make


@pytest.mark.parametrize("isa", ["avx512", "amx"])
@pytest.mark.parametrize("streams", [1, 4])
def test_every_line_is_read_once(load: Load, isa: Isa, streams: int) -> None:
    library, scratch = load(isa)
    data = np.random.default_rng(streams).integers(-1000, 1000, (NUM_CHUNKS, 12, 16), dtype=np.int32)
    Emulator(isa).call(library.read_memory, data, data.nbytes, streams)
    np.testing.assert_array_equal(scratch[:64].view(np.int32), data[-1].sum(0))  # of the chunk that came last


@pytest.mark.parametrize("isa", ["avx512", "amx"])
def test_floats_are_multiplied_as_often_as_is_counted(load: Load, isa: Isa) -> None:
    library, scratch = load(isa)
    rounds, num_sums = 5, 12
    operations = Emulator(isa).call(library.multiply, 0, rounds)
    assert operations == NUM_CHUNKS * rounds * num_sums * 16 * 2
    expected = np.float64(OPERAND) * (1 + rounds * np.float64(OPERAND))
    sums = scratch[128 : 128 + num_sums * 64].view(np.float32)
    np.testing.assert_allclose(sums, expected, rtol=1e-6)
    assert (scratch[128 + num_sums * 64 : 4096] == BYTE).all()


def test_integers_of_avx512_are_multiplied_as_often_as_is_counted(load: Load) -> None:
    library, scratch = load("avx512")
    rounds, num_sums = 5, 12
    operations = Emulator("avx512").call(library.multiply, 2, rounds)
    assert operations == NUM_CHUNKS * rounds * num_sums * 64 * 2
    sums = scratch[128 : 128 + num_sums * 64].view(np.int32)
    np.testing.assert_array_equal(sums, 0x3F3F3F3F + rounds * 4 * BYTE * BYTE)


@pytest.mark.parametrize(("kind", "depth"), [(1, 32), (2, 64)])
def test_tiles_of_amx_run_and_are_counted(load: Load, kind: int, depth: int) -> None:
    library, _ = load("amx")
    assert Emulator("amx").call(library.multiply, kind, 2) == NUM_CHUNKS * 2 * 4 * 16 * 16 * depth * 2
