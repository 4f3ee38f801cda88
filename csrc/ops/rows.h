// Operators on the rows of an activation: norms, rotation, sums, activations.
//
// Reductions over a row: sixteen lanes, lane i takes elements i, i + 16, ... in order with fma, then reduce_add.
#pragma once

#include <cstdint>

#include "core/team.h"
#include "ops/activation.h"
#include "ops/rounding.h"

namespace octavo {

// For each of rows x heads slices of `width` values: y = x / sqrt(mean(x^2) + eps) * (offset + weight), or
// layer norm: (x - mean) / sqrt(var + eps) * weight + bias. Rounded once.
//
// With `sum`: first x = r(addend_scale * addend + x), which is also stored to `sum` (may be x itself).
struct NormArgs {
    int64_t rows;
    int64_t heads;  // slices of a row, next to each other
    int64_t width;
    const float* x;
    int64_t x_stride;
    const float* addend = nullptr;
    int64_t addend_stride = 0;
    float addend_scale = 1.0f;
    float* sum = nullptr;
    int64_t sum_stride = 0;
    const float* weight;  // [width]
    const float* bias = nullptr;  // layer norm only
    float offset = 0.0f;          // rms norm only
    float eps;
    float* y;
    int64_t y_stride;
    Rounding rounding;
};

// Rotates the first `rotary_dim` of each head in halves: (x1 cos - x2 sin, x2 cos + x1 sin); the rest is copied.
struct RopeArgs {
    int64_t rows;
    int64_t heads;
    int64_t head_dim;
    int64_t rotary_dim;
    const float* x;
    int64_t x_stride;
    const float* cos_sin;  // [rows][rotary_dim]: cos of each pair, then sin
    float* y;              // may be x
    int64_t y_stride;
    Rounding rounding;
};

// y = r(x + scale * addend), as fma(scale, addend, x).
struct AddArgs {
    int64_t rows;
    int64_t width;
    const float* x;
    int64_t x_stride;
    const float* addend;
    int64_t addend_stride;
    float scale;
    float* y;
    int64_t y_stride;
    Rounding rounding;
};

// y = r(act(x)), or gated: x is (gate, up), each `width` wide, y = r(act(gate) * up).
struct ActivationArgs {
    int64_t rows;
    int64_t width;  // of y
    bool gated;
    Activation kind;
    const float* x;
    int64_t x_stride;
    float* y;
    int64_t y_stride;
    Rounding rounding;
};

// x = r(scale * x), in place.
struct ScaleArgs {
    int64_t rows;
    int64_t width;
    float* x;
    int64_t x_stride;
    float scale;
    Rounding rounding;
};

}  // namespace octavo
