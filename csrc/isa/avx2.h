// AVX2: eight float32 lanes.
#pragma once

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {

constexpr size_t kLanes = 8;
using F32 = __m256;

static inline F32 load(const float* source) { return _mm256_loadu_ps(source); }
static inline void store(float* target, F32 x) { _mm256_storeu_ps(target, x); }

static inline F32 load_bf16(const uint16_t* source) {
    const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

static inline void store_bf16(uint16_t* target, F32 x) {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i high = _mm256_srli_epi32(bits, 16);
    const __m256i odd = _mm256_and_si256(high, _mm256_set1_epi32(1));
    const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
    const __m256i quiet =
        _mm256_or_si256(_mm256_and_si256(high, _mm256_set1_epi32(0x8000)), _mm256_set1_epi32(0x7fc0));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i chosen = _mm256_blendv_epi8(rounded, quiet, is_nan);
    // packus works within 128-bit halves: bring quarters 0 and 2 together.
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(chosen, chosen), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_castsi256_si128(packed));
}

}  // namespace octavo::OCTAVO_ISA
