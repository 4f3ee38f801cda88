"""A decoding step takes no memory, and its Python does not grow with the model's layers."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from tests.tiny import save_tiny_llama

from octavo.engine.llm import LLM
from octavo.request import SamplingParams

# Comes before libc in the order of the loader: what the extension (through operator new too) and its threads ask for.
COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/types.h>

static atomic_long num_calls;
long num_allocations(void) { return atomic_load(&num_calls); }

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (next == NULL) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
    atomic_fetch_add(&num_calls, 1)

void* __libc_malloc(size_t);
void* __libc_calloc(size_t, size_t);
void* __libc_realloc(void*, size_t);
void* __libc_memalign(size_t, size_t);
void* malloc(size_t size) { atomic_fetch_add(&num_calls, 1); return __libc_malloc(size); }
void* calloc(size_t n, size_t size) { atomic_fetch_add(&num_calls, 1); return __libc_calloc(n, size); }
void* realloc(void* p, size_t size) { atomic_fetch_add(&num_calls, 1); return __libc_realloc(p, size); }
void* aligned_alloc(size_t a, size_t size) { atomic_fetch_add(&num_calls, 1); return __libc_memalign(a, size); }
int posix_memalign(void** p, size_t a, size_t size) { *p = aligned_alloc(a, size); return *p == NULL ? 12 : 0; }
void* mmap(void* at, size_t size, int protection, int flags, int fd, off_t offset) {
    NEXT(mmap);
    return next(at, size, protection, flags, fd, offset);
}
int madvise(void* at, size_t size, int advice) { NEXT(madvise); return next(at, size, advice); }
"""
SCRIPT = "import sys; from tests.backends.native import test_steady_state as t; t.count_allocations(*sys.argv[1:])"


class CountingPlan:
    """Stands in for a plan, and notes how many allocations each of its runs makes."""

    def __init__(self, plan: Any, num_allocations: Any) -> None:
        self._plan = plan
        self._num_allocations = num_allocations
        self.counts: list[int] = []

    def run(self, first: int, end: int) -> None:
        before = self._num_allocations()
        self._plan.run(first, end)
        self.counts.append(self._num_allocations() - before)

    def run_rows(self, *arguments: Any) -> None:
        before = self._num_allocations()
        self._plan.run_rows(*arguments)
        self.counts.append(self._num_allocations() - before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)


def count_allocations(model: str, library: str) -> None:
    """In a process of its own, which loads `library` first."""
    num_allocations = ctypes.CDLL(library).num_allocations
    num_allocations.restype = ctypes.c_long
    for options in ({}, {"quantization": "int8"}, {"quantization": "int4", "dtype": "bfloat16"}):
        llm = LLM(model, threads=2, max_model_len=256, kv_cache_memory_bytes="4MiB", repack_cache=False, **options)
        program = llm._core._execute.__self__._decoder.program
        plan = CountingPlan(program.plan, num_allocations)
        object.__setattr__(program, "plan", plan)
        params = [
            SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True),
            SamplingParams(seed=1, max_tokens=60, ignore_eos=True, logprobs=2),
        ]
        llm.generate([[1, 2, 3], [4] * 20], params, use_tqdm=False)
        assert sum(plan.counts) > 0, "the arena grew, and nobody noticed"
        plan.counts.clear()
        llm.generate([[1, 2, 3], [4] * 20], params, use_tqdm=False)
        assert len(plan.counts) > 100, plan.counts
        print(options, len(plan.counts), "runs,", sum(plan.counts), "allocations")


def test_a_planned_step_takes_no_memory(tmp_path: Path) -> None:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("no C compiler to build the counter with, or not Linux")
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("the address sanitizer has allocation functions of its own")
    library = tmp_path / "counter.so"
    (tmp_path / "counter.c").write_text(COUNTER)
    command = [compiler, "-O1", "-shared", "-fPIC", str(tmp_path / "counter.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    model = save_tiny_llama(tmp_path / "model")
    environment = os.environ | {"LD_PRELOAD": str(library), "PYTHONPATH": str(Path(__file__).parents[3])}
    arguments = [sys.executable, "-c", SCRIPT, str(model), str(library)]
    found = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert len(lines) == 3 and all(line.endswith(" 0 allocations") for line in lines), lines


def calls_of_steps(model: Path) -> Counter[CodeType | str]:
    """The functions that steps of two requests call from Python, each with how often."""
    llm = LLM(str(model), threads=1, max_model_len=128, kv_cache_memory_bytes="4MiB", repack_cache=False)
    params = SamplingParams(temperature=0.0, seed=0, max_tokens=40, ignore_eos=True)
    calls: Counter[CodeType | str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            calls[frame.f_code] += 1
        elif event == "c_call":
            calls[getattr(argument, "__qualname__", repr(argument))] += 1

    llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    llm._core.reset_prefix_cache()
    sys.setprofile(note)
    try:
        llm.generate([[1, 2, 3], [4, 5]], params, use_tqdm=False)
    finally:
        sys.setprofile(None)
    return calls


def test_the_python_of_a_step_is_the_same_for_two_layers_and_for_six(tmp_path: Path) -> None:
    few, many = (calls_of_steps(save_tiny_llama(tmp_path / str(layers), num_hidden_layers=layers)) for layers in (2, 6))
    assert few.total() > 1000
    assert few == many, (few - many, many - few)
