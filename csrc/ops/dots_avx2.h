// AVX2. int4: vpmaddubsw adds two products of an unsigned weight and an activation in int16, and 8 of those fit
// (8 * 2 * 15 * 127 < 2^15), so that 32 k need one widening to int32. int8: packed weights go through vpmaddubsw as
// magnitudes, with their signs given to the activations (2 * 128 * 127 < 2^15); widened ones are int16 pairs of k
// (0, 2) and (1, 3) of four, activations likewise, for vpmaddwd.
#pragma once

namespace octavo::OCTAVO_ISA {

constexpr int kDirectRows = 4;
constexpr int kBlockRows = 6;
template <WeightFormat format>
constexpr int32_t kBias = 0;
template <WeightFormat format>
constexpr int64_t kWideWeight = format == WeightFormat::int8 ? 2 : 1;
template <WeightFormat format>
constexpr int64_t kWideRow = format == WeightFormat::int8 ? 2 : 1;

static inline __m256i load_32(const void* bytes) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); }
static inline void store_32(void* bytes, __m256i x) { _mm256_storeu_si256(static_cast<__m256i*>(bytes), x); }
static inline __m256i broadcast_4(const void* bytes) {
    int32_t four;
    memcpy(&four, bytes, sizeof four);
    return _mm256_set1_epi32(four);
}
static inline __m256i low_halves(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(15)); }
static inline __m256i high_halves(__m256i bytes) { return low_halves(_mm256_srli_epi16(bytes, 4)); }
static inline __m256i even_bytes(__m256i bytes) { return _mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8); }
static inline __m256i odd_bytes(__m256i bytes) { return _mm256_srai_epi16(bytes, 8); }
static inline __m256i add_pairs(__m256i x) { return _mm256_madd_epi16(x, _mm256_set1_epi16(1)); }

template <WeightFormat format>
static inline void widen_weights(const uint8_t* packed, int64_t k, uint8_t* wide) {
    constexpr int64_t step = format == WeightFormat::int8 ? 4 : 8;
    for (int64_t i = 0; i < k; i += step, packed += 64, wide += 128) {
        const __m256i low = load_32(packed), high = load_32(packed + 32);
        if constexpr (format == WeightFormat::int8) {
            store_32(wide, even_bytes(low));
            store_32(wide + 32, even_bytes(high));
            store_32(wide + 64, odd_bytes(low));
            store_32(wide + 96, odd_bytes(high));
        } else {
            store_32(wide, low_halves(low));
            store_32(wide + 32, low_halves(high));
            store_32(wide + 64, high_halves(low));
            store_32(wide + 96, high_halves(high));
        }
    }
}

template <WeightFormat format>
static inline void widen_row(const int8_t* q, int64_t k, uint8_t* wide) {
    if constexpr (format == WeightFormat::int8) {
        for (int64_t i = 0; i < k; i += 16, wide += 32) {
            const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + i));
            const __m128i even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8), odd = _mm_srai_epi16(bytes, 8);
            _mm_storeu_si128(reinterpret_cast<__m128i*>(wide), _mm_unpacklo_epi32(even, odd));
            _mm_storeu_si128(reinterpret_cast<__m128i*>(wide + 16), _mm_unpackhi_epi32(even, odd));
        }
    } else {
        memcpy(wide, q, static_cast<size_t>(k));
    }
}

// Keeps the compiler from computing the products of all rows before it adds the first, which spills the sums.
OCTAVO_INLINE void in_order(__m256i& low, __m256i& high) { asm volatile("" : "+x"(low), "+x"(high)); }

