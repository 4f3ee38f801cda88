// Scales and minima of int4 and int8 weights, and the groups of quantized rows that they meet.
#pragma once

#include "isa/current.h"
#include "ops/linear.h"

namespace octavo::OCTAVO_ISA {

// The sixteen values of a group of a panel.
static inline int64_t group_bytes(ScaleFormat format) { return kPanel * (format == ScaleFormat::f16 ? 2 : 4); }
static inline F32 load_group(const uint8_t* values, ScaleFormat format) {
    if (format == ScaleFormat::f16) return load_f16(reinterpret_cast<const uint16_t*>(values));
    return load(reinterpret_cast<const float*>(values));
}
// Those of group `index`, counted over all panels.
static inline F32 load_group(const void* values, ScaleFormat format, int64_t index) {
    return load_group(static_cast<const uint8_t*>(values) + index * group_bytes(format), format);
}

// What is added to int4 weights without minima.
static inline int32_t middle(const PackedMatrix& w) { return w.format == WeightFormat::int4 && !w.has_min ? -8 : 0; }

// One group of one quantized row.
struct RowGroup {
    float scale;
    int32_t offset;  // to add to its integer sums, for what these have too much
    float sum;       // scale * sum of q: what a minimum of 1 would give
};

static inline RowGroup row_group(const QuantizedRows& x, int64_t index, int32_t bias) {
    const float scale = x.scales[index];
    const int32_t sum = x.sums[index];
    return {scale, static_cast<int32_t>(static_cast<uint32_t>(sum) * static_cast<uint32_t>(-bias)),
            scale * static_cast<float>(sum)};
}

static inline F32 add_group(F32 acc, I32 dot, const RowGroup& x, F32 scale) {
    return fma(broadcast(x.scale) * scale, to_f32(dot + broadcast(x.offset)), acc);
}
static inline F32 add_min(F32 acc, const RowGroup& x, F32 min) { return fma(broadcast(x.sum), min, acc); }

}  // namespace octavo::OCTAVO_ISA
