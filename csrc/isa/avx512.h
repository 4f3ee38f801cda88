// AVX-512 (F, BW, DQ, VL, VNNI): sixteen lanes in one register.
#pragma once

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {

struct F32 {
    __m512 all;
};
struct I32 {
    __m512i all;
};
using Mask = __mmask16;

static inline F32 broadcast(float value) { return {_mm512_set1_ps(value)}; }
static inline I32 broadcast(int32_t value) { return {_mm512_set1_epi32(value)}; }

static inline F32 load(const float* source) { return {_mm512_loadu_ps(source)}; }
static inline void store(float* target, F32 x) { _mm512_storeu_ps(target, x.all); }
static inline I32 load(const int32_t* source) { return {_mm512_loadu_si512(source)}; }
static inline void store(int32_t* target, I32 x) { _mm512_storeu_si512(target, x.all); }

static inline Mask first_lanes(size_t count) { return static_cast<Mask>((1u << count) - 1); }
static inline F32 load_masked(const float* source, Mask mask) { return {_mm512_maskz_loadu_ps(mask, source)}; }
static inline void store_masked(float* target, F32 x, Mask mask) { _mm512_mask_storeu_ps(target, mask, x.all); }
static inline F32 select(Mask mask, F32 yes, F32 no) { return {_mm512_mask_mov_ps(no.all, mask, yes.all)}; }

static inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.all, b.all)}; }
static inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.all, b.all)}; }
static inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.all, b.all)}; }
static inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.all, b.all)}; }
static inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.all, b.all, c.all)}; }
static inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.all, b.all)}; }
static inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.all, b.all)}; }
static inline F32 sqrt(F32 a) { return {_mm512_sqrt_ps(a.all)}; }
static inline F32 abs(F32 a) { return {_mm512_abs_ps(a.all)}; }
static inline F32 copy_sign(F32 a, F32 sign) {
    const __m512 bit = _mm512_set1_ps(-0.0f);
    return {_mm512_or_ps(_mm512_andnot_ps(bit, a.all), _mm512_and_ps(bit, sign.all))};
}
static inline Mask less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.all, b.all, _CMP_LT_OQ); }
static inline Mask is_nan(F32 a) { return _mm512_cmp_ps_mask(a.all, a.all, _CMP_UNORD_Q); }

static inline F32 as_f32(I32 a) { return {_mm512_castsi512_ps(a.all)}; }
static inline I32 as_i32(F32 a) { return {_mm512_castps_si512(a.all)}; }
static inline F32 to_f32(I32 a) { return {_mm512_cvtepi32_ps(a.all)}; }
static inline I32 to_i32(F32 a) { return {_mm512_cvtps_epi32(a.all)}; }
static inline I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.all, b.all)}; }
static inline I32 operator&(I32 a, I32 b) { return {_mm512_and_si512(a.all, b.all)}; }
template <int count>
static inline I32 shift_left(I32 a) {
    return {_mm512_slli_epi32(a.all, count)};
}
template <int count>
static inline I32 shift_right(I32 a) {
    return {_mm512_srli_epi32(a.all, count)};
}

static inline float reduce_add(F32 x) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x.all), _mm512_extractf32x8_ps(x.all, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
static inline float reduce_max(F32 x) {
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x.all), _mm512_extractf32x8_ps(x.all, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

static inline F32 load_bf16(const uint16_t* source) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
// Integer arithmetic, because VCVTNEPS2BF16 flushes subnormals to zero.
static inline void store_bf16(uint16_t* target, F32 x) {
    const __m512i bits = _mm512_castps_si512(x.all);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i quiet =
        _mm512_or_si512(_mm512_and_si512(high, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(0x7fc0));
    const __m512i chosen = _mm512_mask_mov_epi32(rounded, is_nan(x), quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(chosen));
}

static inline F32 load_f16(const uint16_t* source) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)))};
}
static inline void store_f16(uint16_t* target, F32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(x.all, _MM_FROUND_TO_NEAREST_INT));
}

}  // namespace octavo::OCTAVO_ISA
