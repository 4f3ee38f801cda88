// Checkpoint rows into the packed panels of ops/linear.h. Runs at load; not compiled per instruction set.
//
// A matrix lives in one region of memory: data, scales, minima, each 64-byte aligned, without anything else. Its rows
// come from `RowSource`s, one after the other; they may differ in type where their integer form is the same.
//
// Integer forms of the GGUF block types (scale * q + min, as the block defines it; q * scale is exact in float32 for
// every one of them, so fma(scale, q, min) has the bits of the two-step definition):
//
//   Q4_0                       int4, group 32                f16 scales
//   Q4_1                       int4, group 32, minima        f16
//   Q8_0, Q5_0, IQ4_NL         int8, group 32                f16
//   Q5_1                       int8, group 32, minima        f16
//   Q2_K                       int4, group 16, minima        f32: block scale * 4-bit scale, 15 bits
//   Q3_K                       int4, group 16                f32: block scale * 6-bit scale, 17 bits
//   Q4_K                       int4, group 32, minima        f32
//   Q5_K                       int8, group 32, minima        f32
//   Q6_K                       int8, group 16                f32: block scale * int8, 19 bits
//   IQ4_XS                     int8, group 32                f32: block scale * 6-bit scale
//   MXFP4                      int8, group 32                f32: a power of two; exact unless below 2^-126
//
// f32 scales become f16 where all of a matrix are exactly that (`scales_fit_f16`).
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/team.h"
#include "ops/linear.h"

namespace octavo {

// Goes up when the bytes that a packing function writes for the same rows change.
constexpr int kPackVersion = 1;

enum class RowType : uint8_t {
    f32, bf16, f16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4,
};

// By GGUF's name: "F32", "Q4_K" ...
std::optional<RowType> find_row_type(std::string_view name);

struct RowShape {
    int64_t block;  // values in a block; 1 for plain types
    int64_t bytes;  // of a block
};
RowShape row_shape(RowType type);

// Consecutive rows of k values each.
struct RowSource {
    RowType type;
    const uint8_t* data;
    int64_t count;
    int64_t stride;  // bytes from row to row
};

struct IntegerForm {
    WeightFormat format;
    int64_t group;
    bool has_min;
    bool has_f16_scales;  // always; else see scales_fit_f16
};
// Of a block type; empty for plain types.
std::optional<IntegerForm> integer_form(RowType type);

// `matrix` with padded_k, num_panels and, for `group` 0, the group (padded_k) filled in.
PackedMatrix with_layout(PackedMatrix matrix);

struct RegionLayout {
    int64_t scales;  // offsets; the data begin at 0
    int64_t mins;
    int64_t size;  // a multiple of 64
};
RegionLayout region_layout(const PackedMatrix& matrix);

// Whether every value is exactly a bfloat16 or float16. Plain types only.
bool values_fit(WeightFormat format, const std::vector<RowSource>& sources, int64_t k, Team& team);

// Whether every scale and minimum of the integer forms is exactly a float16.
bool scales_fit_f16(const std::vector<RowSource>& sources, int64_t k);

// Into a float matrix, block types dequantized. Rounds to nearest even where the format is narrower; beyond the largest
// float16 is infinity. Returns how many finite values became infinite.
int64_t pack_values(const PackedMatrix& target, const std::vector<RowSource>& sources, Team& team);

// Blocks into the integer matrix of their common form, bit for bit the same weights.
void pack_blocks(const PackedMatrix& target, const std::vector<RowSource>& sources, Team& team);

// Round to nearest into an integer matrix. Symmetric int8: scale = max |w| / 127. Symmetric int4: scale = w / -8 of
// the w of largest magnitude. With minima: min = the least, scale = (max - min) / 15 (int8: / 255, q from -128 up).
// Scales and minima are rounded to their format before the integers are chosen.
// Returns the largest |w|, infinity or NaN if there are any.
float quantize_values(const PackedMatrix& target, const std::vector<RowSource>& sources, Team& team);

}  // namespace octavo
