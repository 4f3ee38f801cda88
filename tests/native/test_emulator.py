import ctypes
import mmap
import os
import subprocess
from fractions import Fraction

import numpy as np
import pytest
from tests.native.emulator import PAGE, Emulator, Fault, Unavailable, core

FLAGS = "-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mavx512bf16 -mamx-tile -mamx-int8 -mamx-bf16".split()
PORTABLE = r"""
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
static thread_local int64_t num_calls = 40;

extern "C" {

int64_t weigh(int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g, int64_t h) {
    return a + 2 * b + 3 * c + 4 * d + 5 * e + 6 * f + 7 * g + 8 * h;
}

void scaled(float* target, float scale, int64_t i, double offset) { target[i] = scale * 2 + offset; }

int64_t count_call(char* target, const char* source, size_t n) {
    std::memset(target, 7, 2 * n);
    std::memcpy(target, source, n);
    return ++num_calls;
}

void* allocate(size_t n) { return std::malloc(n); }
void spin() { for (;;) asm volatile(""); }
void poke(volatile char* address) { *address = 1; }
int64_t divide(int64_t a, int64_t b) { return a / b; }

void fma_portable(const float* a, const float* b, float* c, int64_t n) {
    for (int64_t i = 0; i < n; ++i) c[i] = std::fma(a[i], b[i], c[i]);
}

}
"""
VECTOR = r"""
#include <immintrin.h>
#include <cstdint>

#define BARRIER asm volatile("" ::: "memory")

extern "C" {

void fma_avx512(const float* a, const float* b, float* c, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) {
        const __mmask16 mask = n - i < 16 ? (1u << (n - i)) - 1 : 0xffff;
        const __m512 sum = _mm512_fmadd_ps(
            _mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i), _mm512_maskz_loadu_ps(mask, c + i));
        _mm512_mask_storeu_ps(c + i, mask, sum);
    }
}

void dot_u8_i8(const uint8_t* a, const int8_t* b, int32_t* c) {
    _mm512_storeu_si512(c, _mm512_dpbusd_epi32(_mm512_loadu_si512(c), _mm512_loadu_si512(a), _mm512_loadu_si512(b)));
}

void dot_bf16(const void* a, const void* b, float* c) {
    const __m512bh left = (__m512bh)_mm512_loadu_si512(a), right = (__m512bh)_mm512_loadu_si512(b);
    _mm512_storeu_ps(c, _mm512_dpbf16_ps(_mm512_loadu_ps(c), left, right));
}

void narrow_bf16(const float* source, void* target) {
    _mm256_storeu_si256((__m256i*)target, (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(source)));
}

struct Config { uint8_t palette, unused[15]; uint16_t column_bytes[16]; uint8_t rows[16]; };
static const Config one_tile = {1, {}, {4}, {1}};
void load_static_config() { BARRIER; _tile_loadconfig(&one_tile); }
void load_config(const void* config) { BARRIER; _tile_loadconfig(config); }
void store_config(void* config) { _tile_storeconfig(config); }
void release() { _tile_release(); }
void copy_tile(const void* source, int64_t from, void* target, int64_t to) {
    BARRIER;
    _tile_loadd(6, source, from);
    _tile_stored(6, target, to);
}
void zero_tile(void* target) { _tile_zero(6); _tile_stored(6, target, 64); }

#define PRODUCT(name, instruction)                                      \
    void name(void* c, const void* a, const void* b, int64_t stride) {  \
        BARRIER;                                                        \
        _tile_loadd(0, c, stride);                                      \
        _tile_loadd(1, a, stride);                                      \
        _tile_stream_loadd(7, b, stride);                               \
        instruction(0, 1, 7);                                           \
        _tile_stored(0, c, stride);                                     \
    }
PRODUCT(product_bf16, _tile_dpbf16ps)
PRODUCT(product_i8_i8, _tile_dpbssd)
PRODUCT(product_i8_u8, _tile_dpbsud)
PRODUCT(product_u8_i8, _tile_dpbusd)
PRODUCT(product_u8_u8, _tile_dpbuud)
// tdpbf16ps tmm0, tmm1, tmm1, which no assembler accepts
void product_of_equal_tiles() { asm volatile(".byte 0xc4, 0xe2, 0x72, 0x5c, 0xc1"); }

// C += A B for M x K and K x N in tile order, all full tiles.
void matmul_bf16(float* c, const uint16_t* a, const uint16_t* b, int64_t m, int64_t n, int64_t k) {
    BARRIER;
    for (int64_t i = 0; i < m; ++i)
        for (int64_t j = 0; j < n; ++j) {
            _tile_zero(0);
            for (int64_t l = 0; l < k; ++l) {
                _tile_loadd(1, a + (i * k + l) * 512, 64);
                _tile_loadd(2, b + (j * k + l) * 512, 64);
                _tile_dpbf16ps(0, 1, 2);
            }
            _tile_stored(0, c + (i * n + j) * 256, 64);
        }
}

}
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    try:
        core()
    except Unavailable as reason:
        pytest.skip(str(reason))
    folder = tmp_path_factory.mktemp("kernels")
    compiler = os.environ.get("CXX", "c++"), "-O2", "-fPIC"
    for name, source, flags in (("portable", PORTABLE, []), ("vector", VECTOR, FLAGS)):
        (folder / f"{name}.cpp").write_text(source)
        subprocess.run([*compiler, *flags, "-c", f"{name}.cpp"], cwd=folder, check=True, timeout=100)
    objects = "portable.o", "vector.o"
    subprocess.run([*compiler, "-shared", *objects, "-o", "kernels.so"], cwd=folder, check=True, timeout=100)
    return ctypes.CDLL(folder / "kernels.so")


@pytest.fixture(scope="module")
def random():
    return np.random.default_rng(11)


def bf16(values: np.ndarray) -> np.ndarray:
    """The upper halves: exact where the values fit."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def tile_config(*shapes: tuple[int, int]) -> np.ndarray:
    """`shapes` are rows and bytes a row, from tile 0 on."""
    config = np.zeros(64, np.uint8)
    config[0] = 1
    for tile, (rows, column_bytes) in enumerate(shapes):
        config[16 + 2 * tile] = column_bytes
        config[48 + tile] = rows
    return config


