// AVX2 with FMA and F16C: sixteen lanes in two registers.
#pragma once

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {

struct F32 {
    __m256 low, high;
};
struct I32 {
    __m256i low, high;
};
struct Mask {
    __m256i low, high;  // all bits of a lane, or none
};

static inline F32 broadcast(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
static inline I32 broadcast(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }

static inline F32 load(const float* source) { return {_mm256_loadu_ps(source), _mm256_loadu_ps(source + 8)}; }
static inline void store(float* target, F32 x) {
    _mm256_storeu_ps(target, x.low);
    _mm256_storeu_ps(target + 8, x.high);
}
static inline I32 load(const int32_t* source) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + 8))};
}
static inline void store(int32_t* target, I32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), x.low);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target + 8), x.high);
}

static inline Mask first_lanes(size_t count) {
    const __m256i all = _mm256_set1_epi32(static_cast<int>(count));
    return {_mm256_cmpgt_epi32(all, _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)),
            _mm256_cmpgt_epi32(all, _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15))};
}
static inline F32 load_masked(const float* source, Mask mask) {
    return {_mm256_maskload_ps(source, mask.low), _mm256_maskload_ps(source + 8, mask.high)};
}
static inline void store_masked(float* target, F32 x, Mask mask) {
    _mm256_maskstore_ps(target, mask.low, x.low);
    _mm256_maskstore_ps(target + 8, mask.high, x.high);
}
static inline F32 select(Mask mask, F32 yes, F32 no) {
    return {_mm256_blendv_ps(no.low, yes.low, _mm256_castsi256_ps(mask.low)),
            _mm256_blendv_ps(no.high, yes.high, _mm256_castsi256_ps(mask.high))};
}

static inline F32 operator+(F32 a, F32 b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
static inline F32 operator-(F32 a, F32 b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
static inline F32 operator*(F32 a, F32 b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
static inline F32 operator/(F32 a, F32 b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
static inline F32 fma(F32 a, F32 b, F32 c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
static inline F32 max(F32 a, F32 b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
static inline F32 min(F32 a, F32 b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }
static inline F32 sqrt(F32 a) { return {_mm256_sqrt_ps(a.low), _mm256_sqrt_ps(a.high)}; }
static inline F32 abs(F32 a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.low), _mm256_andnot_ps(sign, a.high)};
}
static inline F32 copy_sign(F32 a, F32 sign) {
    const __m256 bit = _mm256_set1_ps(-0.0f);
    return {_mm256_or_ps(_mm256_andnot_ps(bit, a.low), _mm256_and_ps(bit, sign.low)),
            _mm256_or_ps(_mm256_andnot_ps(bit, a.high), _mm256_and_ps(bit, sign.high))};
}
static inline Mask less(F32 a, F32 b) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, b.low, _CMP_LT_OQ)),
            _mm256_castps_si256(_mm256_cmp_ps(a.high, b.high, _CMP_LT_OQ))};
}
static inline Mask is_nan(F32 a) {
    return {_mm256_castps_si256(_mm256_cmp_ps(a.low, a.low, _CMP_UNORD_Q)),
            _mm256_castps_si256(_mm256_cmp_ps(a.high, a.high, _CMP_UNORD_Q))};
}

static inline F32 as_f32(I32 a) { return {_mm256_castsi256_ps(a.low), _mm256_castsi256_ps(a.high)}; }
static inline I32 as_i32(F32 a) { return {_mm256_castps_si256(a.low), _mm256_castps_si256(a.high)}; }
static inline F32 to_f32(I32 a) { return {_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)}; }
static inline I32 to_i32(F32 a) { return {_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)}; }
static inline I32 operator+(I32 a, I32 b) {
    return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)};
}
static inline I32 operator&(I32 a, I32 b) {
    return {_mm256_and_si256(a.low, b.low), _mm256_and_si256(a.high, b.high)};
}
template <int count>
static inline I32 shift_left(I32 a) {
    return {_mm256_slli_epi32(a.low, count), _mm256_slli_epi32(a.high, count)};
}
template <int count>
static inline I32 shift_right(I32 a) {
    return {_mm256_srli_epi32(a.low, count), _mm256_srli_epi32(a.high, count)};
}

static inline float reduce_add(F32 x) {
    const __m256 eight = _mm256_add_ps(x.low, x.high);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float reduce_max(F32 x) {
    const __m256 eight = _mm256_max_ps(x.low, x.high);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline __m256 load_8_bf16(const uint16_t* source) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
static inline F32 load_bf16(const uint16_t* source) { return {load_8_bf16(source), load_8_bf16(source + 8)}; }

static inline __m256i to_8_bf16(__m256 x) {  // in the low halves of the lanes
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet =
        _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi32(0x8000)), _mm256_set1_epi32(0x7fc0));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
static inline void store_bf16(uint16_t* target, F32 x) {
    // packus works within 128-bit halves: its quarters come out as 0, 2, 1, 3.
    const __m256i packed = _mm256_packus_epi32(to_8_bf16(x.low), to_8_bf16(x.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm256_permute4x64_epi64(packed, 0xd8));
}

static inline F32 load_f16(const uint16_t* source) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + 8)))};
}
static inline void store_f16(uint16_t* target, F32 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(x.low, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target + 8), _mm256_cvtps_ph(x.high, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace octavo::OCTAVO_ISA
