// The kernel table of one instruction set.
#include "kernels.h"
#include "ops/functions.h"

namespace octavo::OCTAVO_ISA {

extern const Kernels kernels;
const Kernels kernels = {
    .bf16_to_f32 = bf16_to_f32,
    .f32_to_bf16 = f32_to_bf16,
    .linear_float = linear_float,
    .linear_dequantized = linear_dequantized,
    .linear_quantized = linear_quantized,
    .quantize_rows = quantize_rows,
    .unpack_rows = unpack_rows,
    .store_kv = store_kv,
    .attend = attend,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .rope = rope,
    .add = add,
    .activation = activation,
    .scale_rows = scale_rows,
    .sample = sample,
    .read_memory = read_memory,
    .multiply = multiply,
};

}  // namespace octavo::OCTAVO_ISA
