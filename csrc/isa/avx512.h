// AVX-512 (F, BW, DQ, VL): sixteen float32 lanes.
#pragma once

#include <immintrin.h>

namespace octavo::OCTAVO_ISA {

constexpr size_t kLanes = 16;
using F32 = __m512;

static inline F32 load(const float* source) { return _mm512_loadu_ps(source); }
static inline void store(float* target, F32 x) { _mm512_storeu_ps(target, x); }

static inline F32 load_bf16(const uint16_t* source) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// Integer arithmetic, because VCVTNEPS2BF16 flushes subnormals to zero.
static inline void store_bf16(uint16_t* target, F32 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i high = _mm512_srli_epi32(bits, 16);
    const __m512i odd = _mm512_and_si512(high, _mm512_set1_epi32(1));
    const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    const __m512i quiet =
        _mm512_or_si512(_mm512_and_si512(high, _mm512_set1_epi32(0x8000)), _mm512_set1_epi32(0x7fc0));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_mov_epi32(rounded, is_nan, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtepi32_epi16(chosen));
}

}  // namespace octavo::OCTAVO_ISA
