"""The AVX-512 build of the sampling kernel gives NumPy's bits too: run by an emulated processor."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.backends.native.test_sampler import random_logits, random_mask, random_row
from tests.native.emulator import KERNEL_FLAGS, Emulator, Unavailable, core

from octavo.backends.native.sampler import NativeSampler
from octavo.sampling.sampler import Sampler

CSRC = Path(__file__).parents[3] / "csrc"
FLAGS = [*KERNEL_FLAGS["avx512"], "-DOCTAVO_ISA=avx512", "-w"]
GLUE = r"""
#include <cstdlib>
#include <initializer_list>

#include "ops/sampler.h"

namespace octavo::avx512 { void sample(const SampleArgs&, Team&); }
using namespace octavo;

static Team* team = new Team(1);
static SampleArgs args;

template <class T>
static void take(T*& target, void**& arrays) { target = static_cast<T*>(*arrays++); }

extern "C" {

void set_args(void** arrays, const int64_t* sizes) {
    take(args.logits, arrays), take(args.options, arrays), take(args.positions, arrays), take(args.sources, arrays);
    take(args.edit_of_row, arrays);
    for (RaggedIds* list : {&args.allowed, &args.banned, &args.biased, &args.seen}) {
        take(list->starts, arrays), take(list->ids, arrays);
    }
    take(args.biases, arrays), take(args.counts, arrays), take(args.mask_of_row, arrays), take(args.masks, arrays);
    take(args.token_ids, arrays), take(args.statuses, arrays);
    Described& d = args.described;
    take(d.values, arrays), take(d.peaks, arrays), take(d.totals, arrays), take(d.ranks, arrays);
    take(d.num_top, arrays), take(d.top_ids, arrays), take(d.top_values, arrays);
    args.vocab_size = sizes[0], args.rows = sizes[1], args.logits_stride = sizes[2], args.mask_words = sizes[3];
    d.top_stride = sizes[4], args.processed = sizes[5] != 0;
    std::free(args.workspace);
    const int64_t size = (sample_workspace(args.vocab_size, 1).bytes + 63) / 64 * 64;
    args.workspace = static_cast<uint8_t*>(std::aligned_alloc(64, size));
}

void run_sample() { avx512::sample(args, *team); }

}
"""


class EmulatedSampler:
    """Stands in for `_native.Sampler`."""

    def __init__(self, library: ctypes.CDLL, vocab_size: int) -> None:
        self._library = library
        self._vocab_size = vocab_size
        self._emulator = Emulator("avx512")

    def sample(
        self,
        logits: np.ndarray,
        options: np.ndarray,
        positions: np.ndarray,
        sources: np.ndarray,
        edits: Sequence[np.ndarray] | None,
        masks: Sequence[np.ndarray] | None,
        given: None,
        processed: bool,
        token_ids: np.ndarray,
        statuses: np.ndarray,
        described: Sequence[np.ndarray] | None,
    ) -> None:
        columns = [logits, options, positions, sources, *(edits or [None] * 11), *(masks or [None] * 2)]
        arrays = [*columns, token_ids, statuses, *(described or [None] * 7)]
        pointers = [None if array is None else array.ctypes.data for array in arrays]
        mask_words = 0 if masks is None else masks[1].shape[1]
        top_stride = 0 if described is None else described[5].shape[1]
        sizes = (self._vocab_size, len(sources), logits.strides[0] // 4, mask_words, top_stride, processed)
        self._library.set_args((ctypes.c_void_p * len(pointers))(*pointers), (ctypes.c_int64 * 6)(*sizes))
        self._emulator.call(self._library.run_sample)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    try:
        core()
    except Unavailable as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("sampler")
    (folder / "glue.cpp").write_text(GLUE)
    compiler = os.environ.get("CXX", "c++"), "-O2", "-fPIC", "-std=c++20", "-ffp-contract=off", f"-I{CSRC}", "-pthread"
    for source, flags in ((CSRC / "ops/sampler.cpp", FLAGS), (CSRC / "core/team.cpp", []), (Path("glue.cpp"), [])):
        subprocess.run([*compiler, *flags, "-c", str(source)], cwd=folder, check=True, timeout=200)
    objects = "sampler.o", "team.o", "glue.o"
    subprocess.run([*compiler, "-shared", *objects, "-o", "sampler.so"], cwd=folder, check=True, timeout=100)
    return ctypes.CDLL(str(folder / "sampler.so"))


@pytest.mark.parametrize("vocab_size", [63, 1025, 5003])
def test_the_avx512_kernel_samples_what_numpy_samples(library: ctypes.CDLL, vocab_size: int) -> None:
    for case in range(40):
        random = np.random.default_rng([vocab_size, case, 512])
        logits = random_logits(random, 2, vocab_size)
        rows = [random_row(random, vocab_size) for _ in range(2)]
        masks = [random_mask(random, vocab_size) for _ in rows] if random.random() < 0.3 else None
        kernels = NativeSampler.__new__(NativeSampler)
        kernels._native = EmulatedSampler(library, vocab_size)  # type: ignore[assignment]
        mode = "raw" if case % 2 else "processed"
        expected = Sampler(vocab_size, mode).sample(logits, rows, token_masks=masks)
        assert Sampler(vocab_size, mode, kernels).sample(logits, rows, token_masks=masks) == expected, case
