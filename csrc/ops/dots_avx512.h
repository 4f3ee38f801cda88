// AVX-512 VNNI: vpdpbusd multiplies unsigned weights with signed activations, sixteen columns and four k at a time.
// int8 weights become unsigned by adding 128.
#pragma once

namespace octavo::OCTAVO_ISA {

constexpr int kDirectRows = 8;
constexpr int kBlockRows = 12;
template <WeightFormat format>
constexpr int32_t kBias = format == WeightFormat::int8 ? 128 : 0;
template <WeightFormat format>
constexpr int64_t kWideWeight = 1;
template <WeightFormat format>
constexpr int64_t kWideRow = 1;

static inline __m512i broadcast_4(const void* bytes) {
    int32_t four;
    memcpy(&four, bytes, sizeof four);
    return _mm512_set1_epi32(four);
}
static inline __m512i to_unsigned(__m512i weights) {
    return _mm512_xor_si512(weights, _mm512_set1_epi8(static_cast<char>(0x80)));
}
static inline __m512i low_halves(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
static inline __m512i high_halves(__m512i bytes) { return low_halves(_mm512_srli_epi16(bytes, 4)); }

template <WeightFormat format>
static inline void widen_weights(const uint8_t* packed, int64_t k, uint8_t* wide) {
    constexpr int64_t step = format == WeightFormat::int8 ? 4 : 8;
    for (int64_t i = 0; i < k; i += step, packed += 64, wide += step * kPanel) {
        const __m512i w = _mm512_loadu_si512(packed);
        if constexpr (format == WeightFormat::int8) {
            _mm512_storeu_si512(wide, to_unsigned(w));
        } else {
            _mm512_storeu_si512(wide, low_halves(w));
            _mm512_storeu_si512(wide + 64, high_halves(w));
        }
    }
}

template <WeightFormat format>
static inline void widen_row(const int8_t* q, int64_t k, uint8_t* wide) {
    memcpy(wide, q, static_cast<size_t>(k));
}

template <WeightFormat format, int rows>
OCTAVO_INLINE void dot_wide(const uint8_t* weights, const uint8_t* activations, int64_t stride, int64_t k, I32* sums) {
    __m512i sum[rows];
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sum[r] = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 4) {
        const __m512i w = _mm512_loadu_si512(weights + i * kPanel);
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            sum[r] = _mm512_dpbusd_epi32(sum[r], w, broadcast_4(activations + r * stride + i));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sums[r] = {sum[r]};
}

template <WeightFormat format, int rows>
OCTAVO_INLINE void dot_packed(const uint8_t* packed, const int8_t* q, int64_t stride, int64_t k, I32* sums) {
    __m512i even[rows], odd[rows];  // two chains: one would wait for its own latency
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) even[r] = odd[r] = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 8) {
        __m512i first, second;
        if constexpr (format == WeightFormat::int8) {
            first = to_unsigned(_mm512_loadu_si512(packed + i * kPanel));
            second = to_unsigned(_mm512_loadu_si512(packed + i * kPanel + 64));
        } else {
            const __m512i w = _mm512_loadu_si512(packed + i * kPanel / 2);
            first = low_halves(w);
            second = high_halves(w);
        }
#pragma GCC unroll 16
        for (int r = 0; r < rows; ++r) {
            even[r] = _mm512_dpbusd_epi32(even[r], first, broadcast_4(q + r * stride + i));
            odd[r] = _mm512_dpbusd_epi32(odd[r], second, broadcast_4(q + r * stride + i + 4));
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < rows; ++r) sums[r] = {_mm512_add_epi32(even[r], odd[r])};
}

}  // namespace octavo::OCTAVO_ISA
