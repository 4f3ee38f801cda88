// y = x W^T with what follows it fused: the packed weights, the arguments, and the rules that fix every bit.
//
// Contract of every linear kernel: output element (row, column) depends on that row of x and that column alone, never
// on the number of rows or columns, the chunk, the thread or the instruction set.
//
//   f32, f16 weights   acc = 0; for k ascending: acc = fma(x[k], w[k], acc)
//   bf16 weights       per block of 32 k: even = odd = 0; for pairs ascending: even = fma(x[2i], w[2i], even),
//                      odd = fma(x[2i+1], w[2i+1], odd); acc = acc + (even + odd). This is what AMX's tdpbf16ps
//                      computes (FTZ and DAZ set), so tiles may be used where every x is a bfloat16.
//   int4, int8 weights with float activations
//                      w[k] = fma(scale, q, min) (scale * q without minima), then as for f32
//   int4, int8 weights with int8 activations (q_x, s_x = scale of the row and group)
//                      per group ascending: dot = sum q_x q_w, exact in int32; acc = fma(s_x * s_w, float(dot), acc);
//                      with minima acc = fma(s_x * float(sum q_x), min, acc)
//
// k is padded with zero weights; what x holds beyond k is not read.
#pragma once

#include <cstdint>

#include "core/team.h"
#include "ops/activation.h"
#include "ops/rounding.h"

namespace octavo {

enum class WeightFormat : uint8_t { f32, bf16, f16, int8, int4 };
enum class ScaleFormat : uint8_t { f32, f16 };

constexpr int64_t kPanel = 16;  // columns of the product (rows of W) that are stored together

// W [n, k] in panels of 16 of its rows (columns of the product), panel by panel, each 64-byte aligned. Within a panel,
// c is the column in it:
//   f32, f16  [padded_k][16 c]                                     padded_k: a multiple of 32
//   bf16      [padded_k / 2][16 c][2 k]                            padded_k: a multiple of 32
//   int8      [padded_k / 4][16 c][4 k], signed                    padded_k: a multiple of 64
//   int4      [padded_k / 8][16 c][4 bytes]: byte j of a row of 8 k holds k = j in its low half and k = 4 + j in its
//             high half, unsigned 0..15                            padded_k: a multiple of 64
// Scales and minima: [panel][group index][16 c]; the weight is scale * q + min. Without minima int8 is scale * q and
// int4 is scale * (q - 8). A group divides padded_k; it is 16, 32, 64, 128 or padded_k itself.
//
// Gated (gate and up in one matrix, n = 2 F): the panels of gate and up alternate, each half padded to whole panels.
// Column c of gate panel p is output column 16 p + c, of up panel p output column F + 16 p + c.
struct PackedMatrix {
    WeightFormat format;
    ScaleFormat scale_format = ScaleFormat::f32;
    bool has_min = false;
    bool gated = false;
    int64_t n = 0;
    int64_t k = 0;
    int64_t padded_k = 0;
    int64_t num_panels = 0;
    int64_t group = 0;
    const void* data = nullptr;
    const void* scales = nullptr;
    const void* mins = nullptr;
};

// Rows of x in int8, one scale per row and group: x ~ scale * q, q in [-127, 127], scale = max |x| / 127 of the group
// (0 for a group of zeros), q = round_to_even(x / scale). Rows are padded with zeros to padded_k.
struct QuantizedRows {
    const int8_t* q;       // [rows][padded_k]
    const float* scales;   // [rows][padded_k / group]
    const int32_t* sums;   // [rows][padded_k / group], of q
    int64_t padded_k;
    int64_t group;
};

// What happens to acc before it is stored, in this order; `r` rounds to `rounding`.
//   v = r(acc + bias)
//   with logit options:  v = v * scale; v = softcap * tanh(v / softcap)      (rounding is f32 there)
//   gated:               v = r(act(gate) * up);  else with an activation: v = r(act(v))
//   residual:            v = r(residual + residual_scale * v), as fma(residual_scale, v, residual)
struct Epilogue {
    const float* bias = nullptr;  // [n]
    float scale = 1.0f;
    float softcap = 0.0f;  // 0: none
    Activation activation = Activation::none;
    bool gated = false;  // y has n / 2 columns
    const float* residual = nullptr;  // may be y itself
    int64_t residual_stride = 0;
    float residual_scale = 1.0f;
    Rounding rounding = Rounding::f32;
};

struct LinearArgs {
    const PackedMatrix* weight;
    int64_t rows;
    const float* x = nullptr;  // [rows][x_stride], or null where `quantized` is given
    int64_t x_stride = 0;
    bool x_is_bf16 = false;  // every x is exactly a bfloat16
    const QuantizedRows* quantized = nullptr;
    Epilogue epilogue;
    float* y = nullptr;  // [rows][y_stride]; null when only `best` is wanted
    int64_t y_stride = 0;
    // Where not null: [rows], the column of the largest y of each row, the lowest such column among equals; -1 where
    // one is NaN or infinity, or none is above minus infinity. `best_scratch` holds num_panels x rows of these.
    int32_t* best = nullptr;
    struct Best {
        float value;
        int32_t column;
    };
    Best* best_scratch = nullptr;
};

struct QuantizeArgs {
    const float* x;
    int64_t x_stride;
    int64_t rows;
    int64_t k;
    int64_t padded_k;
    int64_t group;
    int8_t* q;
    float* scales;
    int32_t* sums;
};

}  // namespace octavo
