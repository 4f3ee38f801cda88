// Conversion between bfloat16 and float32 rows; see kernels.h for the rounding.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo::OCTAVO_ISA {

void bf16_to_f32(const uint16_t* source, float* target, size_t count);
void f32_to_bf16(const float* source, uint16_t* target, size_t count);

}  // namespace octavo::OCTAVO_ISA
