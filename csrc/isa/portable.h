// Plain C++: one lane. What every compiler and processor has, and the meaning of the other headers.
#pragma once

namespace octavo::OCTAVO_ISA {

constexpr size_t kLanes = 1;
using F32 = float;

static inline F32 load(const float* source) { return *source; }
static inline void store(float* target, F32 x) { *target = x; }

static inline F32 load_bf16(const uint16_t* source) {
    const uint32_t bits = static_cast<uint32_t>(*source) << 16;
    F32 x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline void store_bf16(uint16_t* target, F32 x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    *target = static_cast<uint16_t>(is_nan ? ((bits >> 16) & 0x8000) | 0x7fc0 : rounded);
}

}  // namespace octavo::OCTAVO_ISA
