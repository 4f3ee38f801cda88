// The fastest instructions that the kernels of this instruction set use, and nothing else.
//
// Every sum and operand comes from memory that the compiler knows nothing of, and goes back there: otherwise it would
// see that all sums are the same, or that a product is the same in every round.
#include "ops/roofline.h"

#include "isa/current.h"
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int64_t kChunks = 8;  // for each thread
constexpr int64_t kLine = 64;
constexpr int64_t kAhead = 24 * kLine;

template <int kStreams>
static inline I32 read_lines(const uint8_t* data, int64_t bytes) {
    const int64_t length = bytes / kStreams;
    I32 sums[kStreams];
    for (int s = 0; s < kStreams; ++s) sums[s] = broadcast(int32_t{0});
    for (int64_t at = 0; at < length; at += kLine) {
#pragma GCC unroll 4
        for (int s = 0; s < kStreams; ++s) {
            const uint8_t* line = data + s * length + at;
            __builtin_prefetch(line + kAhead, 0, 3);
            sums[s] = sums[s] + load(reinterpret_cast<const int32_t*>(line));
        }
    }
    I32 total = sums[0];
    for (int s = 1; s < kStreams; ++s) total = total + sums[s];
    return total;
}

#if defined(__AVX512F__)
constexpr int kSums = 12;
#else
constexpr int kSums = 6;
#endif

static void multiply_floats(float* memory, int64_t rounds) {
    const F32 x = load(memory), y = load(memory + kLanes);
    float* sums = memory + 2 * kLanes;
    F32 sum[kSums];
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sum[i] = load(sums + i * kLanes);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sum[i] = fma(x, y, sum[i]);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) store(sums + i * kLanes, sum[i]);
}
constexpr int64_t kFloatOps = 2 * kSums * static_cast<int64_t>(kLanes);

#if defined(__AMX_TILE__)

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kBf16Ops = 4 * 2 * 16 * 16 * 32, kInt8Ops = 2 * kBf16Ops;  // of four products of tiles

template <ProductKind kind>
static void multiply_tiles(uint8_t* memory, int64_t rounds) {
    struct {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    // GCC 12 does not know that these instructions read memory.
    asm volatile("" ::: "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, memory, 64);
    _tile_loadd(5, memory + kTileBytes, 64);
    _tile_loadd(6, memory + 2 * kTileBytes, 64);
    _tile_loadd(7, memory + 3 * kTileBytes, 64);
    for (int64_t round = 0; round < rounds; ++round) {
        if constexpr (kind == ProductKind::bf16) {
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        } else {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
    }
    _tile_release();
}
static void multiply_bf16(uint8_t* memory, int64_t rounds) { multiply_tiles<ProductKind::bf16>(memory, rounds); }
static void multiply_int8(uint8_t* memory, int64_t rounds) { multiply_tiles<ProductKind::int8>(memory, rounds); }

#else

// Every bfloat16 is a float32, and is multiplied as one.
constexpr int64_t kBf16Ops = kFloatOps;
static void multiply_bf16(uint8_t* memory, int64_t rounds) {
    multiply_floats(reinterpret_cast<float*>(memory), rounds);
}

#if defined(__AVX512F__)

constexpr int64_t kInt8Ops = 2 * kSums * 64;
static void multiply_int8(uint8_t* memory, int64_t rounds) {
    const __m512i x = _mm512_loadu_si512(memory), y = _mm512_loadu_si512(memory + 64);
    uint8_t* sums = memory + 128;
    __m512i sum[kSums];
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sum[i] = _mm512_loadu_si512(sums + i * 64);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) sum[i] = _mm512_dpbusd_epi32(sum[i], x, y);
    }
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) _mm512_storeu_si512(sums + i * 64, sum[i]);
}

#elif defined(__AVX2__)

constexpr int64_t kInt8Ops = 2 * kSums * 32;
static void multiply_int8(uint8_t* memory, int64_t rounds) {
    auto* vectors = reinterpret_cast<__m256i*>(memory);
    const __m256i y = _mm256_loadu_si256(vectors + 1), ones = _mm256_set1_epi16(1);
    __m256i x = _mm256_loadu_si256(vectors), sum[kSums];
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) sum[i] = _mm256_loadu_si256(vectors + 2 + i);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 12
        for (int i = 0; i < kSums; ++i) {
            asm volatile("" : "+x"(x));
            sum[i] = _mm256_add_epi32(sum[i], _mm256_madd_epi16(_mm256_maddubs_epi16(x, y), ones));
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < kSums; ++i) _mm256_storeu_si256(vectors + 2 + i, sum[i]);
}

#else

constexpr int64_t kInt8Ops = 2 * 64;
static void multiply_int8(uint8_t* memory, int64_t rounds) {
    const auto *x = reinterpret_cast<const int8_t*>(memory), *y = x + 64;
    auto* sum = reinterpret_cast<int32_t*>(memory + 128);
    for (int64_t round = 0; round < rounds; ++round) {
        asm volatile("" ::: "memory");
        for (int c = 0; c < 16; ++c) {
            for (int j = 0; j < 4; ++j) sum[c] += x[j] * y[4 * c + j];
        }
    }
}

#endif
#endif

}  // namespace

void read_memory(const ReadArgs& args, Team& team) {
    const int64_t units = args.bytes / kReadUnit, chunks = kChunks * team.num_threads();
    team.each(chunks, [&](int64_t chunk, int thread) {
        const int64_t first = chunk_start(units, chunks, chunk), end = chunk_start(units, chunks, chunk + 1);
        const uint8_t* data = args.data + first * kReadUnit;
        const int64_t bytes = (end - first) * kReadUnit;
        const I32 sum = args.streams == 1 ? read_lines<1>(data, bytes) : read_lines<4>(data, bytes);
        store(reinterpret_cast<int32_t*>(team.scratch(thread)), sum);
    });
}

int64_t multiply(const ProductsArgs& args, Team& team) {
    const int64_t chunks = kChunks * team.num_threads();
    team.each(chunks, [&](int64_t, int thread) {
        uint8_t* memory = team.scratch(thread);
        memset(memory, 0x3f, 4096);  // as float32 or bfloat16: 0.7
        switch (args.kind) {
            case ProductKind::f32: return multiply_floats(reinterpret_cast<float*>(memory), args.rounds);
            case ProductKind::bf16: return multiply_bf16(memory, args.rounds);
            case ProductKind::int8: return multiply_int8(memory, args.rounds);
        }
    });
    const int64_t ops = args.kind == ProductKind::f32 ? kFloatOps : args.kind == ProductKind::bf16 ? kBf16Ops : kInt8Ops;
    return chunks * args.rounds * ops;
}

}  // namespace octavo::OCTAVO_ISA
