// Rows of a packed matrix, back in float32.
#pragma once

#include <cstdint>

#include "ops/linear.h"

namespace octavo::OCTAVO_ISA {

// Row `row` of an int4 or int8 matrix that is not gated, dequantized as linear.h says: out [k]. In linear_dequantized.cpp.
void unpack_int_row(const PackedMatrix& matrix, int64_t row, float* out);

}  // namespace octavo::OCTAVO_ISA