FULL = tile_config(*[(16, 64)] * 8)


def test_integers_travel_in_registers_and_on_the_stack(kernels):
    assert Emulator("avx2").call(kernels.weigh, *range(1, 9)) == sum(i * i for i in range(1, 9))
    assert Emulator("avx2").call(kernels.weigh, -1, *[0] * 7) == 2**64 - 1


def test_floats_travel_beside_integers(kernels):
    target = np.zeros(4, np.float32)
    Emulator().call(kernels.scaled, target, ctypes.c_float(1.5), 2, ctypes.c_double(0.25))
    assert target.tolist() == [0, 0, 3.25, 0]
    with pytest.raises(TypeError):
        Emulator().call(kernels.scaled, target, 1.5, 2, 0.25)


def test_memcpy_and_touched_thread_locals_work_in_the_memory_of_this_process(kernels):
    source = np.arange(10_000).astype(np.uint8)
    target = np.zeros(20_001, np.uint8)
    emulator = Emulator()
    assert kernels.count_call(None, None, ctypes.c_size_t(0)) == 41
    assert emulator.call(kernels.count_call, target, source, 10_000) == 42
    assert np.array_equal(target, np.concatenate([source, np.full(10_000, 7), [0]]))
    assert kernels.count_call(None, None, ctypes.c_size_t(0)) == 43


def test_an_allocation_is_a_fault_and_not_a_deadlock(kernels):
    with pytest.raises(Fault, match="#BP .*malloc is called, which cannot be emulated"):
        Emulator().call(kernels.allocate, 100)


@pytest.mark.parametrize("n", [1, 16, 63, 1000])
def test_masked_avx512_fma_equals_the_portable_one_run_natively(kernels, random, n):
    a, b, c = random.standard_normal((3, n)).astype(np.float32)
    a[0], b[0], c[0] = 1 + 2**-12, 1 + 2**-12, -(1 + 2**-11)  # rounding the product first would give zero
    expected = c.copy()
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (a, b, expected)]
    kernels.fma_portable(*pointers, ctypes.c_int64(n))
    Emulator("avx512").call(kernels.fma_avx512, a, b, c, n)
    assert c[0] == 2**-24
    assert np.array_equal(c.view(np.uint32), expected.view(np.uint32))


