// Exact sums of products of int8 activations with the sixteen columns of a packed panel: all of the quantized product
// that differs between instruction sets.
//
// Each instruction set defines
//   kDirectRows           up to so many rows are multiplied with the packed weights as they are
//   kBlockRows            beyond, weights are widened once, and multiplied with so many rows at a time
//   kBias<format>         what is added to every weight in the sums (8, the middle of int4, is not counted)
//   kWideWeight, kWideRow<format>    bytes of one widened weight, and of one widened activation
//   widen_weights<format>(packed, k, wide)        of a panel
//   widen_row<format>(q, k, wide)
//   dot_packed<format, rows>(packed, q, stride, k, sums)
//   dot_wide<format, rows>(wide weights, wide rows, stride, k, sums)      strides in bytes
// where k is a multiple of 16, and sums[r] becomes sum over k of q[r][k] * (weight[k][c] + kBias), modulo 2^32.
#pragma once

#include "isa/current.h"
#include "ops/linear.h"

namespace octavo::OCTAVO_ISA {

// Bytes of k rows of a packed panel.
static constexpr int64_t packed_bytes(WeightFormat format, int64_t k) {
    return format == WeightFormat::int4 ? k * kPanel / 2 : k * kPanel;
}

// With constant arguments these become straight lines of instructions.
#define OCTAVO_INLINE [[gnu::always_inline]] static inline

static inline void prefetch(const void* address) { __builtin_prefetch(address, 0, 3); }

}  // namespace octavo::OCTAVO_ISA

#if defined(__AVX512F__)
#include "ops/dots_avx512.h"
#elif defined(__AVX2__)
#include "ops/dots_avx2.h"
#else
#include "ops/dots_portable.h"
#endif
