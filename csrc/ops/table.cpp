// The kernel table of one instruction set.
#include "kernels.h"
#include "ops/bf16.h"

namespace octavo::OCTAVO_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    .bf16_to_f32 = bf16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
};

}  // namespace octavo::OCTAVO_ISA
