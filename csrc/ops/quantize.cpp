// Rows of activations in int8.
#include "ops/functions.h"
#include "ops/linear.h"

#include "isa/current.h"

namespace octavo::OCTAVO_ISA {
namespace {

// Sixteen values from -127 to 127.
inline void store_int8(int8_t* target, I32 x) {
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm512_cvtepi32_epi8(x.all));
#elif defined(__AVX2__)
    // packs works within 128-bit halves: its quarters come out as 0, 2, 1, 3.
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.low, x.high), 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), bytes);
#else
    for (size_t i = 0; i < kLanes; ++i) target[i] = static_cast<int8_t>(x.lane[i]);
#endif
}

inline int32_t sum_lanes(I32 x) {
    int32_t lanes[kLanes], sum = 0;
    store(lanes, x);
    for (int32_t lane : lanes) sum += lane;
    return sum;
}

// `count` values exist; the group is padded with zeros. A group that holds an infinity or a NaN gets zeros and a NaN
// for its scale, so that every product with it is NaN.
inline void quantize_group(const float* x, int64_t count, int64_t group, int8_t* q, float* scale, int32_t* sum) {
    constexpr auto lanes = static_cast<int64_t>(kLanes);
    const auto left = [&](int64_t i) { return static_cast<size_t>(count > i ? count - i : 0); };
    F32 largest = broadcast(0.0f), poison = broadcast(0.0f);  // 0 * x is NaN where x is not finite
    for (int64_t i = 0; i < group; i += lanes) {
        const F32 v = load_first(x + i, left(i));
        largest = max(largest, abs(v));
        poison = fma(v, broadcast(0.0f), poison);
    }
    *scale = reduce_add(poison) == 0.0f ? reduce_max(largest) / 127.0f : __builtin_nanf("");
    I32 total = broadcast(int32_t{0});
    if (*scale > 0.0f) {
        const F32 divisor = broadcast(*scale);
        for (int64_t i = 0; i < group; i += lanes) {
            const I32 rounded = to_i32(load_first(x + i, left(i)) / divisor);
            store_int8(q + i, rounded);
            total = total + rounded;
        }
    } else {
        memset(q, 0, static_cast<size_t>(group));
    }
    *sum = sum_lanes(total);
}

}  // namespace

void quantize_rows(const QuantizeArgs& args, Team& team) {
    const int64_t num_groups = args.padded_k / args.group;
    // A chunk should take longer than handing it out.
    const int64_t most = args.rows * args.padded_k / 16384;
    const int64_t num_chunks = most < 1 ? 1 : most < args.rows ? most : args.rows;
    team.each(num_chunks, [&](int64_t chunk, int) {
        const int64_t end = chunk_start(args.rows, num_chunks, chunk + 1);
        for (int64_t row = chunk_start(args.rows, num_chunks, chunk); row < end; ++row) {
            const float* x = args.x + row * args.x_stride;
            int8_t* q = args.q + row * args.padded_k;
            for (int64_t g = 0; g < num_groups; ++g) {
                const int64_t first = g * args.group;
                const int64_t count = first < args.k ? args.k - first : 0;
                quantize_group(x + first, count, args.group, q + first, args.scales + row * num_groups + g,
                               args.sums + row * num_groups + g);
            }
        }
    });
}

}  // namespace octavo::OCTAVO_ISA