// Adds the sums of `quads` times four k, eight at most, of widened int4 weights.
template <int rows>
OCTAVO_INLINE void add_quads(const uint8_t* weights, const uint8_t* activations, int64_t stride, int quads, I32* sums) {
    __m256i low[rows], high[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < quads; ++i) {
        const __m256i w_low = load_32(weights + 64 * i), w_high = load_32(weights + 64 * i + 32);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const __m256i x = broadcast_4(activations + r * stride + 4 * i);
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(w_low, x));
            high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(w_high, x));
            in_order(low[r], high[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sums[r] = sums[r] + I32{add_pairs(low[r]), add_pairs(high[r])};
}

template <WeightFormat format, int rows>
OCTAVO_INLINE void dot_wide(const uint8_t* weights, const uint8_t* activations, int64_t stride, int64_t k, I32* sums) {
    if constexpr (format == WeightFormat::int8) {
        __m256i low[rows], high[rows];
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 2
        for (int64_t i = 0; i < k; i += 16) {
#pragma GCC unroll 8
            for (int j = 0; j < 16; j += 2) {
                const __m256i w_low = load_32(weights + 32 * (i + j)), w_high = load_32(weights + 32 * (i + j) + 32);
#pragma GCC unroll 8
                for (int r = 0; r < rows; ++r) {
                    const __m256i x = broadcast_4(activations + r * stride + 2 * (i + j));
                    low[r] = _mm256_add_epi32(low[r], _mm256_madd_epi16(w_low, x));
                    high[r] = _mm256_add_epi32(high[r], _mm256_madd_epi16(w_high, x));
                    in_order(low[r], high[r]);
                }
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) sums[r] = {low[r], high[r]};
    } else {
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) sums[r] = broadcast(int32_t{0});
        for (int64_t i = 0; i + 32 <= k; i += 32) {
            add_quads<rows>(weights + i * kPanel, activations + i, stride, 8, sums);
        }
        if (k % 32 != 0) add_quads<rows>(weights + (k - 16) * kPanel, activations + k - 16, stride, 4, sums);
    }
}

// The same of `octets` times eight k, four at most, of packed int4 weights.
template <int rows>
OCTAVO_INLINE void add_octets(const uint8_t* packed, const int8_t* q, int64_t stride, int octets, I32* sums) {
    __m256i low[rows], high[rows];
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) low[r] = high[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < octets; ++i) {
        const __m256i left = load_32(packed + 64 * i), right = load_32(packed + 64 * i + 32);
        const __m256i left_first = low_halves(left), left_second = high_halves(left);
        const __m256i right_first = low_halves(right), right_second = high_halves(right);
#pragma GCC unroll 8
        for (int r = 0; r < rows; ++r) {
            const __m256i first = broadcast_4(q + r * stride + 8 * i), second = broadcast_4(q + r * stride + 8 * i + 4);
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(left_first, first));
            high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(right_first, first));
            low[r] = _mm256_add_epi16(low[r], _mm256_maddubs_epi16(left_second, second));
            high[r] = _mm256_add_epi16(high[r], _mm256_maddubs_epi16(right_second, second));
            in_order(low[r], high[r]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sums[r] = sums[r] + I32{add_pairs(low[r]), add_pairs(high[r])};
}

template <WeightFormat format, int rows>
OCTAVO_INLINE void dot_packed(const uint8_t* packed, const int8_t* q, int64_t stride, int64_t k, I32* sums) {
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) sums[r] = broadcast(int32_t{0});
    if constexpr (format == WeightFormat::int8) {
#pragma GCC unroll 4
        for (int64_t i = 0; i < k; i += 4, packed += 64) {
            const __m256i w_low = load_32(packed), w_high = load_32(packed + 32);
            const __m256i size_low = _mm256_abs_epi8(w_low), size_high = _mm256_abs_epi8(w_high);
#pragma GCC unroll 8
            for (int r = 0; r < rows; ++r) {
                const __m256i x = broadcast_4(q + r * stride + i);
                const __m256i low = _mm256_maddubs_epi16(size_low, _mm256_sign_epi8(x, w_low));
                const __m256i high = _mm256_maddubs_epi16(size_high, _mm256_sign_epi8(x, w_high));
                sums[r] = sums[r] + I32{add_pairs(low), add_pairs(high)};
                in_order(sums[r].low, sums[r].high);
            }
        }
    } else {
        for (int64_t i = 0; i + 32 <= k; i += 32) {
            add_octets<rows>(packed + packed_bytes(format, i), q + i, stride, 4, sums);
        }
        if (k % 32 != 0) add_octets<rows>(packed + packed_bytes(format, k - 16), q + k - 16, stride, 2, sums);
    }
}

}  // namespace octavo::OCTAVO_ISA