def test_vnni_products_are_exact(kernels, random):
    a = random.integers(0, 256, 64).astype(np.uint8)
    b = random.integers(-128, 128, 64).astype(np.int8)
    c = random.integers(-(2**31), 2**31, 16).astype(np.int32)
    expected = c + (a.astype(np.int32) * b).reshape(16, 4).sum(1, dtype=np.int32)
    Emulator("avx512").call(kernels.dot_u8_i8, a, b, c)
    assert np.array_equal(c, expected)


def test_bf16_vectors_multiply_and_convert(kernels, random):
    a, b = random.integers(-100, 100, (2, 32)).astype(np.float32)
    c = random.integers(-100, 100, 16).astype(np.float32)
    expected = c + (a * b).reshape(16, 2).sum(1)
    Emulator("avx512").call(kernels.dot_bf16, bf16(a), bf16(b), c)
    assert np.array_equal(c, expected)

    source = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8 + 2**-20), np.inf] * 4, np.float32)
    target = np.zeros(16, np.uint16)
    Emulator("avx512").call(kernels.narrow_bf16, source, target)
    assert target[:4].tolist() == bf16(np.array([1, 1 + 2**-6, -(1 + 2**-7), np.inf])).tolist()


@pytest.mark.parametrize("isa, name", [("avx2", "dot_bf16"), ("avx512", "load_config"), ("avx512", "release")])
def test_an_instruction_that_the_processor_lacks_is_an_invalid_opcode(kernels, isa, name):
    with pytest.raises(Fault, match=f"#UD invalid opcode at rip 0x[0-9a-f]+ .{name}") as fault:
        Emulator(isa).call(getattr(kernels, name), FULL, FULL, FULL)
    start = ctypes.cast(getattr(kernels, name), ctypes.c_void_p).value
    assert (fault.value.vector, 0 <= fault.value.rip - start < 16) == (6, True)


def test_a_system_call_is_an_invalid_opcode():
    try:
        emulator = Emulator()
    except Unavailable as reason:
        pytest.skip(str(reason))
    with pytest.raises(Fault, match="bytes 0f 05"):
        emulator.call(ctypes.CDLL(None).getppid)


def test_a_division_by_zero_is_a_fault(kernels):
    with pytest.raises(Fault, match="#DE divide error"):
        Emulator().call(kernels.divide, 1, 0)


@pytest.fixture
def guarded():
    """The address of a page followed by one that may not be touched, and a function that sets its protection."""
    pages = mmap.mmap(-1, 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))

    def protect(page: int, protection: int) -> None:
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + page * PAGE), PAGE, protection) == 0

    protect(1, 0)
    yield address, protect
    protect(1, mmap.PROT_READ)


def test_a_wild_access_is_a_fault_and_not_a_crash(kernels, guarded):
    address, protect = guarded
    with pytest.raises(Fault, match="write at 0x10, not mapped"):
        Emulator().call(kernels.poke, 0x10)
    with pytest.raises(Fault, match=f"write at {address + PAGE:#x}, not mapped"):
        Emulator().call(kernels.poke, address + PAGE)
    protect(0, mmap.PROT_READ)
    with pytest.raises(Fault, match=f"write at {address:#x}, not allowed"):
        Emulator().call(kernels.poke, address)
    protect(0, mmap.PROT_READ | mmap.PROT_WRITE)
    Emulator().call(kernels.poke, address)
    assert ctypes.string_at(address, 2) == b"\1\0"
    with pytest.raises(Fault, match="execution at"):
        Emulator().call(address)


def test_masked_lanes_may_lie_beyond_the_end_of_memory(kernels, guarded):
    address, _ = guarded
    floats = np.frombuffer((ctypes.c_float * 3).from_address(address + PAGE - 12), np.float32)
    floats[:] = 1, 2, 3
    Emulator("avx512").call(kernels.fma_avx512, floats, floats, floats, 3)
    assert floats.tolist() == [2, 6, 12]
    with pytest.raises(Fault, match=f"read at {address + PAGE:#x}, not mapped"):
        Emulator("avx512").call(kernels.fma_avx512, floats, floats, floats, 4)


