// The vector vocabulary of the instruction set that this translation unit is compiled for (OCTAVO_ISA).
//
// F32 and I32 are sixteen lanes on every instruction set, and every function here gives the same bits on each of
// them (portable.h is the definition): `fma` rounds once, `max` and `min` return their second argument where
// either is NaN, `reduce_*` halve the vector (lane i with lane i + 8, then + 4, + 2, + 1), rounding is to nearest,
// ties to even. A kernel written with them is the same function everywhere.
//
// A kernel includes this header and no template or inline function of the standard library: the linker keeps
// one copy of those, and it could be the one compiled for a newer processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace octavo::OCTAVO_ISA {
constexpr size_t kLanes = 16;
}

#if defined(__AVX512F__)
#include "avx512.h"
#elif defined(__AVX2__)
#include "avx2.h"
#else
#include "portable.h"
#endif

#include "ops/rounding.h"

namespace octavo::OCTAVO_ISA {

static inline F32 round_to_bf16(F32 x) {
    const I32 bits = as_i32(x);
    const I32 odd = shift_right<16>(bits) & broadcast(int32_t{1});
    const I32 nearest = (bits + odd + broadcast(int32_t{0x7fff})) & broadcast(static_cast<int32_t>(0xffff0000));
    return select(is_nan(x), x, as_f32(nearest));
}
static inline F32 round_to_f16(F32 x) {
    uint16_t halves[kLanes];
    store_f16(halves, x);
    return load_f16(halves);
}
static inline F32 rounded(F32 x, Rounding rounding) {
    switch (rounding) {
        case Rounding::bf16: return round_to_bf16(x);
        case Rounding::f16: return round_to_f16(x);
        default: return x;
    }
}

// `count` values of a row, fewer than or equal to sixteen; the lanes beyond are zero.
static inline F32 load_first(const float* source, size_t count) {
    return count >= kLanes ? load(source) : load_masked(source, first_lanes(count));
}
static inline void store_first(float* target, F32 x, size_t count) {
    if (count >= kLanes) {
        store(target, x);
    } else {
        store_masked(target, x, first_lanes(count));
    }
}

}  // namespace octavo::OCTAVO_ISA
