// The kernels of one instruction set; what each does stands with its arguments.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/attention.h"
#include "ops/linear.h"
#include "ops/roofline.h"
#include "ops/rows.h"
#include "ops/sampler.h"

namespace octavo::OCTAVO_ISA {

void bf16_to_f32(const uint16_t* source, float* target, size_t count);
void f32_to_bf16(const float* source, uint16_t* target, size_t count);

void linear_float(const LinearArgs& args, Team& team);
void linear_dequantized(const LinearArgs& args, Team& team);
void linear_quantized(const LinearArgs& args, Team& team);
void quantize_rows(const QuantizeArgs& args, Team& team);
void unpack_rows(const PackedMatrix& matrix, const int32_t* ids, int64_t count, float* out, int64_t out_stride,
                 Team& team);

void store_kv(const StoreKvArgs& args, Team& team);
void attend(const AttentionArgs& args, Team& team);

void rms_norm(const NormArgs& args, Team& team);
void layer_norm(const NormArgs& args, Team& team);
void rope(const RopeArgs& args, Team& team);
void add(const AddArgs& args, Team& team);
void activation(const ActivationArgs& args, Team& team);
void scale_rows(const ScaleArgs& args, Team& team);

void sample(const SampleArgs& args, Team& team);

void read_memory(const ReadArgs& args, Team& team);
int64_t multiply(const ProductsArgs& args, Team& team);

}  // namespace octavo::OCTAVO_ISA