def test_a_function_that_does_not_return_times_out(kernels):
    with pytest.raises(TimeoutError, match="spin.* has not returned after 0.2 s"):
        Emulator().call(kernels.spin, timeout_s=0.2)
    assert Emulator().call(kernels.weigh, *[1] * 8) == 36


def test_the_tile_configuration_lasts_until_it_is_released(kernels):
    emulator = Emulator("amx")
    stored = np.full(64, 9, np.uint8)
    emulator.call(kernels.load_config, FULL)
    emulator.call(kernels.store_config, stored)
    assert np.array_equal(stored, FULL)
    emulator.call(kernels.load_static_config)
    emulator.call(kernels.store_config, stored)
    assert np.array_equal(stored, tile_config((1, 4)))
    emulator.call(kernels.release)
    emulator.call(kernels.store_config, stored)
    assert not stored.any()
    with pytest.raises(Fault, match="#UD .*tile 6 is not configured"):
        emulator.call(kernels.zero_tile, stored)


def test_tiles_load_and_store_rows_at_any_distance(kernels, random):
    emulator = Emulator("amx")
    emulator.call(kernels.load_config, tile_config(*[(16, 64)] * 6, (5, 24)))
    source = random.integers(0, 256, (5, 100)).astype(np.uint8)
    target = np.zeros((5, 40), np.uint8)
    emulator.call(kernels.copy_tile, source[4:], -100, target, 40)
    assert np.array_equal(target[:, :24], source[::-1, :24])
    assert not target[:, 24:].any()
    target = np.full((6, 64), 3, np.uint8)
    emulator.call(kernels.zero_tile, target)
    assert not target[:5, :24].any()
    assert (target[:5, 24:] == 3).all() and (target[5] == 3).all()


@pytest.mark.parametrize(
    "change", [(0, 2), (5, 1), (17, 1), (48, 17), (48, 0), (63, 1)], ids="palette reserved wide long empty tail".split()
)
def test_an_invalid_tile_configuration_is_a_general_protection_fault(kernels, change):
    config = FULL.copy()
    config[change[0]] = change[1]
    with pytest.raises(Fault, match="#GP .*load_config.*invalid tile configuration"):
        Emulator("amx").call(kernels.load_config, config)


def test_tiles_that_do_not_fit_together_cannot_be_multiplied(kernels):
    emulator = Emulator("amx")
    emulator.call(kernels.load_config, FULL)
    with pytest.raises(Fault, match="#UD .*tiles 0, 1, 1"):
        emulator.call(kernels.product_of_equal_tiles)
    emulator.call(kernels.load_config, tile_config((16, 64), (16, 60), *[(16, 64)] * 6))
    with pytest.raises(Fault, match="#UD .*cannot be multiplied"):
        emulator.call(kernels.product_bf16, *[np.zeros((16, 64), np.uint8)] * 3, 64)


def test_tile_accesses_respect_the_memory_map(kernels, guarded):
    address, _ = guarded
    emulator = Emulator("amx")
    emulator.call(kernels.load_config, FULL)
    with pytest.raises(Fault, match=f"#PF .*read at {address + PAGE:#x}, not mapped"):
        emulator.call(kernels.copy_tile, address + PAGE - 960, 64, address, 64)


@pytest.mark.parametrize("rows, depth, columns", [(16, 16, 16), (3, 5, 7), (1, 16, 16)])
@pytest.mark.parametrize("type_a, type_b", [("i8", "i8"), ("i8", "u8"), ("u8", "i8"), ("u8", "u8")])
def test_int8_tile_products_equal_numpy(kernels, random, type_a, type_b, rows, depth, columns):
    a, b = random.integers(0, 256, (2, 16, 64)).astype(np.uint8)
    c = random.integers(-(2**31), 2**31, (16, 16)).astype(np.int32)
    wide_a = a.view(type_a.replace("8", "1")).astype(np.int32)[:rows, : 4 * depth]
    wide_b = b.view(type_b.replace("8", "1")).astype(np.int32).reshape(16, 16, 4)[:depth, :columns]
    expected = c.copy()
    expected[:rows, :columns] += np.einsum("mkq,knq->mn", wide_a.reshape(rows, depth, 4), wide_b)
    emulator = Emulator("amx")
    shapes = (rows, 4 * columns), (rows, 4 * depth), *[(1, 4)] * 5, (depth, 4 * columns)
    emulator.call(kernels.load_config, tile_config(*shapes))
    emulator.call(getattr(kernels, f"product_{type_a}_{type_b}"), c, a, b, 64)
    assert np.array_equal(c, expected)


def nearest_f32(exact: Fraction) -> Fraction:
    """To nearest, ties to even; a result below the smallest normal is zero."""
    if exact == 0:
        return exact
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()  # the denominator is a power of two
    unit = Fraction(2) ** (exponent - 23)
    rounded = round(exact / unit) * unit  # Fraction rounds ties to even
    return rounded if abs(rounded) >= Fraction(2) ** -126 else Fraction(0)


def test_bf16_tile_products_round_and_flush_as_documented(kernels, random):
    rows, depth, columns = 2, 16, 3
    a, b = random.standard_normal((2, 16, 32)) * 2.0 ** random.integers(-12, 12, (2, 16, 32))
    a[1], b[:, 4:6] = a[1] * 2.0**-70, b[:, 4:6] * 2.0**-72  # sums on both sides of the smallest normal
    c = random.standard_normal((16, 16)).astype(np.float32)
    c[1] = 2.0**-127  # read as zero
    a, b = bf16(a), bf16(b)
    a[0, 0] = 0x0040  # subnormal, read as zero

    def exact(bits: np.ndarray) -> Fraction:
        value = Fraction(float((bits.astype(np.uint32) << 16).view(np.float32)))
        return value if abs(value) >= Fraction(2) ** -126 else Fraction(0)

    expected = np.zeros((rows, columns), np.float32)
    num_flushed = 0
    for m in range(rows):
        for n in range(columns):
            chains = [Fraction(0), Fraction(0)]
            for k in range(depth):
                for odd in range(2):
                    total = chains[odd] + exact(a[m, 2 * k + odd]) * exact(b[k, 2 * n + odd])
                    chains[odd] = nearest_f32(total)
                    num_flushed += total != 0 and chains[odd] == 0
            before = Fraction(float(c[m, n])) if m != 1 else Fraction(0)
            expected[m, n] = float(nearest_f32(before + nearest_f32(sum(chains))))
    assert 0 < num_flushed < 2 * depth

    emulator = Emulator("amx")
    emulator.call(kernels.load_config, FULL)
    emulator.call(kernels.product_bf16, c, a, b, 64)
    assert np.array_equal(c[:rows, :columns], expected)


def test_a_bf16_matrix_product_of_many_tiles_equals_numpy(kernels, random):
    m, n, k = 2, 2, 4
    a = random.integers(-15, 16, (16 * m, 32 * k)).astype(np.float32)
    b = random.integers(-15, 16, (32 * k, 16 * n)).astype(np.float32)
    a_tiles = bf16(a).reshape(m, 16, k, 32).swapaxes(1, 2).copy()
    b_tiles = bf16(b).reshape(k, 16, 2, n, 16).transpose(3, 0, 1, 4, 2).copy()
    c = np.zeros((m, n, 16, 16), np.float32)
    emulator = Emulator("amx")
    emulator.call(kernels.load_config, FULL)
    emulator.call(kernels.matmul_bf16, c, a_tiles, b_tiles, m, n, k)
    assert np.array_equal(c.swapaxes(1, 2).reshape(16 * m, 16 * n), a @ b)


def test_mxcsr_lasts_and_decides_about_subnormals(kernels):
    values = np.full(16, 2.0**-100, np.float32)
    for mxcsr, expected in ((0x1F80, 2.0**-140), (0x9FC0, 0.0)):
        emulator = Emulator("avx512", mxcsr=mxcsr)
        c = np.zeros(16, np.float32)
        emulator.call(kernels.fma_avx512, values, np.full(16, 2.0**-40, np.float32), c, 16)
        assert (c == expected).all()
        assert emulator.mxcsr & ~0x3F == mxcsr & ~0x3F
